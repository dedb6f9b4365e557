"""Charts as PNG and SVG, drawn without a display."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from muonsw.lab.files import write_atomically
from muonsw.lab.report.charts import (
    FONT_SIZE,
    GRID,
    MUTED,
    SANS,
    TEXT,
    ArmStyle,
    Axis,
    Chart,
    Curve,
    LegendEntry,
    Sheet,
    arm_styles,
)

DPI = 160
# Without a date two equal runs give equal files.
METADATA: dict[str, dict[str, str | None]] = {"png": {}, "svg": {"Date": None}}
# Inches of a panel: one alone, one of two, and one of many.
PANELS = {1: (8.0, 4.9), 2: (5.75, 4.6)}
SMALL = (3.5, 3.2)
LETTER, HANDLE = 0.083, 0.55  # width of a letter and of what stands before an entry of the legend
LONGEST_TEXT = 120  # characters
FEW = 15  # values of a curve below which each is marked
LARGEST = 1e100  # far beyond it margins and ticks of an axis overflow
# Plotly's words for dashes, and what curves say.
DASHES: Mapping[str, Any] = {
    "solid": "-",
    "dashdot": (0, (5, 2, 1, 2)),
    "dot": (0, (1, 1.5)),
    "longdashdot": (0, (8, 2, 1, 2)),
    "dashed": (0, (5, 2.5)),
}
STYLE: Mapping[str, Any] = {
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
    "legend.frameon": False,
    "svg.hashsalt": "muonsw",
}


def write_sheet(sheet: Sheet, arms: Sequence[LegendEntry], folder: Path) -> list[Path]:
    """Draw all charts of a sheet on one picture, its legend below them, and write it as PNG and SVG under its name."""
    styles, columns = arm_styles(arms), min(sheet.columns, len(sheet.charts))
    rows = math.ceil(len(sheet.charts) / columns)
    width, height = PANELS.get(columns, SMALL) if rows == 1 else SMALL
    with matplotlib.rc_context(cast(Any, STYLE)):
        figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
        for place, chart in enumerate(sheet.charts, start=1):
            _draw_chart(figure.add_subplot(rows, columns, place), chart, styles, small=(width, height) == SMALL)
        if sheet.title:
            figure.suptitle(_text(sheet.title), x=0.01, ha="left", fontsize=15, weight="bold")
        if entries := _legend_entries(sheet, styles):
            longest = max(len(str(entry.get_label())) for entry in entries)
            across = max(1, min(len(entries), int((columns * width - 0.4) / (HANDLE + LETTER * longest))))
            figure.legend(handles=entries, loc="outside lower left", ncols=across, fontsize=10.5)
        written = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # letters that the font lacks show as boxes
            for suffix, metadata in METADATA.items():
                figure.savefig(buffer := io.BytesIO(), format=suffix, dpi=DPI, metadata=metadata)
                written.append(write_atomically(folder / f"{sheet.name}.{suffix}", buffer.getvalue()))
    return written


def _draw_chart(axes: Axes, chart: Chart, styles: Mapping[str, ArmStyle], *, small: bool) -> None:
    for arm in {curve.arm: None for curve in chart.curves}:
        _draw_arm(axes, [curve for curve in chart.curves if curve.arm == arm], styles[arm], chart.points)
    for level in chart.levels:
        look = {"linestyle": DASHES["dashed"], "linewidth": 1.4, "zorder": 3} if level.label else {"linewidth": 1.0}
        axes.axhline(level.y, color=TEXT if level.label else MUTED, **cast(Any, look))
    title, label, tick = (12, 11, 10.5) if small else (13, 12, 11)
    axes.set_title(_text(chart.title), fontsize=title)
    axes.set_xlabel(_text(chart.x.title), fontsize=label)
    axes.set_ylabel(_text(chart.y.title), fontsize=label, wrap=True)
    axes.tick_params(labelsize=tick)
    axes.margins(x=0.02)
    axes.set_xscale("log", base=chart.x.log) if chart.x.log else axes.set_xscale("linear")
    axes.set_yscale("log", base=chart.y.log) if chart.y.log else axes.set_yscale("linear")
    _set_ticks(axes.xaxis, chart.x, most=4 if small else 6)
    _set_ticks(axes.yaxis, chart.y, most=5 if small else 7)
    axes.set(xlim=chart.x.limits, ylim=chart.y.limits)


def _draw_arm(axes: Axes, curves: Sequence[Curve], style: ArmStyle, marked: bool) -> None:
    """Curves that look alike as one collection, which draws hundreds at once; thin where there is a middle."""
    has_middle, single = any(curve.middle for curve in curves), sum(not curve.middle for curve in curves)
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for curve in curves:
        y = np.asarray(curve.y, dtype=float)
        points = np.column_stack([curve.x, np.where(np.abs(y) < LARGEST, y, np.nan)])  # gaps where axes would overflow
        groups.setdefault((curve.dashed, curve.middle), []).append(points)
    for (dashed, middle), lines in groups.items():
        look: dict[str, Any] = {"linewidths": 1.6, "linestyles": [DASHES["dashed" if dashed else style.dash]]}
        if middle:
            look["linewidths"] = 2.4
        elif has_middle and not dashed:
            look = {"linewidths": 0.8, "alpha": min(0.4, max(0.06, 6.0 / single))}
        axes.add_collection(LineCollection(lines, colors=style.colour, zorder=2, **look))
        for points in lines:
            few = len(points) < FEW and not has_middle
            if not dashed and (few or (marked and middle == has_middle)):
                size = 6 if marked else 4
                axes.plot(*points.T, style.marker, color=style.colour, markersize=size, markeredgewidth=0)
    axes.autoscale_view()


def _set_ticks(drawn: DrawnAxis, axis: Axis, most: int) -> None:
    """Ticks: the given ones, powers, or round numbers, thousands of steps as `20k`."""
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


def _legend_entries(sheet: Sheet, styles: Mapping[str, ArmStyle]) -> list[Line2D]:
    """What tells the curves apart: the arms where there are several, then what kinds of lines mean."""
    used = {curve.arm: None for chart in sheet.charts for curve in chart.curves}
    marked = any(chart.points for chart in sheet.charts)
    entries = []
    for arm in used if len(used) > 1 else ():
        colour, dash, marker = styles[arm]
        look = {"marker": marker if marked else None, "markersize": 6}
        entries.append(Line2D([], [], color=colour, linestyle=DASHES[dash], label=_text(arm), **cast(Any, look)))
    for kind, word in dict.fromkeys(pair for chart in sheet.charts for pair in chart.key):
        entries.append(Line2D([], [], color=MUTED, label=_text(word), linestyle=DASHES[kind]))
    for label in dict.fromkeys(level.label for chart in sheet.charts for level in chart.levels if level.label):
        entries.append(Line2D([], [], color=TEXT, linestyle=DASHES["dashed"], label=_text(label)))
    return entries


def _text(text: str) -> str:
    """A text for matplotlib, which takes dollars for formulas and leaves no room for a chart beside a long name."""
    return (text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…").replace("$", r"\$")
