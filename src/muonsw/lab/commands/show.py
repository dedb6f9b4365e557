"""How commands end: the verdict first, then a table, then one line that says where the files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from muonsw.lab.console import Table, paragraph, print_table, say
from muonsw.lab.studies.study import Conclusion
from muonsw.text import counted


def print_conclusion(
    console: Console, conclusion: Conclusion, folder: Path, tables: Sequence[Table], *, verbose: bool, more: str = ""
) -> None:
    """Print the result of a study: its sentence, these tables, and where its files are, with `more` about files."""
    say(console, "")
    paragraph(console, f"{conclusion.sentence} ({conclusion.seconds:.0f} s)")
    for table in tables:
        print_table(console, table, verbose=verbose)
    say(console, f"\n{files(conclusion.paths, folder)}{more}")


def files(paths: Sequence[Path], folder: Path) -> str:
    """Where files are, in one line: those to open by name, figures by number.

    Examples:
        >>> folder = Path("out/theory")
        >>> files([folder / name for name in ("claims.json", "convergence.png", "convergence.html")], folder)
        'wrote claims.json, convergence.html and 1 figure to out/theory'
    """
    named = [path.name for path in paths if path.suffix in (".json", ".html")]
    figures = len(paths) - len(named)
    parts = [", ".join(named)] + ([counted(figures, "figure")] if figures else [])
    return f"wrote {' and '.join(parts)} to {folder}"
