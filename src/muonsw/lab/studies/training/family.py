"""The family: each member at its best learning rate and lambda, constant against scaled decay, in two stages.

A search on one seed that nothing else uses, in runs half as long: three learning rates times three lambdas under both
rules; what AdamW owns keeps its rate. The rates lie a factor of two apart around one at which a member moves weights
about as far as Muon does, with one more where the best of the three was an end; the lambdas a factor of four apart
around the one whose decay adds up to 1 over the run, as that of Muon's best lambdas does. Then, on other seeds and in
full length, each rule at its best rate (and where that is an end, at its neighbour too, as longer runs may want a lower
one) with three lambdas, the same for both: the one at which they were best together, counted as what constant decay
takes over the run, and four times less and more; where the largest of these is the best of a rule, both have one that
is four times larger still, and where the smallest is, that rule has one that is four times smaller. The claims were
written down before the runs:

- Scaled decay forgives a large lambda for every member, as it does for Muon: the largest one costs it at most 0.6 of
  what it costs constant decay, each above its own best.
- No member moves the best lambda by more than a factor of two from Muon's, once it is counted as what decay takes over
  the run (the sum of phi): members count learning rates differently, and lambda alone would move with them.

The first is not judged where a best lambda is the largest that was tried, the second where one is at either end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muonsw.lab.claims.claim import Claim, at_most, within
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Axis, Chart
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import RULES, Arm, Comparison, Key, Results, Runs, lr_multiples
from muonsw.lab.studies.outcome import loss_cell, swept_loss, with_interval
from muonsw.lab.studies.scales import NEVER, Scale
from muonsw.lab.studies.training.regret import (
    BEYOND,
    EXACT,
    Optimum,
    at_horizon,
    basins_chart,
    best_of_means,
    losses_of,
    optimum,
    under,
)
from muonsw.lab.studies.training.sweeps import mean_losses, vertex
from muonsw.lab.train.config import RunConfig
from muonsw.text import sized

MUON = "muon"
# By member, its middle learning rate over that of the run: 0.2, Muon's RMS, over the RMS of its directions at width
# 128, as the first 25 updates of one layer have it.
RATES: Mapping[str, float] = {
    MUON: 1.0,
    **dict.fromkeys(("normuon", "muon2", "aurora", "soap_muon"), 2.5),
    "dion2": 5.0,
    **dict.fromkeys(("adamuon", "asgo"), 1.0),
    "soap": 0.5,
    "shampoo": 0.3,
    "kl_shampoo": 4.0,
    "lion": 0.2,
}
# It waits for eigendecompositions, which torch 2.11 makes one after another on GPUs: trained on CPUs alone.
SLOW_ON_GPUS = "shampoo"
RATE_FACTORS, LAMBDA_FACTORS = (0.5, 1.0, 2.0), (0.25, 1.0, 4.0)
# By member whose best of these rates was an end, the one beyond it.
FURTHER_RATE: Mapping[str, float] = {
    **dict.fromkeys((MUON, "normuon", "muon2", "aurora", "soap_muon", "adamuon", "kl_shampoo"), 4.0),
    "lion": 0.25,
}
TOTAL, MORE = 1.0, 16.0
# How many times shorter the search's runs are, and updates between records: the first one lets others compile.
SHORTER, LOGGED = 2, 20
FORGIVEN = 0.6
SEARCHED = replace(BEYOND, hypothesis="each at the best of nine or twelve settings")
OCTAVE = Tolerance(1.0, "a factor of two, the bound that was stated before the runs")


def members(scale: Scale) -> list[str]:
    """Those that are trained at a scale.

    Examples:
        >>> from muonsw.lab.studies.scales import CPU, MINI
        >>> set(members(CPU)) - set(members(MINI))
        {'shampoo'}
    """
    return [member for member in RATES if member != SLOW_ON_GPUS or scale.name == "cpu"]


def search(scale: Scale) -> list[Comparison]:
    """Nine or twelve settings of every member under both rules, in short runs.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> one = search(MINI)[1]
        >>> str(one.key), one.seeds, len(one.arms), one.arms[0].name
        ('normuon, 200 updates', (3,), 24, 'constant, lr 0.025, lambda 0.0917')
    """
    run = family_run(scale, shorter=SHORTER)
    seeds = (scale.map_seeds,)
    keys = {member: Key(member, steps=run.steps) for member in members(scale)}
    return [Comparison(key, run, grid(run, member), seeds, paired=False) for member, key in keys.items()]


def family(found: Results, scale: Scale) -> list[Comparison]:
    """Lambdas of every member under both rules, at the rates that the search found; before it the middle ones.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> one = family({}, MINI)[1]
        >>> str(one.key), one.seeds, [arm.name for arm in one.arms[:2]]
        ('normuon, 400 updates', (0, 1, 2), ['constant, lr 0.05, lambda 0.0229', 'constant, lr 0.05, lambda 0.0917'])
    """
    run, seeds = family_run(scale), tuple(range(scale.map_seeds))
    tuned = {key.name: arms for key, arms in found.items() if key.steps != run.steps}
    comparisons = []
    for member in members(scale):
        key, arms = Key(member, steps=run.steps), around(run, member, tuned.get(member), LAMBDA_FACTORS)
        comparisons.append(Comparison(key, run, arms, seeds, paired=False))
        if key in found:
            best = {rule: best_of(found[key], rule) for rule in RULES}
            larger = any(one.larger is None for one in best.values())
            more = around(run, member, tuned.get(member), (MORE,)) if larger else ()
            less = tuple(_less(run, member, rule, one) for rule, one in best.items() if one.smallest)
            beyond = {"more decay": more, "less decay": less}
            comparisons += [
                Comparison(_beyond(key, what), run, arms, seeds, paired=False) for what, arms in beyond.items() if arms
            ]
    return comparisons


def _beyond(key: Key, what: str) -> Key:
    return replace(key, name=f"{key.name}, {what}")


def _less(run: RunConfig, member: str, rule: str, best: Best) -> Arm:
    """A quarter of the best lambda, at the best rate."""
    total = best.run.config.optimizer.weight_decay * best.lr * math.fsum(lr_multiples(run))
    return _arm(run, member, rule, best.lr, total * LAMBDA_FACTORS[0])


def family_run(scale: Scale, *, shorter: int = 1) -> RunConfig:
    """The shortest run of the regret map with half its batch; only infinite losses end it."""
    run = at_horizon(scale.map_run, next(iter(scale.maps)) // shorter)
    optimizer = replace(run.optimizer, muon_lr="none", peak="group", adam_lr=run.optimizer.lr)
    run = replace(run, eval_every=run.steps, telemetry_every=0, log_every=LOGGED)
    return replace(run, optimizer=optimizer, batch=max(1, run.batch // 2), diverged=NEVER)


def grid(run: RunConfig, member: str) -> tuple[Arm, ...]:
    """The settings of a member that the search tries."""
    factors = sorted({*RATE_FACTORS, FURTHER_RATE.get(member, 1.0)})
    rates = [run.optimizer.lr * RATES[member] * faster for faster in factors]
    return tuple(_arm(run, member, rule, lr, more) for lr in rates for more in LAMBDA_FACTORS for rule in RULES)


def around(run: RunConfig, member: str, tuned: Runs | None, factors: Sequence[float]) -> tuple[Arm, ...]:
    """The settings of a member: each rule at its best rates, with the lambdas around the one that is best for both."""
    rates, total = {rule: [run.optimizer.lr * RATES[member]] for rule in RULES}, TOTAL
    if tuned is not None:
        best = {rule: best_of(tuned, rule) for rule in RULES}
        rates = {rule: _with_neighbour(one, searched_rates(tuned, rule)) for rule, one in best.items()}
        means = [list(mean_losses(one.seeds).values()) for one in best.values()]  # by lambda, ascending as totals do
        together = [math.fsum(losses) for losses in zip(*means, strict=True)]
        total = LAMBDA_FACTORS[together.index(min(together))]
    return tuple(_arm(run, member, rule, lr, total * more) for rule in RULES for lr in rates[rule] for more in factors)


def searched_rates(arms: Runs, rule: str) -> list[float]:
    """The learning rates that were tried under a rule, ascending."""
    return sorted({those[0].config.optimizer.lr for those in under(arms, rule).values()})


def _with_neighbour(best: Best, rates: Sequence[float]) -> list[float]:
    """The best rate, and where it is the lowest or highest of several the one next to it."""
    if not best.edge or len(rates) == 1:
        return [best.lr]
    return [best.lr, rates[1] if best.lr == rates[0] else rates[-2]]


def _arm(run: RunConfig, member: str, rule: str, lr: float, total: float) -> Arm:
    """A member, Muon being the run's own, with the lambda that takes so much over the run under constant decay."""
    base = replace(run.optimizer, preset="" if member == MUON else member)
    lr = float(f"{lr:.3g}")
    lam = float(f"{total / math.fsum(lr_multiples(run)) / lr:.3g}")
    return Arm(f"{rule}, lr {lr:g}, lambda {lam:g}", replace(base, decay=rule, lr=lr, weight_decay=lam))


@dataclass(frozen=True)
class Best:
    """A member under one rule at its best learning rate."""

    seeds: list[dict[float, float]]  # for each seed, the loss of each lambda at that rate
    optimum: Optimum  # what they say about lambda
    larger: list[float] | None  # for each seed, what the largest lambda costs; None where it is the best
    smallest: bool  # whether the best lambda is the smallest that was tried at that rate
    edge: bool  # whether the best rate is the lowest or the highest that was tried
    run: Run  # the first seed's at the best lambda

    @property
    def lr(self) -> float:
        """The best learning rate."""
        return self.run.config.optimizer.lr

    @property
    def losses(self) -> list[float]:
        """Of the best lambda, by seed."""
        return [losses[self.run.config.optimizer.weight_decay] for losses in self.seeds]

    @property
    def totals(self) -> list[float]:
        """What decay takes over the run at the best lambda, by seed."""
        return [vertex(losses) * self.optimum.per_lambda for losses in self.seeds]


def best_of(arms: Runs, rule: str) -> Best:
    """The rate whose best lambda has the lowest mean loss, and what was found there."""
    runs = under(arms, rule)
    rates = searched_rates(arms, rule)
    at_rate = {lr: {name: r for name, r in runs.items() if r[0].config.optimizer.lr == lr} for lr in rates}
    seeds = {lr: losses_of(those, rule) for lr, those in at_rate.items()}
    lr = min(rates, key=lambda lr: min(mean_losses(seeds[lr]).values()))
    lam, largest = best_of_means(seeds[lr]), max(seeds[lr][0])
    one = next(r[0] for r in at_rate[lr].values() if r[0].config.optimizer.weight_decay == lam)
    larger = None if lam == largest else [losses[largest] - losses[lam] for losses in seeds[lr]]
    found = optimum(at_rate[lr], rule)
    return Best(seeds[lr], found, larger, lam == min(seeds[lr][0]), lr in (rates[0], rates[-1]), one)


def tuned_members(results: Results, scale: Scale) -> dict[str, dict[str, Best]]:
    """By member and rule, what the runs after the search found; whether a rate is an edge is known from the search."""
    steps = family_run(scale).steps
    searches = {key.name: arms for key, arms in results.items() if key.steps != steps}
    found = {}
    for key in (key for key in results if key.steps == steps and key.name in RATES):
        arms, search = _with_more(results, key), searches.get(key.name, results[key])
        best = {rule: best_of(arms, rule) for rule in RULES}
        ends = {rule: (min(rates), max(rates)) for rule in RULES if (rates := searched_rates(search, rule))}
        found[key.name] = {rule: replace(one, edge=one.lr in ends[rule]) for rule, one in best.items()}
    return found


def _with_more(results: Results, key: Key) -> Runs:
    """The runs of a member, with those of more and of less decay once all seeds have them."""
    arms = dict(results[key])
    seeds = len(next(iter(arms.values())))
    for further in (results.get(_beyond(key, what), {}) for what in ("more decay", "less decay")):
        if all(len(runs) == seeds for runs in further.values()):
            arms |= further
    return arms


def judge_family(results: Results, scale: Scale) -> list[Claim]:
    """Whether scaled decay forgives a large lambda for each member, and whether a member moves the best one."""
    found = tuned_members(results, scale)
    claims = []
    for member, rules in found.items():
        constant, scaled = (rules[rule].larger for rule in RULES)
        if constant is not None and scaled is not None:
            costs = [s - FORGIVEN * c for s, c in zip(scaled, constant, strict=False)]
            text = f"{member}: what the largest lambda costs scaled decay, minus 0.6 of constant decay's, in nats"
            claims.append(at_most(f"{member}-forgives", text, SEARCHED, over_seeds(costs), 0.0, EXACT))
        for rule in RULES if member != MUON and MUON in found else ():
            both = zip(rules[rule].totals, found[MUON][rule].totals, strict=False)
            text = f"{member}, {rule} decay: total of the best lambda over Muon's, in octaves"
            moved = over_seeds([math.log2(ours / theirs) for ours, theirs in both])
            if not any(one[rule].optimum.at_an_end for one in (rules, found[MUON])):
                claims.append(within(f"{member}-{rule}-lambda", text, SEARCHED, moved, 0.0, OCTAVE))
    return claims


def family_tables(results: Results, scale: Scale) -> list[Table]:
    """Every member at its best under both rules, with the size of its state; and the search."""
    return [table for table in (_members_table(results, scale), _search_table(results, scale)) if table.rows]


def _members_table(results: Results, scale: Scale) -> Table:
    found = tuned_members(results, scale)
    numbers = ("learning rate", "lambda", "total (Σφ)", "loss", "minus constant", "minus Muon", "at the largest lambda")
    columns = [Column("member"), Column("rule"), *(Column(name, number=True) for name in (*numbers, "state"))]
    rows: list[list[Value | Cell]] = []
    for member, rules in found.items():
        for rule, best in rules.items():
            others = [rules[RULES[0]] if rule != RULES[0] else None, found.get(MUON, {}).get(rule)]
            gaps = [None if one is None or one is best else with_interval(gaps_of(best, one), 3) for one in others]
            rows.append([member, rule, *_best_cells(best), *gaps, *_cost_cells(best)])
    seeds = sorted({len(best.seeds) for rules in found.values() for best in rules.values()})
    note = (
        "The best of the rates and lambdas that were tried after the search: validation loss, means over "
        f"{' to '.join(map(str, seeds))} seeds with half of the 95% t interval; the same minus constant decay's and "
        "minus Muon's under the same rule, paired by seed; what the largest lambda costs, in nats; and bytes of "
        "optimizer state. An asterisk: the lowest or highest that was tried, so perhaps better beyond it."
    )
    timed = [best.run for rules in found.values() for best in rules.values() if best.run.config.device == "cpu"]
    table = Table("family", "Every member at its best", columns, rows, note)
    return _with_times(table, timed) if timed else table


def gaps_of(ours: Best, theirs: Best) -> list[float]:
    """How much lower or higher one ends than another, by seed."""
    return [a - b for a, b in zip(ours.losses, theirs.losses, strict=False)]


def _best_cells(best: Best) -> list[Value | Cell]:
    optimizer = best.run.config.optimizer
    ends = "*" if best.optimum.at_an_end else ""
    return [
        f"{best.lr:g}{'*' if best.edge else ''}",
        f"{optimizer.weight_decay:g}{ends}",
        f"{best.optimum.best * best.optimum.per_lambda:.2f}",
        with_interval(best.losses, 3),
    ]


def _cost_cells(best: Best) -> list[Value | Cell]:
    held = best.run.state_bytes
    larger = None if best.larger is None else f"{statistics.fmean(best.larger):+.3f}"
    return [larger, None if math.isnan(held) else sized(int(held))]


def _with_times(table: Table, runs: Sequence[Run]) -> Table:
    """The time of an update too, where each run had a core of its own; runs that share a GPU say nothing about it."""
    times = [f"{1000 * run.seconds / run.config.steps:.1f}" for run in runs]
    rows = [[*row, took] for row, took in zip(table.rows, times, strict=True)]
    return replace(table, columns=[*table.columns, Column("ms an update", number=True)], rows=rows)


def time_table(measured: Mapping[str, Any]) -> Table:
    """What a step of every member takes that `bench/step_time.py` timed, by set of matrices."""
    results, where = measured["results"], measured["environment"]
    timed = [name for name in ("muonsw", *RATES) if name in next(iter(results.values()))]
    columns = [Column("member"), *(Column(f"{name}, ms a step", number=True) for name in results)]
    rows: list[list[Value | Cell]] = [
        [MUON if name == "muonsw" else name, *(f"{steps[name]['ms']:.1f}" for steps in results.values())]
        for name in timed
    ]
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    note = (
        f"The step alone, on the hidden matrices of the paper's models of these widths: {where['device']}, {versions}, "
        f"medians, {where['date']}."
    )
    return Table("family-time", "What a step takes", columns, rows, note)


def family_charts(results: Results, scale: Scale) -> list[Chart]:
    """Both rules over what decay takes over the run, one panel for each member."""
    charts = []
    for member, rules in tuned_members(results, scale).items():
        means = {
            rule: {lam * best.optimum.per_lambda: loss for lam, loss in best.optimum.losses.items()}
            for rule, best in rules.items()
        }
        charts.append(basins_chart(f"family-{member}", member, means, Axis("total (Σφ)", log=2)))
    return charts


def _search_table(results: Results, scale: Scale) -> Table:
    run, factors = family_run(scale), sorted({*RATE_FACTORS, *FURTHER_RATE.values()})
    numbers = ("middle rate", *(f"{factor:g} x" for factor in factors))
    columns = [Column("member"), Column("rule"), *(Column(name, number=True) for name in numbers)]
    rows: list[list[Value | Cell]] = []
    for key, arms in results.items():
        for rule in RULES if key.steps != run.steps else ():
            middle, losses = run.optimizer.lr * RATES[key.name], dict[float, list[float]]()
            for one in (those[0] for those in under(arms, rule).values()):
                factor = min(factors, key=lambda each: abs(one.config.optimizer.lr / middle - each))
                losses.setdefault(factor, []).append(swept_loss(one))
            lowest = {factor: min(those) for factor, those in losses.items()}
            rows.append([key.name, rule, f"{middle:g}", *(loss_cell(lowest, factor) for factor in factors)])
    note = (
        "Validation loss of the best of three lambdas on the seed of the search, at multiples of the member's middle "
        "learning rate, the best of each row marked."
    )
    return Table("family-search", "The search", columns, rows, note)
