"""Gradient growth: AdamC's claim about matrices whose output enters a normalization.

Their gradient is orthogonal to them, so the norm settles where what decay takes is what the step adds. For SGD at a
learning rate eta that is `|g|/|w| = sqrt(2 lambda/eta)`: under constant decay gradients rise as the rate falls, under
scaled decay, which has eta_max for eta, they stay. AdamW and Muon normalize the gradient and average it, so what the
formula speaks of is the step for a unit of rate, `|u|/eta`, times `sqrt((1 + beta)/(1 - beta))` for what momentum
averages out of independent gradients. The raw gradient is recorded beside it, without clipping. Lambda is relaxation-
matched, so that norms settle within the run. The claims were written down before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.claims.claim import Claim, Source, above, within, within_share
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Axis, Chart, Curve
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import RULES, Arm, Comparison, Key, Results, multiples
from muonsw.lab.studies.outcome import over_runs, paired, with_interval
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.cases import ADAMW_RATE
from muonsw.lab.studies.training.regret import EXACT
from muonsw.lab.train.config import OptimizerConfig, RunConfig

ADAMC = Source("AdamC (arXiv 2506.02285); claims written down before the runs", "matrices that a normalization follows")
TENTH = Tolerance(0.1, "a tenth, as was asked of a small reproduction")
STAYS = Tolerance(math.log(1.1), "a tenth up or down")
FACTORS = (0.5, 1.0, 2.0)

Chosen = Callable[[Run], NDArray[np.bool_]]


def growth_runs(scale: Scale) -> list[Comparison]:
    """Both rules under AdamW and Muon at three peak rates, with one lambda each.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> [str(one.key) for one in growth_runs(MINI)][:3]
        ['adamw, lr 0.005', 'adamw, lr 0.01', 'adamw, lr 0.02']
    """
    run = scale.rows[min(scale.rows)]
    run = replace(run, telemetry_every=scale.sampled_every or run.telemetry_every)
    found = []
    for optimizer in _optimizers(run):
        for lr in multiples(optimizer.lr, FACTORS):
            one = replace(optimizer, lr=lr)
            arms = tuple(Arm(rule, replace(one, decay=rule)) for rule in RULES)
            key = Key(f"{one.algorithm}, lr {one.lr:g}")
            found.append(Comparison(key, run, arms, tuple(range(scale.sweep_seeds))))
    return found


def _optimizers(run: RunConfig) -> list[OptimizerConfig]:
    """AdamW with the decay that Muon has in a step at its peak."""
    muon = replace(run.optimizer, peak="group", clip=0.0)
    weight_decay = float(f"{muon.weight_decay * muon.lr / ADAMW_RATE:.3g}")
    return [replace(muon, algorithm="adamw", lr=ADAMW_RATE, weight_decay=weight_decay), muon]


def near_peak(run: Run) -> NDArray[np.bool_]:
    """Samples at nine tenths of the highest learning rate and above, after warmup."""
    seen = run.normalized
    at_peak = np.isfinite(seen["lr"]) & (seen["lr"] >= 0.9 * np.nanmax(seen["lr"]))
    return at_peak & (seen.step > run.config.schedule.warmup(run.config.steps))


def between(low: float, high: float) -> Chosen:
    """Samples in a part of the run."""
    return lambda run: (run.normalized.step > low * run.config.steps) & (run.normalized.step <= high * run.config.steps)


MIDDLE, END = between(0.4, 0.6), between(0.9, 1.0)


def settled_ratio(run: Run, chosen: Chosen) -> float:
    """The step for a unit of rate over the weight, against what the formula says: 1 where the norm has settled."""
    seen, optimizer = run.normalized, run.config.optimizer
    beta = optimizer.betas[0] if optimizer.algorithm == "adamw" else optimizer.momentum
    averaged = math.sqrt((1 + beta) / (1 - beta))
    ratios = averaged * seen["update_rms"] / seen["weight_rms"] / np.sqrt(2 * seen["decay"])
    return _median(ratios[chosen(run)])


def gradient_growth(run: Run) -> float:
    """The logarithm of the gradient at the end over that in the middle of the run."""
    middle, end = (_median(run.normalized["gradient_rms"][chosen(run)]) for chosen in (MIDDLE, END))
    return math.log(end / middle)


def _median(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def judge_growth(results: Results, _scale: Scale) -> list[Claim]:
    """The formula at every rate; gradients rise under constant decay, stay under scaled, and rise less there."""
    claims = []
    for key, arms in results.items():
        for rule, runs in arms.items():
            holds = f"{key}, {rule} decay: size of the step over the weight at the peak, over sqrt(2 lambda/eta)"
            ratio = over_runs(runs, lambda run: settled_ratio(run, near_peak))
            claims.append(within_share(f"{key.slug}-{rule}-ratio", holds, ADAMC, ratio, 1.0, TENTH))
        constant, scaled = (over_runs(arms[rule], gradient_growth) for rule in RULES)
        rises = f"{key}, constant decay: gradient at the end over the middle, its logarithm"
        stays = f"{key}, scaled decay: gradient at the end over the middle, its logarithm"
        more = f"{key}: the first minus the second"
        gap = over_seeds(paired(arms["constant"], arms["scaled"], gradient_growth))
        claims += [
            above(f"{key.slug}-rises", rises, ADAMC, constant, 0.0, EXACT),
            within(f"{key.slug}-stays", stays, ADAMC, scaled, 0.0, STAYS),
            above(f"{key.slug}-rises-more", more, ADAMC, gap, 0.0, EXACT),
        ]
    return claims


def growth_tables(results: Results, _scale: Scale) -> list[Table]:
    """Ratios at the peak, in the middle and at the end, and how gradients grow."""
    names = ("at the peak", "middle", "end", "gradient, end over middle")
    columns = [Column("run"), Column("rule"), *(Column(name, number=True) for name in names)]
    rows: list[list[Value | Cell]] = []
    for key, arms in results.items():
        for rule, runs in arms.items():
            ratios = [with_interval([settled_ratio(run, part) for run in runs], 2) for part in (near_peak, MIDDLE, END)]
            grows = f"{math.exp(over_runs(runs, gradient_growth).value):.2f}"
            rows.append([str(key), rule, *ratios, grows])
    note = (
        "On the matrices that write to the residual stream: the size of a step over its rate and the weight, without "
        "what momentum averages out, over sqrt(2 lambda/eta) (eta_max under scaled decay), with half of its 95% t "
        "interval over seeds; and the raw gradient at the end over that in the middle."
    )
    return [Table("gradient-growth", "Gradients and weights that a normalization follows", columns, rows, note)]


def growth_charts(results: Results, _scale: Scale) -> list[Chart]:
    """The raw gradient over the run, one panel for each optimizer and rate, first seeds."""
    return [
        Chart(
            f"gradient-{key.slug}",
            str(key),
            [_gradient_curve(rule, runs[0]) for rule, runs in arms.items()],
            x=Axis("updates"),
            y=Axis("gradient", "RMS", log=10),
        )
        for key, arms in results.items()
    ]


def _gradient_curve(rule: str, run: Run) -> Curve:
    steps, sizes = run.normalized.known("gradient_rms")
    return Curve(rule, rule, steps.tolist(), sizes.tolist())
