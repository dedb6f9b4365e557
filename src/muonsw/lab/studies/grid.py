"""A grid: settings x rules x values of lambda (or of the learning rate) x seeds, judged and shown in one way.

The best value of a rule is the one with the lowest mean loss over seeds (best of means). A best value at the edge of
the grid is marked, because a better one may be outside. The paper's two sweeps of AdamW's learning rate are grids with
their own claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Any, Literal

from muonsw.lab import paper
from muonsw.lab.charts import Axis, Chart, Curve
from muonsw.lab.compare import (
    CONSTANT,
    RULES,
    SCALED,
    Arm,
    Comparison,
    Results,
    Runs,
    decay_factors,
    slug,
    swept_loss,
    with_interval,
)
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Source, at_most, below, from_means, over_seeds, within
from muonsw.lab.studies.scales import SCALES, Scale, adamw_sweep, at_width
from muonsw.lab.studies.study import Study
from muonsw.lab.train.config import OptimizerConfig, RunConfig

BEYOND = Source("beyond the paper; claims written before the runs", "each rule at its best value")
EXACT = Tolerance(0.0, "the bound itself was stated before the runs")

# By rule, the optimizer settings that it changes.
Rules = Mapping[str, Mapping[str, Any]]
RULE_CHANGES: Rules = {rule: {"decay": rule} for rule in RULES}

# By value, ascending: the loss of each seed, infinite if the run diverged.
Losses = Mapping[float, Sequence[float]]


@dataclass(frozen=True)
class GridCell:
    """One setting of a grid, with all rules and values tried in it."""

    key: str
    run: RunConfig  # shared by all runs, except for the optimizer
    arms: Mapping[str, Mapping[float, OptimizerConfig]]  # by rule, then by value
    over: str = "lambda"  # the setting that has these values: "lambda", or "lr" for the learning rate

    def comparison(self, seeds: int) -> Comparison:
        arms = [
            Arm(self.arm(rule, value), tried[value]) for rule, tried in self.arms.items() for value in sorted(tried)
        ]
        return Comparison(self.key, self.run, tuple(arms), tuple(range(seeds)), paired=False)

    def arm(self, rule: str, value: float) -> str:
        return f"{rule}, {self.over} {value:g}"

    def losses(self, runs: Runs) -> dict[str, dict[float, list[float]]]:
        """By rule, the final losses of each value."""
        return {
            rule: {value: [swept_loss(run) for run in runs[self.arm(rule, value)]] for value in sorted(tried)}
            for rule, tried in self.arms.items()
        }

    def total(self, rule: str, value: float) -> float:
        """Total decay of a rule at one of its values."""
        return math.fsum(decay_factors(self.run, self.arms[rule][value]))


def sweep(
    key: str,
    run: RunConfig,
    values: Sequence[float],
    rules: Rules = RULE_CHANGES,
    over: Literal["lambda", "lr"] = "lambda",
) -> GridCell:
    """A cell that tries each rule, given as changes of the optimizer, at these lambdas or learning rates."""
    setting = "weight_decay" if over == "lambda" else "lr"
    arms = {
        rule: {value: replace(run.optimizer, **{**changes, setting: value}) for value in values}
        for rule, changes in rules.items()
    }
    return GridCell(key, run, arms, over)


def means(losses: Losses) -> dict[float, float]:
    """The mean over seeds of each value."""
    return {value: math.fsum(ends) / len(ends) for value, ends in losses.items()}


def best_of_means(losses: Losses) -> float:
    """The value with the lowest mean loss over seeds; the lowest loss of each seed would be too optimistic.

    Examples:
        >>> best_of_means({0.1: [3.0, 3.3], 0.2: [3.1, 3.1]})
        0.2
    """
    mean = means(losses)
    return min(mean, key=mean.__getitem__)


def at_edge(losses: Losses) -> bool:
    """Whether the best value is the smallest or the largest of several."""
    return len(losses) > 1 and best_of_means(losses) in (min(losses), max(losses))


def vertex(losses: Losses) -> float:
    """The best value: the vertex of the parabola over its logarithm through the lowest mean and its neighbours.

    A basin rises more steeply towards large values, so a parabola through all points would be biased.

    Examples:
        >>> round(vertex({0.01: [1.0], 0.02: [0.5], 0.04: [1.0]}), 6)
        0.02
        >>> vertex({0.01: [1.0], 0.02: [2.0]})
        0.01
    """
    mean, best = means(losses), best_of_means(losses)
    values = sorted(mean)
    place = values.index(best)
    near = values[max(0, place - 1) : place + 2]
    if len(near) < 3 or math.inf in map(mean.__getitem__, near):
        return best
    x, y = [math.log(value) for value in near], [mean[value] for value in near]
    left, right = ((y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in (0, 1))
    return math.exp((x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / (right - left)) if right > left else best


def by_seed(losses: Losses) -> list[dict[float, list[float]]]:
    """The losses of each seed separately."""
    seeds = min(len(ends) for ends in losses.values())
    return [{value: [ends[seed]] for value, ends in losses.items()} for seed in range(seeds)]


def best_gaps(losses: Losses, baseline: Losses) -> list[float]:
    """By seed, one rule at its best value minus another at its own."""
    return [a - b for a, b in zip(losses[best_of_means(losses)], baseline[best_of_means(baseline)], strict=False)]


def judge_cell(cell: GridCell, runs: Runs) -> list[Claim]:
    """Compare the rules at the best lambda of each, and at the largest lambda."""
    losses, name, claims = cell.losses(runs), slug(cell.key), []
    constant = losses[CONSTANT]
    for rule in (rule for rule in losses if rule != CONSTANT):
        words = f"{cell.key}: {rule} minus constant decay, each at its best, in nats"
        gap = over_seeds(best_gaps(losses[rule], constant))
        claims.append(below(f"{name}-{rule}-best", words, BEYOND, gap, 0.0, EXACT))
    if cell.over == "lr":
        return claims
    if SCALED in losses and len(shared := sorted(losses[SCALED].keys() & constant.keys())) > 1:
        words = f"{cell.key}: scaled minus constant decay at lambda {shared[-1]:g}, the largest of both, in nats"
        gaps = [a - b for a, b in zip(losses[SCALED][shared[-1]], constant[shared[-1]], strict=False)]
        claims.append(below(f"{name}-largest", words, BEYOND, over_seeds(gaps), 0.0, EXACT))
    return claims


def grid_table(cells: Sequence[GridCell], results: Results) -> Table:
    """One row per setting and rule: best value, total decay, loss, and the difference from constant decay."""
    heads = ("best", "total decay", "loss at the best", "minus constant decay", "cost of the largest", "tried")
    columns = [Column("setting"), Column("rule"), *(Column(head, number=True) for head in heads)]
    rows: list[list[Value | Cell]] = []
    for cell in cells:
        losses = cell.losses(results[cell.key])
        for rule, ends in losses.items():
            best, mark, gap, cost = best_of_means(ends), "*" * at_edge(ends), None, None
            total = cell.total(rule, best) * (vertex(ends) / best if cell.over == "lambda" and best else 1.0)
            if rule != CONSTANT and CONSTANT in losses:
                gap = with_interval(best_gaps(ends, losses[CONSTANT]))
            if best < max(ends):
                cost = with_interval([a - b for a, b in zip(ends[max(ends)], ends[best], strict=True)])
            shown = f"{vertex(ends):.3g}{mark}", None if math.isnan(total) else f"{total:.2f}{mark}"
            tried = ", ".join(f"{value:.3g}" for value in ends)
            rows.append([cell.key, rule, *shown, with_interval(ends[best]), gap, cost, tried])
    note = (
        "Best: the vertex of a parabola through the lowest mean and its neighbours; a star marks an edge of what was "
        "tried. Loss and differences are at the best value tried, paired by seed, ± half a 95% t interval."
    )
    return Table("grid", "Each rule at its best", columns, rows, note)


def grid_charts(cells: Sequence[GridCell], results: Results) -> list[Chart]:
    """Mean loss of every rule over the values, relative to the lowest of all; one panel per setting."""
    charts = []
    for cell in cells:
        by_rule = {rule: means(ends) for rule, ends in cell.losses(results[cell.key]).items() if len(ends) > 1}
        if not by_rule:
            continue
        lowest = min(min(losses.values()) for losses in by_rule.values())
        curves = [
            Curve(rule, rule, list(mean), [loss - lowest if loss < math.inf else math.nan for loss in mean.values()])
            for rule, mean in by_rule.items()
        ]
        x = Axis("learning rate" if cell.over == "lr" else "lambda", log=2)
        y, note = Axis("above the lowest", "nats"), "Mean final loss over seeds minus the lowest of all rules."
        charts.append(Chart(f"grid-{slug(cell.key)}", cell.key, curves, x=x, y=y, note=note, points=True))
    return charts


def grid(
    name: str,
    title: str,
    cells: Callable[[Scale], Sequence[GridCell]],
    *,
    judge: Callable[[Sequence[GridCell], Results, Scale], list[Claim]] | None = None,
    scales: tuple[str, ...] = ("mini",),
) -> Study:
    """A grid as a study; by default at the one size of docs/evidence.md."""

    def known(results: Results, scale: Scale) -> list[GridCell]:
        return [cell for cell in cells(scale) if cell.key in results]

    def claims(results: Results, scale: Scale) -> list[Claim]:
        if judge is not None:
            return judge(known(results, scale), results, scale)
        return [claim for cell in known(results, scale) for claim in judge_cell(cell, results[cell.key])]

    def show(results: Results, scale: Scale) -> tuple[list[Table], list[Chart]]:
        those = known(results, scale)
        return [grid_table(those, results)], grid_charts(those, results)

    return Study(
        name=name,
        title=title,
        comparisons=lambda scale: [cell.comparison(scale.seeds) for cell in cells(scale)],
        judge=claims,
        show=show,
        scales=scales,
    )


# ---- The paper's sweeps of AdamW's peak learning rate: does its best value transfer over widths, and how does it
# follow the horizon?

ADAMW = "AdamW for all parameters, constant decay"
WIDTH_FIGURE = Source("appendix on muP, figure on width and the table commented out in the source", ADAMW)
HORIZON_FIGURE = Source("appendix on muP, figure on the horizon", ADAMW)
UNKNOWN_AT_EDGE = "unknown if one is at an edge of the grid"
ONE_STEP = Tolerance(0.0, "one step of the grid: basins are flat, and a parabola over a grid resolves no more")


def width_cells(scale: Scale) -> list[GridCell]:
    """The same learning rates at every width."""
    return [
        sweep(f"width {width}", at_width(scale.sweep, width), scale.rates, {"adamw": {}}, over="lr")
        for width in scale.widths
    ]


def horizon_cells(scale: Scale) -> list[GridCell]:
    """The same learning rates for every number of steps."""
    return [
        sweep(f"{steps} steps", adamw_sweep(scale.sweep, steps), scale.rates, {"adamw": {}}, over="lr")
        for steps in scale.horizons
    ]


def grid_step(rates: Sequence[float]) -> float:
    """The mean distance between neighbours, in logarithms.

    Examples:
        >>> round(math.exp(grid_step([0.01, 0.02, 0.08])), 6)
        2.828427
    """
    return math.log(rates[-1] / rates[0]) / max(1, len(rates) - 1) or 1.0


def judge_widths(cells: Sequence[GridCell], results: Results, scale: Scale) -> list[Claim]:
    """The best rate is the same at every width within a grid step; at paper scale also the printed losses."""
    sweeps = {cell.key: cell.losses(results[cell.key])["adamw"] for cell in cells}
    claims = []
    if len(sweeps) > 1:
        best = [vertex(losses) for losses in sweeps.values()]
        moved = math.log(max(best) / min(best)) / grid_step(scale.rates)
        measured = from_means(math.nan if any(map(at_edge, sweeps.values())) else moved, scale.seeds)
        same = f"steps of the grid between the best learning rates of the widths ({UNKNOWN_AT_EDGE})"
        claims.append(at_most("same-rate", same, WIDTH_FIGURE, measured, 1.0, ONE_STEP))
    for cell in cells if scale.printed else ():
        key, losses = cell.key, sweeps[cell.key]
        costs = f"{key}: what a learning rate of {paper.TRANSFERRED_RATE:g} costs, in nats"
        lowest = [min(seed[rate][0] for rate in seed) for seed in by_seed(losses)]
        cost = over_seeds([a - b for a, b in zip(losses[paper.TRANSFERRED_RATE], lowest, strict=True)])
        claims.append(at_most(f"{slug(key)}-transferred", costs, WIDTH_FIGURE, cost, *paper.TRANSFERRED))
        for rate, printed in zip(paper.SWEEP_RATES, paper.SWEEP[cell.run.decoder.width], strict=True):
            ends, loss = f"{key}: loss after 5,000 steps at learning rate {rate:g}", over_seeds(losses[rate])
            claims.append(within(f"{slug(key)}-lr-{rate:g}", ends, WIDTH_FIGURE, loss, printed, paper.SWEEP_LOSS))
    return claims


def judge_horizons(cells: Sequence[GridCell], results: Results, scale: Scale) -> list[Claim]:
    """The best learning rate falls as the cube root of the horizon."""
    sweeps = [cell.losses(results[cell.key])["adamw"] for cell in cells]
    horizons = [math.log(cell.run.steps) for cell in cells]
    if len(horizons) < 2:
        return []
    # By seed, the power of the horizon in the best rate.
    best = [[math.log(vertex(seed)) for seed in by_seed(losses)] for losses in sweeps]
    slopes = [linear_regression(horizons, rates).slope for rates in zip(*best, strict=False)]
    slope = math.nan if any(map(at_edge, sweeps)) else over_seeds(slopes)
    limits = "" if scale.printed else "validated by the paper for 5,000 to 20,000 steps only"
    # At either end, the optimum is known to a quarter of a grid step.
    size = 0.5 * grid_step(scale.rates) / (max(horizons) - min(horizons))
    slack = Tolerance(size, "a quarter of a step of the grid at either end")
    falls = f"power of the horizon that the best learning rate follows ({UNKNOWN_AT_EDGE})"
    return [within("cube-root", falls, HORIZON_FIGURE, slope, paper.HORIZON_POWER, slack, limits=limits)]


WIDTH_TRANSFER = grid(
    "width-transfer",
    "muP: the best learning rate of AdamW at three widths",
    width_cells,
    judge=judge_widths,
    scales=tuple(SCALES),
)
HORIZON_TRANSFER = grid(
    "horizon-transfer",
    "the best learning rate of AdamW against the horizon, and the cube-root rule",
    horizon_cells,
    judge=judge_horizons,
    scales=tuple(SCALES),
)
