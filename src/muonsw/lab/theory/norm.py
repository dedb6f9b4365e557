"""Section 5: how the norm of a weight matrix evolves under decay, where it settles, and how a measured norm compares.

Throughout, r is the RMS of the weight's elements, s the RMS of an update (0.2 eta for Muon with an exactly orthogonal
direction, less with Newton-Schulz: use the measured one), phi the decay factor of the step (`lambda eta` for constant
decay, `lambda eta^2 / eta_max` for scaled), and a the cosine between weight and update direction. A negative a pushes
outward.

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

from muonsw.lab.theory.hypotheses import require

Samples: TypeAlias = Sequence[float] | Tensor

WINDOW, MIN_SAMPLES = 0.1, 3  # window of a line fit, as a share of the run; fewest samples for a line
LAG = 0.2  # a norm follows its target while it is within a fifth of it


def next_norm(r: float, *, s: float, phi: float, a: float) -> float:
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
    return math.sqrt(((1.0 - phi) * r - s * a) ** 2 + s**2 * (1.0 - a**2))


def steady_state_norm(*, s: Tensor, phi: Tensor, a: Tensor) -> Tensor:
    """The norm at which decay and update balance: `r* = s/(2 phi) (-a + sqrt(a^2 + 2 phi))`.

    It is the fixed point of `r^2 <- (1 - 2 phi) r^2 - 2 s a r + s^2`, the recursion without the terms in phi^2 and
    phi s. Under scaled decay with an alignment of `-k eta`, it is the same at every learning rate.

    Hypotheses: s >= 0, phi > 0.

    Examples:
        >>> steady_state_norm(s=torch.tensor(0.25), phi=torch.tensor(0.5), a=torch.tensor([0.0, 0.75]))
        tensor([0.2500, 0.1250])
    """
    require("s >= 0", s >= 0.0, s=s)
    require("phi > 0", phi > 0.0, phi=phi)
    h = a.abs() + (a**2 + 2.0 * phi).sqrt()
    # For each sign of a, the form without cancellation.
    return torch.where(a > 0.0, s / h, s * h / (2.0 * phi))


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


def tracking_end(history: NormHistory) -> float:
    """The step from which the norm stays more than a fifth off its smooth target; infinite if it still follows."""
    lag = history.r.log() - smooth_targets(history).log()  # NaN where decay or update is zero
    # During warmup, which ends at the peak of decay, the target moves by design. The lag must last for half a window
    # of the fit: windows overlap, so a few noisy samples at the end are not a break.
    warm = int(history.steps[history.phi >= history.phi.max() * (1.0 - 1e-3)][0])
    counts = lag.isfinite() & (history.steps > warm)
    later, above = history.steps[counts], lag[counts].abs() > LAG
    below = (~above).nonzero().flatten()
    first = int(below[-1]) + 1 if len(below) else 0
    broke = first < len(later) and float(later[-1] - later[first]) >= fit_window(history) / 2
    return float(later[first]) if broke else math.inf


def smooth_targets(history: NormHistory) -> Tensor:
    """The quasi-steady norm r* without the noise of single alignments: ln r* is fitted by lines.

    Examples:
        >>> still = dict(s=[0.01] * 100, phi=[0.005] * 100, a=[0.0] * 100)
        >>> history = NormHistory.of(range(1, 1001, 10), r=[0.1] * 100, **still)
        >>> round(float(smooth_targets(history)[-1]), 6), tracking_end(history)
        (0.1, inf)
    """
    return windowed_line(history.steps, target_norms(history).log(), fit_window(history)).exp()


def fit_window(history: NormHistory) -> float:
    """The window of a line fit in steps: a tenth of the run, with at least five samples."""
    steps = history.steps
    if len(steps) < 2:
        return 0.0
    return max(WINDOW * float(steps[-1] - steps[0]), 4.0 * float(steps.diff().double().median()))


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


def windowed_line(steps: Tensor, values: Tensor, window: float) -> Tensor:
    """At each sample, the least-squares line through a window of that many steps around it.

    Samples that are not finite are ignored; with fewer than three, the result is NaN.
    """
    known, missing = values.isfinite(), torch.full_like(values, torch.nan, dtype=torch.float64)
    x, y = steps[known].double(), values[known].double()
    if len(x) < MIN_SAMPLES:
        return missing
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
    return torch.where(known & (high - low >= MIN_SAMPLES), height, missing)
