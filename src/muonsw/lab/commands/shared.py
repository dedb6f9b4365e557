"""What several commands do: look at their options, and say how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from muonsw.lab.console import Table, paragraph, print_table, say
from muonsw.lab.errors import UsageError
from muonsw.text import counted

if TYPE_CHECKING:
    from muonsw.lab.compare import Answer
    from muonsw.lab.studies.study import Conclusion


def changed(command: Any) -> list[str]:
    """The options of a command that differ from their defaults, those of its groups of options included.

    Examples:
        >>> from muonsw.lab.commands.train import Changes, Train
        >>> changed(Train(seed=3, optimizer=Changes(weight_decay=0.1)))
        ['--seed', '--weight-decay']
    """
    found = []
    for one in fields(command):
        value = getattr(command, one.name)
        if is_dataclass(value):
            found += changed(value)
        elif value != one.default:
            found.append(f"--{one.name.replace('_', '-')}")
    return found


def given(command: Any, *names: str) -> dict[str, Any]:
    """Options of a command by their names, without those that were left out."""
    return {name: value for name in names if (value := getattr(command, name)) is not None}


def require_at_least_one(command: Any, *names: str) -> None:
    for name, value in given(command, *names).items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def print_conclusion(
    console: Console,
    conclusion: Answer | Conclusion,
    folder: Path,
    tables: Sequence[Table],
    *,
    verbose: bool,
    more: str = "",
) -> None:
    """Print a result: its sentence, these tables, and where its files are, with `more` about files."""
    say(console, "")
    paragraph(console, f"{conclusion.sentence} ({conclusion.seconds:.0f} s)")
    for table in tables:
        print_table(console, table, verbose=verbose)
    # Files to open by name, figures by number.
    named = [path.name for path in conclusion.paths if path.suffix in (".json", ".html")]
    figures = len(conclusion.paths) - len(named)
    parts = [", ".join(named)] + ([counted(figures, "figure")] if figures else [])
    say(console, f"\nwrote {' and '.join(parts)} to {folder}{more}")
