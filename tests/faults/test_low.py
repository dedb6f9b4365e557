"""Single faults, each of which once was a traceback or a silence."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from muonsw.lab import storage
from muonsw.lab.commands.plan import Plan
from muonsw.lab.data.tokenizers import ByteTokenizer
from muonsw.lab.errors import MachineError, UsageError
from muonsw.lab.model import Decoder
from muonsw.lab.runs import load_run
from muonsw.lab.studies.arms import parse_arm
from muonsw.lab.train import checkpoint
from muonsw.lab.train.config import OptimizerConfig
from muonsw.lab.train.export import sample
from muonsw.lab.train.groups import build_optimizer
from muonsw.lab.train.loop import Watch, train
from tests.faults.made import LAST, MODEL, config, ending, made
from tests.faults.test_damage import NEWER, OLDER, digest
from tests.faults.tried import say


def refused(*arguments: object) -> str:
    said = say(*arguments)
    assert said.code == 2, said
    assert said.text.count("muonsw: ") == 1
    return said.text


@pytest.mark.parametrize("content", ["[1]", "[" * 10_000, '{"a":' * 10_000, "9" * 400, '{"step": NaN}', ""], ids=len)
def test_a_state_that_is_no_state_is_put_aside_and_named(content):
    run = made().copy("stopped")
    (run / NEWER / "state.json").write_text(content)
    said = say("train", "--config", run / "config.json", "--out", run)
    assert said.code == 0
    assert f"damaged checkpoint left out: {run / NEWER / 'state.json'}" in said.text
    assert ending(run) == ending(made().whole)


def test_a_link_to_a_checkpoint_is_used_and_only_the_link_is_deleted():
    run = made().copy("stopped")
    elsewhere = run.parent / "elsewhere"
    (run / OLDER).rename(elsewhere)
    (run / OLDER).symlink_to(elsewhere)
    shutil.rmtree(run / NEWER)
    notes = []
    settings = config(made().data, keep=1)
    train(settings, run, Watch(note=notes.append))
    assert f"going on after update 2, from {run / OLDER}" in notes
    assert not (run / OLDER).exists()
    assert checkpoint.load(elsewhere.rename(elsewhere.with_name("step-00000002"))).step == 2


@pytest.mark.parametrize("command", ["export", "sample"])
def test_an_older_checkpoint_is_not_taken_without_a_word(command):
    run = made().copy("whole")
    (run / LAST / "model.safetensors").write_bytes(b"")
    said = say(command, run)
    assert said.code == 0
    assert f"damaged checkpoint left out, an older one is taken if there is one: {run / LAST}" in said.text


def test_a_run_whose_name_is_not_utf8_is_trained_shown_and_exported():
    run = made().copy("stopped")
    named = run.with_name(os.fsdecode(b"run-\xff\xfe"))
    run.rename(named)
    assert "going on after update 4" in say("train", "--config", named / "config.json", "--out", named).text
    assert ending(named) == ending(made().whole)
    assert say("export", named).code == 0
    assert say("sample", named / "export", "--tokens", "2", "--prompt", os.fsdecode(b"\xff")).code == 0
    page = named.parent / "page.html"
    assert say("report", named, "-o", page, "--no-images").code == 0
    assert "run-\\udcff\\udcfe" in page.read_text(encoding="utf-8")


def test_an_alignment_above_one_is_drawn_without_a_prediction():
    run = made().copy("whole")
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"alignment_update":', '"alignment_update":3,"other":'))
    assert len(load_run(run).predicted_norms[0]) == 0
    assert len(load_run(made().whole).predicted_norms[0]) > 1
    assert say("report", run, "-o", run / "page.html", "--no-images").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("plan", "--preset", "demo", "--steps", "9", "--momentum", "1"),
            "momentum=1.0 must be at least 0 and below 1",
        ),
        (("plan", "--preset", "demo", "--steps", "9", "--final-fraction", "nan"), "final_fraction"),
        (("data", "prepare", "DIR", "--vocab", "1" * 25), "a bpe needs a --vocab above 256 (below 2**31)"),
        (("sample", "RUN", "--temperature", "nan"), "--temperature finite"),
        (("sample", "RUN", "--seed", "9" * 25), "--seed must be at least 0 and below 2**63"),
        (("train", "--data", "DATA", "--out", "DIR", "--device", "meta"), "device 'meta' cannot be used here"),
        (("train", "--data", "DATA", "--out", "DIR", "--seed", "9" * 25), "seed=9999999999999999999999999 must be"),
        (("train", "--data", "DATA", "--out", "DIR", "--steps", "9" * 25), "steps=9999999999999999999999999 must be"),
        (("compare", "--data", "DATA", "--out", "DIR", "--weight-decay", "0", "--control", "total"), "needs decay"),
        (("compare", "--data", "DATA", "--out", "DIR", "--arms", "scaled", "constant,adam_lr="), "setting=value pairs"),
        (("compare", "--data", "DATA", "--out", "DIR", "--arms", "scaled", "constant,adam_lr=nan"), "adam_lr=nan must"),
        (("compare", "--data", "DATA", "--out", "DIR", "--arms", "scaled", "none,ns_dtype=x"), "ns_dtype='x' must be"),
    ],
    ids=lambda value: "-".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_written(arguments, message, tmp_path):
    places = {"DIR": tmp_path / "out", "RUN": made().whole, "DATA": made().data}
    assert message in refused(*(places.get(argument, argument) for argument in arguments))
    assert not list(tmp_path.glob("out/**/*.json*"))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "adam_lr", "clip"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1", "0", "1e308"])
def test_an_arm_is_refused_at_once_or_can_be_built(name, value):
    """So that no bad option is found only after another arm has trained."""
    try:
        arm = parse_arm(f"constant,{name}={value}", OptimizerConfig())
    except UsageError:
        return
    assert build_optimizer(Decoder(MODEL), arm.optimizer).param_groups


def test_changed_settings_do_not_resume_though_the_config_is_gone():
    run = made().copy("stopped")
    (run / "config.json").unlink()
    changed = run.parent / "changed.json"
    text = (made().whole / "config.json").read_text()
    changed.write_text(text.replace('"lr": 0.02', '"lr": 0.03'))
    assert "optimizer.lr: 0.02 there, 0.03 now" in refused("train", "--config", changed, "--out", run)
    assert not (run / "config.json").exists()
    assert say("train", "--config", made().whole / "config.json", "--out", run).code == 0
    assert ending(run) == ending(made().whole)


def test_tokens_may_move_but_not_change():
    run, data = made().copy("stopped"), made().copy("data")
    train(config(data), run)
    assert ending(run) == ending(made().whole)
    with pytest.raises(UsageError, match=r"data\.fingerprint: '.*' there, '.*' now"):
        train(config(made().other_data), run)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_lock_that_is_none_is_named(kind):
    run = made().copy("stopped")
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").mkdir() if kind == "folder" else (run / ".lock").symlink_to(run / "config.json")
    said = refused("train", "--config", run / "config.json", "--out", run)
    assert f"{run / '.lock'} is not a lock of ours: delete it" in said


def test_a_model_without_finite_outputs_is_told():
    model = Decoder(MODEL)
    torch.nn.init.constant_(model.embedding.weight, float("nan"))
    with pytest.raises(UsageError, match="outputs are not finite: it has diverged"):
        list(sample(model, ByteTokenizer(), "a", tokens=1))
    model, tokenizer = Decoder(MODEL), ByteTokenizer()
    drawn = [list(sample(model, tokenizer, "a", tokens=5, temperature=warm)) for warm in (0.0, 1e-320)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "option",
    [{"tokens": "1e308", "steps": None}, {"batch_tokens": "1e308"}, {"tflops": 1e-320}, {"weight_decay": 1e308}],
    ids=str,
)
def test_a_plan_of_any_size_is_a_plan_or_a_usage_error(option, capsys):
    try:
        assert Plan(**{"preset": "demo", "steps": 9, "json": True, **option}).run() == 0
    except UsageError as error:
        assert re.search("give a smaller one|lower it", str(error))  # noqa: PT017 (a plan is as good)
    else:
        assert json.loads(capsys.readouterr().out)


def test_a_full_disk_is_the_machine_s_fault_and_a_bad_name_the_user_s(tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", full)
    with pytest.raises(MachineError, match=r"No space left on device; make room"):
        storage.prepare_folder(tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another") as error:
        storage.prepare_folder(tmp_path / "file" / "below")
    assert error.value.exit_code == 2


def test_the_cli_says_when_memory_is_short(monkeypatch, capsys):
    from muonsw.lab import cli

    def greedy(_arguments):
        raise MemoryError

    monkeypatch.setattr(cli, "_run", greedy)
    assert cli.main(["plan"]) == 3
    assert "not enough memory: ask for something smaller" in capsys.readouterr().err


RUN_TWICE = """
import os, signal, sys
from muonsw.lab.train import loop
real = loop.Training.update
def update(self, *arguments, **options):
    for _ in range(TIMES):
        os.kill(os.getpid(), signal.SIGINT)
    return real(self, *arguments, **options)
loop.Training.update = update
from muonsw.lab.run import main
sys.exit(main())
"""
AT_START = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "muonsw.lab.train.loop":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from ENTRY import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (RUN_TWICE.replace("TIMES", "1"), "stopped after 1 of 6 updates, saved"),
        (RUN_TWICE.replace("TIMES", "2"), "interrupted"),
        (AT_START.replace("ENTRY", "muonsw.lab.run"), "interrupted"),
        (AT_START.replace("ENTRY", "muonsw.lab.cli"), "interrupted"),
    ],
    ids=["once", "twice", "while run loads", "while the command line loads"],
)
def test_an_interrupt_at_any_time_is_told_in_a_line(program, said, tmp_path):
    arguments = [made().whole / "config.json", tmp_path / "run"]
    if "cli" in program:
        arguments = ["train", "--config", arguments[0], "--out", arguments[1]]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.startswith(f"muonsw: {said}")
    assert done.stderr.count("\n") == 1


def test_a_result_without_numbers_is_refused_by_name():
    run = made().copy("whole")
    for content in ('{"final_loss": NaN}', '{"final_loss": 1e999}', '{"final_loss": ' + "9" * 400 + "}"):
        (run / "result.json").write_text(content)
        with pytest.raises(UsageError, match=r"result\.json cannot be read: .*; delete it, and the command"):
            load_run(run)
    (run / "result.json").write_text(json.dumps({"steps": 1e300, "final_loss": -1e308, "best_step": 1e300}))
    assert say("report", run, "-o", Path(run) / "page.html", "--no-images").code == 0


class Trap:
    """Leaves a file behind if anything unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "write", [torch.save, lambda trap, path: path.write_bytes(pickle.dumps(trap))], ids=["torch", ""]
)
def test_a_pickle_in_the_place_of_tensors_is_never_run(write, tmp_path):
    export, run = made().copy("export"), made().copy("stopped")
    write(Trap(tmp_path / "sprung"), export / "model.safetensors")
    config_file = export / "config.json"
    content = json.loads(config_file.read_text()) | {"sha256": digest(export / "model.safetensors")}
    config_file.write_text(json.dumps(content))
    assert "is not a whole file of tensors" in refused("sample", export)
    shutil.copyfile(export / "model.safetensors", run / NEWER / "optimizer.safetensors")
    state = json.loads((run / NEWER / "state.json").read_text())
    state["checksums"]["optimizer"] = content["sha256"]
    state.pop("checksum")
    (run / NEWER / "state.json").write_text(json.dumps({**state, "checksum": checkpoint._digest(state)}))
    assert "damaged checkpoint left out" in say("train", "--config", run / "config.json", "--out", run).text
    assert ending(run) == ending(made().whole)
    assert not (tmp_path / "sprung").exists()
