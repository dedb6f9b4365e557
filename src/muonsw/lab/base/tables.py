"""A table as data, for terminals, files and pages, and one way to print it.

rich draws it. Which columns are drawn is decided here: rich would cut numbers where the width does not suffice.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from muonsw.lab.base.terminal import harmless, say

Value = str | float | int | bool | None
MISSING = "\N{EN DASH}"
GAP = 2  # blanks between columns
NARROWEST_TEXT = 20  # characters that a column of text keeps before it wraps its words over several lines
LARGE = 1e6  # numbers from here on are written with an exponent
LONGEST_WORD = 40  # longer ones, such as paths, are broken
TONES = {"holds": "green", "fails": "bold red", "undecided": "dim"}


@dataclass(frozen=True)
class Cell:
    """A cell that says more than its text."""

    text: str
    note: str = ""  # a smaller second line; the terminal shows it with `verbose`
    tone: str = ""  # "holds", "fails" and "undecided" have colours


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    number: bool = False  # numbers are set to the right and never broken
    digits: int = 5  # significant ones of floats
    rank: int = 1  # where room is short, columns of the highest rank are left out first


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row and is always shown."""

    name: str  # its id on a page: letters, digits, hyphens
    title: str
    columns: Sequence[Column | str]  # a plain string is a column of text
    rows: Sequence[Sequence[Value | Cell]]  # None shows as a dash
    note: str = ""  # a sentence below it
    folded: bool = False  # whether it starts closed on a page

    def headings(self) -> list[Column]:
        """The columns, all in full."""
        return [column if isinstance(column, Column) else Column(column) for column in self.columns]

    def cells(self) -> list[list[Cell]]:
        """The rows, all values as text; a row that is not as long as there are columns is an error."""
        columns = self.headings()
        for row in self.rows:
            if len(row) != len(columns):
                raise ValueError(f"a row has {len(row)} values for {len(columns)} columns: {row!r}")
        return [[_as_cell(value, column) for value, column in zip(row, columns, strict=True)] for row in self.rows]


def show(value: Value, digits: int = 5) -> str:
    """A value as a table shows it.

    Examples:
        >>> show(0.123456789), show(True), show(12345678), show(float("nan"))
        ('0.12346', 'yes', '12,345,678', 'not finite')
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.{digits}g}" if math.isfinite(value) else "not finite"
    return value


def loss_text(loss: float) -> str:
    """A loss as every table and sentence shows it: four decimals, or four digits of one from a million on.

    Examples:
        >>> loss_text(3.14159), loss_text(1.5e30), loss_text(float("nan"))
        ('3.1416', '1.5e+30', '\N{EN DASH}')
    """
    return decimals(loss, 4) if math.isfinite(loss) else MISSING


def decimals(value: float, digits: int, sign: str = "") -> str:
    """A number with so many decimals; from a million on, as diverging runs have them, with so many digits in all.

    Examples:
        >>> decimals(0.5, 3), decimals(2.0, 2, sign="+"), decimals(1.2345e20, 3)
        ('0.500', '+2.00', '1.23e+20')
    """
    return f"{value:{sign}.{digits}{'f' if abs(value) < LARGE else 'g'}}"


def norm_text(norm: float) -> str:
    """A norm, or another size, as every table and sentence shows it: three digits.

    Examples:
        >>> norm_text(0.204139), norm_text(0.015), norm_text(461.2)
        ('0.204', '0.0150', '461')
    """
    return f"{norm:#.3g}".removesuffix(".") if math.isfinite(norm) else MISSING


def change_text(change: float) -> str:
    """A relative change as every table and sentence shows it: whole percents with their sign.

    Examples:
        >>> change_text(-0.604), change_text(0.02), change_text(-0.001)
        ('-60%', '+2%', '0%')
    """
    if not math.isfinite(change):
        return MISSING
    whole = round(100 * change)
    return f"{whole:+d}%" if whole else "0%"


def print_table(console: Console, table: Table, *, verbose: bool = False, hint: str = "--verbose shows them") -> None:
    """Print a table under its title, with its note.

    In a terminal the columns of the lowest rank that fit into its width are shown, and a line below names the others
    and gives the hint; with `verbose` they are printed as further tables, and so are the notes of cells. A file or a
    pipe has no width: there all columns are printed, as plain text.
    """
    if not console.is_terminal:
        parts = (table.title, plain_text(table, notes=verbose), table.note)
        say(console, "\n" + "\n".join(part for part in parts if part))
        return
    table = _harmless(table)
    chosen, left_out = fitting(table, console.width)
    _draw(console, table, chosen, title=table.title, notes=verbose)
    while verbose and left_out:
        chosen, left_out = fitting(table, console.width, among=[0, *left_out])
        _draw(console, table, chosen)
    if table.note:
        console.print(Text(table.note, style="dim"))
    if left_out:
        names = ", ".join(table.headings()[place].title for place in left_out)
        console.print(Text(f"Not shown at this width: {names}{f' ({hint})' if hint else ''}.", style="dim"))


def fitting(table: Table, width: int, among: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
    """Which columns of a table fit into a width, and which do not, both as places in the table's order.

    Columns are taken by rank, those of one rank from left to right, until the next one does not fit. The first column
    is always taken, and so is one more: a row without a value would say nothing.

    Examples:
        >>> columns = ("arm", Column("seeds", rank=2), Column("final loss", number=True))
        >>> table = Table("arms", "Arms", columns, [("scaled", "3", 5.2345), ("constant", "3", 5.3456)])
        >>> fitting(table, 23), fitting(table, 22)
        (([0, 1, 2], []), ([0, 2], [1]))
    """
    columns, cells = table.headings(), table.cells()
    places = list(range(len(columns)) if among is None else among)
    taken, room = [places[0]], width - _least(columns, cells, places[0])
    ranked = sorted(places[1:], key=lambda place: columns[place].rank)
    for place in ranked:
        room -= GAP + _least(columns, cells, place)
        if room < 0 and len(taken) > 1:
            break
        taken.append(place)
    return sorted(taken), [place for place in places if place not in taken]


def plain_text(table: Table, *, notes: bool = False) -> str:
    """A table as aligned text without colours, numbers to the right.

    Examples:
        >>> print(plain_text(Table("t", "T", ("arm", Column("loss", number=True)), [("scaled", 3.1)])))
        arm     loss
        scaled   3.1
    """
    columns = table.headings()
    lines = [[_with_note(cell) if notes else cell.text for cell in row] for row in table.cells()]
    if any(column.title for column in columns):
        lines.insert(0, [column.title for column in columns])
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    sides = [str.rjust if column.number else str.ljust for column in columns]
    triples = (zip(sides, line, widths, strict=True) for line in lines)
    aligned = ("  ".join(side(text, width) for side, text, width in each) for each in triples)
    return "\n".join(line.rstrip() for line in aligned)


def _as_cell(value: Value | Cell, column: Column) -> Cell:
    return value if isinstance(value, Cell) else Cell(show(value, column.digits))


def _harmless(table: Table) -> Table:
    """The table with nothing in it that could steer a terminal."""
    cells = [
        [replace(cell, text=harmless(cell.text), note=harmless(cell.note)) for cell in row] for row in table.cells()
    ]
    columns = [replace(column, title=harmless(column.title)) for column in table.headings()]
    return replace(table, title=harmless(table.title), columns=columns, rows=cells, note=harmless(table.note))


def _with_note(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _least(columns: Sequence[Column], cells: Sequence[Sequence[Cell]], place: int) -> int:
    """The width below which a column is not shown: that of its longest number, or of its text with words wrapped."""
    heading = max(map(cell_len, columns[place].title.split()), default=0)
    texts = [row[place].text for row in cells]
    longest = max(map(cell_len, texts), default=0)
    if columns[place].number:
        return max(heading, longest)
    words = [min(cell_len(word), LONGEST_WORD) for text in texts for word in text.split()]
    return max([heading, *words, min(NARROWEST_TEXT, longest)])


def _draw(console: Console, table: Table, places: Sequence[int], *, title: str = "", notes: bool = False) -> None:
    """Print the chosen columns: numbers as wide as they are, text in the room that is left."""
    columns, cells = table.headings(), table.cells()
    named = any(columns[place].title for place in places)
    drawn = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, show_header=named)
    for place in places:
        column, least = columns[place], _least(columns, cells, place)
        if column.number:
            heading = Text("\n".join(textwrap.wrap(column.title, least)))
            drawn.add_column(heading, justify="right", no_wrap=True, width=least)
        else:
            drawn.add_column(Text(column.title), overflow="fold", min_width=least)
    for row in cells:
        drawn.add_row(*(_rich(row[place], notes=notes) for place in places))
    console.print()
    if title:
        console.print(Text(title, style="bold"))
    console.print(drawn, crop=False)


def _rich(cell: Cell, *, notes: bool) -> Text:
    text = Text(cell.text, style=TONES.get(cell.tone, ""))
    return text.append(f"\n{cell.note}", style="dim") if notes and cell.note else text
