"""Tables and claims in the terminal, as aligned plain text where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from muonsw.lab.claims.claim import Claim, failed_first, verdict
from muonsw.lab.claims.text import measured_text, predicted_text
from muonsw.lab.report.sections import Cell, Column, Table, Value, show
from muonsw.lab.terminal import say


def print_table(console: Console, table: Table) -> None:
    """A table under its heading, with its note."""
    columns = table.headings()
    rows = [[_text(column, value) for column, value in zip(columns, row, strict=True)] for row in table.rows]
    if console.is_terminal:
        drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=escape(table.title), title_justify="left")
        for column in columns:
            drawn.add_column(escape(column.title), justify="right" if column.number else "left")
        for row in rows:
            drawn.add_row(*map(escape, row))
        console.print(drawn)
    else:
        heading = [column.title for column in columns]
        say(console, f"\n{table.title}\n{aligned([heading, *rows], columns)}")
    if table.note:
        console.print(table.note, style="dim", highlight=False, markup=False)


def aligned(rows: Sequence[Sequence[str]], columns: Sequence[Column]) -> str:
    """Rows as plain text in columns, numbers to the right.

    Examples:
        >>> print(aligned([["arm", "loss"], ["scaled", "3.1"]], [Column("arm"), Column("loss", number=True)]))
        arm     loss
        scaled   3.1
    """
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.number else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in rows
    )


def print_claims(console: Console, claims: Sequence[Claim]) -> None:
    """Claims with what was said, what was found and the verdict; those that failed come first."""
    if not claims:
        return
    columns = ("claim", Column("expected", number=True), Column("measured", number=True), "verdict")
    rows = [
        (claim.statement, predicted_text(claim), measured_text(claim), verdict(claim.holds))
        for claim in failed_first(claims)
    ]
    print_table(console, Table("claims", "Claims", columns, rows))


def _text(column: Column, value: Value | Cell) -> str:
    return value.text if isinstance(value, Cell) else show(value, column.digits)
