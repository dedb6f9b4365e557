"""Section 5: how the norm of a weight matrix evolves under decay, and where it settles.

Throughout, r is the RMS of the weight's elements, s that of an update (0.2 eta for Muon with an exactly
orthogonal direction, less with Newton-Schulz: use the measured one), phi the decay factor of the step
(`lambda eta` for constant decay, `lambda eta^2 / eta_max` for scaled), and a the cosine between weight and
update direction. A negative a pushes outward. All functions of these take floats or tensors.
"""

import math

import torch

from muonsw.lab.theory.hypotheses import Number, require, require_at_least, require_positive


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
    # The sum of two squares cannot turn negative by rounding.
    return _sqrt(((1.0 - phi) * r - s * a) ** 2 + s**2 * (1.0 - a**2))


def steady_state_norm(*, s: Number, phi: Number, a: Number) -> Number:
    """The norm at which decay and update balance: `r* = s/(2 phi) (-a + sqrt(a^2 + 2 phi))`.

    It leaves `r^2 <- (1 - 2 phi) r^2 - 2 s a r + s^2` unchanged, the recursion without products of phi with phi or s.

    Hypotheses: s >= 0, phi > 0.

    Examples:
        >>> steady_state_norm(s=0.25, phi=0.5, a=0.0), steady_state_norm(s=0.25, phi=0.5, a=0.75)
        (0.25, 0.125)
    """
    require("s >= 0", s >= 0.0, s=s)
    require("phi > 0", phi > 0.0, phi=phi)
    h = abs(a) + _sqrt(a**2 + 2.0 * phi)
    # Each form is the one that does not cancel for its sign of a.
    outward, inward = s * h / (2.0 * phi), s / h
    if isinstance(a, torch.Tensor):
        return torch.where(a > 0.0, inward, outward)
    return inward if a > 0.0 else outward


def relaxation_times(*, s: Number, phi: Number, r_star: Number) -> tuple[Number, Number]:
    """Steps in which the norm closes most of its distance to r*: `1/(2 phi)`, and `1/(phi + s^2/(2 r*^2))`.

    The first holds if a follows the relative update, proportional to s/r, the second if a stays as it is. Both agree
    where a = 0; an outward push makes the second longer, an inward push shorter.
    """
    return 1.0 / (2.0 * phi), 1.0 / (phi + s**2 / (2.0 * r_star**2))


def scaled_decay_norm_limit(*, lam: float, eta_max: float, k: float, update: float = 0.2) -> float:
    """Where scaled decay lets the norm settle: `update eta_max/(2 lambda) (k + sqrt(k^2 + 2 lambda/eta_max))`.

    Hypotheses: lambda > 0, eta_max > 0, and an alignment proportional to the learning rate, `a = -k eta`, which
    therefore cancels. `update` is the RMS of an update at learning rate 1.

    Examples:
        >>> round(scaled_decay_norm_limit(lam=0.1, eta_max=4.8e-3, k=20.8), 3)
        0.204
    """
    require_positive("lambda", lam)
    require_positive("eta_max", eta_max)
    # At eta = eta_max: the limit is the steady state at any learning rate.
    return steady_state_norm(s=update * eta_max, phi=lam * eta_max, a=-k * eta_max)


def constant_decay_norm_limit(*, lam: float, a0: float, update: float = 0.2) -> float:
    """Where constant decay drives the norm as the learning rate vanishes: `update a0 / lambda`.

    Hypotheses: lambda > 0, and an alignment that tends to `-a0` with `a0 >= 0`.

    Examples:
        >>> round(constant_decay_norm_limit(lam=0.1, a0=7.4e-3), 4)
        0.0148
    """
    require_positive("lambda", lam)
    require_at_least("a0", a0, 0)
    return update * a0 / lam


def _sqrt(x: Number) -> Number:
    if isinstance(x, torch.Tensor):
        return torch.sqrt(x)
    return math.sqrt(x)
