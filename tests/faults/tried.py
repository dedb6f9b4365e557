"""What a command does with broken files, as one of three outcomes; a traceback or a silence fails the test."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

from muonsw.lab.cli import main

UNAFFECTED, REPAIRED, REFUSED = "unaffected", "repaired with a note", "refused"


class Said(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    text: str


def say(*arguments: object) -> Said:
    """Run a command in this process; whatever it raises but a usage error of the parser is the test's failure."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Said(code, out.getvalue())


def outcome(said: Said, broken: Path, *, same: bool) -> str:
    """Which of the three outcomes it was.

    Args:
        said: By the command.
        broken: The file that was broken; what is said about it must hold its name, or that of a folder around it.
        same: Whether what came out is what comes out with whole files.
    """
    assert "Traceback" not in said.text, said.text
    # A line is printed as one, however long it is; a break is part of the text.
    named = [line for line in said.text.splitlines() if _names(line, broken)]
    if said.code in (1, 2):
        assert named, f"exit code {said.code}, and {broken} is not named: {said.text}"
        assert any(_has_remedy(line) for line in said.text.splitlines()), f"no remedy: {said.text}"
        return REFUSED
    assert said.code == 0, said
    if said.text and any(_is_note(line) for line in named):
        return REPAIRED
    assert same, f"another result, and not a word about {broken}: {said.text}"
    return UNAFFECTED


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
