"""Charts as data, their style, and drawing to PNG and SVG; `report` draws the same charts on a page.

Constant decay is blue and scaled decay is vermillion in every figure of the project. The hues are those of Okabe and
Ito, which readers with any common colour blindness can tell apart.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muonsw.lab.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as DrawnAxis
    from matplotlib.lines import Line2D


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    label: str = ""
    unit: str = ""
    log: int = 0  # the base of a logarithmic axis; 0 for a linear one
    limits: tuple[float, float] | None = None  # initial range
    ticks: Sequence[float] = ()  # positions of the labels; automatic if empty

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit and self.label else self.label or self.unit


@dataclass(frozen=True)
class Curve:
    """A curve over steps, or points over anything."""

    label: str  # name of the run, shown on hover
    arm: str  # its entry in the legend
    x: Sequence[float]  # ascending
    y: Sequence[float]  # non-finite values are gaps
    dashed: bool = False  # predicted or published values
    middle: bool = False  # the median of an arm, drawn thick; its runs are then drawn thin


@dataclass(frozen=True)
class Level:
    """A horizontal line of a picture: thin, or dashed if it has a label."""

    y: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """One panel."""

    name: str  # its id on the page and the stem of its files
    title: str
    curves: Sequence[Curve]  # in drawing order
    x: Axis = Axis("step")
    y: Axis = Axis()
    note: str = ""
    points: bool = False  # whether each value has a marker
    levels: Sequence[Level] = ()


# ---- The style

FONT_SIZE = 12.0
SANS = ("DejaVu Sans", "Helvetica Neue", "Arial", "sans-serif")
TEXT, MUTED, GRID = "#1B1F24", "#57606A", "#E3E6EA"
HUES = {"constant": "#0072B2", "scaled": "#D55E00"}
FURTHER = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", MUTED)
# Arms of one rule: how far to darken the hue, and plotly's name of the dash style.
SHADES = ((0.0, "solid"), (0.45, "dashdot"), (0.2, "dot"), (0.65, "longdashdot"))
MARKERS = "os^vD"  # for readers who cannot tell the colours apart


class ArmStyle(NamedTuple):
    """Colour, dash style (plotly's name) and marker (matplotlib's) of an arm."""

    colour: str
    dash: str
    marker: str


def arm_styles(rules: Mapping[str, str]) -> dict[str, ArmStyle]:
    """Choose a style for each arm by its rule, which sets the hue; more arms of a rule are shaded and dashed.

    Examples:
        >>> arm_styles({"a": "scaled", "b": "scaled"})["b"]
        ArmStyle(colour='#814210', dash='dashdot', marker='s')
    """
    further = list(dict.fromkeys(rule for rule in rules.values() if rule not in HUES))
    styles: dict[str, ArmStyle] = {}
    seen = Counter[str]()
    for arm, rule in rules.items():
        hue = HUES[rule] if rule in HUES else FURTHER[further.index(rule) % len(FURTHER)]
        share, dash = SHADES[seen[rule] % len(SHADES)]
        parts = [(int(hue[k : k + 2], 16), int(TEXT[k : k + 2], 16)) for k in (1, 3, 5)]
        mixed = "".join(f"{round((1.0 - share) * a + share * b):02X}" for a, b in parts)
        styles[arm] = ArmStyle(f"#{mixed}", dash, MARKERS[len(styles) % len(MARKERS)])
        seen[rule] += 1
    return styles


# ---- PNG and SVG

WIDTH, HEIGHT = 4.2, 3.6  # of a panel in inches
LETTER, HANDLE = 0.083, 0.55  # inches of a letter and of the handle of a legend entry
FEW = 15  # curves with fewer values get markers
LARGEST = 1e100  # values far beyond it overflow margins and ticks
DASHES: Mapping[str, Any] = {  # by plotly's name
    "solid": "-",
    "dashdot": (0, (5, 2, 1, 2)),
    "dot": (0, (1, 1.5)),
    "longdashdot": (0, (8, 2, 1, 2)),
    "dashed": (0, (5, 2.5)),
}
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), TEXT),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.family": "sans-serif",
    "font.sans-serif": list(SANS[:-1]),
    "font.size": FONT_SIZE,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.frameon": False,
    "svg.hashsalt": "muonsw",
}


def draw(
    stem: Path, charts: Sequence[Chart], rules: Mapping[str, str], *, title: str = "", columns: int = 2
) -> list[Path]:
    """Draw charts row by row with a legend below, and write the picture as PNG and SVG; `rules` are those of arms."""
    import matplotlib  # takes a second, and training draws nothing
    from matplotlib.figure import Figure

    styles, columns = arm_styles(rules), min(columns, len(charts))
    rows = math.ceil(len(charts) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(columns * WIDTH, rows * HEIGHT), layout="constrained")
        for place, chart in enumerate(charts, start=1):
            _draw_chart(figure.add_subplot(rows, columns, place), chart, styles)
        if title:
            figure.suptitle(_text(title), x=0.01, ha="left", fontsize=15, weight="bold")
        if entries := _legend_entries(charts, styles):
            longest = max(len(str(entry.get_label())) for entry in entries)
            across = max(1, min(len(entries), int((columns * WIDTH - 0.4) / (HANDLE + LETTER * longest))))
            figure.legend(handles=entries, loc="outside lower left", ncols=across, fontsize=10.5)
        written = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # missing letters show as boxes
            for suffix in ("png", "svg"):
                # Without a date, equal runs give equal files.
                metadata = {"Date": None} if suffix == "svg" else {}
                figure.savefig(buffer := io.BytesIO(), format=suffix, dpi=160, metadata=metadata)
                written.append(write_atomically(stem.with_name(f"{stem.name}.{suffix}"), buffer.getvalue()))
    return written


def _draw_chart(axes: Axes, chart: Chart, styles: Mapping[str, ArmStyle]) -> None:
    for arm in dict.fromkeys(curve.arm for curve in chart.curves):
        _draw_arm(axes, [curve for curve in chart.curves if curve.arm == arm], styles[arm], chart.points)
    for level in chart.levels:
        look: dict[str, Any] = {"color": MUTED, "linewidth": 1.0}
        if level.label:
            look = {"color": TEXT, "linestyle": DASHES["dashed"], "linewidth": 1.4, "zorder": 3}
        axes.axhline(level.y, **look)
    axes.set_title(_text(chart.title))
    axes.set_xlabel(_text(chart.x.title))
    axes.set_ylabel(_text(chart.y.title), wrap=True)
    axes.margins(x=0.02)
    axes.set_xscale("log", base=chart.x.log) if chart.x.log else axes.set_xscale("linear")
    axes.set_yscale("log", base=chart.y.log) if chart.y.log else axes.set_yscale("linear")
    _set_ticks(axes.xaxis, chart.x, most=4)
    _set_ticks(axes.yaxis, chart.y, most=5)
    axes.set(xlim=chart.x.limits, ylim=chart.y.limits)


def _draw_arm(axes: Axes, curves: Sequence[Curve], style: ArmStyle, marked: bool) -> None:
    """Draw the curves of an arm; thin if there is a median."""
    has_middle, single = any(curve.middle for curve in curves), sum(not curve.middle for curve in curves)
    for curve in curves:
        look: dict[str, Any] = {"linewidth": 1.6, "linestyle": DASHES["dashed" if curve.dashed else style.dash]}
        if curve.middle:
            look["linewidth"] = 2.4
        elif has_middle and not curve.dashed:
            look = {"linewidth": 0.8, "alpha": min(0.4, max(0.06, 6.0 / single))}
        few = len(curve.x) < FEW and not has_middle
        if not curve.dashed and (few or (marked and curve.middle == has_middle)):
            look |= {"marker": style.marker, "markersize": 6 if marked else 4, "markeredgewidth": 0}
        y = np.asarray(curve.y, dtype=float)
        # Values that would overflow the axes are gaps.
        axes.plot(curve.x, np.where(np.abs(y) < LARGEST, y, np.nan), color=style.colour, zorder=2, **look)


def _set_ticks(drawn: DrawnAxis, axis: Axis, most: int) -> None:
    """Set ticks: those of the axis, powers, or round numbers (20,000 steps as `20k`)."""
    from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if axis.ticks or axis.log:
        places = FixedLocator(list(axis.ticks)) if axis.ticks else LogLocator(base=axis.log, numticks=6)
        drawn.set_major_locator(places)
        drawn.set_minor_locator(NullLocator())
    else:
        drawn.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    if axis.ticks or axis.log == 2:
        drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif axis.label.startswith("step"):
        drawn.set_major_formatter(EngFormatter(sep=""))


def _legend_entries(charts: Sequence[Chart], styles: Mapping[str, ArmStyle]) -> list[Line2D]:
    """List the arms if there are several, then the labels of levels."""
    from matplotlib.lines import Line2D

    arms = dict.fromkeys(curve.arm for chart in charts for curve in chart.curves)
    marked = any(chart.points for chart in charts)
    entries = []
    for arm in arms if len(arms) > 1 else ():
        colour, dash, marker = styles[arm]
        look: dict[str, Any] = {"marker": marker if marked else None, "markersize": 6}
        entries.append(Line2D([], [], color=colour, linestyle=DASHES[dash], label=_text(arm), **look))
    for label in dict.fromkeys(level.label for chart in charts for level in chart.levels if level.label):
        entries.append(Line2D([], [], color=TEXT, linestyle=DASHES["dashed"], label=_text(label)))
    return entries


def _text(text: str) -> str:
    """Escape dollars, which would start formulas."""
    return text.replace("$", r"\$")
