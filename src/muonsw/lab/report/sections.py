"""What a report is made of, as data: tables and charts. Each chart is described once and drawn by two back ends.

`muonsw.lab.report.page` draws on an interactive page, `muonsw.lab.report.static` as PNG and SVG. Neither measures
anything: curves come with the values that are to be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muonsw.lab.console import Table


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    label: str = ""
    unit: str = ""
    log: int = 0  # the base of a logarithmic axis; 0 for a linear one
    limits: tuple[float, float] | None = None  # the range that is shown first; all of it unless given
    ticks: Sequence[float] = ()  # where it is labelled; chosen by the back end unless given

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
    """A curve over steps, or points over anything."""

    label: str  # which run it is of; shown on hover
    arm: str  # the entry of the legend that it belongs to
    x: Sequence[float]  # ascending
    y: Sequence[float]  # gaps where not finite
    dashed: bool = False  # predicted or published values; otherwise the line of its arm
    middle: bool = False  # the middle of an arm's runs, drawn thick; the single ones are then drawn thin
    neutral: bool = False  # in the colour of text, where it lies upon another curve of its arm


@dataclass(frozen=True)
class Level:
    """A horizontal line at a height that means something: a thin one, or a dashed bound with its name."""

    y: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """One panel."""

    name: str  # its id on the page and the stem of its files
    title: str
    curves: Sequence[Curve]  # in the order in which they are drawn
    x: Axis = Axis("step")
    y: Axis = Axis()
    note: str = ""
    points: bool = False  # whether each value is marked
    levels: Sequence[Level] = ()
    key: Sequence[tuple[str, str]] = ()  # what "solid" and "dashed" lines mean, in words


@dataclass(frozen=True)
class Sheet:
    """Several charts on one picture, row by row."""

    name: str  # the stem of its files
    title: str
    charts: Sequence[Chart]
    columns: int = 2


@dataclass(frozen=True)
class LegendEntry:
    """An arm as the legend shows it."""

    name: str
    rule: str = ""  # the decay rule, which fixes its hue; any other word gets one of the further colours
    runs: int = 1  # how many it stands for


Section = Table | Chart


@dataclass(frozen=True)
class Document:
    """A whole page."""

    title: str
    sections: Sequence[Section]
    verdict: str = ""  # the sentence on top that says what came out
    failed: bool = False  # whether it says that something failed
    arms: Sequence[LegendEntry] = ()
