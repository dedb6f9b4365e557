"""The command line: help in 80 columns with the same names in every command, and one line for what it refuses."""

import io
import re
import subprocess
import sys

import pytest

import muonsw
from muonsw.lab.cli import COMMANDS, main

PAGES = [[name] for name in COMMANDS]
PAGES += [["data", name] for name in ("prepare", "verify", "info")] + [["task", name] for name in ("check", "new")]


def help_of(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_says_first_what_the_command_does(words, capsys, monkeypatch):
    shown = help_of(words, capsys, monkeypatch)
    usage, empty, answer = shown.splitlines()[:3]
    assert usage.startswith(f"usage: muonsw {' '.join(words)}")
    assert empty == ""
    assert answer[0].isupper()
    assert [line for line in shown.splitlines() if len(line.rstrip()) > 80] == []


def test_the_list_of_commands_is_short_and_names_them_all(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert all(re.search(rf"^  {name} +[a-z]", shown, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: muonsw"),
        (["trian"], "did you mean 'train'"),
        (["train", "--out", ""], "an argument is empty after --out"),
        (["train", "--out="], "an argument is empty after --out"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_output_that_is_ascii_gets_what_can_be_printed(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii", errors="strict", write_through=True))
    assert main(["advise", "--steps", "1600"]) == 0
    assert b"lambda" in printed.getvalue()
    assert b"?" not in printed.getvalue()


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["reproduce", "theory", "--scale", "big"], ["cpu", "mini", "paper"]),
        (["train", "--strategy", "ddq"], ["ddp", "fsdp"]),
        (["train", "--steps", "few"], ["--steps"]),
        (["reproduce", "--nonsense"], ["nonsense"]),
    ],
    ids=lambda words: words[0],
)
def test_a_value_of_the_wrong_kind_exits_with_2(words, known, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert all(choice in errors for choice in known)
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", [["muonsw"], pytest.param(["muonsw.lab.cli"], marks=pytest.mark.slow)])
def test_the_version_is_printed(command):
    done = subprocess.run([sys.executable, "-m", *command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"muonsw {muonsw.__version__}\n"


@pytest.mark.parametrize("package", ["tyro", "numpy"])
def test_a_missing_package_is_said_in_one_line(package):
    code = f"import sys; sys.modules['{package}'] = None; from muonsw.lab.cli import main; sys.exit(main(['train']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"muonsw: the lab needs the package {package}: run pip install '.[lab]'" in ended.stderr  # torch warns too
    assert "Traceback" not in ended.stderr
