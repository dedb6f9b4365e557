"""Run a command in this process, and judge what it does with a broken file."""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

from muonsw.lab.cli import main


class CommandResult(NamedTuple):
    """The exit code of a command or a rank (or minus the signal that ended it), and what it printed."""

    code: int
    text: str


def run_command(*arguments: object) -> CommandResult:
    """Run a command; any exception except a usage error of the parser fails the test."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return CommandResult(code, out.getvalue())


def refused(*arguments: object) -> str:
    """Run a command that must end with a single usage error, and return what it printed."""
    output = run_command(*arguments)
    assert output.code == 2, output
    assert len(re.findall("^muonsw: ", output.text, re.MULTILINE)) == 1
    return output.text


def assert_good(output: CommandResult, broken: Path, *, same: bool) -> None:
    """A broken file must be refused or repaired by name, or make no difference."""
    assert output.code in (0, 1, 2), output
    assert "Traceback" not in output.text
    # Its own name, or that of the checkpoint, run or shard folder that it belongs to.
    named = any(str(path) in output.text for path in (broken, broken.parent, broken.parent.parent))
    repaired = named and any(word in output.text for word in ("damaged", "left out"))
    assert named if output.code else same or repaired, output
