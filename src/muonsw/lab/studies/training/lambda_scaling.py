"""How the best lambda follows width, batch and size: three exponents under both rules, beside those published.

| axis  | what grows                                             | published                                        |
|-------|--------------------------------------------------------|--------------------------------------------------|
| width | the width, with the same updates                       | 0, if the total of decay is constant             |
| batch | the batch, with the same tokens, so fewer updates      | 1, linear in the batch (Power Lines)             |
| size  | the width, and updates with its square, so that tokens | -2 (nanochat, cautious and falling decay); a     |
|       | for each weight of a matrix stay                       | constant total (Wang & Aitchison) is -2 here too |

Five lambdas at each point, around the one that takes as much over the run as the best one of the regret map. Widths
have half the learning rate of the other axes and the same lambdas: there each ends near its best, which falls with the
width (`rate_drift` shares some of these runs). The best lambda is the vertex of a parabola, the exponent the slope of a
line over logarithms, both seed by seed. A point whose best lambda is the smallest or largest that was tried says no
more than that it may lie beyond, and is left out of both. The claims were written down before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muonsw.lab.claims.claim import Claim, Estimate, Source, at_most, within
from muonsw.lab.claims.statistics import from_means, over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Axis, Chart, Curve
from muonsw.lab.studies.arms import RULES, Comparison, Key, Results, Runs, multiples
from muonsw.lab.studies.scales import Scale, at_width
from muonsw.lab.studies.training.long import FACTORS
from muonsw.lab.studies.training.rate_drift import at_rate, drift_run
from muonsw.lab.studies.training.regret import (
    BEYOND,
    Optimum,
    first_run,
    lambda_map,
    losses_of,
    of_same_total,
    optimum,
)
from muonsw.lab.studies.training.sweeps import power, resolution, vertex
from muonsw.lab.train.config import RunConfig

WIDTH_RATE, BATCHES, SIZES = 0.5, (0.5, 1.0, 2.0), (0.5, 1.0, 1.5)
# The smallest size wants less in its few updates: two lambdas more, so that the best one has neighbours on both sides.
SMALLER = (0.0625, 0.125)
# Totals of the best lambdas within this factor count as one: basins are flatter than that.
SAME_TOTAL = 3.0
FLAT = Tolerance(0.0, "a factor of three: basins are flatter than that")
WANG = Source("Wang & Aitchison (arXiv 2405.13698), AdamW", "Muon")
SIZE_SLACK = Tolerance(0.4, "what four sizes of nanochat leave open")


@dataclass(frozen=True)
class Growth:
    """A direction in which runs grow: by what, and the exponent that was published."""

    name: str
    grows: str
    published: float
    source: Source


AXES = (
    Growth("width", "the width at the same updates", 0.0, replace(BEYOND, hypothesis="a constant total of decay")),
    Growth("batch", "the batch at the same tokens", 1.0, Source("Power Lines (arXiv 2505.13738), AdamW", "Muon")),
    Growth("size", "the width at the same tokens for each weight", -2.0, Source("nanochat's log, 2026-01-10", "Muon")),
)


def points(scale: Scale) -> dict[Key, RunConfig]:
    """The runs of every axis, by axis and by what grows along it; one is on two of them.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> [(str(key), run.model.width, run.batch, run.steps) for key, run in points(MINI).items()][3:6]
        [('batch 4', 128, 4, 3200), ('batch 8', 128, 8, 1600), ('batch 16', 128, 16, 800)]
    """
    # The narrowest model learns too slowly: where the others end, its loss still falls steeply.
    run, widths = drift_run(scale), scale.drift_widths[1:]
    slower = replace(run, optimizer=at_rate(run.optimizer, WIDTH_RATE * run.optimizer.lr))
    found = {Key("width", width=width): at_width(slower, width) for width in widths}
    shared, steps, batch = at_width(run, widths[0]), run.steps, run.batch
    for factor in BATCHES:
        wanted = int(factor * batch)
        found[Key(f"batch {wanted}")] = of_same_total(replace(shared, batch=wanted), round(steps * batch / wanted))
    for factor in SIZES:
        width = int(factor * widths[0])
        found[Key("size", width=width)] = of_same_total(at_width(shared, width), round(steps * factor**2))
    return found


def lambda_scaling(scale: Scale) -> list[Comparison]:
    """Five lambdas under both rules at every point, and seven for the smallest size."""
    found = points(scale)
    shortest = min(run.steps for run in found.values())
    factors = {key: FACTORS if run.steps > shortest else (*SMALLER, *FACTORS) for key, run in found.items()}
    return [
        lambda_map(key, run, multiples(run.optimizer.weight_decay, factors[key]), scale.map_seeds)
        for key, run in found.items()
    ]


def points_of(axis: Growth, results: Results) -> Results:
    """The points of an axis."""
    return {key: arms for key, arms in results.items() if key.name.split()[0] == axis.name}


def along(axis: Growth, results: Results, rule: str) -> dict[int, Runs]:
    """Those at which the best lambda of a rule is known, by what grows along the axis."""
    found = {}
    for arms in points_of(axis, results).values():
        if not optimum(arms, rule).at_an_end:
            run = first_run(arms).config
            found[run.batch if axis.name == "batch" else run.decoder.width] = arms
    return found


def exponent(axis: Growth, results: Results, rule: str) -> Estimate | None:
    """The power of what grows that the best lambda follows, seed by seed; None of fewer than two points."""
    known = along(axis, results, rule)
    found = {grown: [vertex(one) for one in losses_of(arms, rule)] for grown, arms in known.items()}
    if len(found) < 2:
        return None
    return over_seeds([power(best, list(found)) for best in zip(*found.values(), strict=False)])


def judge_scaling(results: Results, _scale: Scale) -> list[Claim]:
    """The published exponents, under both rules; and one total for all points."""
    claims = []
    for axis in AXES:
        for rule in RULES:
            if (found := exponent(axis, results, rule)) is not None:
                follows = f"{rule} decay: power of {axis.grows} that the best lambda follows"
                slack = SIZE_SLACK if axis.name == "size" else resolution(math.log(2), along(axis, results, rule))
                claims.append(within(f"{rule}-{axis.name}", follows, axis.source, found, axis.published, slack))
    for rule in RULES:
        if len(totals := known_totals(results, rule)) > 1:
            same = f"{rule} decay: highest over lowest total of the best lambdas, over all points where it is known"
            ratio = from_means(max(totals) / min(totals), min(one.seeds for one in _optima(results, rule).values()))
            claims.append(at_most(f"{rule}-one-total", same, WANG, ratio, SAME_TOTAL, FLAT))
    return claims


def known_totals(results: Results, rule: str) -> list[float]:
    """What the best lambdas of a rule take over their runs, of all points where the best is not at an end."""
    return [one.best * one.per_lambda for one in _optima(results, rule).values() if not one.at_an_end]


def _optima(results: Results, rule: str) -> Mapping[Key, Optimum]:
    return {key: optimum(arms, rule) for key, arms in results.items()}


def scaling_tables(results: Results, _scale: Scale) -> list[Table]:
    """The three exponents beside the published ones; and the best lambda of every point."""
    return [table for table in (_exponents_table(results), _points_table(results)) if table.rows]


def _exponents_table(results: Results) -> Table:
    columns = [Column("power of"), Column("published"), *(Column(rule, number=True) for rule in RULES)]
    published = {
        "width": "0, if the total is constant",
        "batch": "1 (Power Lines)",
        "size": "-2 (nanochat; a constant total)",
    }
    rows: list[list[Value | Cell]] = []
    for axis in AXES:
        found = [exponent(axis, results, rule) for rule in RULES]
        if any(found):
            rows.append([axis.grows, published[axis.name], *(exponent_text(one) for one in found)])
    note = (
        "The power that the best lambda of each seed follows, with its 95% t interval; without points at which the "
        "best of means is at an end of those tried. Of single seeds a few are, and count as the end."
    )
    return Table("lambda-powers", "How the best lambda scales", columns, rows, note)


def exponent_text(found: Estimate | None) -> str | None:
    """A power with its interval."""
    if found is None or found.interval is None:
        return None if found is None else f"{found.value:.2f}"
    return f"{found.value:.2f} ({found.interval.low:.2f} to {found.interval.high:.2f})"


def _points_table(results: Results) -> Table:
    names = ("width", "batch", "updates", "best lambda", "total (Σφ)", "lowest mean loss")
    columns = [Column("axis"), Column("rule"), *(Column(name, number=True) for name in names)]
    rows: list[list[Value | Cell]] = []
    for rule in RULES:
        for key, one in _optima(results, rule).items():
            run = first_run(results[key]).config
            best = f"{one.best:.3g}{', at an end' if one.at_an_end else ''}"
            total, lowest = f"{one.best * one.per_lambda:.2f}", f"{min(one.losses.values()):.4f}"
            rows.append([key.name.split()[0], rule, run.decoder.width, run.batch, run.steps, best, total, lowest])
    note = "From means over seeds: the vertex of a parabola over log lambda through the lowest and its neighbours."
    return Table("lambda-points", "The best lambda of every point", columns, rows, note)


def scaling_charts(results: Results, _scale: Scale) -> list[Chart]:
    """The best lambda over what grows, in panels of one height; dashed what was published, through the first point."""
    charts = []
    for axis in AXES:
        curves, known = [], {rule: along(axis, results, rule) for rule in RULES}
        for rule, grown in known.items():
            if len(grown) > 1:
                best = [optimum(arms, rule).best for arms in grown.values()]
                curves.append(Curve(rule, rule, list(grown), best))
                published = [best[0] * (one / min(grown)) ** axis.published for one in grown]
                curves.append(Curve(f"{rule}, published", rule, list(grown), published, dashed=True))
        if curves:
            ticks = sorted({one for grown in known.values() for one in grown})
            x = Axis("batch" if axis.name == "batch" else "width", log=2, ticks=ticks)
            title, key = f"Best lambda over the {axis.name}", [("dashed", "published")]
            charts.append(Chart(f"lambda-{axis.name}", title, curves, x=x, points=True, key=key))
    shown = [value for chart in charts for curve in chart.curves for value in curve.y]
    limits = (0.8 * min(shown), 1.25 * max(shown)) if shown else None
    return [replace(chart, y=Axis("best lambda", log=2, limits=limits)) for chart in charts]
