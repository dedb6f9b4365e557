"""How the late alignment depends on the learning rate, and which limit of the norm follows from that.

Intervals are Student's t with the number of independent samples in place of the number of samples: neighbouring
samples of the alignment resemble each other, and plain least squares would take them for independent. With rho the
correlation of neighbouring residuals, n samples count as `n (1 - rho)/(1 + rho)`, as for a first-order autoregression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from muonsw.lab.claims.claim import Interval
from muonsw.lab.claims.statistics import student_t_quantile
from muonsw.lab.diagnose.history import LATE, LINEAR, QUADRATIC, Array, History
from muonsw.theory import constant_decay_norm_limit, scaled_decay_norm_limit

CONFIDENCE = 0.95
MIN_SAMPLES = 5
# Below this spread, relative to its mean, the learning rate was constant and cannot tell slope from offset.
MIN_SPREAD = 1e-3


@dataclass(frozen=True)
class AlignmentFit:
    """A line `a = -a0 - k eta`, through the origin if `a0_interval` is None.

    Attributes:
        k: Minus the slope.
        k_interval: Where it lies.
        a0: What remains of the outward alignment at learning rate 0.
        a0_interval: Where it lies; None for a line through the origin.
        residual: Standard deviation of the samples around the line.
        samples: How many there are.
        independent: As how many independent ones they count.
    """

    k: float
    k_interval: Interval
    a0: float
    a0_interval: Interval | None
    residual: float
    samples: int
    independent: float

    def at(self, lr: Array) -> Array:
        """The line."""
        return -self.a0 - self.k * lr


@dataclass(frozen=True)
class NormLimit:
    """Where the norm would go with the learning rate to zero, by the fit that belongs to the decay rule.

    Attributes:
        value: The limit.
        interval: That of the fit, carried through the formula.
        fit: Which fit it rests on, "origin" or "offset".
        formula: In which `update` is the RMS of an update at learning rate 1.
    """

    value: float
    interval: Interval
    fit: str
    formula: str


@dataclass(frozen=True)
class LateFits:
    """Both fits over the last part of a run; a fit that the samples do not support is None."""

    first_step: int
    last_step: int
    origin: AlignmentFit | None
    offset: AlignmentFit | None
    limit: NormLimit | None


def fit_alignment(lr: Array, alignment: Array, *, offset: bool, confidence: float = CONFIDENCE) -> AlignmentFit:
    """Least squares of alignment over learning rate.

    Args:
        lr: Learning rates, in the order of their steps.
        alignment: The alignment at each.
        offset: Whether the line may miss the origin.
        confidence: Of the intervals.

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
    if offset and np.ptp(lr) <= MIN_SPREAD * np.abs(lr).mean():
        raise ValueError("the learning rate does not vary over these samples, so slope and offset cannot be told apart")
    columns = [-lr, -np.ones(n)] if offset else [-lr]
    design = np.stack(columns, axis=1)
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ (design.T @ alignment)
    residuals = alignment - design @ coefficients
    independent = independent_samples(residuals)
    freedom = max(independent - len(columns), 1.0)
    deviations = np.sqrt(np.diag(inverse) * (residuals @ residuals) / freedom)
    half = student_t_quantile(0.5 + confidence / 2.0, math.floor(freedom)) * deviations
    method = f"{100 * confidence:g}% t, n={n} counted as {independent:.0f}"
    intervals = [Interval(float(c - h), float(c + h), method) for c, h in zip(coefficients, half, strict=True)]
    return AlignmentFit(
        k=float(coefficients[0]),
        k_interval=intervals[0],
        a0=float(coefficients[1]) if offset else 0.0,
        a0_interval=intervals[1] if offset else None,
        residual=math.sqrt(residuals @ residuals / max(n - len(columns), 1)),
        samples=n,
        independent=independent,
    )


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
    fits = {offset: _try_fit(lr[where], alignment[where], offset) for offset in (False, True)}
    steps = history.steps[where]
    limit = norm_limit(history, fits[False], fits[True])
    return LateFits(int(steps[0]), int(steps[-1]), fits[False], fits[True], limit)


def norm_limit(history: History, origin: AlignmentFit | None, offset: AlignmentFit | None) -> NormLimit | None:
    """The limit that belongs to the run's rule; its interval is that of the fit carried through the formula.

    Lambda, the peak and the size of an update at learning rate 1 are taken as measured, and as exact.
    """
    if not (history.lam > 0 and history.update > 0 and history.peak_lr > 0):
        return None
    if history.run.rule in QUADRATIC and origin is not None:

        def scaled(k: float) -> float:
            return scaled_decay_norm_limit(lam=history.lam, eta_max=history.peak_lr, k=k, update=history.update)

        ends, method = origin.k_interval, origin.k_interval.method
        text = "update eta_max/(2 lambda) (k + sqrt(k^2 + 2 lambda/eta_max))"
        return NormLimit(scaled(origin.k), Interval(scaled(ends.low), scaled(ends.high), method), "origin", text)
    if history.run.rule in LINEAR and offset is not None and offset.a0_interval is not None:

        def constant(a0: float) -> float:
            return constant_decay_norm_limit(lam=history.lam, a0=max(a0, 0.0), update=history.update)

        ends, method = offset.a0_interval, offset.a0_interval.method
        text = "update a0 / lambda"
        return NormLimit(constant(offset.a0), Interval(constant(ends.low), constant(ends.high), method), "offset", text)
    return None


def _try_fit(lr: Array, alignment: Array, offset: bool) -> AlignmentFit | None:
    try:
        return fit_alignment(lr, alignment, offset=offset)
    except ValueError:
        return None
