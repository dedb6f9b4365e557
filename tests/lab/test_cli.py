"""The command line: help for every command, and one line for what it refuses."""

import subprocess
import sys

import pytest

import muonsw
from muonsw.lab.cli import COMMANDS, main

PAGES = [[name] for name in COMMANDS]
PAGES += [["data", name] for name in ("prepare", "verify")] + [["task", name] for name in ("check", "new")]


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_says_first_what_the_command_does(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    usage, empty, answer, *_ = lines = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: muonsw {' '.join(words)}")
    assert empty == ""
    assert answer[0].isupper()
    assert [line for line in lines[1:] if len(line.rstrip()) > 80] == [], "tyro wraps all but the usage"
    assert not any(
        noise in " ".join(lines) for noise in ("(default: None", "(default: False", "(default: )", "(default: '')")
    )


def test_the_list_of_commands_names_them_all(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: muonsw"),
        (["trian"], "did you mean 'train'"),
        (["train", "--out="], "an argument is empty after --out"),
        (["reproduce", "theory", "--scale", "big"], "mini"),
        (["train", "--steps", "few"], "--steps"),
        (["reproduce", "--nonsense"], "nonsense"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words, message, capsys):
    try:
        code = main(words)
    except SystemExit as ended:  # of the parser
        code = ended.code
    assert code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_the_version_is_printed():
    done = subprocess.run([sys.executable, "-m", "muonsw", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"muonsw {muonsw.__version__}\n"


@pytest.mark.parametrize("package", ["tyro", "numpy"])
def test_a_missing_package_is_named_in_one_line(package):
    code = f"import sys; sys.modules['{package}'] = None; from muonsw.lab.cli import main; sys.exit(main(['train']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"needs the package {package}: run pip install" in ended.stderr
    assert "Traceback" not in ended.stderr
