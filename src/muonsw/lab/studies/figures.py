"""The figures of the studies that train no run: convergence on two quadratics, and the coordinate check of muP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from muonsw.lab.charts import Axis, Chart, Curve, Level, draw
from muonsw.lab.stats import Evidence, Series

CONVERGENCE_TITLE = "Constant decay stops at its bound, scaled decay does not"
QUADRATICS = {
    "scalar-figure": "SGD on ½a(w \N{MINUS SIGN} c)²",
    "matrix-figure": "Muon on ½‖W \N{MINUS SIGN} A‖²",
}
COORDINATES_TITLE = "muP keeps sizes nearly equal at all widths; for that Muon needs its learning rate over √width"
# The arms and sizes of the coordinate check: the change of an output over the whole run, and the change of a matrix's
# output in the first step.
WIDTH_ARMS: Mapping[str, str] = {
    "adamw": "AdamW, muP",
    "muon-sqrt": "Muon, muP, lr / √width",
    "muon-adam": "Muon, muP, lr / width (paper)",
    "muon-none": "Muon, muP, one lr",
    "standard": "AdamW, standard",
}
SIZES: Mapping[str, str] = {
    "change stream": "residual stream",
    "change attention": "attention output",
    "change experts": "experts' output",
    "change logits": "logits",
    "update qkv": "queries, keys, values",
    "update out": "attention projection",
    "update gate_up": "experts, gate and up",
    "update down": "experts, down",
}
LABELS = {"change": "whole run, over narrowest", "update": "first step, over narrowest"}


def draw_convergence(outcomes: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Draw each rule's loss on the two quadratics as PNG and SVG; nothing if neither was run."""
    charts = [_convergence_chart(name, outcomes[name].series) for name in QUADRATICS if name in outcomes]
    rules = {rule: rule for rule in ("constant", "scaled")}
    return draw(folder / "convergence", charts, rules, title=CONVERGENCE_TITLE) if charts else []


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
    for kind, label in LABELS.items():
        row = [_width_chart(size, outcomes) for size in SIZES if size.startswith(kind)]
        values = [value for chart in row for curve in chart.curves for value in curve.y]
        y = Axis(label, log=2, limits=(min(values) / 1.15, max(values) * 1.15))
        charts += [replace(chart, y=y if place == 0 else replace(y, label="")) for place, chart in enumerate(row)]
    rules = {label: name for name, label in WIDTH_ARMS.items()}
    return draw(folder / "coordinates", charts, rules, title=COORDINATES_TITLE, columns=4)


def _width_chart(size: str, outcomes: Mapping[str, Evidence]) -> Chart:
    """One size over the width, for every arm with a line for each seed and layer."""
    curves: list[Curve] = []
    widths: Sequence[float] = ()
    for name, outcome in outcomes.items():
        layers = [series for series in outcome.series if series.name.partition("/")[0] == size]
        lines = [[value / values[0] for value in values] for series in layers for values in series.values]
        widths = layers[0].steps
        curves += _with_median("seed and layer", WIDTH_ARMS[name], widths, lines)
    x = Axis("width", log=2, ticks=widths)
    return Chart(size.replace(" ", "-"), SIZES[size], curves, x=x, points=True, levels=[Level(1.0)])


def _with_median(label: str, arm: str, x: Sequence[float], lines: Sequence[Sequence[float]]) -> list[Curve]:
    middle = [median(column) for column in zip(*lines, strict=True)]
    curves = [Curve(f"{label} {number}", arm, x, line) for number, line in enumerate(lines)]
    return [*curves, Curve("median", arm, x, middle, middle=True)]
