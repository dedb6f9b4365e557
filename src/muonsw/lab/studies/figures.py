"""The figures of the studies that train no run: convergence on two quadratics, and the coordinate check of muP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from muonsw.lab.charts import Axis, Chart, Curve, Level, draw
from muonsw.lab.stats import Evidence, Series
from muonsw.lab.studies import mup

QUADRATICS = {
    "scalar-figure": "SGD on ½a(w \N{MINUS SIGN} c)²",
    "matrix-figure": "Muon on ½‖W \N{MINUS SIGN} A‖²",
}
TITLES = {experiment.name: experiment.title for experiment in mup.EXPERIMENTS}
# The change of outputs over the whole run, and of matrices' outputs in the first step.
ROWS = {
    "change": (mup.COORDINATES, "whole run, over narrowest"),
    "update": (mup.MATRICES, "first step, over narrowest"),
}


def draw_convergence(outcomes: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Draw each rule's loss on the two quadratics as PNG and SVG; nothing if neither was run."""
    charts = [_convergence_chart(name, outcomes[name].series) for name in QUADRATICS if name in outcomes]
    rules = {rule: rule for rule in ("constant", "scaled")}
    title = "Constant decay stops at its bound, scaled decay does not"
    return draw(folder / "convergence", charts, rules, title=title) if charts else []


def _convergence_chart(name: str, series: Sequence[Series]) -> Chart:
    curves, levels = [], []
    for chains in series:
        curves += _with_median("start", chains.rule, chains.steps, chains.values)
        levels += [] if chains.level is None else [Level(chains.level, "lower bound for constant")]
    lowest = min(value for curve in curves for value in curve.y if value > 0)
    highest = max(value for curve in curves for value in curve.y)
    return Chart(
        name,
        f"{QUADRATICS[name]}, {len(series[0].values)} starts",
        curves,
        x=Axis("1 + step t", log=10),
        y=Axis("loss / mean initial loss", log=10, limits=(10 ** math.floor(math.log10(lowest)), 1.2 * highest)),
        levels=levels,
    )


def draw_coordinates(outcomes: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Draw sizes over the width for every rule as PNG and SVG; the charts of one row have the same range."""
    charts = []
    for kind, (names, label) in ROWS.items():
        row = [_width_chart(kind, name, outcomes) for name in names]
        values = [value for chart in row for curve in chart.curves for value in curve.y]
        y = Axis(label, log=2, limits=(min(values) / 1.15, max(values) * 1.15))
        charts += [replace(chart, y=y if place == 0 else replace(y, label="")) for place, chart in enumerate(row)]
    rules = {title: name for name, title in TITLES.items()}
    title = "Under muP sizes hardly depend on the width; Muon needs lr / √width"
    return draw(folder / "coordinates", charts, rules, title=title, columns=4)


def _width_chart(kind: str, size: str, outcomes: Mapping[str, Evidence]) -> Chart:
    """One size over the width, for every arm with a line for each seed and layer."""
    curves: list[Curve] = []
    widths: Sequence[float] = ()
    for name, outcome in outcomes.items():
        layers = [series for series in outcome.series if series.name.partition("/")[0] == f"{kind} {size}"]
        lines = [[value / values[0] for value in values] for series in layers for values in series.values]
        widths = layers[0].steps
        curves += _with_median("seed and layer", TITLES[name], widths, lines)
    x = Axis("width", log=2, ticks=widths)
    return Chart(f"{kind}-{size}", mup.WORDS[size], curves, x=x, points=True, levels=[Level(1.0)])


def _with_median(label: str, arm: str, x: Sequence[float], lines: Sequence[Sequence[float]]) -> list[Curve]:
    middle = [median(column) for column in zip(*lines, strict=True)]
    curves = [Curve(f"{label} {number}", arm, x, line) for number, line in enumerate(lines)]
    return [*curves, Curve("median", arm, x, middle, middle=True)]
