"""The paper's two effects as claims: the scaled arm ends lower, and keeps its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from muonsw.lab.claims.claim import Claim, Comparison, Interval
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.studies.compare.outcome import ArmOutcome, Outcome, PairOutcome

HYPOTHESIS = "the same weights, batches and lambda for both rules"


def effects(outcome: Outcome) -> list[Claim]:
    """The claims that a comparison of scaled with constant decay allows; none where it compares other things."""
    arms = {arm.name: arm for arm in outcome.arms}
    found = []
    for pair in outcome.pairs:
        one, other = arms[pair.baseline], arms[pair.arm]
        rules = (one.rule, other.rule) == ("constant", "scaled")
        if rules and math.isclose(one.weight_decay, other.weight_decay) and pair.interval is not None:
            found += [lower_loss(pair, pair.interval), kept_norm(one, other)]
    return found


def lower_loss(pair: PairOutcome, interval: Interval) -> Claim:
    """The scaled arm's final validation loss is lower, seed by seed."""
    return Claim(
        id="loss",
        statement=f"{pair.arm} ends at a lower validation loss than {pair.baseline}",
        reference="main table",
        hypothesis=HYPOTHESIS,
        predicted=0.0,
        measured=pair.mean,
        comparison=Comparison.AT_MOST,
        tolerance=0.0,
        because="the whole interval of the paired difference must lie below zero",
        interval=interval,
        limits="at this size and length the gain need not be the paper's",
    )


def kept_norm(constant: ArmOutcome, scaled: ArmOutcome) -> Claim:
    """The scaled arm's weights end larger than the constant arm's, relative to where they were largest."""
    gained = _paired(scaled.norm_change, constant.norm_change)
    return Claim(
        id="norm",
        statement="constant decay shrinks the weights while the learning rate falls, scaled decay holds them",
        reference="steady-state figure",
        hypothesis=HYPOTHESIS,
        predicted=0.0,
        measured=float(gained.mean()),
        comparison=Comparison.AT_LEAST,
        tolerance=0.0,
        because="the paired difference of what is left of the largest norm must lie above zero",
        interval=t_interval(gained),
    )


def _paired(one: Sequence[float], other: Sequence[float]) -> torch.Tensor:
    return torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
