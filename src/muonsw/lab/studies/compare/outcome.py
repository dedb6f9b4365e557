"""What a comparison found: each arm's losses and norms, and paired differences with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from muonsw.lab.claims.claim import Interval
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.runs import Run
from muonsw.lab.storage import plain
from muonsw.lab.studies.compare.arms import decay_factors
from muonsw.lab.train.config import RunConfig
from muonsw.theory import relaxation_number


@dataclass(frozen=True)
class ArmOutcome:
    """One arm over its seeds.

    Attributes:
        name: The arm.
        rule: Its decay rule.
        weight_decay: Its lambda.
        seeds: In the order of the values below.
        final: Last validation loss of each run.
        best: Lowest validation loss of each run.
        norm: Weight RMS of the decayed matrices at the end of each run.
        norm_change: The same relative to its largest value, minus one.
        relative_update: Update over weight RMS, at the peak of the learning rate.
        relaxation: N = 2 sum phi, how many relaxation times the run lasts.
        total_decay: Sum of phi.
        phi_peak: Decay of one update at the peak.
        memory_ratio: phi_peak over 1 - beta; well under one where decay is slow beside momentum.
    """

    name: str
    rule: str
    weight_decay: float
    seeds: tuple[int, ...]
    final: tuple[float, ...]
    best: tuple[float, ...]
    norm: tuple[float, ...]
    norm_change: tuple[float, ...]
    relative_update: tuple[float, ...]
    relaxation: float
    total_decay: float
    phi_peak: float
    memory_ratio: float


@dataclass(frozen=True)
class PairOutcome:
    """One arm against the baseline, seed by seed.

    Attributes:
        baseline: The arm that is compared with.
        arm: The arm.
        seeds: In the order of the values below.
        differences: Final loss of the arm minus the baseline's; negative where the arm is better.
        mean: Their mean.
        interval: Of their mean; None with fewer than two seeds.
        steps_to_match: The update at which the arm reaches the baseline's best loss, over the update at which the
            baseline did; None where it never does.
        match_interval: Of the mean of those; None where one is missing or with fewer than two seeds.
    """

    baseline: str
    arm: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    interval: Interval | None
    steps_to_match: tuple[float | None, ...]
    match_interval: Interval | None

    @property
    def mean_match(self) -> float | None:
        """Mean of the steps to match; None where one is missing."""
        known = [value for value in self.steps_to_match if value is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(self.steps_to_match) else None


def arm_outcome(runs: Sequence[Run]) -> ArmOutcome:
    """What the runs of one arm found; they differ in the seed alone."""
    config = RunConfig.from_data(runs[0].config)
    phis = decay_factors(config, config.optimizer)
    norms = [run.telemetry.scope("decayed") for run in runs]
    return ArmOutcome(
        name=config.arm,
        rule=config.optimizer.decay,
        weight_decay=config.optimizer.weight_decay,
        seeds=tuple(int(run.config["seed"]) for run in runs),
        final=tuple(run.final_loss for run in runs),
        best=tuple(run.best_loss for run in runs),
        norm=tuple(float(scope["weight_rms"][-1]) if scope.records else math.nan for scope in norms),
        norm_change=tuple(run.norm_change for run in runs),
        relative_update=tuple(_at_peak(run) for run in runs),
        relaxation=relaxation_number(phis),
        total_decay=math.fsum(phis),
        phi_peak=max(phis),
        memory_ratio=max(phis) / (1.0 - _momentum(config)),
    )


def _momentum(config: RunConfig) -> float:
    chosen = config.optimizer
    return chosen.betas[0] if chosen.algorithm == "adamw" else chosen.momentum


def _at_peak(run: Run) -> float:
    scope = run.telemetry.scope("decayed")
    if not scope.records:
        return math.nan
    return float(scope["relative_update"][int(np.nanargmax(scope["lr"]))])


def pair_outcome(baseline: Sequence[Run], arm: Sequence[Run]) -> PairOutcome:
    """An arm against the baseline, on the seeds that both have."""
    ours, theirs = ({int(run.config["seed"]): run for run in runs} for runs in (arm, baseline))
    seeds = tuple(seed for seed in theirs if seed in ours)
    differences = tuple(ours[seed].final_loss - theirs[seed].final_loss for seed in seeds)
    matches = tuple(steps_to_match(theirs[seed], ours[seed]) for seed in seeds)
    known = [match for match in matches if match is not None]
    return PairOutcome(
        baseline=str(baseline[0].config["arm"]),
        arm=str(arm[0].config["arm"]),
        seeds=seeds,
        differences=differences,
        mean=math.fsum(differences) / len(differences),
        interval=_interval(differences),
        steps_to_match=matches,
        match_interval=_interval(known) if len(known) == len(matches) else None,
    )


def _interval(values: Sequence[float]) -> Interval | None:
    return t_interval(torch.tensor(values, dtype=torch.float64)) if len(values) > 1 else None


def steps_to_match(baseline: Run, arm: Run) -> float | None:
    """The update at which the arm first has the baseline's best loss, over the update at which the baseline had it."""
    steps, losses = baseline.evals.known("loss")
    best = int(losses.argmin())
    if steps[best] == 0:
        return None
    reached = first_crossing(*arm.evals.known("loss"), level=float(losses[best]))
    return None if reached is None else reached / float(steps[best])


def first_crossing(steps: Any, losses: Any, level: float) -> float | None:
    """The step at which a loss first falls to a level, between evaluations by a straight line; None if never.

    Examples:
        >>> first_crossing([0, 10, 20], [5.0, 4.0, 3.0], 3.5)
        15.0
        >>> first_crossing([0, 10], [5.0, 4.0], 3.5) is None
        True
    """
    for place, loss in enumerate(losses):
        if loss <= level:
            if place == 0:
                return float(steps[0])
            before = losses[place - 1]
            share = (before - level) / (before - loss)
            return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))
    return None


@dataclass(frozen=True)
class Outcome:
    """A whole comparison; the first arm is the baseline of every pair."""

    arms: tuple[ArmOutcome, ...]
    pairs: tuple[PairOutcome, ...]

    def as_data(self) -> dict[str, Any]:
        """Everything as JSON data."""
        data: dict[str, Any] = plain(asdict(self))
        return data


def compare(runs: Mapping[str, Sequence[Run]]) -> Outcome:
    """What the runs of several arms say; the first arm is the baseline."""
    first, *others = runs.values()
    arms = tuple(arm_outcome(those) for those in runs.values())
    return Outcome(arms, tuple(pair_outcome(first, those) for those in others))
