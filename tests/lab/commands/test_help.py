"""What `--help` says: in 80 columns, in words, with the names that exist, and the same names in every command."""

import io
import re

import pytest

from muonsw import DECAY_RULES
from muonsw.lab.cli import main
from muonsw.lab.commands import COMMANDS, load

DATA, TASK = ("prepare", "verify", "info"), ("check", "new")
PAGES = [[name] for name in COMMANDS] + [["data", name] for name in DATA] + [["task", name] for name in TASK]


def help_of(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_fits_into_80_columns_and_shows_no_default_that_is_none(words, capsys, monkeypatch):
    shown = help_of(words, capsys, monkeypatch)
    assert shown.startswith(f"usage: muonsw {' '.join(words)}")
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert re.findall(r"\{None|None\}|default: (?:None|False|''|\)|\(\))", " ".join(shown.split())) == []


def test_help_lists_every_decay_rule(capsys, monkeypatch):
    assert ", ".join(DECAY_RULES) in " ".join(help_of(["train"], capsys, monkeypatch).split())


@pytest.mark.parametrize("words", [["train"], ["compare"], ["task", "check"]], ids=" ".join)
def test_help_says_that_a_task_file_is_executed(words, capsys, monkeypatch):
    assert "which is executed as you" in " ".join(help_of(words, capsys, monkeypatch).split())


def test_the_list_of_commands_is_short_and_names_them_all(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert all(re.search(rf"^  {name} +[a-z]", shown, re.MULTILINE) for name in COMMANDS)
    assert all(callable(load(name).run) for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "code", "message"), [([], 2, "usage: muonsw"), (["trian"], 2, "did you mean 'train'")]
)
def test_a_missing_or_unknown_command_is_a_usage_error(words, code, message, capsys):
    assert main(words) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "compare", "plan", "advise"])
def test_learning_rate_and_decay_have_one_name(command, capsys, monkeypatch):
    shown = help_of([command], capsys, monkeypatch)
    assert re.search(r"^ +--lr FLOAT", shown, re.MULTILINE)
    assert re.search(r"^ +--weight-decay FLOAT", shown, re.MULTILINE)
    assert "--peak-lr" not in shown
    assert "--shape" not in shown


@pytest.mark.parametrize(
    "words", [["plan", "--preset", "w256", "--steps", "100"], ["plan", "--recipe", "glm-4.5"]], ids=" ".join
)
def test_output_that_is_ascii_gets_what_can_be_printed(words, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii", errors="strict", write_through=True))
    assert main(words) == 0
    assert b"lambda" in printed.getvalue()
    assert b"?" not in printed.getvalue()


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["reproduce", "theory", "--scale", "big"], ["cpu", "mini", "paper"]),
        (["train", "--strategy", "ddq"], ["ddp", "fsdp"]),
        (["compare", "--cluster", "lsf"], ["slurm", "local"]),
        (["train", "--steps", "few"], ["--steps INT"]),
        (["train", "--steps", "None"], ["--steps INT"]),
        (["plan", "--tokens", "None", "--lr", "high"], ["--lr FLOAT"]),
    ],
    ids=" ".join,
)
def test_a_value_of_the_wrong_kind_is_refused_without_a_choice_that_is_none(words, known, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(choice in said for choice in known)
    assert "None" not in said.replace("'None'", "", words.count("None"))
