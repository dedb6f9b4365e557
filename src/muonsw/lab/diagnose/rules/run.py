"""Rules about the run as a whole: how far it got, how much it recorded, whether it learns."""

from __future__ import annotations

import numpy as np

from muonsw.lab.diagnose.findings import Finding, Severity, percent
from muonsw.lab.diagnose.history import Array, History

ENOUGH_SAMPLES = 20
MANY_SKIPPED = 0.01
# Share of the records that one average of the loss covers, and share of the progress that may be given back.
AVERAGED, GIVEN_BACK = 0.05, 0.1


def unfinished(history: History) -> Finding | None:
    """The run has not written its result."""
    if history.run.complete:
        return None
    seen = [steps[-1] for steps in (history.run.train.step, history.steps) if len(steps)]
    step = int(max(seen, default=0))
    text = f"The run is not complete: step {step:,} of {history.planned_steps:,}. What follows is so far."
    return Finding("unfinished", Severity.NOTE, history.scope, text, {"step": step, "planned": history.planned_steps})


def too_few_samples(history: History) -> Finding | None:
    """There is too little telemetry for fits and slopes."""
    n = int(history.complete.sum())
    if n >= ENOUGH_SAMPLES:
        return None
    text = (
        f"Only {n} telemetry samples have norm, update, decay and alignment: too few for fits and slopes, so what is "
        f"silent here may still be there. Sample every {max(history.planned_steps // 100, 1)} steps."
    )
    return Finding("too-few-samples", Severity.NOTE, history.scope, text, {"samples": n})


def skipped_steps(history: History) -> Finding | None:
    """Updates were left out because gradients were not finite."""
    known = history.run.telemetry.skipped
    skipped = int(np.nanmax(known)) if np.isfinite(known).any() else 0
    if not skipped:
        return None
    share = skipped / max(int(history.steps[-1]), 1)
    severity = Severity.WARNING if share > MANY_SKIPPED else Severity.NOTE
    text = (
        f"{skipped:,} of {int(history.steps[-1]):,} updates ({percent(share)}) were skipped because a gradient was not "
        "finite. Look for overflow: loss scale, data, attention logits, learning rate."
    )
    return Finding("skipped", severity, history.scope, text, {"skipped": skipped, "share": share})


def diverging(history: History) -> Finding | None:
    """The training loss is not a number, or has given back part of what was learned."""
    recorded = history.run.train.get("loss")
    if recorded is None or not len(recorded):
        return None
    steps = history.run.train.step
    if not np.isfinite(recorded[-1]):
        known = np.flatnonzero(np.isfinite(recorded))
        since = int(steps[known[-1] + 1]) if len(known) else int(steps[0])
        text = (
            f"The training loss is not a number since step {since:,}. Restart from a checkpoint before that, at a "
            "lower learning rate."
        )
        return Finding("diverging", Severity.PROBLEM, history.scope, text, {"since": since})
    loss = recorded[np.isfinite(recorded)]
    steps = steps[np.isfinite(recorded)]
    averages, width = _averages(loss)
    if len(averages) < 2:
        return None
    best = int(averages.argmin())
    progress, back = float(averages[0] - averages[best]), float(averages[-1] - averages[best])
    if not back > GIVEN_BACK * max(progress, 1e-12):
        return None
    text = (
        f"The training loss has risen from {averages[best]:.3f} around step {int(steps[best + width // 2]):,} to "
        f"{averages[-1]:.3f}: the run is diverging. Lower the learning rate, or go back to a checkpoint."
    )
    numbers = {"best": float(averages[best]), "now": float(averages[-1]), "best_step": float(steps[best + width // 2])}
    return Finding("diverging", Severity.PROBLEM, history.scope, text, numbers)


def _averages(loss: Array) -> tuple[Array, int]:
    """Moving averages of the loss, and how many records each covers."""
    width = max(int(AVERAGED * len(loss)), 5)
    if len(loss) < 2 * width:
        return loss[:0], width
    return np.convolve(loss, np.full(width, 1.0 / width), mode="valid"), width
