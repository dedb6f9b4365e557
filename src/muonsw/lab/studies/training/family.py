"""The family: each member at its best learning rate and lambda, constant against scaled decay.

Three learning rates times three lambdas under both rules, in short runs of one model; what AdamW owns keeps its rate.
The rates lie a factor of two apart around one at which a member moves weights about as far as Muon does, the lambdas a
factor of four apart around the one whose decay adds up to 1 over the run, as that of Muon's best lambdas does. So at
every rate the totals are the same, and the next lambda of the grid is four times as large. The claims were written down
before the runs:

- Scaled decay forgives a large lambda for every member, as it does for Muon: four times the best lambda costs it at
  most 0.6 of what it costs constant decay.
- No member moves the best lambda by more than a factor of two from Muon's, once it is counted as what decay takes over
  the run (the sum of phi): members count learning rates differently, and lambda alone would move with them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muonsw.lab.base.tables import Cell, Column, Table, Value
from muonsw.lab.claims.claim import Claim, Source, at_most, within
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import Arm, Comparison, Key, Results, Runs
from muonsw.lab.studies.outcome import with_interval
from muonsw.lab.studies.scales import NEVER, Scale
from muonsw.lab.studies.training.regret import EXACT, RULES, Optimum, at_horizon, losses_of, optimum, vertex
from muonsw.lab.studies.training.sweeps import mean_losses
from muonsw.lab.train.config import OptimizerConfig, RunConfig
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
RATE_FACTORS, LAMBDA_FACTORS = (0.5, 1.0, 2.0), (0.25, 1.0, 4.0)
TOTAL = 1.0
FORGIVEN = 0.6
BEYOND = Source("beyond the paper; claims written down before the runs", "each at the best of nine settings")
OCTAVE = Tolerance(1.0, "a factor of two, the bound that was stated before the runs")


def family(scale: Scale) -> list[Comparison]:
    """Nine settings of every member under both rules.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> one = family(MINI)[1]
        >>> str(one.key), one.base.steps, len(one.arms), one.arms[0].name
        ('normuon', 400, 18, 'constant, lr 0.025, lambda 0.0459')
    """
    run = family_run(scale)
    seeds = tuple(range(scale.map_seeds))
    return [Comparison(Key(member), run, member_arms(run, member), seeds, paired=False) for member in RATES]


def family_run(scale: Scale) -> RunConfig:
    """The shortest run of the regret map with half its batch; only infinite losses end it."""
    run = at_horizon(scale.map_run, next(iter(scale.maps)))
    optimizer = replace(run.optimizer, muon_lr="none", peak="group", adam_lr=run.optimizer.lr)
    return replace(run, optimizer=optimizer, batch=max(1, run.batch // 2), diverged=NEVER, eval_every=run.steps)


def member_arms(run: RunConfig, member: str) -> tuple[Arm, ...]:
    """The settings of a member; Muon is the run's own."""
    base = replace(run.optimizer, preset="" if member == MUON else member)
    multiple = run.schedule.multiple(run.steps)
    middle = TOTAL / math.fsum(multiple(step) for step in range(run.steps))
    return tuple(
        _arm(base, rule, base.lr * RATES[member] * faster, middle * more)
        for faster in RATE_FACTORS
        for more in LAMBDA_FACTORS
        for rule in RULES
    )


def _arm(base: OptimizerConfig, rule: str, lr: float, phi: float) -> Arm:
    lr = float(f"{lr:.3g}")
    lam = float(f"{phi / lr:.3g}")
    return Arm(f"{rule}, lr {lr:g}, lambda {lam:g}", replace(base, decay=rule, lr=lr, weight_decay=lam))


@dataclass(frozen=True)
class Best:
    """A member under one rule at its best learning rate.

    Attributes:
        seeds: For each seed, the loss of each lambda at that rate.
        optimum: What they say about lambda.
        larger: For each seed, what four times the best lambda costs; None where the best is the largest.
        edge: Whether the best rate is the lowest or the highest that was tried.
        run: The first seed's at the best lambda.
    """

    seeds: list[dict[float, float]]
    optimum: Optimum
    larger: list[float] | None
    edge: bool
    run: Run

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
    runs = {name: those for name, those in arms.items() if those[0].config.optimizer.decay == rule}
    rates = sorted({those[0].config.optimizer.lr for those in runs.values()})
    at_rate = {lr: {name: r for name, r in runs.items() if r[0].config.optimizer.lr == lr} for lr in rates}
    seeds = {lr: losses_of(those, rule) for lr, those in at_rate.items()}
    lr = min(rates, key=lambda lr: min(mean_losses(seeds[lr]).values()))
    means = mean_losses(seeds[lr])
    lam = min(means, key=lambda lam: means[lam])
    one = next(r[0] for r in at_rate[lr].values() if r[0].config.optimizer.weight_decay == lam)
    return Best(seeds[lr], optimum(seeds[lr], one, rule), _larger(seeds[lr], lam), lr in (rates[0], rates[-1]), one)


def _larger(seeds: list[dict[float, float]], lam: float) -> list[float] | None:
    grid = list(seeds[0])
    place = grid.index(lam) + 1
    return None if place == len(grid) else [losses[grid[place]] - losses[lam] for losses in seeds]


def judge_family(results: Results, _scale: Scale) -> list[Claim]:
    """Whether scaled decay forgives a large lambda for each member, and whether a member moves the best one."""
    found = {key.name: {rule: best_of(arms, rule) for rule in RULES} for key, arms in results.items()}
    claims = []
    for member, rules in found.items():
        constant, scaled = (rules[rule].larger for rule in RULES)
        if constant is not None and scaled is not None:
            costs = [s - FORGIVEN * c for s, c in zip(scaled, constant, strict=False)]
            text = f"{member}: what 4 times the best lambda costs scaled decay, minus 0.6 of constant decay's, in nats"
            claims.append(at_most(f"{member}-forgives", text, BEYOND, over_seeds(costs), 0.0, EXACT))
        for rule in RULES if member != MUON and MUON in found else ():
            both = zip(rules[rule].totals, found[MUON][rule].totals, strict=False)
            text = f"{member}, {rule} decay: total of the best lambda over Muon's, in octaves"
            moved = over_seeds([math.log2(ours / theirs) for ours, theirs in both])
            ends = any(one[rule].optimum.at_an_end for one in (rules, found[MUON]))
            limits = "a best lambda is the smallest or the largest that was tried" if ends else ""
            claims.append(within(f"{member}-{rule}-lambda", text, BEYOND, moved, 0.0, OCTAVE, limits=limits))
    return claims


def family_tables(results: Results, _scale: Scale) -> list[Table]:
    """Every member at its best under both rules, with what it costs."""
    numbers = ("learning rate", "lambda", "total (Σφ)", "loss", "at 4 times lambda", "ms an update", "state")
    columns = [Column("member"), Column("rule"), *(Column(name, number=True) for name in numbers)]
    rows: list[list[Value | Cell]] = []
    for key, arms in results.items():
        for rule in RULES:
            rows.append([key.name, rule, *_best_cells(best_of(arms, rule)), *_cost_cells(arms)])
    note = (
        "The best of three learning rates and three lambdas: validation loss, mean over seeds with half of its 95% t "
        "interval; what four times that lambda costs, in nats; the median time of an update with its forward and "
        "backward pass; bytes of optimizer state. An asterisk: the lowest or highest that was tried, so perhaps better "
        "beyond it."
    )
    return [Table("family", "Every member at its best", columns, rows, note)]


def _best_cells(best: Best) -> list[Value | Cell]:
    optimizer = best.run.config.optimizer
    ends = "*" if best.optimum.at_an_end else ""
    larger = None if best.larger is None else f"{statistics.fmean(best.larger):+.3f}"
    return [
        f"{optimizer.lr:g}{'*' if best.edge else ''}",
        f"{optimizer.weight_decay:g}{ends}",
        f"{best.optimum.best * best.optimum.per_lambda:.2f}",
        with_interval(best.losses),
        larger,
    ]


def _cost_cells(arms: Runs) -> list[Value | Cell]:
    """Medians over all runs of a member: the first one compiles."""
    runs = [run for those in arms.values() for run in those]
    took = statistics.median(run.seconds / run.config.steps for run in runs)
    held = runs[0].state_bytes
    return [f"{1000 * took:.1f}", None if math.isnan(held) else sized(int(held))]
