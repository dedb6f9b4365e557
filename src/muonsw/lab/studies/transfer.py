"""Sweeps of AdamW's peak learning rate: does its best value transfer over widths, and how does it follow horizons?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import linear_regression

from muonsw.lab import paper
from muonsw.lab.arms import Key, Results
from muonsw.lab.console import Column, Table
from muonsw.lab.outcome import loss_cell
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.charts import Axis, Chart, Curve
from muonsw.lab.stats import Claim, Source, at_least, at_most, from_means, over_seeds, within
from muonsw.lab.studies.grid import Cell, Losses, by_seed, means, vertex
from muonsw.lab.studies.scales import Scale, adamw_sweep, at_width
from muonsw.lab.studies.study import TrainingStudy
from muonsw.lab.train.config import RunConfig

ADAMW = "AdamW for all parameters, constant decay"
WIDTH_FIGURE = Source("appendix on muP, figure on width and the table commented out in the source", ADAMW)
HORIZON_FIGURE = Source("appendix on muP, figure on the horizon", ADAMW)
INSIDE = Tolerance(0.0, "at an edge of the grid a better rate may lie beyond, and nothing can be said of transfer")
ONE_STEP = Tolerance(0.0, "one step of the grid: basins are flat, and a parabola over a grid says no more")
TRANSFER = Tolerance(0.0, "a quarter: by the paper's own table the best rate of width 128 costs 0.14 at width 256")
TRANSFER_COST = 0.25


def _cell(key: Key, run: RunConfig, scale: Scale) -> Cell:
    return Cell(key, run, {"adamw": {rate: replace(run.optimizer, lr=rate) for rate in scale.rates}}, over="lr")


def width_cells(scale: Scale) -> list[Cell]:
    """The same learning rates at every width."""
    return [_cell(Key(width=width), at_width(scale.sweep, width), scale) for width in scale.sweep_widths]


def horizon_cells(scale: Scale) -> list[Cell]:
    """The same learning rates for every number of steps."""
    return [_cell(Key(steps=steps), adamw_sweep(scale.sweep, steps), scale) for steps in scale.horizons]


def grid_step(rates: Sequence[float]) -> float:
    """The mean distance of neighbours, in logarithms.

    Examples:
        >>> round(math.exp(grid_step([0.01, 0.02, 0.08])), 6)
        2.828427
    """
    return math.log(rates[-1] / rates[0]) / max(1, len(rates) - 1) or 1.0


def power(values: Sequence[float], grown: Sequence[float]) -> float:
    """The power of what grew that values follow: a least-squares slope over logarithms.

    Examples:
        >>> round(power([0.02, 0.01, 0.005], [1000, 2000, 4000]), 6)
        -1.0
    """
    return linear_regression([math.log(x) for x in grown], [math.log(y) for y in values]).slope


def judge_widths(sweeps: Mapping[Key, Losses], scale: Scale) -> list[Claim]:
    """The best rate is the same at every width, within a step of the grid; taking the narrowest's costs little."""
    claims = [_inside(key, losses, WIDTH_FIGURE) for key, losses in sweeps.items()]
    (narrow, first), *wider = sweeps.items()
    rates = sorted(first)
    seeds = min(len(own) for losses in sweeps.values() for own in losses.values())
    if wider:
        best = [vertex(losses) for losses in sweeps.values()]
        moved = from_means(math.log(max(best) / min(best)) / grid_step(rates), seeds)
        same = "steps of the grid between the best learning rates of the widths"
        claims.append(at_most("same-rate", same, WIDTH_FIGURE, moved, 1.0, ONE_STEP))
    for key, losses in wider:
        costs = f"{key}: what the best learning rate of {narrow} costs, over what the worst of the grid costs"
        share = from_means(transfer_cost(means(first), means(losses)), seeds)
        claims.append(at_most(f"{key.slug}-cost", costs, WIDTH_FIGURE, share, TRANSFER_COST, TRANSFER))
    return [*claims, *(_printed_widths(sweeps) if scale.printed else [])]


def transfer_cost(narrow: Mapping[float, float], wide: Mapping[float, float]) -> float:
    """What the best rate of one width costs at another, as a share of what the worst rate that trains costs there.

    Examples:
        >>> transfer_cost({0.01: 1.0, 0.02: 2.0}, {0.005: 3.0, 0.01: 1.5, 0.02: 1.0})
        0.25
    """
    taken, lowest = min(narrow, key=narrow.__getitem__), min(wide.values())
    highest = max((loss for loss in wide.values() if loss < math.inf), default=math.inf)
    return (wide[taken] - lowest) / (highest - lowest) if highest > lowest else 0.0


def _inside(key: Key, losses: Losses, source: Source) -> Claim:
    rates, best = sorted(losses), vertex(losses)
    inside = f"{key}: steps of the grid from the best learning rate to the nearest edge"
    steps = min(math.log(best / rates[0]), math.log(rates[-1] / best)) / grid_step(rates)
    seeds = min(len(own) for own in losses.values())
    return at_least(f"{key.slug}-inside", inside, source, from_means(steps, seeds), 0.5, INSIDE)


def _printed_widths(sweeps: Mapping[Key, Losses]) -> list[Claim]:
    claims = []
    for key, losses in sweeps.items():
        assert key.width is not None
        costs = f"{key}: what a learning rate of {paper.TRANSFERRED_RATE:g} costs, in nats"
        lowest = [min(own[rate][0] for rate in own) for own in by_seed(losses)]
        cost = over_seeds([a - b for a, b in zip(losses[paper.TRANSFERRED_RATE], lowest, strict=True)])
        claims.append(at_most(f"{key.slug}-transferred", costs, WIDTH_FIGURE, cost, *paper.TRANSFERRED))
        for rate, printed in zip(paper.SWEEP_RATES, paper.SWEEP[key.width], strict=True):
            ends, loss = f"{key}: loss after 5,000 steps at learning rate {rate:g}", over_seeds(losses[rate])
            claims.append(within(f"{key.slug}-lr-{rate:g}", ends, WIDTH_FIGURE, loss, printed, paper.SWEEP_LOSS))
    return claims


def judge_horizons(sweeps: Mapping[Key, Losses], scale: Scale) -> list[Claim]:
    """The best learning rate falls with the horizon as its cube root."""
    claims = [_inside(key, losses, HORIZON_FIGURE) for key, losses in sweeps.items()]
    horizons = [key.steps for key in sweeps if key.steps is not None]
    if len(horizons) < 2:
        return claims
    best = [[vertex(own) for own in by_seed(losses)] for losses in sweeps.values()]
    slope = over_seeds([power(rates, horizons) for rates in zip(*best, strict=False)])
    limits = "" if scale.printed else "validated by the paper for 5,000 to 20,000 steps only"
    # An optimum is known to a quarter of a step of the grid at either end.
    size = 0.5 * grid_step(sorted(next(iter(sweeps.values())))) / math.log(max(horizons) / min(horizons))
    slack = Tolerance(size, "a quarter of a step of the grid at either end")
    falls = "power of the horizon that the best learning rate follows"
    return [
        *claims,
        within("cube-root", falls, HORIZON_FIGURE, slope, paper.HORIZON_POWER, slack, limits=limits),
    ]


def sweep_table(sweeps: Mapping[Key, Losses]) -> Table:
    """Mean final loss over seeds by learning rate and comparison, the best of each column marked."""
    found = {key: means(losses) for key, losses in sweeps.items()}
    columns = [Column("learning rate"), *(Column(str(key), number=True) for key in found)]
    rates = sorted({rate for losses in found.values() for rate in losses})
    rows = [[f"{rate:g}", *(loss_cell(losses, rate) for losses in found.values())] for rate in rates]
    return Table("sweep", "Final loss by learning rate", columns, rows, "Validation loss, means over seeds.")


def excess_chart(sweeps: Mapping[Key, Losses], first: int | None) -> Chart:
    """Loss above the lowest; over horizons, over the rate times their cube root, so that the minima should meet."""
    curves = []
    for key, losses in sweeps.items():
        found = means(losses)
        lowest, factor = min(found.values()), 1.0 if first is None else ((key.steps or first) / first) ** (1 / 3)
        y = [loss - lowest if loss < math.inf else math.nan for loss in found.values()]
        curves.append(Curve(str(key), str(key), [rate * factor for rate in found], y))
    label = "learning rate" if first is None else f"learning rate times (T/{first})^(1/3)"
    note = "Mean over seeds minus the lowest of the same curve."
    x, y_axis = Axis(label, log=10), Axis("excess loss", "nats per token")
    return Chart("excess-loss", "Excess loss", curves, x=x, y=y_axis, note=note, points=True)


def _sweeps(cells: Sequence[Cell], results: Results) -> dict[Key, Losses]:
    return {cell.key: cell.losses(results[cell.key])["adamw"] for cell in cells if cell.key in results}


WIDTH_TRANSFER = TrainingStudy(
    name="width-transfer",
    title="muP: the best learning rate of AdamW at three widths",
    reference=WIDTH_FIGURE.reference,
    comparisons=lambda scale: [cell.comparison(scale.sweep_seeds) for cell in width_cells(scale)],
    claims=lambda results, scale: judge_widths(_sweeps(width_cells(scale), results), scale),
    own_tables=lambda results, scale: [sweep_table(_sweeps(width_cells(scale), results))],
    charts=lambda results, scale: [excess_chart(_sweeps(width_cells(scale), results), None)],
    notes={
        "cpu": "At so few tokens the best rate is set by the length of the run as much as by the model.",
        "paper": "The paper does not print the decay of these runs; constant decay with lambda 0.1 is assumed.",
    },
)
HORIZON_TRANSFER = TrainingStudy(
    name="horizon-transfer",
    title="the best learning rate of AdamW against the horizon, and the cube-root rule",
    reference=HORIZON_FIGURE.reference,
    comparisons=lambda scale: [cell.comparison(scale.sweep_seeds) for cell in horizon_cells(scale)],
    claims=lambda results, scale: judge_horizons(_sweeps(horizon_cells(scale), results), scale),
    own_tables=lambda results, scale: [sweep_table(_sweeps(horizon_cells(scale), results))],
    charts=lambda results, scale: [excess_chart(_sweeps(horizon_cells(scale), results), scale.horizons[0])],
    notes={
        "cpu": "The rule is the paper's for 5,000 to 20,000 steps; a tenth of so short a run is warmup.",
        "mini": "The rule is the paper's for 5,000 to 20,000 steps.",
        "paper": "The paper does not print its rates here; those of its width sweep are taken.",
    },
)
