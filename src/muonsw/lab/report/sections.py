"""What a report is made of, as data: text, tables, figures. How they look is decided where they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from muonsw.lab.claims.table import Claims, any_failed, claims_table
from muonsw.lab.tables import MISSING, Cell, Column, Table, Value, show

__all__ = [
    "MISSING",
    "Arm",
    "Cell",
    "Chart",
    "Claims",
    "Column",
    "Curve",
    "Document",
    "Figure",
    "Section",
    "Table",
    "Text",
    "Value",
    "any_failed",
    "claims_table",
    "show",
]


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
