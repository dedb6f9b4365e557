"""Section 5: how the norm of a weight matrix evolves under decay, where it settles, and how a measured norm compares.

Throughout, r is the RMS of the weight's elements, s the RMS of an update (0.2 eta for Muon with an exactly orthogonal
direction, less with Newton-Schulz: use the measured one), phi the decay factor of the step (`lambda eta` for constant
decay, `lambda eta^2 / eta_max` for scaled), and a the cosine between weight and update direction. A negative a pushes
outward. Closed forms take floats or tensors.

Step n turns the norm `r_n` into `r_(n+1)`. A sample at step n holds the norm before that step, with the update's size
`s_n`, its decay factor `phi_n` and its measured alignment `a_n`, which includes the effect of momentum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from muonsw.lab.theory.hypotheses import Number, require, require_at_least, require_positive

Samples: TypeAlias = Sequence[float] | Tensor

WINDOW, MIN_SAMPLES = 0.1, 3  # window of a line fit, as a share of the run; fewest samples for a line
# A norm follows its target while it is within a fifth of it. To first order ln r lags ln r* by the adiabatic ratio,
# which must be far below 1.
LAG = 0.2


def next_norm(r: Number, *, s: Number, phi: Number, a: Number) -> Number:
    """One step of the RMS norm: the root of `(1 - phi)^2 r^2 - 2 (1 - phi) s a r + s^2`.

    Hypotheses: r >= 0, s >= 0, 0 <= phi <= 1, -1 <= a <= 1.

    Examples:
        >>> next_norm(3.0, s=4.0, phi=0.0, a=0.0)
        5.0
    """
    require("r >= 0", r >= 0.0, r=r)
    require("s >= 0", s >= 0.0, s=s)
    require("0 <= phi <= 1", abs(phi - 0.5) <= 0.5, phi=phi)
    require("-1 <= a <= 1", abs(a) <= 1.0, a=a)
    # As a sum of two squares, so that rounding cannot make it negative.
    return _sqrt(((1.0 - phi) * r - s * a) ** 2 + s**2 * (1.0 - a**2))


def steady_state_norm(*, s: Number, phi: Number, a: Number) -> Number:
    """The norm at which decay and update balance: `r* = s/(2 phi) (-a + sqrt(a^2 + 2 phi))`.

    It is the fixed point of `r^2 <- (1 - 2 phi) r^2 - 2 s a r + s^2`, the recursion without the terms in phi^2 and
    phi s.

    Hypotheses: s >= 0, phi > 0.

    Examples:
        >>> steady_state_norm(s=0.25, phi=0.5, a=0.0), steady_state_norm(s=0.25, phi=0.5, a=0.75)
        (0.25, 0.125)
    """
    require("s >= 0", s >= 0.0, s=s)
    require("phi > 0", phi > 0.0, phi=phi)
    h = abs(a) + _sqrt(a**2 + 2.0 * phi)
    # For each sign of a, the form without cancellation.
    outward, inward = s * h / (2.0 * phi), s / h
    if isinstance(a, Tensor):
        return torch.where(a > 0.0, inward, outward)
    return inward if a > 0.0 else outward


def scaled_decay_norm_limit(*, lam: float, eta_max: float, k: float, update: float = 0.2) -> float:
    """Where the norm settles under scaled decay: `update eta_max/(2 lambda) (k + sqrt(k^2 + 2 lambda/eta_max))`.

    Hypotheses: lambda > 0, eta_max > 0, and an alignment proportional to the learning rate, `a = -k eta`, so
    that eta cancels. `update` is the RMS of an update at learning rate 1.

    Examples:
        >>> round(scaled_decay_norm_limit(lam=0.1, eta_max=4.8e-3, k=20.8), 3)
        0.204
    """
    require_positive("lambda", lam)
    require_positive("eta_max", eta_max)
    # The steady state is the same at any learning rate; take eta_max.
    return steady_state_norm(s=update * eta_max, phi=lam * eta_max, a=-k * eta_max)


def constant_decay_norm_limit(*, lam: float, a0: float, update: float = 0.2) -> float:
    """Where the norm goes under constant decay as the learning rate vanishes: `update a0 / lambda`.

    Hypotheses: lambda > 0, and an alignment that tends to `-a0` with `a0 >= 0`.

    Examples:
        >>> round(constant_decay_norm_limit(lam=0.1, a0=7.4e-3), 4)
        0.0148
    """
    require_positive("lambda", lam)
    require_at_least("a0", a0, 0)
    return update * a0 / lam


def _sqrt(x: Number) -> Number:
    if isinstance(x, Tensor):
        return torch.sqrt(x)
    return math.sqrt(x)


@dataclass(frozen=True, eq=False)
class NormHistory:
    """Samples of the norm, ordered by step."""

    steps: Tensor  # the sampled steps, increasing
    r: Tensor  # RMS of the weight before the update
    s: Tensor  # RMS of the update
    phi: Tensor  # decay factor of the step
    a: Tensor  # cosine between weight and update

    @classmethod
    def of(cls, steps: Samples, *, r: Samples, s: Samples, phi: Samples, a: Samples) -> "NormHistory":
        """Make a history from numbers or tensors, as float64 on the CPU."""
        columns = [torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (steps, r, s, phi, a)]
        require("equally many samples of each", len({len(x) for x in columns}) == 1)
        require("at least one sample", len(columns[0]) > 0)
        for name, column in zip(("steps", "r", "s", "phi", "a"), columns, strict=True):
            require(f"{name} is finite", column.isfinite())
        require("steps increase", columns[0].diff() > 0)
        return cls(columns[0].long(), *columns[1:])

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, eq=False)
class Tracking:
    """The theory of a history, sample by sample; see `track`."""

    smooth_target: Tensor  # the quasi-steady norm r*, with the noise of single alignments averaged out
    ratio: Tensor  # adiabatic ratio `tau |d ln r*/dt|`, with tau for an alignment that follows s/r
    lag: Tensor  # `ln(r / smooth_target)`: how far the norm is from where it would settle
    broke_at: int | None  # step from which the lag stays above a fifth; None if the norm still follows
    predicted: Tensor  # the recursion from the first observed norm


def track(history: NormHistory) -> Tracking:
    """Compare a history of the norm with its theory; ln r* is fitted by lines over a tenth of the run.

    The ratio is the cause of a break, the lag its effect. A cosine flattens at its end: the target stands still and the
    ratio returns to zero, but the norm may not have time to catch up, which the lag shows.

    Examples:
        >>> steps = range(1, 1001, 10)
        >>> still = dict(s=[0.01] * 100, phi=[0.005] * 100, a=[0.0] * 100)
        >>> tracking = track(NormHistory.of(steps, r=[0.1] * 100, **still))
        >>> round(float(tracking.smooth_target[-1]), 6), tracking.broke_at
        (0.1, None)
    """
    steps, width = history.steps, 0.0
    if len(steps) > 1:  # at least five samples
        width = max(WINDOW * float(steps[-1] - steps[0]), 4.0 * float(steps.diff().double().median()))
    smooth, slope = windowed_line(steps, target_norms(history).log(), width)
    # Where decay or update is zero, the slope and the ratios are NaN.
    tau = 1.0 / (2.0 * history.phi)  # steps in which the norm closes most of its distance to r*, if a follows s/r
    lag = history.r.log() - smooth

    # During warmup, which ends at the peak of decay, the target moves by design. The lag must last for half a window
    # of the fit: windows overlap, so a few noisy samples at the end are not a break.
    warm = int(steps[history.phi >= history.phi.max() * (1.0 - 1e-3)][0])
    counts = lag.isfinite() & (steps > warm)
    later, above = steps[counts], lag[counts].abs() > LAG
    below = (~above).nonzero().flatten()
    first = int(below[-1]) + 1 if len(below) else 0
    broke = first < len(later) and float(later[-1] - later[first]) >= width / 2
    return Tracking(
        smooth_target=smooth.exp(),
        ratio=tau * slope.abs(),
        lag=lag,
        broke_at=int(later[first]) if broke else None,
        predicted=predict_norms(history),
    )


def target_norms(history: NormHistory) -> Tensor:
    """The quasi-steady norm r* at every sample, NaN where decay or update is zero."""
    defined = (history.phi > 0.0) & (history.s > 0.0)
    targets = torch.full_like(history.r, torch.nan)
    targets[defined] = steady_state_norm(s=history.s[defined], phi=history.phi[defined], a=history.a[defined])
    return targets


def predict_norms(history: NormHistory) -> Tensor:
    """Replay the recursion from the first observed norm; between samples s, phi and a are interpolated linearly.

    Only the first observed norm is used, so errors of the recursion add up.
    """
    seen = history.steps.numpy()
    steps = np.arange(seen[0], seen[-1])
    coefficients = (np.interp(steps, seen, x.numpy()).tolist() for x in (history.s, history.phi, history.a))
    sampled, norms, norm = set(seen.tolist()), [], float(history.r[0])
    for step, s, phi, a in zip(steps.tolist(), *coefficients, strict=True):
        if step in sampled:
            norms.append(norm)
        norm = next_norm(norm, s=s, phi=phi, a=a)
    return history.r.new_tensor([*norms, norm])


def windowed_line(steps: Tensor, values: Tensor, window: float) -> tuple[Tensor, Tensor]:
    """Height and slope of the least-squares line through a window of that many steps centred on each sample.

    The window is cut off at both ends of the run, so the slope there belongs to a time up to a quarter of a window
    further inside. Samples that are not finite are ignored; with fewer than three, both results are NaN.
    """
    known, missing = values.isfinite(), torch.full_like(values, torch.nan, dtype=torch.float64)
    x, y = steps[known].double(), values[known].double()
    if len(x) < MIN_SAMPLES:
        return missing, missing
    # Centre the numbers: the slope is a difference of sums, which would cancel.
    at = (steps.double() - x.mean()) / (x[-1] - x[0])
    u, v = at[known], y - y.mean()
    low = torch.searchsorted(x, steps.double() - window / 2, right=False)
    high = torch.searchsorted(x, steps.double() + window / 2, right=True)
    n = (high - low).double().clamp(min=1.0)

    def mean(z: Tensor) -> Tensor:
        sums = torch.cat([z.new_zeros(1), z.cumsum(0)])
        return (sums[high] - sums[low]) / n

    slope = (mean(u * v) - mean(u) * mean(v)) / (mean(u * u) - mean(u) ** 2)
    height = mean(v) + slope * (at - mean(u)) + y.mean()
    enough = known & (high - low >= MIN_SAMPLES)
    return torch.where(enough, height, missing), torch.where(enough, slope / (x[-1] - x[0]), missing)
