"""Rate drift: how far does Muon's best learning rate move with the width, under constant, scaled and no decay?

Published with the same training for every width from 128 to 2,048: Muon's best rate moves by a factor of 4 under
constant decay, and of 1.4 with norms held fixed (Hyperball). A factor d over a range of widths w is the power
log(d)/log(w), so that ranges can be compared. Nothing here is divided by the width, and what AdamW owns keeps its rate:
only that of the matrices is swept. Where both rates are the same the runs are those of `lambda-scaling`, and trained
once. Hyperball holds the RMS of the matrices where constant decay's weights end, because held at its initialization the
same model ends far higher. The claims were written down before the runs.

A best rate that is the lowest or highest of the grid may lie beyond it: the drift of that rule is so large or larger,
and two rules are compared without such widths. The widest model has one rate more, half of the lowest, because under
both decay rules that was its best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from muonsw.lab.claims.claim import Claim, Source, at_least, at_most
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.report.sections import Axis, Chart, Curve
from muonsw.lab.studies.arms import RULES, Arm, Comparison, Key, Results
from muonsw.lab.studies.outcome import with_interval
from muonsw.lab.studies.scales import Scale, at_width
from muonsw.lab.studies.training.best_rules import TARGET, rules_run
from muonsw.lab.studies.training.regret import BEYOND, EXACT, of_same_total
from muonsw.lab.studies.training.sweeps import (
    Losses,
    at_an_end,
    by_name,
    excess,
    grid_step,
    mean_losses,
    resolution,
    sweep_tables,
    transfer_cost,
    vertex,
)
from muonsw.lab.train.config import OptimizerConfig, RunConfig

HYPERBALL = Source("Hyperball (arXiv 2606.16899), widths 128 to 2,048", "Muon, the same rates at every width")
OURS = replace(BEYOND, hypothesis=HYPERBALL.hypothesis)
# By arm: the factor by which its best rate was found to move, over a range of widths.
PUBLISHED, PUBLISHED_RANGE = {"constant": 4.0, "hyperball": 1.4}, 16.0

# The highest ones of a scale: the lowest are far below the best of Muon.
RATES = 5

# By width, narrowest first: for each seed the loss of each learning rate.
Sweeps = Mapping[Key, Sequence[Losses]]


def rate_drift(scale: Scale) -> list[Comparison]:
    """The same learning rates at every width under every rule.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> [str(one.key) for one in rate_drift(MINI)][:2], len(rate_drift(MINI))
        (['constant, width 64', 'scaled, width 64'], 12)
    """
    run, seeds = drift_run(scale), tuple(range(scale.map_seeds))
    return [
        Comparison(
            Key(rule, width=width),
            at_width(run, width),
            tuple(Arm(f"lr {rate:g}", at_rate(optimizer, rate)) for rate in _rates_at(scale, width)),
            seeds,
            paired=False,
        )
        for width in scale.drift_widths
        for rule, optimizer in _optimizers(run).items()
    ]


def _rates_at(scale: Scale, width: int) -> Sequence[float]:
    rates = scale.rates[-RATES:]
    return (rates[0] / 2, *rates) if width == max(scale.drift_widths) else rates


def drift_run(scale: Scale) -> RunConfig:
    """The run of the regret map with half its batch and a lambda of the same total."""
    run = of_same_total(rules_run(scale), scale.drift_steps)
    return replace(run, optimizer=replace(run.optimizer, muon_lr="none", peak="group"), batch=run.batch // 2)


def at_rate(optimizer: OptimizerConfig, rate: float) -> OptimizerConfig:
    """Another learning rate for the matrices alone."""
    return replace(optimizer, lr=rate, adam_lr=None if rate == optimizer.lr else optimizer.lr)


def _optimizers(run: RunConfig) -> dict[str, OptimizerConfig]:
    base = run.optimizer
    held = replace(base, norm="hyperball", target_norm=TARGET)
    return {"constant": replace(base, decay="constant"), "scaled": replace(base, decay="scaled"), "hyperball": held}


def drift_powers(sweeps: Sweeps) -> list[float]:
    """For each seed, the power of the width by which the best rate moves: never negative, zero where it stays.

    Examples:
        >>> at = {width: [{0.5 * best: 1.0, best: 0.0, 2 * best: 1.0}] for width, best in ((64, 0.04), (256, 0.02))}
        >>> [round(power, 6) for power in drift_powers({Key(width=width): seeds for width, seeds in at.items()})]
        [0.5]
    """
    best = [[vertex(losses) for losses in those] for those in zip(*sweeps.values(), strict=False)]
    widths = _widths(sweeps)
    return [math.log(max(rates) / min(rates)) / math.log(max(widths) / min(widths)) for rates in best]


def by_rule(results: Results) -> dict[str, Sweeps]:
    """The sweeps of each rule at the widths that all rules have, of which a study under way may lack some.

    Nothing of fewer than two of them.
    """
    found = by_name(results)
    shared = set.intersection(*({key.width for key in sweeps} for sweeps in found.values()))
    return {
        rule: {key: seeds for key, seeds in sweeps.items() if key.width in shared}
        for rule, sweeps in found.items()
        if len(shared) > 1
    }


def _widths(sweeps: Sweeps) -> list[int]:
    return [key.width for key in sweeps if key.width is not None]


def judge_drift(results: Results, _scale: Scale) -> list[Claim]:
    """Constant decay and Hyperball drift as published; scaled decay less than constant decay."""
    found = by_rule(results)
    limits = "of a number that is never negative, so a little too large"
    claims = []
    for rule, make in (("constant", at_least), ("hyperball", at_most)):
        if rule in found:
            asked = _published(rule)
            moves = f"{rule}: power of the width by which the best learning rate moves"
            step = resolution(grid_step(_rates(found)), _widths(found[rule]))
            slack = replace(step, size=step.size / asked)  # a share of the bound
            power = over_seeds(drift_powers(found[rule]))
            claims.append(make(f"{rule}-drift", moves, HYPERBALL, power, asked, slack, limits=limits))
    known = _inside({rule: found[rule] for rule in RULES if rule in found})
    if len(known) == len(RULES):
        widths = _widths(known["scaled"])
        less = f"widths {min(widths)} to {max(widths)}: that power under scaled decay minus that under constant decay"
        gaps = [a - b for a, b in zip(*(drift_powers(known[rule]) for rule in ("scaled", "constant")), strict=False)]
        claims.append(at_most("scaled-drifts-less", less, OURS, over_seeds(gaps), 0.0, EXACT))
    return claims


def _published(rule: str) -> float:
    return math.log(PUBLISHED[rule]) / math.log(PUBLISHED_RANGE)


def _inside(found: Mapping[str, Sweeps]) -> dict[str, Sweeps]:
    """The sweeps at the widths where the best rate of each rule has others on both sides; nothing of fewer than two."""
    ends = {key.width for sweeps in found.values() for key, seeds in sweeps.items() if at_an_end(mean_losses(seeds))}
    inside = {rule: {key: sweeps[key] for key in sweeps if key.width not in ends} for rule, sweeps in found.items()}
    return {rule: sweeps for rule, sweeps in inside.items() if len(sweeps) > 1}


def drift_charts(results: Results, _scale: Scale) -> list[Chart]:
    """The best rate over the width by rule; and excess loss over the rate, one panel for each rule."""
    found = by_rule(results)
    means = {rule: {key: mean_losses(seeds) for key, seeds in sweeps.items()} for rule, sweeps in found.items()}
    curves, panels = [], []
    for rule, widths in means.items():
        curves.append(Curve(rule, rule, _widths(found[rule]), [vertex(losses) for losses in widths.values()]))
        panels.append(_excess_chart(rule, widths, _rates(found)))
    x, y = (
        Axis("width", log=2, ticks=curves[0].x if curves else ()),
        Axis("best learning rate", log=2, ticks=_rates(found)),
    )
    return [Chart("rate-drift", "Best learning rate", curves, x=x, y=y, points=True), *panels] if curves else []


def _rates(found: Mapping[str, Sweeps]) -> list[float]:
    return sorted({rate for sweeps in found.values() for seeds in sweeps.values() for rate in seeds[0]})


def _excess_chart(rule: str, widths: Mapping[Key, Losses], rates: Sequence[float]) -> Chart:
    curves = [Curve(str(key), f"width {key.width}", list(losses), excess(losses)) for key, losses in widths.items()]
    x, y = Axis("learning rate", log=2, ticks=rates), Axis("above the lowest", "nats")
    return Chart(f"rate-drift-{rule}", rule, curves, x=x, y=y, points=True)


def moved(sweeps: Sweeps) -> str:
    """The highest best rate over the lowest, in words."""
    means = [mean_losses(seeds) for seeds in sweeps.values()]
    best = [vertex(losses) for losses in means]
    return f"{max(best) / min(best):.2f} times{' or more' * any(map(at_an_end, means))}"


def drift_tables(results: Results, scale: Scale) -> list[Table]:
    """The best rate at each width, by how much it moves, and what the narrowest model's costs the widest."""
    found = by_rule(results)
    widths = _widths(next(iter(found.values()), {}))
    names = (*(f"width {width}" for width in widths), "moves by", "power of the width", "narrowest's, at the widest")
    columns = [Column("rule"), *(Column(name, number=True) for name in names)]
    rows: list[list[Value | Cell]] = []
    for rule, sweeps in found.items():
        means = [mean_losses(seeds) for seeds in sweeps.values()]
        best = [f"{vertex(losses):.3g}{'*' * at_an_end(losses)}" for losses in means]
        power = with_interval(drift_powers(sweeps), 2)
        cost = f"{transfer_cost(means[0], means[-1]):.2f}"
        rows.append([rule, *best, moved(sweeps), power, cost])
    note = (
        "Best learning rates, each the vertex of a parabola through the lowest and its neighbours, from means over "
        "seeds (*: the lowest or highest that was tried); the highest over the lowest; that factor as a power of the "
        "width, with half of its 95% t interval over seeds; what the best rate of the narrowest model costs the "
        f"widest, over what the worst one costs. Published: 4 times (power {_published('constant'):.2f}) under "
        f"constant decay, 1.4 times (power {_published('hyperball'):.2f}) with norms held fixed."
    )
    table = Table("rate-drift", "How far the best learning rate moves", columns, rows, note)
    return [*([table] if rows else []), *sweep_tables(results, scale)]
