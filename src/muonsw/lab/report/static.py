"""Figures for paper and README: PNG and SVG, drawn without a display."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter

from muonsw.lab.claims.claim import Series
from muonsw.lab.report.sections import Arm, Chart, Curve
from muonsw.lab.report.theme import LIGHT, RULE_MATH, ArmStyle, Palette, arm_styles, matplotlib_style
from muonsw.lab.storage import write_atomically

WIDTH, HEIGHT, DPI = 11.0, 4.8, 160
MOST_IN_A_LINE = 4
# Plotly's words for dashes.
DASHES: Mapping[str, Any] = {
    "solid": "-",
    "dashdot": (0, (5, 2, 1, 2)),
    "dot": (0, (1, 1.5)),
    "longdashdot": (0, (8, 2, 1, 2)),
}
MARGINS = {"left": 0.12, "right": 0.97, "top": 0.92, "bottom": 0.13}
BOUND = "lower bound for constant"
PanelData = tuple[str, Sequence[Series]]


def write_panels(parts: Sequence[PanelData], title: str, stem: Path, palette: Palette = LIGHT) -> list[Path]:
    """Draw panels of loss over steps side by side and write `stem.png` and `stem.svg`."""
    with matplotlib.rc_context(cast(Any, matplotlib_style(palette))):
        figure = Figure(
            figsize=(WIDTH * len(parts) / 2, HEIGHT), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.09)
        )
        figure.suptitle(title, x=0.008, ha="left", fontweight="bold", fontsize=15.5)
        axes = figure.subplots(1, len(parts), squeeze=False)[0]
        for place, (axis, (heading, series)) in enumerate(zip(axes, parts, strict=True)):
            draw_panel(axis, heading, series, palette)
            axis.set_ylabel("loss / mean initial loss" if place == 0 else "")
        handles, labels = axes[0].get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda place: labels[place] == BOUND)
        axes[0].legend([handles[k] for k in order], [labels[k] for k in order], loc="lower left", handlelength=2.2)
        return save_figure(figure, stem)


def draw_panel(axis: Axes, heading: str, series: Sequence[Series], palette: Palette) -> None:
    """Single starts thin, their median thick, the bound dashed; logarithmic axes."""
    for curves in series:
        colour = palette.colour(curves.rule)
        for values in curves.values:
            axis.plot(curves.steps, values, color=colour, alpha=min(0.35, 6.0 / len(curves.values)), linewidth=0.8)
        middle = [median(column) for column in zip(*curves.values, strict=True)]
        axis.plot(curves.steps, middle, color=colour, label=RULE_MATH[curves.rule])
        if curves.level is not None:
            bound = axis.axhline(curves.level, color=palette.bound, linewidth=1.4, zorder=3)
            bound.set(linestyle=(0, (5, 3)), label=BOUND)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(heading)
    axis.set_xlabel("1 + step t")
    axis.yaxis.set_major_locator(LogLocator(numticks=8))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.margins(x=0.02)
    low, high = axis.get_ylim()
    axis.set_ylim(10 ** math.floor(math.log10(low)), high * 1.2)


def write_chart(chart: Chart, arms: Sequence[Arm], folder: Path, palette: Palette = LIGHT) -> list[Path]:
    """Draw a chart of a report and write it as PNG and SVG under its name."""
    styles = dict(zip((arm.name for arm in arms), arm_styles([arm.rule for arm in arms], palette), strict=True))
    with matplotlib.rc_context(cast(Any, matplotlib_style(palette))):
        # Fixed margins: finding them takes longer than drawing, and charts are many.
        figure = Figure(figsize=(8.0, 4.8))
        axis = figure.subplots(gridspec_kw=MARGINS)
        for arm in {curve.arm: None for curve in chart.curves}:
            _draw_arm(axis, [curve for curve in chart.curves if curve.arm == arm], styles[arm], marked=chart.points)
        axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axis.set_xscale("log" if chart.log_x else "linear")
        axis.set_yscale("log" if chart.log_y else "linear")
        axis.margins(x=0.02)
        if chart.window:
            axis.set_ylim(*chart.window)
        if len(styles) > 1:
            _legend(axis, len(styles))
        return save_figure(figure, folder / chart.name)


def _draw_arm(axis: Axes, curves: Sequence[Curve], style: ArmStyle, *, marked: bool) -> None:
    """Single runs as one collection, which draws hundreds at once; thin where there is a middle."""
    middle = any(curve.middle for curve in curves)
    dash = DASHES[style.dash]
    looks = {
        "single": {"linewidths": 0.8, "alpha": 0.4} if middle else {"linewidths": 1.6, "linestyles": [dash]},
        "predicted": {"linewidths": 1.6, "linestyles": [(0, (4, 2.5))]},
        "middle": {"linewidths": 2.4, "linestyles": [dash]},
    }
    for kind, look in looks.items():
        lines = [np.column_stack([curve.x, curve.y]) for curve in curves if _kind(curve) == kind]
        if lines:
            axis.add_collection(LineCollection(lines, colors=style.colour, **cast(Any, look)))
    if marked:
        for curve in curves:
            axis.plot(curve.x, curve.y, "o", color=style.colour, markersize=4)
    axis.autoscale_view()
    axis.plot([], [], color=style.colour, linestyle=dash, label=curves[0].arm.replace("$", r"\$"))


def _legend(axis: Axes, entries: int) -> None:
    """In the line of the title, where no curve is; many entries go where most room is."""
    if entries <= MOST_IN_A_LINE:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": entries, "borderaxespad": 0.3}
    else:
        place = {"ncols": 1 + entries // 9}
    axis.legend(handlelength=2.0, columnspacing=1.4, fontsize=10, **cast(Any, place))


def _kind(curve: Curve) -> str:
    return "middle" if curve.middle else "predicted" if curve.dashed else "single"


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; two equal figures give equal files."""
    with _any_letter():
        if figure.get_layout_engine() is not None:
            figure.draw_without_rendering()
            figure.set_layout_engine(None)  # laid out once for both files
        return [_write(figure, stem.with_suffix(suffix)) for suffix in (".png", ".svg")]


def _write(figure: Figure, path: Path) -> Path:
    buffer = io.BytesIO()
    # Without a date two equal runs give equal files.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(buffer, format=path.suffix[1:], dpi=DPI, metadata=metadata)
    return write_atomically(path, buffer.getvalue())


@contextmanager
def _any_letter() -> Iterator[None]:
    """A name may hold letters that the font lacks; they show as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield
