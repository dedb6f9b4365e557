"""Charts as PNG and SVG, drawn without a display."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from muonsw.lab.report.own import METADATA, write_own
from muonsw.lab.report.sections import Axis, Chart, Curve, LegendEntry, Sheet
from muonsw.lab.report.theme import LIGHT, ArmStyle, arm_styles, matplotlib_style

DPI = 160
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


def write_chart(chart: Chart, arms: Sequence[LegendEntry], folder: Path) -> list[Path]:
    """Draw one chart and write it as PNG and SVG under its name."""
    return write_sheet(Sheet(chart.name, "", [chart], columns=1), arms, folder)


def write_sheet(sheet: Sheet, arms: Sequence[LegendEntry], folder: Path) -> list[Path]:
    """Draw all charts of a sheet on one picture, its legend below them, and write it as PNG and SVG under its name."""
    styles = dict(zip((arm.name for arm in arms), arm_styles([arm.rule for arm in arms]), strict=True))
    columns = min(sheet.columns, len(sheet.charts))
    rows = math.ceil(len(sheet.charts) / columns)
    width, height = PANELS.get(columns, SMALL) if rows == 1 else SMALL
    with matplotlib.rc_context(cast(Any, matplotlib_style())):
        figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
        for place, chart in enumerate(sheet.charts, start=1):
            _draw_chart(figure.add_subplot(rows, columns, place), chart, styles, small=(width, height) == SMALL)
        if sheet.title:
            figure.suptitle(_text(sheet.title), x=0.01, ha="left", fontsize=15, weight="bold")
        if entries := _legend_entries(sheet, styles):
            longest = max(len(str(entry.get_label())) for entry in entries)
            across = max(1, min(len(entries), int((columns * width - 0.4) / (HANDLE + LETTER * longest))))
            figure.legend(handles=entries, loc="outside lower left", ncols=across, fontsize=10.5)
        return _save(figure, folder / sheet.name)


def _draw_chart(axis: Axes, chart: Chart, styles: Mapping[str, ArmStyle], *, small: bool) -> None:
    for arm in {curve.arm: None for curve in chart.curves}:
        _draw_arm(axis, [curve for curve in chart.curves if curve.arm == arm], styles[arm], chart.points)
    for level in chart.levels:
        look = {"linestyle": DASHES["dashed"], "linewidth": 1.4, "zorder": 3} if level.label else {"linewidth": 1.0}
        axis.axhline(level.y, color=LIGHT.bound if level.label else LIGHT.muted, **cast(Any, look))
    title, label, tick = (12, 11, 10.5) if small else (13, 12, 11)
    axis.set_title(_text(chart.title), fontsize=title)
    axis.set_xlabel(_text(chart.x.title), fontsize=label)
    axis.set_ylabel(_text(chart.y.title), fontsize=label, wrap=True)
    axis.tick_params(labelsize=tick)
    axis.margins(x=0.02)
    axis.set_xscale("log", base=chart.x.log) if chart.x.log else axis.set_xscale("linear")
    axis.set_yscale("log", base=chart.y.log) if chart.y.log else axis.set_yscale("linear")
    _label(axis.xaxis, chart.x, most=4 if small else 6)
    _label(axis.yaxis, chart.y, most=5 if small else 7)
    axis.set(xlim=chart.x.limits, ylim=chart.y.limits)


def _draw_arm(axis: Axes, curves: Sequence[Curve], style: ArmStyle, marked: bool) -> None:
    """Curves that look alike as one collection, which draws hundreds at once; thin where there is a middle."""
    curves = [replace(curve, y=_drawable(curve.y)) for curve in curves]
    middle = any(curve.middle for curve in curves)
    single = sum(not curve.middle for curve in curves)
    groups: dict[tuple[bool, bool, bool], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.dashed, curve.middle, curve.neutral), []).append(curve)
    for (dashed, is_middle, neutral), alike in groups.items():
        colour = LIGHT.text if neutral else style.colour
        look: dict[str, Any] = {"linewidths": 1.6, "linestyles": [DASHES["dashed" if dashed else style.dash]]}
        if is_middle:
            look["linewidths"] = 2.4
        elif middle and not dashed:
            look = {"linewidths": 0.8, "alpha": min(0.4, max(0.06, 6.0 / single))}
        lines = [np.column_stack([curve.x, curve.y]) for curve in alike]
        axis.add_collection(LineCollection(lines, colors=colour, zorder=3 if neutral else 2, **look))
        for curve in alike:
            few = len(curve.x) < FEW and not middle
            if not dashed and (few or (marked and is_middle == middle)):
                size = 6 if marked else 4
                axis.plot(curve.x, curve.y, style.marker, color=colour, markersize=size, markeredgewidth=0)
    axis.autoscale_view()


def _drawable(heights: Sequence[float]) -> list[float]:
    """Heights with gaps where matplotlib could not divide the axis, as losses of a run that diverged."""
    values = np.asarray(heights, dtype=float)
    return [float(value) for value in np.where(np.abs(values) < LARGEST, values, np.nan)]


def _label(drawn: DrawnAxis, axis: Axis, most: int) -> None:
    """Ticks: the given ones, powers, or round numbers, thousands of steps as `20k`."""
    if axis.ticks:
        drawn.set_major_locator(FixedLocator(list(axis.ticks)))
        drawn.set_minor_locator(NullLocator())
    elif axis.log:
        drawn.set_major_locator(LogLocator(base=axis.log, numticks=6))
        drawn.set_minor_formatter(NullFormatter())
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
    entries = [
        Line2D([], [], color=styles[arm].colour, linestyle=DASHES[styles[arm].dash], label=_text(arm),
               marker=styles[arm].marker if marked else None, markersize=6)
        for arm in used
    ]  # fmt: skip
    entries = entries if len(used) > 1 else []
    for kind, word in dict.fromkeys(pair for chart in sheet.charts for pair in chart.key):
        entries.append(Line2D([], [], color=LIGHT.muted, label=_text(word), linestyle=DASHES[kind]))
    for label in dict.fromkeys(level.label for chart in sheet.charts for level in chart.levels if level.label):
        entries.append(Line2D([], [], color=LIGHT.bound, linestyle=DASHES["dashed"], label=_text(label)))
    return entries


def _text(text: str) -> str:
    """A text for matplotlib, which takes dollars for formulas and leaves no room for a chart beside a long name."""
    return (text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…").replace("$", r"\$")


def _save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; two equal figures give equal files."""
    written = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # letters that the font lacks show as boxes
        for suffix, metadata in METADATA.items():
            figure.savefig(buffer := io.BytesIO(), format=suffix[1:], dpi=DPI, metadata=metadata)
            written.append(write_own(stem.with_name(f"{stem.name}{suffix}"), buffer.getvalue()))
    return written
