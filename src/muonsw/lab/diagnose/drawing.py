"""What the figures of a diagnosis share: colours and names of runs, panels, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from muonsw.lab.diagnose.diagnosis import Diagnosis
from muonsw.lab.diagnose.history import Array
from muonsw.lab.report.static import save_figure
from muonsw.lab.report.theme import LIGHT, RULE_MATH, Palette, matplotlib_style
from muonsw.lab.runs import unique_names
from muonsw.theory.sampled import window_in_steps, windowed_line

PANEL = (5.6, 4.3)
SMALL_PANEL = (3.3, 2.5)
# From so many samples on a curve is smoothed, over this share of the run.
NOISY, SMOOTHED = 60, 0.05
DASHED, DOTTED = (0, (5, 2.5)), (0, (1, 1.6))


@dataclass(frozen=True)
class Arm:
    """A diagnosis with the name and colour it has in every figure."""

    diagnosis: Diagnosis
    label: str
    colour: str


def arms(diagnoses: Sequence[Diagnosis], palette: Palette = LIGHT) -> list[Arm]:
    """Names and colours: the first run of a rule has the rule's colour, further ones the extra colours.

    Runs are called by their rule where that tells them apart, else by their folder.
    """
    rules = [one.run.rule for one in diagnoses]
    by_rule = len(set(rules)) == len(rules) and all(rule in RULE_MATH for rule in rules)
    names = [RULE_MATH[rule] for rule in rules] if by_rule else unique_names(one.run.name for one in diagnoses)
    result, extra = [], 0
    for place, (diagnosis, name, rule) in enumerate(zip(diagnoses, names, rules, strict=True)):
        if rule in RULE_MATH and rule not in rules[:place]:
            colour = palette.colour(rule)
        else:
            colour, extra = palette.extra[extra % len(palette.extra)], extra + 1
        result.append(Arm(diagnosis, name if by_rule else escape_math(name), colour))
    return result


def escape_math(name: str) -> str:
    r"""A name as plain text for matplotlib, which takes dollars for formulas.

    Examples:
        >>> escape_math("run$1")
        'run\\$1'
    """
    return name.replace("$", r"\$")


@contextmanager
def figure_with(
    title: str, rows: int, columns: int, panel: tuple[float, float] = PANEL, palette: Palette = LIGHT
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure in the project's style with its panels, row by row."""
    with matplotlib.rc_context(cast(Any, matplotlib_style(palette))):
        size = (max(panel[0] * columns, 6.4), panel[1] * rows + 0.5)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        figure.suptitle(title, x=0.008, ha="left", fontweight="bold", fontsize=15)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in panels:
            axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _: short_count(step)))
            axis.xaxis.set_major_locator(MaxNLocator(4 if panel == SMALL_PANEL else 6, steps=[1, 2, 5, 10]))
            axis.margins(x=0.02)
        yield figure, panels


def line(axis: Axes, x: Any, y: Any, colour: str, **style: Any) -> None:
    """A line through the finite points; few points are marked too."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = np.isfinite(x) & np.isfinite(y)
    marker = "o" if known.sum() < 15 and "linestyle" not in style else None
    axis.plot(x[known], y[known], color=colour, marker=marker, markersize=3.5, **style)


def noisy_line(axis: Axes, x: Any, y: Array, colour: str, label: str) -> None:
    """Samples thin, and a line fitted through their neighbourhood thick, where there are enough to be noisy."""
    known = np.isfinite(y)
    x, y = np.asarray(x, dtype=np.float64)[known], y[known]
    if len(y) < NOISY:
        line(axis, x, y, colour, label=label)
        return
    axis.plot(x, y, color=colour, alpha=0.3, linewidth=0.8)
    steps = torch.from_numpy(x)
    height, _ = windowed_line(steps, torch.from_numpy(y.copy()), window_in_steps(steps, SMOOTHED))
    axis.plot(x, height.numpy(), color=colour, label=label)


def zero_line(axis: Axes, height: float = 0.0, palette: Palette = LIGHT) -> None:
    """A thin line at a height that means something."""
    axis.axhline(height, color=palette.muted, linewidth=1.0, zorder=1.5)


def short_count(value: float) -> str:
    """Steps as axis labels.

    Examples:
        >>> short_count(300000), short_count(2500), short_count(40)
        ('300k', '2.5k', '40')
    """
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def legend(axis: Axes, **options: Any) -> None:
    """A legend over whatever is drawn below it, if anything has a name."""
    if options.get("handles") or axis.get_legend_handles_labels()[0]:
        look: dict[str, Any] = {"frameon": True, "facecolor": LIGHT.background, "edgecolor": "none", "framealpha": 0.85}
        axis.legend(**look | {"handlelength": 2.2, "fontsize": 10.5} | options)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name.png` and `name.svg`."""
    return save_figure(figure, folder / name)
