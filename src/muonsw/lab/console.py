"""The terminal: text with any characters, tables (also for pages and files), and progress."""

from __future__ import annotations

import io
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable

Value = str | float | int | None
MISSING = "\N{EN DASH}"
GAP = 2  # spaces between columns
NARROWEST_TEXT = 20  # minimum width of a text column before it wraps
SECONDS_BETWEEN_LINES = 10.0  # when progress goes to a file
TONES = {"holds": "green", "fails": "bold red", "undecided": "dim"}

# Control characters, bidirectional overrides, and surrogates; the latter stand for bytes of file names that are not
# UTF-8, and cannot be printed.
_STEERING = chain(range(0x20), range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A), range(0xD800, 0xE000))
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _STEERING if chr(code) not in "\n\t"}


def harmless(text: object) -> str:
    r"""Escape control characters: names, settings and documents come from files of unknown origin."""
    return str(text).translate(_SHOWN)


def say(console: Console, text: object) -> None:
    """Print a line verbatim, without rich's markup, wrapping or colours."""
    console.print(harmless(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def paragraph(console: Console, text: str) -> None:
    """Print sentences, wrapped only in a terminal."""
    console.print(harmless(text), highlight=False, markup=False, emoji=False, soft_wrap=not console.is_terminal)


def print_any_character() -> None:
    """Print "?" for characters that the stream cannot encode, and each line at once."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=True)


@dataclass(frozen=True)
class Cell:
    """A cell with a note or a colour."""

    text: str
    note: str = ""  # a smaller second line on a page
    tone: str = ""  # "holds", "fails" or "undecided" sets the colour


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    number: bool = False  # right-aligned and never wrapped


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row."""

    name: str  # its id on a page
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value | Cell]]  # None shows as a dash
    note: str = ""  # printed below the table

    def cells(self) -> list[list[Cell]]:
        """Return all rows as `Cell`."""
        return [[value if isinstance(value, Cell) else Cell(show(value)) for value in row] for row in self.rows]


def show(value: Value) -> str:
    """Format a value for a table, floats with five significant digits.

    Examples:
        >>> show(0.123456789), show(12345678), show(float("nan"))
        ('0.12346', '12,345,678', 'not finite')
    """
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.5g}" if math.isfinite(value) else "not finite"
    return value


def decimals(value: float, digits: int = 4, sign: str = "") -> str:
    """Format a number with this many decimals.

    Examples:
        >>> decimals(0.5), decimals(2.0, 2, sign="+"), decimals(math.nan)
        ('0.5000', '+2.00', '\N{EN DASH}')
    """
    return f"{value:{sign}.{digits}f}" if math.isfinite(value) else MISSING


def norm_text(norm: float) -> str:
    """Format a norm with three digits."""
    return f"{norm:#.3g}".removesuffix(".") if math.isfinite(norm) else MISSING


def print_table(console: Console, table: Table) -> None:
    """Print a table with title and note.

    Columns that do not fit in the terminal follow in further tables, which repeat the first column. A file or a pipe
    gets one table.
    """
    from rich.text import Text  # `muonsw --help` needs only `harmless`, and works without rich

    if not console.is_terminal:
        parts = (table.title, plain_text(table), table.note)
        say(console, "\n" + "\n".join(part for part in parts if part))
        return
    console.print()
    if table.title:
        console.print(Text(harmless(table.title), style="bold"))
    widths = least_widths(table)
    for number, places in enumerate(side_by_side(widths, console.width)):
        if number:
            console.print()
        console.print(_drawn(table, places, widths), crop=False)
    if table.note:
        console.print(Text(harmless(table.note), style="dim"))


def least_widths(table: Table) -> list[int]:
    """Return the minimum width of each column: numbers are never wrapped, text wraps at words or at 20 characters."""
    from rich.cells import cell_len

    widths, cells = [], table.cells()
    for place, column in enumerate(table.columns):
        texts = [row[place].text if column.number else row[place].text[:NARROWEST_TEXT] for row in cells]
        widths.append(max(map(cell_len, [*column.title.split(), *texts]), default=0))
    return widths


def side_by_side(widths: Sequence[int], width: int) -> list[list[int]]:
    """Split columns into groups that fit the width, as indices; each group starts with the first column.

    Examples:
        >>> side_by_side([8, 5, 6], 23), side_by_side([8, 5, 6], 22)
        ([[0, 1, 2]], [[0, 1], [0, 2]])
    """
    groups: list[list[int]] = [[0]]
    for place in range(1, len(widths)):
        if sum(widths[i] + GAP for i in groups[-1]) + widths[place] > width and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(place)
    return groups


def _drawn(table: Table, places: Sequence[int], widths: Sequence[int]) -> RichTable:
    """Draw these columns; text columns share the width that numbers leave."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    columns = table.columns
    named = any(columns[place].title for place in places)
    drawn = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, show_header=named)
    for place in places:
        title, least = harmless(columns[place].title), widths[place]
        if columns[place].number:
            drawn.add_column(Text("\n".join(textwrap.wrap(title, least))), justify="right", no_wrap=True, width=least)
        else:
            drawn.add_column(Text(title), overflow="fold", min_width=least)
    for row in table.cells():
        cells = (row[place] for place in places)
        drawn.add_row(*(Text(harmless(cell.text), style=TONES.get(cell.tone, "")) for cell in cells))
    return drawn


def plain_text(table: Table) -> str:
    """Format a table as aligned text without colours."""
    columns = table.columns
    titles = [[column.title for column in columns]] if any(column.title for column in columns) else []
    lines = titles + [[cell.text for cell in row] for row in table.cells()]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    sides = [str.rjust if column.number else str.ljust for column in columns]
    aligned = (
        "  ".join(side(text, width) for side, text, width in zip(sides, line, widths, strict=True)) for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned)


class View:
    """The progress of named tasks, as `showing` yields it."""

    def __init__(self, console: Console, totals: Mapping[str, float | None], what: str) -> None:
        self.console, self.totals, self.what = console, dict(totals), what
        self.numbers: dict[str, dict[str, str]] = {name: {} for name in totals}
        self.done: dict[str, float] = {}
        self.first: dict[str, float] = {}  # position when first seen; a resumed run does not start at zero
        self.ended: set[str] = set()
        self.begun = self.printed = time.monotonic()

    def update(
        self,
        name: str,
        done: float | None = None,
        numbers: Mapping[str, str] | None = None,
        *,
        total: float | None = None,
    ) -> None:
        """Record the position of a task, in the unit of its total, and update its numbers."""
        if total is not None:
            self.totals[name] = total
        if done is not None:
            self.done[name] = done
            self.first.setdefault(name, done)
        self.numbers[name] = {**self.numbers[name], **(numbers or {})}  # atomic, because another thread draws
        if time.monotonic() - self.printed > SECONDS_BETWEEN_LINES and (moving := self._moving()):
            self.printed = time.monotonic()
            self.log("; ".join(filter(None, (self.summary(), *moving))))

    def finish(self, name: str, outcome: str) -> None:
        """Record that a task has ended, and print its outcome."""
        self.ended.add(name)
        self.say(f"{name}: {outcome}")

    def say(self, text: str) -> None:
        """Print a permanent line."""
        say(self.console, text)

    def log(self, text: str) -> None:
        """Print a line unless a terminal shows it already."""
        if not self.console.is_terminal:
            say(self.console, text)

    def summary(self) -> str:
        """Count completed tasks, and estimate the time left from the pace so far."""
        count = f"{len(self.ended)} of {len(self.totals)} {self.what} complete" if len(self.totals) > 1 else ""
        totals = {name: total for name, total in self.totals.items() if total is not None}
        done = sum(self._position(name, total) - self.first.get(name, 0.0) for name, total in totals.items())
        left = sum(total - self._position(name, total) for name, total in totals.items())
        if done <= 0 or left <= 0:
            return count
        seconds = (time.monotonic() - self.begun) * left / done
        time_left = f"about {timedelta(seconds=round(seconds))} left"
        return f"{count}, {time_left}" if count else time_left

    def _position(self, name: str, total: float) -> float:
        return total if name in self.ended else min(self.done.get(name, 0.0), total)

    def _moving(self) -> list[str]:
        """Describe each task that has begun and not ended in a line."""
        begun = {name: row for name, row in self.numbers.items() if any(row.values()) and name not in self.ended}
        return [
            f"{name}: {', '.join(f'{key} {text}' for key, text in row.items() if text)}" for name, row in begun.items()
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        lines = [*self._moving()[: max(1, console.height - 4)], self.summary()]
        yield Text("\n".join(map(harmless, lines)))


@contextmanager
def showing(console: Console, totals: Mapping[str, float | None], *, what: str = "runs") -> Iterator[View]:
    """Show the progress of tasks while the block runs.

    `totals` has the amount of work by task, all in the same unit; None if unknown.

    Examples:
        >>> from rich.console import Console
        >>> with showing(Console(width=60), {"training": 12}) as view:
        ...     view.say("72,677,632 parameters")
        ...     view.update("training", 4, {"step": "4/12", "loss": "2.6051"})
        ...     view.finish("training", "validation loss 2.6050")
        72,677,632 parameters
        training: validation loss 2.6050
    """
    view = View(console, totals, what)
    if not console.is_terminal:
        yield view
        return
    from rich.live import Live

    with Live(view, console=console, refresh_per_second=2, transient=True):
        yield view
