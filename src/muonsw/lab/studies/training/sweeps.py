"""Sweeps of the peak learning rate: does its best value transfer over widths, and how does it follow the horizon?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import linear_regression

from muonsw.lab import paper
from muonsw.lab.claims.claim import Claim, Source, at_least, at_most, within
from muonsw.lab.claims.statistics import from_means, over_seeds
from muonsw.lab.console import Column, Table
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Axis, Chart, Curve
from muonsw.lab.studies.arms import Arm, Comparison, Key, Results, Runs
from muonsw.lab.studies.outcome import loss_cell, swept_loss
from muonsw.lab.studies.scales import Scale, adamw_sweep, at_width
from muonsw.lab.train.config import RunConfig

MUON = "muon"
ADAMW = "AdamW for all parameters, constant decay"
WIDTH_FIGURE = Source("appendix on muP, figure on width and the table commented out in the source", ADAMW)
HORIZON_FIGURE = Source("appendix on muP, figure on the horizon", ADAMW)
INSIDE = Tolerance(0.0, "at an edge of the grid a better rate may lie beyond, and nothing can be said of transfer")
ONE_STEP = Tolerance(0.0, "one step of the grid: basins are flat, and a parabola over a grid says no more")
TRANSFER = Tolerance(0.0, "a quarter: by the paper's own table the best rate of width 128 costs 0.14 at width 256")
TRANSFER_COST = 0.25

# By seed: the loss of each learning rate, rates ascending.
Losses = Mapping[float, float]


def width_sweep(scale: Scale) -> list[Comparison]:
    """The same learning rates at every width."""
    runs = {Key(width=width): at_width(scale.sweep, width) for width in scale.sweep_widths}
    return [one for key, run in runs.items() for one in _sweeps(key, run, scale)]


def horizon_sweep(scale: Scale) -> list[Comparison]:
    """The same learning rates for every number of updates."""
    runs = {Key(steps=steps): adamw_sweep(scale.sweep, steps) for steps in scale.horizons}
    return [one for key, run in runs.items() for one in _sweeps(key, run, scale)]


def _sweeps(key: Key, run: RunConfig, scale: Scale) -> list[Comparison]:
    """The rates under AdamW, as the paper's; where the scale asks for it under Muon with scaled decay too."""
    muon = replace(run.optimizer, algorithm="muon", decay="scaled")
    chosen = {key: run.optimizer, **({replace(key, name=MUON): muon} if scale.muon_sweeps else {})}
    found = []
    for one, optimizer in chosen.items():
        arms = tuple(Arm(f"lr {rate:g}", replace(optimizer, lr=rate)) for rate in scale.rates)
        found.append(Comparison(one, run, arms, tuple(range(scale.sweep_seeds)), paired=False))
    return found


def by_name(results: Results) -> dict[str, dict[Key, list[dict[float, float]]]]:
    """The sweeps by the names of their keys, which say what is swept: for each comparison the losses of every seed."""
    names = dict.fromkeys(key.name for key in results)
    return {name: {key: losses_by_seed(arms) for key, arms in results.items() if key.name == name} for name in names}


def losses_by_seed(arms: Runs, setting: str = "lr") -> list[dict[float, float]]:
    """For each seed, final loss by a setting of the optimizer; a run without one counts as infinitely bad."""
    found: dict[int, dict[float, float]] = {}
    for run in chain.from_iterable(arms.values()):
        found.setdefault(run.config.seed, {})[getattr(run.config.optimizer, setting)] = swept_loss(run)
    return [dict(sorted(found[seed].items())) for seed in sorted(found)]


def best_place(losses: Losses) -> int:
    """The place of the lowest loss in the grid."""
    values = list(losses.values())
    return values.index(min(values))


def at_an_end(losses: Losses) -> bool:
    """Whether the best setting is the smallest or the largest that was tried, so that a better one may lie beyond.

    Examples:
        >>> at_an_end({0.01: 1.0, 0.02: 2.0}), at_an_end({0.01: 1.0, 0.02: 0.5, 0.04: 1.0})
        (True, False)
    """
    return best_place(losses) in (0, len(losses) - 1)


def vertex(losses: Losses) -> float:
    """The best setting: the vertex of the parabola over its logarithm through the lowest point and its neighbours.

    A basin of rates or lambdas rises more steeply towards large ones, so points far out would pull a parabola through
    all of them; and this one's vertex is never nearer to another point of an even grid.

    Examples:
        >>> round(vertex({0.01: 1.0, 0.02: 0.5, 0.04: 1.0}), 6)
        0.02
        >>> vertex({0.01: 1.0, 0.02: 2.0})
        0.01
    """
    settings, place = list(losses), best_place(losses)
    values = list(losses.values())[max(0, place - 1) : place + 2]
    if at_an_end(losses) or math.inf in values:
        return settings[place]
    x = [math.log(setting) for setting in settings[place - 1 : place + 2]]
    left, right = ((values[i + 1] - values[i]) / (x[i + 1] - x[i]) for i in (0, 1))
    return math.exp((x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / (right - left)) if right > left else settings[place]


def grid_step(rates: Sequence[float]) -> float:
    """The mean distance of neighbours, in logarithms.

    Examples:
        >>> round(math.exp(grid_step([0.01, 0.02, 0.08])), 6)
        2.828427
    """
    return math.log(rates[-1] / rates[0]) / max(1, len(rates) - 1) or 1.0


def distance(seeds: Sequence[Losses]) -> float:
    """Steps of the grid between the lowest and the highest of several best rates."""
    best = [vertex(losses) for losses in seeds]
    return math.log(max(best) / min(best)) / grid_step(list(seeds[0]))


def judge_widths(results: Results, scale: Scale) -> list[Claim]:
    """The best rate is the same at every width, within a step of the grid; taking the narrowest's costs little."""
    return [claim for sweeps in by_name(results).values() for claim in _judge_widths(sweeps, scale)]


def _judge_widths(sweeps: Mapping[Key, Sequence[Losses]], scale: Scale) -> list[Claim]:
    means = {key: mean_losses(seeds) for key, seeds in sweeps.items()}
    claims = [_inside(key, seeds, WIDTH_FIGURE) for key, seeds in sweeps.items()]
    narrow, *wider = means
    who = replace(narrow, width=None)
    spread = ", ".join(f"{distance(those):.2f}" for those in zip(*sweeps.values(), strict=False))
    same = f"{_of(who)}steps of the grid between the best learning rates of the widths"
    moved = from_means(distance(list(means.values())), min(map(len, sweeps.values())))
    limits = f"seed by seed it is {spread}"
    claims.append(at_most(f"{_id(who)}same-rate", same, WIDTH_FIGURE, moved, 1.0, ONE_STEP, limits=limits))
    for key in wider:
        costs = f"{key}: what the best learning rate of {narrow} costs, over what the worst of the grid costs"
        share = from_means(transfer_cost(means[narrow], means[key]), min(len(sweeps[one]) for one in (narrow, key)))
        claims.append(at_most(f"{key.slug}-cost", costs, WIDTH_FIGURE, share, TRANSFER_COST, TRANSFER))
    return [*claims, *(_printed_widths(sweeps) if scale.printed else [])]


def transfer_cost(narrow: Losses, wide: Losses) -> float:
    """What the best rate of one width costs at another, as a share of what the worst rate of the grid costs there.

    Rates at which runs diverged are left out: the worst is the worst that trains. The other width may have more rates.

    Examples:
        >>> transfer_cost({0.01: 1.0, 0.02: 2.0}, {0.005: 3.0, 0.01: 1.5, 0.02: 1.0})
        0.25
    """
    values, taken = list(wide.values()), min(narrow, key=lambda rate: narrow[rate])
    lowest, highest = min(values), max((value for value in values if value < math.inf), default=math.inf)
    return (wide[taken] - lowest) / (highest - lowest) if highest > lowest else 0.0


def _of(key: Key) -> str:
    return f"{key}: " if str(key) else ""


def _id(key: Key) -> str:
    return f"{key.slug}-" if str(key) else ""


def mean_losses(seeds: Sequence[Losses]) -> dict[float, float]:
    """The mean over seeds by learning rate."""
    return {rate: math.fsum(losses[rate] for losses in seeds) / len(seeds) for rate in seeds[0]}


def excess(losses: Losses, lowest: float | None = None) -> list[float]:
    """Losses above the lowest of them, or above another, as a curve shows them: with a gap where a run diverged.

    Examples:
        >>> excess({0.1: 3.5, 0.2: 3.0, 0.4: math.inf})
        [0.5, 0.0, nan]
    """
    lowest = min(losses.values()) if lowest is None else lowest
    return [loss - lowest if loss < math.inf else math.nan for loss in losses.values()]


def _inside(key: Key, seeds: Sequence[Losses], source: Source) -> Claim:
    rates, best = list(seeds[0]), vertex(mean_losses(seeds))
    inside = f"{key}: steps of the grid from the best learning rate to the nearest edge"
    steps = min(math.log(best / rates[0]), math.log(rates[-1] / best)) / grid_step(rates)
    return at_least(f"{key.slug}-inside", inside, source, from_means(steps, len(seeds)), 0.5, INSIDE)


def _printed_widths(sweeps: Mapping[Key, Sequence[Losses]]) -> list[Claim]:
    claims = []
    for key, seeds in sweeps.items():
        assert key.width is not None
        costs = f"{key}: what a learning rate of {paper.TRANSFERRED_RATE:g} costs, in nats"
        cost = over_seeds([losses[paper.TRANSFERRED_RATE] - min(losses.values()) for losses in seeds])
        claims.append(at_most(f"{key.slug}-transferred", costs, WIDTH_FIGURE, cost, *paper.TRANSFERRED))
        for rate, printed in zip(paper.SWEEP_RATES, paper.SWEEP[key.width], strict=True):
            ends = f"{key}: loss after 5,000 updates at learning rate {rate:g}"
            loss = over_seeds([losses[rate] for losses in seeds])
            claims.append(within(f"{key.slug}-lr-{rate:g}", ends, WIDTH_FIGURE, loss, printed, paper.SWEEP_LOSS))
    return claims


def judge_horizons(results: Results, scale: Scale) -> list[Claim]:
    """The best learning rate falls with the horizon as its cube root."""
    return [claim for sweeps in by_name(results).values() for claim in _judge_horizons(sweeps, scale)]


def _judge_horizons(sweeps: Mapping[Key, Sequence[Losses]], scale: Scale) -> list[Claim]:
    claims = [_inside(key, seeds, HORIZON_FIGURE) for key, seeds in sweeps.items()]
    horizons = [key.steps for key in sweeps if key.steps is not None]
    if len(horizons) < 2:
        return claims
    who = replace(next(iter(sweeps)), steps=None)
    best = [[vertex(losses) for losses in those] for those in zip(*sweeps.values(), strict=False)]
    slope = over_seeds([power(rates, horizons) for rates in best])
    falls = f"{_of(who)}power of the horizon that the best learning rate follows"
    limits = "" if scale.printed else "validated by the paper for 5,000 to 20,000 updates only"
    rule, slack = paper.HORIZON_POWER, resolution(grid_step(scale.rates), horizons)
    return [*claims, within(f"{_id(who)}cube-root", falls, HORIZON_FIGURE, slope, rule, slack, limits=limits)]


def power(rates: Sequence[float], horizons: Sequence[float]) -> float:
    """The least-squares slope of the logarithm of the rate over that of the horizon.

    Examples:
        >>> round(power([0.02, 0.01, 0.005], [1000, 2000, 4000]), 6)
        -1.0
    """
    return linear_regression(*([math.log(value) for value in values] for values in (horizons, rates))).slope


def resolution(step: float, grown: Collection[float]) -> Tolerance:
    """How well a grid can tell a power of what grew: an optimum is known to a quarter of its step at either end.

    Examples:
        >>> resolution(math.log(2.0), (400, 1_600)).size
        0.25
    """
    size = 0.5 * step / math.log(max(grown) / min(grown))
    return Tolerance(size, "a quarter of a step of the grid at either end")


def sweep_tables(results: Results, _scale: Scale) -> list[Table]:
    """Mean final loss over seeds by learning rate and comparison, the best of each column marked."""
    sweeps = {key: losses_by_seed(arms) for key, arms in results.items()}
    means = {key: mean_losses(seeds) for key, seeds in sweeps.items()}
    columns = [Column("learning rate"), *(Column(str(key), number=True) for key in means)]
    rates = sorted({rate for losses in means.values() for rate in losses})
    rows = [[f"{rate:g}", *(loss_cell(losses, rate) for losses in means.values())] for rate in rates]
    most = max(map(len, sweeps.values()))
    seeds = "one seed" if most == 1 else f"means over {most} seeds"
    return [Table("sweep", "Final loss by learning rate", columns, rows, f"Validation loss, {seeds}.")]


def width_charts(results: Results, _scale: Scale) -> list[Chart]:
    """Excess loss over the learning rate, one curve for each width."""
    return [_excess_chart(results, 1.0, "learning rate")]


def horizon_charts(results: Results, scale: Scale) -> list[Chart]:
    """The same, over the learning rate times the cube root of the horizon: the minima should then meet."""
    first = scale.horizons[0]
    return [_excess_chart(results, float(first), f"learning rate times (T/{first})^(1/3)")]


def _excess_chart(results: Results, first: float, label: str) -> Chart:
    curves = []
    for key, arms in results.items():
        losses = mean_losses(losses_by_seed(arms))
        factor = ((key.steps or first) / first) ** (1.0 / 3.0)
        curves.append(Curve(str(key), str(key), [rate * factor for rate in losses], excess(losses)))
    note = "Mean over seeds minus the lowest of the same curve."
    x, y = Axis(label, log=10), Axis("excess loss", "nats per token")
    return Chart("excess-loss", "Excess loss", curves, x=x, y=y, note=note, points=True)
