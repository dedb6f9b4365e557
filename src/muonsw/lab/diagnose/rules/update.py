"""Rules about single updates: their size, their direction, and what arrives of them."""

from __future__ import annotations

import numpy as np

from muonsw.lab.diagnose.findings import Finding, Severity, percent, subject, words
from muonsw.lab.diagnose.history import History

MIN_SAMPLES = 5
# Five Newton-Schulz steps map singular values from 1.5e-3 of the largest on into this range (rounding added).
DEFECT_RANGE = (0.68, 1.21)
# Decay should be slow against momentum: a fifth is 0.01 per step at beta 0.95, twice that is a warning.
SLOW, TOO_FAST = 0.2, 0.4
ROUNDING = 0.05
RADIAL = 0.05


def large_updates(history: History) -> Finding | None:
    """Momentum replaces the weights within its own memory."""
    size, bound = history.typical(_relative(history)), 1.0 - history.momentum
    if not size > bound or _few(history):
        return None
    text = (
        f"Updates are {percent(size)} of {words(history.scope)}, more than the {percent(bound)} at which momentum with "
        f"coefficient {history.momentum:g} replaces them within its own memory of {1.0 / bound:.0f} steps. Lower the "
        "learning rate, or lambda if decay has made the weights this small."
    )
    return Finding("large-updates", Severity.WARNING, history.scope, text, {"relative_update": size, "bound": bound})


def fast_decay(history: History) -> Finding | None:
    """Decay is not slow against momentum, as the theory of the norm assumes."""
    peak, forgetting = history.highest("decay"), 1.0 - history.momentum
    ratio = peak / forgetting
    # At the limit itself rounding must not decide.
    if not ratio > SLOW * (1.0 + 1e-6):
        return None
    severity = Severity.WARNING if ratio > TOO_FAST else Severity.NOTE
    text = (
        f"Decay of {words(history.scope)} is not slow against momentum: phi peaks at {peak:.2g} per step, "
        f"{percent(ratio)} of 1 - beta = {forgetting:.2g}. Norms will not match those of runs with slower decay; use a "
        "smaller lambda and more steps."
    )
    return Finding("fast-decay", severity, history.scope, text, {"phi_peak": peak, "ratio": ratio})


def defect_out_of_range(history: History) -> Finding | None:
    """Muon's direction is further from orthogonal than its iteration allows."""
    defect = history.typical(history.column("defect"))
    low, high = DEFECT_RANGE
    if not (defect < low or defect > high) or _few(history):
        return None
    cause = (
        "many singular values of the momentum are below 1.5e-3 of the largest, so whole directions hardly move (dead "
        "experts, unused rows)"
        if defect < low
        else "the iteration overshoots: check ns_dtype and the coefficients"
    )
    text = (
        f"Muon's direction for {words(history.scope)} has size {defect:.2f}, where 1 is orthogonal and {low} to {high} "
        f"is normal: {cause}."
    )
    return Finding("defect", Severity.WARNING, history.scope, text, {"defect": defect})


def lost_in_rounding(history: History) -> Finding | None:
    """The weights moved by something else than was intended."""
    r, s, phi, a = (history.column(key) for key in ("weight_rms", "update_rms", "decay", "alignment_update"))
    with np.errstate(divide="ignore", invalid="ignore"):
        intended = np.sqrt((phi * r + a * s) ** 2 + (1.0 - a**2) * s**2)
        arrived = history.typical(history.column("applied_rms") / intended)
    if not abs(arrived - 1.0) > ROUNDING or _few(history):
        return None
    cause = (
        "rounding swallows the rest; keep these weights in float32 or round stochastically"
        if arrived < 1.0
        else "rounding adds to it; that averages out under stochastic rounding, but keep an eye on it"
    )
    text = f"{subject(history.scope)} move by {percent(arrived)} of what decay and update intend: {cause}."
    return Finding("rounding", Severity.WARNING, history.scope, text, {"arrived": arrived})


def radial_gradient(history: History) -> Finding | None:
    """The loss depends on the size of the weights, not on their direction alone."""
    cosine = history.typical(np.abs(history.column("alignment_gradient")))
    if not cosine > RADIAL or _few(history):
        return None
    text = (
        f"The gradient of {words(history.scope)} is not orthogonal to them (cosine {cosine:.2f} in size): the loss "
        "depends on their norm, as it does where no normalization follows. The alignment of the update then comes from "
        "the loss too, not from momentum alone."
    )
    return Finding("radial-gradient", Severity.NOTE, history.scope, text, {"cosine": cosine})


def _relative(history: History) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    recorded = history.column("relative_update")
    with np.errstate(divide="ignore", invalid="ignore"):
        computed = history.column("update_rms") / history.column("weight_rms")
    return np.where(np.isfinite(recorded), recorded, computed)


def _few(history: History) -> bool:
    return len(history.steps) < MIN_SAMPLES
