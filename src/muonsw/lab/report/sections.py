"""What a report is made of, as data: text, tables, figures. How they look is decided where they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muonsw.lab.claims.claim import Claim, failed_first, verdict
from muonsw.lab.claims.text import measured_text, predicted_text

Value = str | float | int | bool | None
MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """A cell that says more than its text.

    Attributes:
        text: What it shows.
        note: A smaller second line.
        tone: `"fails"` and `"holds"` stand out.
        code: Whether it is something to type.
    """

    text: str
    note: str = ""
    tone: str = ""
    code: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        number: Whether it holds numbers, which are set to the right.
        digits: Significant digits of floats.
    """

    title: str
    number: bool = False
    digits: int = 5


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Its id on the page: letters, digits, hyphens.
        title: Its heading.
        columns: The headings of its columns; a plain string is a column of text.
        rows: As many values in each as there are columns; None shows as a dash.
        note: A sentence below it.
        folded: Whether it starts closed.
    """

    name: str
    title: str
    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Value | Cell]]
    note: str = ""
    folded: bool = False

    def headings(self) -> list[Column]:
        """The columns, all in full."""
        return [column if isinstance(column, Column) else Column(column) for column in self.columns]


@dataclass(frozen=True)
class Text:
    """Paragraphs under a heading."""

    name: str
    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A figure that is given as plotly data.

    Attributes:
        name: Its id on the page.
        note: A caption, as plain text.
        plot: Plotly data and layout. A trace's `meta` names the colour of the theme that it gets.
    """

    name: str
    note: str
    plot: dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A curve over steps, or points over anything.

    Attributes:
        label: Which run it is of; shown on hover.
        arm: The entry of the legend that it belongs to.
        x: Ascending.
        y: As many as `x`; gaps where not finite.
        dashed: For what is predicted, not measured.
        middle: For the middle of an arm's runs, drawn thick.
    """

    label: str
    arm: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    middle: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure that is drawn the same way on the page and on paper.

    Attributes:
        name: Its id on the page and the stem of its files.
        title: What it shows.
        curves: In the order in which they are drawn.
        x_label: Of the horizontal axis.
        y_label: Of the vertical axis.
        note: A caption.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is logarithmic.
        window: The vertical range that is shown first; all of it unless given.
        points: Whether each value is marked.
    """

    name: str
    title: str
    curves: Sequence[Curve]
    x_label: str = "step"
    y_label: str = ""
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    window: tuple[float, float] | None = None
    points: bool = False


@dataclass(frozen=True)
class Arm:
    """An entry of the legend.

    Attributes:
        name: What it says.
        rule: The decay rule, which fixes its hue; any other word gets one of the further colours.
        runs: How many runs it stands for.
    """

    name: str
    rule: str = ""
    runs: int = 1


Section = Text | Table | Figure | Chart
Claims = Mapping[str, Sequence[Claim]]


@dataclass(frozen=True)
class Document:
    """A whole page.

    Attributes:
        title: Its heading.
        sections: In order.
        verdict: The sentence that says what came out, on top.
        failed: Whether the verdict is that something failed.
        arms: The legend of its charts.
    """

    title: str
    sections: Sequence[Section]
    verdict: str = ""
    failed: bool = False
    arms: Sequence[Arm] = field(default=())


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


def claims_table(claims: Claims, headings: tuple[str, str] = ("paper", "ours")) -> Table:
    """Claims with what was said and what was found; those that failed come first."""
    owners = {id(claim): name for name, those in claims.items() for claim in those}
    ordered = failed_first(claim for those in claims.values() for claim in those)
    columns = ("claim", Column(headings[0], number=True), Column(headings[1], number=True), "verdict")
    return Table("claims", "Claims", columns, [_claim_row(owners[id(claim)], claim) for claim in ordered])


def any_failed(claims: Claims) -> bool:
    """Whether one of the claims does not hold."""
    return any(not claim.holds for those in claims.values() for claim in those)


def _claim_row(owner: str, claim: Claim) -> tuple[Cell, ...]:
    details = f"{claim.reference}. Assumes {claim.hypothesis}. Tolerance {claim.tolerance:.2g}: {claim.because}."
    if claim.interval is not None:
        details += f" Interval: {claim.interval.method}."
    if claim.limits:
        details += f" {claim.limits[0].upper()}{claim.limits[1:]}."
    word = verdict(claim.holds)
    statement = Cell(claim.statement, note=f"{owner}/{claim.id} · {details}")
    return statement, Cell(predicted_text(claim)), Cell(measured_text(claim)), Cell(word, tone=word)
