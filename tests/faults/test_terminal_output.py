"""Nothing that is printed steers the terminal, and nothing that cannot be printed ends the work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from muonsw.lab import run as entry
from muonsw.lab.base.errors import USAGE
from muonsw.lab.cli import main
from muonsw.lab.data.shards import RECORD
from muonsw.lab.diagnose import diagnose, print_diagnosis
from muonsw.lab.runs import load_run
from muonsw.lab.train.loop import train
from tests.lab.train.small_runs import small_run, tokens

CLIPBOARD = "\x1b]52;c;bWFsaWNl\x07"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")


def full_device():
    return Path("/dev/full").open("w", encoding="utf-8")


def unread_pipe():
    """A pipe whose reader has gone, as after `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


@pytest.mark.parametrize(
    ("output", "code", "reason"),
    [
        (unread_pipe, 0, "Broken pipe"),
        pytest.param(full_device, 3, "No space left on device", marks=FULL),
    ],
)
def test_training_goes_on_without_a_standard_output(tmp_path, monkeypatch, capsys, output, code, reason):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(small_run(steps=4).as_data()), encoding="utf-8")
    with output() as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert entry.main([str(settings), str(tmp_path / "run")]) == code
        assert sys.stdout is stream
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["steps"] == 4
    assert capsys.readouterr().err == f"muonsw: standard output could not be written ({reason}) and was left out\n"


@FULL
def test_output_that_is_the_whole_result_is_not_lost_in_silence(monkeypatch, capsys):
    with full_device() as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert main(["plan", "--preset", "demo", "--steps", "10", "--json"]) == 3
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_leaves_a_pipe_ends_no_training(tmp_path):
    """The same through a shell, to the end of the process, where Python itself would complain once more."""
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(small_run(steps=40).as_data()), encoding="utf-8")
    command = f"{sys.executable} -m muonsw.lab.run {settings} {tmp_path / 'run'} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == "muonsw: standard output could not be written (Broken pipe) and was left out\n"
    assert (tmp_path / "run" / "result.json").exists()


def test_the_findings_of_a_hostile_run_are_harmless(hostile_run, capsys):
    print_diagnosis(Console(), [diagnose(load_run(hostile_run))])
    printed = capsys.readouterr().out
    assert "52;c;" in printed
    assert "\x1b" not in printed


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A run whose folder, arm and records all want to write the clipboard."""
    folder = tmp_path_factory.mktemp("hostile") / f"run{CLIPBOARD}"
    train(small_run(steps=4, arm=f"arm{CLIPBOARD}"), folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("diagnose", "RUN", "--out", "OUT"), marks=pytest.mark.slow),  # draws figures
        ("diagnose", "RUN", "RUN", "--out", "OUT", "--scope", f"role:{CLIPBOARD}"),
        ("report", "RUN", "--no-images", "-o", f"OUT/{CLIPBOARD}.html"),
        ("export", "RUN", "--out", f"OUT/{CLIPBOARD}"),
        ("sample", "RUN", "--prompt", CLIPBOARD, "--tokens", "1"),
        ("train", "--data", "DATA", "--out", "RUN", "--steps", "2"),
        ("train", "--config", f"OUT/{CLIPBOARD}"),
        ("data", "info", "OUT/data"),
        ("data", "verify", f"OUT/{CLIPBOARD}"),
        ("compare", "--data", "DATA", "--arms", "constant", f"scaled,lr={CLIPBOARD}"),
        ("plan", "--steps", "10", "--preset", f"demo{CLIPBOARD}"),
    ],
    ids=lambda command: "-".join(word for word in command[:2] if word.isalpha()),
)
def test_no_command_passes_control_characters_on(hostile_run, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    record = json.loads((Path(tokens()) / RECORD).read_text(encoding="utf-8")) | {
        "recipe": {"corpus": {"source": CLIPBOARD}}
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / RECORD).write_text(json.dumps(record), encoding="utf-8")
    places = {"RUN": str(hostile_run), "OUT": str(tmp_path), "DATA": tokens()}
    words = list(command)
    for name, path in places.items():
        words = [word.replace(name, path) for word in words]
    main(words)
    printed = "".join(capsys.readouterr())
    assert "52;c;" in printed, "the test shows nothing if the name is not printed"
    assert not any(character in printed for character in "\x1b\x07\x9d")


@pytest.mark.parametrize(
    "words", [(CLIPBOARD,), ("data", CLIPBOARD), ("train", f"--{CLIPBOARD}"), ("compare", "--seeds", CLIPBOARD)]
)
def test_a_usage_error_repeats_no_control_characters(capsys, words):
    try:
        code = main(list(words))
    except SystemExit as stopped:
        code = stopped.code
    printed = "".join(capsys.readouterr())
    assert code == USAGE
    assert "52;c;" in printed, "the test shows nothing if the word is not printed"
    assert not any(character in printed for character in "\x1b\x07\x9d")
