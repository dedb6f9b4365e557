"""How the late alignment depends on the learning rate, and which limit of the norm follows from that.

Intervals are Student's t with the number of independent samples in place of the number of samples: neighbouring
samples of the alignment resemble each other, and plain least squares would take them for independent. With rho the
correlation of neighbouring residuals, n samples count as `n (1 - rho)/(1 + rho)`, as for a first-order autoregression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from muonsw.lab.claims.claim import Interval
from muonsw.lab.claims.statistics import student_t_quantile
from muonsw.lab.diagnose.history import LATE, LINEAR, QUADRATIC, Array, History
from muonsw.lab.theory import constant_decay_norm_limit, scaled_decay_norm_limit

CONFIDENCE = 0.95
MIN_SAMPLES = 5
# Below this spread, relative to its mean, the learning rate was constant and cannot tell slope from offset.
MIN_SPREAD = 1e-3


@dataclass(frozen=True)
class AlignmentFit:
    """A line `a = -a0 - k eta`, through the origin if `a0_interval` is None."""

    k: float  # minus the slope
    k_interval: Interval  # where it lies
    a0: float  # what remains of the outward alignment at learning rate 0
    a0_interval: Interval | None  # where it lies; None for a line through the origin
    residual: float  # standard deviation of the samples around the line
    samples: int  # how many there are
    independent: float  # as how many independent ones they count

    def at(self, lr: Array) -> Array:
        """The line."""
        return -self.a0 - self.k * lr


@dataclass(frozen=True)
class NormLimit:
    """Where the norm would go with the learning rate to zero, by the fit that belongs to the decay rule."""

    value: float  # the limit
    interval: Interval  # that of the fit, carried through the formula
    fit: str  # which fit it rests on, "origin" or "offset"
    formula: str  # in which `update` is the RMS of an update at learning rate 1


@dataclass(frozen=True)
class LateFits:
    """Both fits over the last part of a run; a fit that the samples do not support is None."""

    first_step: int
    last_step: int
    origin: AlignmentFit | None
    offset: AlignmentFit | None
    limit: NormLimit | None


def fit_alignment(lr: Array, alignment: Array, *, offset: bool) -> AlignmentFit:
    """Least squares of alignment over learning rate, both in the order of their steps.

    Args:
        lr: Learning rates.
        alignment: The alignment at each.
        offset: Whether the line may miss the origin.

    Raises:
        ValueError: If the samples are too few, or the learning rate does not vary and an offset is asked for.

    Examples:
        >>> eta = np.linspace(1e-3, 2e-3, 20)
        >>> fit = fit_alignment(eta, -7.4e-3 - 40.5 * eta, offset=True)
        >>> round(fit.a0, 6), round(fit.k, 6)
        (0.0074, 40.5)
    """
    n = len(lr)
    if n < MIN_SAMPLES:
        raise ValueError(f"a fit needs at least {MIN_SAMPLES} samples, got {n}")
    if offset and not _varies(lr):
        raise ValueError("the learning rate does not vary over these samples, so slope and offset cannot be told apart")
    design = np.stack([-lr, -np.ones(n)] if offset else [-lr], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ (design.T @ alignment)
    residuals = alignment - design @ coefficients
    independent = independent_samples(residuals)
    freedom = max(independent - len(coefficients), 1.0)
    deviations = np.sqrt(np.diag(inverse) * (residuals @ residuals) / freedom)
    half = student_t_quantile(0.5 + CONFIDENCE / 2.0, math.floor(freedom)) * deviations
    method = f"{100 * CONFIDENCE:g}% t, n={n} counted as {independent:.0f}"
    (k, k_interval), *rest = [
        (float(c), Interval(float(c - h), float(c + h), method)) for c, h in zip(coefficients, half, strict=True)
    ]
    a0, a0_interval = rest[0] if offset else (0.0, None)
    residual = math.sqrt(residuals @ residuals / max(n - len(coefficients), 1))
    return AlignmentFit(k, k_interval, a0, a0_interval, residual, n, independent)


def independent_samples(residuals: Array) -> float:
    """As how many independent samples a series counts; never more than there are.

    Examples:
        >>> independent_samples(np.array([1.0, -1.0, 1.0, -1.0]))
        4.0
    """
    n, power = len(residuals), float(residuals @ residuals)
    rho = float(residuals[1:] @ residuals[:-1]) / power if power > 0.0 else 0.0
    if rho <= 0.0:
        return float(n)
    # The estimate is too low by about (1 + 3 rho)/n.
    rho = min(rho + (1.0 + 3.0 * rho) / n, 1.0 - 1.0 / n)
    return n * (1.0 - rho) / (1.0 + rho)


def late_fits(history: History, share: float = LATE) -> LateFits | None:
    """Both fits over the last share of the steps, and the limit that follows; None where nothing can be fitted."""
    lr, alignment = history.column("lr"), history.column("alignment_update")
    where = history.late(share) & np.isfinite(lr) & np.isfinite(alignment) & (lr > 0)
    if where.sum() < MIN_SAMPLES:
        return None
    steps, lr, alignment = history.steps[where], lr[where], alignment[where]
    origin = fit_alignment(lr, alignment, offset=False)
    offset = fit_alignment(lr, alignment, offset=True) if _varies(lr) else None
    return LateFits(int(steps[0]), int(steps[-1]), origin, offset, norm_limit(history, origin, offset))


def norm_limit(history: History, origin: AlignmentFit, offset: AlignmentFit | None) -> NormLimit | None:
    """The limit that belongs to the run's rule; its interval is that of the fit carried through the formula.

    Lambda, the peak and the size of an update at learning rate 1 are taken as measured, and as exact.
    """
    lam, update, peak = history.lam, history.update, history.peak_lr
    if not (lam > 0 and update > 0 and peak > 0):
        return None

    if history.run.rule in QUADRATIC:
        fit, formula = "origin", "update eta_max/(2 lambda) (k + sqrt(k^2 + 2 lambda/eta_max))"
        value, ends = origin.k, origin.k_interval
        limit = partial(scaled_decay_norm_limit, lam=lam, eta_max=peak, update=update)
        limits = [limit(k=k) for k in (value, ends.low, ends.high)]
    elif history.run.rule in LINEAR and offset is not None and offset.a0_interval is not None:
        fit, formula = "offset", "update a0 / lambda"
        value, ends = offset.a0, offset.a0_interval
        limit = partial(constant_decay_norm_limit, lam=lam, update=update)
        limits = [limit(a0=max(a0, 0.0)) for a0 in (value, ends.low, ends.high)]
    else:
        return None
    return NormLimit(limits[0], Interval(limits[1], limits[2], ends.method), fit, formula)


def _varies(lr: Array) -> bool:
    return bool(np.ptp(lr) > MIN_SPREAD * np.abs(lr).mean())
