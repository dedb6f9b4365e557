"""Figures for paper and README: PNG and SVG, drawn without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter

from muonsw.lab.experiments.claims import Series
from muonsw.lab.files import write_atomically
from muonsw.lab.report.theme import LIGHT, RULE_MATH, Palette, matplotlib_style

WIDTH, HEIGHT, DPI = 11.0, 4.8, 160
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
        return [_write(figure, stem.with_suffix(".png")), _write(figure, stem.with_suffix(".svg"))]


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


def _write(figure: Figure, path: Path) -> Path:
    buffer = io.BytesIO()
    # Without a date two equal runs give equal files.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(buffer, format=path.suffix[1:], dpi=DPI, metadata=metadata)
    return write_atomically(path, buffer.getvalue())
