"""Rules about the weight norm and what decay does to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from muonsw.lab.diagnose.findings import Finding, Severity, percent, subject, words
from muonsw.lab.diagnose.history import LINEAR, QUADRATIC, History

MIN_SAMPLES = 5
# Where the norm follows sqrt(lr), it is down by this much when the learning rate has halved.
COLLAPSE = 0.29
HALVED = 0.5
# Part of the loss must have happened after the learning rate had halved: what is left of a large start also falls.
LATE_LOSS = 0.1
HELD = 0.15
# exp(-0.3) = 0.74: all decay of the run together takes a quarter.
IDLE = 0.3
# exp(-3) = 0.05: the squared norm has forgotten 95% of its start.
RELAXED = 3.0
# Sampled updates miss the very peak of a schedule by a few percent.
REACHED = 0.95
UNEXPLAINED = 0.1


def collapsing(history: History) -> Finding | None:
    """Decay in proportion to the learning rate takes the norm down with it."""
    fall = _fall(history)
    if history.run.rule not in LINEAR or fall is None or fall.lost < COLLAPSE or fall.lost_late < LATE_LOSS:
        return None
    held = history.held_norm()
    hope = f"; scaled decay would hold about {held:.2g}" if held > fall.end else ""
    text = (
        f"{subject(history.scope)} have lost {percent(fall.lost)} of their peak norm since step {fall.top_step:,} "
        f"({fall.top:.3g} to {fall.end:.3g}) and the learning rate is at {percent(history.lr_left)} of its peak: "
        f'{history.run.rule} decay is collapsing them{hope}. Try decay="scaled".'
    )
    numbers = {"lost": fall.lost, "peak_norm": fall.top, "peak_step": float(fall.top_step), "held_norm": held}
    return Finding("collapsing", Severity.WARNING, history.scope, text, numbers | {"lr_left": history.lr_left})


def norm_held(history: History) -> Finding | None:
    """Scaled decay keeps the norm where it is while the learning rate falls."""
    fall = _fall(history)
    if history.run.rule not in QUADRATIC or fall is None or abs(fall.lost_late) > HELD:
        return None
    text = (
        f"{subject(history.scope)} keep their norm: {fall.halved:.3g} when the learning rate had halved, "
        f"{fall.end:.3g} at {percent(history.lr_left)} of it. Scaled decay does what it should."
    )
    numbers = {"change": -fall.lost_late, "lr_left": history.lr_left}
    return Finding("norm-held", Severity.GOOD, history.scope, text, numbers)


def decay_idle(history: History) -> Finding | None:
    """All decay of the run together changes nothing that matters."""
    total = history.relaxations / 2.0
    if not total < IDLE or (_rising(history) and not history.run.complete):
        return None
    numbers = {"decay_total": total, "kept": float(np.exp(-total))}
    if total == 0.0:
        text = f"{subject(history.scope)} are not decayed: lambda is 0 for them."
        return Finding("decay-idle", Severity.NOTE, history.scope, text, numbers)
    text = (
        f"Decay has no effect on {words(history.scope)} at this horizon: lambda*sum(eta), or what the rule has in its "
        f"place, is {total:.2g}, so decay alone would have kept {percent(numbers['kept'])} of them. Which rule is "
        f"used does not matter here; for decay to act raise lambda about {1.0 / total:.0f}-fold, or train longer."
    )
    return Finding("decay-idle", Severity.WARNING, history.scope, text, numbers)


def partly_relaxed(history: History) -> Finding | None:
    """The norm still depends on the initial weights."""
    n = history.relaxations
    if not 2.0 * IDLE <= n < RELAXED:
        return None
    text = (
        f"{subject(history.scope)} still remember their initial norm: the run lasts {n:.2g} relaxation times "
        f"(2*sum(phi)), so {percent(float(np.exp(-n)))} of the initial square is left. Compare runs of equal number."
    )
    return Finding("partly-relaxed", Severity.NOTE, history.scope, text, {"relaxations": n})


def peak_not_reached(history: History) -> Finding | None:
    """The peak that scaled decay divides by is higher than any learning rate that was used."""
    used, peak = history.highest("lr"), history.highest("peak_lr")
    # With the undivided peak for all groups a divided learning rate stays below it on purpose.
    if (
        not used < REACHED * peak
        or history.setting("peak") == "base"
        or (_rising(history) and not history.run.complete)
    ):
        return None
    text = (
        f"The peak learning rate of {words(history.scope)} was never reached: decay divides by {peak:.3g}, the highest "
        f"used was {used:.3g}, so decay is {percent(used / peak)} of what lambda promises. Set peak_lr to the peak of "
        "the schedule."
    )
    numbers = {"highest_lr": used, "peak_lr": peak}
    return Finding("peak-not-reached", Severity.WARNING, history.scope, text, numbers)


def tracking_broke(history: History) -> Finding | None:
    """From some step on the steady state no longer says where the norm is."""
    tracking = history.tracking
    if tracking is None or tracking.broke_at is None or int(history.complete.sum()) < MIN_SAMPLES:
        return None
    side = "above" if float(tracking.lag[tracking.lag.isfinite()][-1]) > 0 else "below"
    numbers = {"broke_at": float(tracking.broke_at), "followed": float(tracking.followed)}
    if not tracking.followed:
        text = (
            f"{subject(history.scope)} never came within a fifth of their steady state, and end {side} it: read their "
            "norm from the recursion, not from the limits."
        )
        return Finding("tracking-broke", Severity.NOTE, history.scope, text, numbers)
    text = (
        f"{subject(history.scope)} follow their steady state until step {tracking.broke_at:,}; from there their norm "
        f"stays more than a fifth {side} it, because decay has become too slow to move it. What the norm does after "
        "that was decided before."
    )
    return Finding("tracking-broke", Severity.NOTE, history.scope, text, numbers)


def unexplained_norm(history: History) -> Finding | None:
    """The recorded updates do not add up to the recorded norm."""
    tracking, norm = history.tracking, history.norm
    if tracking is None or norm is None or len(norm) < MIN_SAMPLES:
        return None
    error = tracking.predicted / norm.r - 1.0
    worst = int(error.abs().argmax())
    if float(error[worst].abs()) < UNEXPLAINED:
        return None
    text = (
        f"The recorded updates of {words(history.scope)} do not add up to their norm: the recursion is off by "
        f"{percent(float(error[worst].abs()))} at step {int(norm.steps[worst]):,}. Either something else changes the "
        "weights (a constraint, a cautious mask, rounding, groups with different decay), or telemetry is too sparse: "
        "sample more often."
    )
    numbers = {"error": float(error[worst]), "step": float(norm.steps[worst])}
    return Finding("unexplained-norm", Severity.WARNING, history.scope, text, numbers)


@dataclass(frozen=True)
class Fall:
    """How the norm fell once its start was forgotten: top, value when the learning rate had halved, end."""

    top: float
    top_step: int
    halved: float
    end: float

    @property
    def lost(self) -> float:
        """Share lost since the top."""
        return 1.0 - self.end / self.top

    @property
    def lost_late(self) -> float:
        """Share lost since the learning rate halved."""
        return 1.0 - self.end / self.halved


def _fall(history: History) -> Fall | None:
    """None before the learning rate has halved, and where the initial norm is not forgotten before that."""
    r = history.column("weight_rms")
    halved = np.flatnonzero((history.column("lr") <= HALVED * history.highest("lr")) & np.isfinite(r))
    halved = halved[halved > history.peak_at]
    forgotten = np.flatnonzero((history.relaxations_so_far >= RELAXED) & np.isfinite(r))
    if len(halved) < 2 or not len(forgotten) or forgotten[0] > halved[0]:
        return None
    top = int(forgotten[r[forgotten].argmax()])
    return Fall(float(r[top]), int(history.steps[top]), float(r[halved[0]]), history.last("weight_rms"))


def _rising(history: History) -> bool:
    return history.peak_at == len(history.steps) - 1
