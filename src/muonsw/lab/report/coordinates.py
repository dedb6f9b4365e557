"""The coordinate-check figure: sizes over the width for every rule, in small multiples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from muonsw.lab.claims.claim import Evidence
from muonsw.lab.report.static import save_figure
from muonsw.lab.report.theme import LIGHT, Palette, matplotlib_style

WIDTH, HEIGHT = 13.0, 7.6
TITLE = "muP keeps sizes nearly equal at all widths; for that Muon needs its learning rate over √width"
ROWS: Mapping[str, Mapping[str, str]] = {
    "change": {
        "stream": "residual stream",
        "attention": "attention output",
        "experts": "experts' output",
        "logits": "logits",
    },
    "update": {
        "qkv": "queries, keys, values",
        "out": "attention projection",
        "gate_up": "experts, gate and up",
        "down": "experts, down",
    },
}
LABELS = {"change": "change over the run", "update": "output change, first update"}


@dataclass(frozen=True)
class ArmStyle:
    """How the curves of one arm look.

    Attributes:
        label: For the legend.
        extra: Place among the theme's further colours; None is the muted one.
        marker: Of its points, so that colour is not all that tells arms apart.
        dash: Whether its line is broken.
    """

    label: str
    extra: int | None
    marker: str
    dash: bool = False


ARM_STYLES: Mapping[str, ArmStyle] = {
    "adamw": ArmStyle("AdamW, muP", 3, "o"),
    "muon-sqrt": ArmStyle("Muon, muP, lr / √width", 0, "s"),
    "muon-adam": ArmStyle("Muon, muP, lr / width (paper)", 2, "v"),
    "muon-none": ArmStyle("Muon, muP, one lr", 1, "^"),
    "standard": ArmStyle("AdamW, standard", None, "D", dash=True),
}


def draw(outcomes: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG; nothing where no arm was run."""
    shown = {name: outcome for name, outcome in outcomes.items() if name in ARM_STYLES and outcome.series}
    return write_coordinates(shown, folder / "coordinates") if shown else []


def write_coordinates(outcomes: Mapping[str, Evidence], stem: Path, palette: Palette = LIGHT) -> list[Path]:
    """Draw one panel for each size and write `stem.png` and `stem.svg`."""
    with matplotlib.rc_context(cast(Any, matplotlib_style(palette))):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.08))
        figure.suptitle(TITLE, x=0.008, ha="left", fontweight="bold", fontsize=15.0)
        grid = figure.subplots(len(ROWS), 4, sharex=True, sharey="row")
        for axes, (kind, names) in zip(grid, ROWS.items(), strict=True):
            for place, (axis, (name, heading)) in enumerate(zip(axes, names.items(), strict=True)):
                draw_panel(axis, f"{kind} {name}", outcomes, palette)
                axis.set_title(heading)
                axis.set_ylabel(f"{LABELS[kind]}\nrelative to the narrowest" if place == 0 else "")
                axis.set_xlabel("width" if kind == "update" else "")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), handlelength=2.4)
        return save_figure(figure, stem)


def draw_panel(axis: Axes, name: str, outcomes: Mapping[str, Evidence], palette: Palette) -> None:
    """One size over the width: the median over seeds and layers for every arm, and all of them faintly."""
    widths: Sequence[float] = ()
    for arm, outcome in outcomes.items():
        style = ARM_STYLES[arm]
        colour = palette.muted if style.extra is None else palette.extra[style.extra]
        curves = [curve for curve in outcome.series if curve.name.partition("/")[0] == name]
        widths = curves[0].steps
        lines = [[value / values[0] for value in values] for curve in curves for values in curve.values]
        for line in lines:
            axis.plot(widths, line, color=colour, alpha=0.25, linewidth=0.7)
        middle = [median(column) for column in zip(*lines, strict=True)]
        axis.plot(
            widths, middle, color=colour, marker=style.marker, markersize=5, label=style.label,
            linestyle="--" if style.dash else "-",
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.axhline(1.0, color=palette.bound, linewidth=0.8, zorder=1)
    axis.xaxis.set_major_locator(FixedLocator(list(widths)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_two(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())


def power_of_two(value: float) -> str:
    """A tick as a whole number or a fraction of one.

    Examples:
        >>> power_of_two(8.0), power_of_two(0.25)
        ('8', '1/4')
    """
    exponent = round(math.log2(value))
    return f"{2**exponent}" if exponent >= 0 else f"1/{2**-exponent}"
