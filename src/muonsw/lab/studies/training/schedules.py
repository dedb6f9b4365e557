"""Schedules: where the learning rate spends long near zero the rules differ most, so does scaled decay gain there?

Under constant decay the norm that a weight settles at falls with the root of the learning rate, under scaled decay it
stays. So the rules should differ most where the rate falls early and to zero, and least where it is flat and then falls
quickly (WSD). Both rules at three lambdas under each schedule; each is judged at its best. The claims were written down
before the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from muonsw.lab.claims.claim import Claim, Source, at_most, below
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.report.sections import Chart
from muonsw.lab.studies.arms import RULES, Comparison, Key, Results, multiples
from muonsw.lab.studies.outcome import loss_cell, with_interval
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.best_rules import FACTORS, rules_run
from muonsw.lab.studies.training.regret import (
    BEYOND,
    EXACT,
    at_horizon,
    basins,
    best_gaps,
    lambda_map,
    losses_of,
    optimum,
)
from muonsw.lab.studies.training.sweeps import Losses, mean_losses
from muonsw.lab.train.config import RunConfig, ScheduleConfig

TO_ZERO = Source("Straight to Zero (arXiv 2502.15938), with AdamW; claims written down before the runs", "Muon")
SHAPES, FINALS = ("cosine", "linear", "WSD"), (0.1, 0.0)
# A rate that stays at its peak adds up to almost twice as much: half the lambda takes as much over the run. And half of
# the smallest of these, which was still the best.
WSD_FACTORS = (0.125, *(0.5 * factor for factor in FACTORS))
COSINE, LINEAR, WSD = Key("cosine to 0.1"), Key("linear to 0"), Key("WSD to 0")


def schedules(scale: Scale) -> list[Comparison]:
    """Both rules at three lambdas under every schedule, with the same peak.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> [str(one.key) for one in schedules(MINI)]
        ['cosine to 0.1', 'cosine to 0', 'linear to 0.1', 'linear to 0', 'WSD to 0.1', 'WSD to 0']
    """
    run = at_horizon(rules_run(scale), scale.horizons[1])
    return [
        lambda_map(
            Key(f"{shape} to {final:g}"),
            replace(run, schedule=_schedule(run, shape, final)),
            multiples(run.optimizer.weight_decay, WSD_FACTORS if shape == "WSD" else FACTORS),
            scale.map_seeds,
        )
        for shape in SHAPES
        for final in FINALS
    ]


def _schedule(run: RunConfig, shape: str, final: float) -> ScheduleConfig:
    """A straight line from the end of warmup on is WSD without a flat part."""
    if shape == "linear":
        falling = (run.steps - run.schedule.warmup(run.steps)) / run.steps
        return replace(run.schedule, shape="wsd", final_fraction=final, decay_fraction=falling)
    return replace(run.schedule, shape=shape.lower(), final_fraction=final)


def judge_schedules(results: Results, _scale: Scale) -> list[Claim]:
    """Scaled decay gains where the rate goes to zero, more than under WSD; and going to zero is better."""
    losses = {key: {rule: losses_of(arms, rule) for rule in RULES} for key, arms in results.items()}
    claims = []
    for key in (key for key in (LINEAR, Key("cosine to 0"), WSD) if key in losses):
        lower = f"{key}: scaled decay minus constant decay, each at its best lambda, in nats"
        claims.append(at_most(f"{key.slug}-best", lower, BEYOND, over_seeds(_gaps(losses[key])), 0.0, EXACT))
    if LINEAR in losses and WSD in losses:
        gaps = [_gaps(losses[key]) for key in (LINEAR, WSD)]
        more = f"the same under {LINEAR}, minus the same under {WSD}, in nats"
        difference = over_seeds([a - b for a, b in zip(*gaps, strict=False)])
        claims.append(at_most("more-than-under-wsd", more, BEYOND, difference, 0.0, EXACT))
    if LINEAR in losses and COSINE in losses:
        for rule in RULES:
            zero = f"{rule} decay at its best lambda: {LINEAR} minus {COSINE}, in nats"
            gap = over_seeds(best_gaps(losses[LINEAR][rule], losses[COSINE][rule]))
            claims.append(below(f"{rule}-to-zero", zero, TO_ZERO, gap, 0.0, EXACT))
    return claims


def _gaps(losses: Mapping[str, Sequence[Losses]]) -> list[float]:
    return best_gaps(losses["scaled"], losses["constant"])


def schedule_charts(results: Results, _scale: Scale) -> list[Chart]:
    """Both rules over lambda, one panel for each schedule."""
    return basins("schedule", results)


def schedule_tables(results: Results, _scale: Scale) -> list[Table]:
    """Losses by schedule, rule and lambda, what decay takes, and how far apart the rules end."""
    lambdas = sorted({lam for arms in results.values() for lam in losses_of(arms, RULES[0])[0]})
    names = (*(f"lambda {lam:g}" for lam in lambdas), "total (Σφ)", "scaled minus constant")
    columns = [Column("schedule"), Column("rule"), *(Column(name, number=True) for name in names)]
    rows: list[list[Value | Cell]] = []
    for key, arms in results.items():
        losses = {rule: losses_of(arms, rule) for rule in RULES}
        for rule, seeds in losses.items():
            one, means = optimum(arms, rule), mean_losses(seeds)
            gap = with_interval(_gaps(losses)) if rule == "scaled" else None
            total = f"{one.best * one.per_lambda:.2f}{'*' * one.at_an_end}"
            rows.append([str(key), rule, *(loss_cell(means, lam) for lam in lambdas), total, gap])
    note = (
        "Validation loss, means over seeds, the best lambda of each row marked; what decay takes at the best lambda, "
        "with an asterisk where no smaller or no larger one was tried; "
        "and the difference of the rules, each at its best lambda, with half of its 95% t interval."
    )
    return [Table("schedules", "Both rules under every schedule", columns, rows, note)]
