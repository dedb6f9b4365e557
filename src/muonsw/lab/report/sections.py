"""What a report is made of, as data: tables and charts. Each chart is described once and drawn by two back ends.

`muonsw.lab.report.page` draws on an interactive page, `muonsw.lab.report.static` as PNG and SVG. Neither measures
anything: curves come with the values that are to be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from muonsw.lab.tables import Table


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        label: What it shows.
        unit: In what; empty for a number without one.
        log: The base of a logarithmic axis; 0 for a linear one.
        limits: The range that is shown first; all of it unless given.
        ticks: Where it is labelled; chosen by the back end unless given.
    """

    label: str = ""
    unit: str = ""
    log: int = 0
    limits: tuple[float, float] | None = None
    ticks: Sequence[float] = ()

    @property
    def title(self) -> str:
        """Label and unit together.

        Examples:
            >>> Axis("loss", "nats per token").title, Axis("cosine").title
            ('loss (nats per token)', 'cosine')
        """
        return f"{self.label} ({self.unit})" if self.unit and self.label else self.label or self.unit


@dataclass(frozen=True)
class Curve:
    """A curve over steps, or points over anything.

    Attributes:
        label: Which run it is of; shown on hover.
        arm: The entry of the legend that it belongs to.
        x: Ascending.
        y: As many as `x`; gaps where not finite.
        line: "" for the line of its arm, "dashed" or "dotted" for what is predicted, "none" for points alone.
        middle: For the middle of an arm's runs, drawn thick; the single ones are then drawn thin.
        neutral: Drawn in the colour of text, where it lies upon another curve of its arm.
    """

    label: str
    arm: str
    x: Sequence[float]
    y: Sequence[float]
    line: str = ""
    middle: bool = False
    neutral: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line at a height that means something: a thin one, or a dashed bound with its name."""

    y: float
    label: str = ""


@dataclass(frozen=True)
class Band:
    """A range of heights that means something."""

    low: float
    high: float


@dataclass(frozen=True)
class Mark:
    """A step at which something happened to an arm."""

    x: float
    arm: str


@dataclass(frozen=True)
class Chart:
    """One panel.

    Attributes:
        name: Its id on the page and the stem of its files.
        title: What it shows.
        curves: In the order in which they are drawn.
        x: The horizontal axis.
        y: The vertical axis.
        note: A caption.
        points: Whether each value is marked.
        levels: Horizontal lines.
        bands: Horizontal bands.
        marks: Vertical lines.
        key: What kinds of lines mean, as pairs of "solid", "dashed", "dotted" or "mark" and a word.
    """

    name: str
    title: str
    curves: Sequence[Curve]
    x: Axis = Axis("step")
    y: Axis = Axis()
    note: str = ""
    points: bool = False
    levels: Sequence[Level] = ()
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    key: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Sheet:
    """Several charts on one picture.

    Attributes:
        name: The stem of its files.
        title: Above all of them.
        charts: Row by row.
        columns: How many stand side by side.
    """

    name: str
    title: str
    charts: Sequence[Chart]
    columns: int = 2


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


Section = Table | Chart


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
