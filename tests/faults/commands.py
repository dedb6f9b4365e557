"""What a command does with broken files, as one of three outcomes; a traceback or a silence is none of them."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

from muonsw.lab.cli import main

UNAFFECTED, REPAIRED, REFUSED = "unaffected", "repaired with a note", "refused"
GOOD = (UNAFFECTED, REPAIRED, REFUSED)


class CommandResult(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    text: str


def run_command(*arguments: object) -> CommandResult:
    """Run a command in this process; whatever it raises but a usage error of the parser is the test's failure."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return CommandResult(code, out.getvalue())


def refused(*arguments: object) -> str:
    """What a command printed that must end with a usage error, in one sentence."""
    said = run_command(*arguments)
    assert said.code == 2, said
    assert said.text.count("muonsw: ") == 1
    return said.text


def outcome(said: CommandResult, broken: Path, *, same: bool) -> str:
    """Which of the three good outcomes it was, or what is wrong.

    Args:
        said: By the command.
        broken: The file that was broken; what is said about it must hold its name, or that of a folder around it.
        same: Whether what came out is what comes out with whole files.
    """
    if "Traceback" in said.text or said.code not in (0, 1, 2):
        return f"exit code {said.code}: {said.text}"
    # A line is printed as one, however long it is; a break is part of the text.
    lines = said.text.splitlines()
    named = [line for line in lines if _names(line, broken)]
    if said.code != 0:
        if not named:
            return f"exit code {said.code}, and {broken} is not named: {said.text}"
        return REFUSED if any(_has_remedy(line) for line in lines) else f"no remedy: {said.text}"
    if any(_is_note(line) for line in named):
        return REPAIRED
    return UNAFFECTED if same else f"another result, and not a word about {broken}: {said.text}"


def _names(line: str, broken: Path) -> bool:
    """Whether a line speaks of a file, or of the checkpoint, run or shard folder that it belongs to."""
    return any(str(path) in line for path in (broken, broken.parent, broken.parent.parent))


REMEDIES = (
    "delete", "prepare", "export the run again", "put ", "choose", "check", "train it", "run the same", "train with",
    "give those", "move it", "name a folder",
)  # fmt: skip


def _has_remedy(line: str) -> bool:
    return any(remedy in line for remedy in REMEDIES)


def _is_note(line: str) -> bool:
    return any(word in line for word in ("damaged", "left out", "moved to", "not whole", "not complete", "is lost"))
