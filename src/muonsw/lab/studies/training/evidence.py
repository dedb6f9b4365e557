"""From runs to claims: what was measured seed by seed, with a t interval wherever there are two seeds or more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from muonsw.lab.claims.claim import Claim, Comparison, Interval
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.diagnose import History, open_history
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs import Run

ONE_SEED = "one seed: chance is not excluded"
BEYOND = "beyond the paper"
Measure = Callable[[Run], float]


def over_seeds(values: Sequence[float]) -> tuple[float, Interval | None]:
    """The mean over seeds with its t interval, which one seed does not have.

    Examples:
        >>> over_seeds([0.5])
        (0.5, None)
        >>> over_seeds([1.0, 2.0, 3.0])[1].method
        '95% t, n=3'
    """
    mean = math.fsum(values) / len(values)
    return mean, t_interval(torch.tensor(values, dtype=torch.float64)) if len(values) > 1 else None


def paired(one: Sequence[Run], other: Sequence[Run], measure: Measure) -> list[float]:
    """A measure of one arm minus that of the other, on the seeds that both have."""
    ours, theirs = ({int(run.config["seed"]): run for run in runs} for runs in (one, other))
    return [measure(ours[seed]) - measure(theirs[seed]) for seed in ours if seed in theirs]


def claim(
    identity: str,
    statement: str,
    values: Sequence[float],
    comparison: Comparison,
    predicted: float,
    tolerance: Tolerance,
    *,
    reference: str,
    hypothesis: str = "",
    limits: str = "",
    derived: bool = False,
) -> Claim:
    """A claim about the mean over seeds; with one seed its limits say so.

    Bounds must hold for the whole interval, an equality for the mean. A `derived` value was made from all seeds at
    once, as a best point of means is.
    """
    mean, interval = over_seeds(values)
    notes = [limits] if limits else []
    notes += [ONE_SEED] if interval is None and not derived else []
    return Claim(
        id=identity,
        statement=statement,
        reference=reference,
        hypothesis=hypothesis or "the same weights and batches for every arm",
        predicted=predicted,
        measured=mean,
        comparison=comparison,
        tolerance=tolerance.size,
        because=tolerance.because,
        interval=interval,
        limits="; ".join(notes),
    )


def relabelled(run: Run, arm: str) -> Run:
    """The run under the name that a study has for its arm."""
    return replace(run, config={**run.config, "arm": arm})


def last_loss(run: Run) -> float:
    """The last validation loss, not a number where there is none."""
    return run.final_loss


def lowest_loss(run: Run) -> float:
    """The best validation loss, not a number where there is none."""
    return run.best_loss


def history(run: Run) -> History:
    """What was recorded of the weights that decay."""
    return open_history(run)


def end_norm(run: Run) -> float:
    """Weight RMS of the decayed matrices at the last sample; of all where nothing decays."""
    scope = "decayed" if "decayed" in run.telemetry.scopes() else "all"
    return open_history(run, scope).last("weight_rms")


def norm_left(run: Run) -> float:
    """The last norm relative to its largest value, minus one."""
    seen = history(run)
    return seen.last("weight_rms") / seen.highest("weight_rms") - 1.0
