"""How the size of a weight matrix evolves under decay: the recursion of its RMS norm and where it settles.

Throughout, r is the RMS of the weight's entries, s that of one update (0.2 eta for Muon with an exactly
orthogonal direction, less with Newton-Schulz: use the measured one), phi the decay factor of the step
(`lambda eta` for constant decay, `lambda eta^2 / eta_max` for scaled), and a the cosine between weight and
update direction. A negative a pushes outward. All functions of these take floats or tensors.
"""

import math

import torch

from muonsw.lab.theory.hypotheses import Number, Steps, require, require_at_least, require_decay, step_sizes


def next_norm(r: Number, *, s: Number, phi: Number, a: Number) -> Number:
    """One step of the RMS norm, exactly: the root of `(1 - phi)^2 r^2 - 2 (1 - phi) s a r + s^2`.

    Hypotheses: r >= 0, s >= 0, 0 <= phi <= 1, -1 <= a <= 1.

    Examples:
        >>> next_norm(3.0, s=4.0, phi=0.0, a=0.0)
        5.0
    """
    _require_step(r, s, phi)
    require("-1 <= a <= 1", abs(a) <= 1.0, a=a)
    shrunk = (1.0 - phi) * r
    # The sum of two squares cannot turn negative by rounding.
    return _sqrt((shrunk - s * a) ** 2 + s**2 * (1.0 - a**2))


def next_norm_simplified(r: Number, *, s: Number, phi: Number, a: Number) -> Number:
    """One step of the RMS norm to leading order: the root of `(1 - 2 phi) r^2 - 2 s a r + s^2`.

    Products of phi with phi or s are dropped.

    Hypotheses: r >= 0, s >= 0, 0 <= phi <= 1, and a right-hand side that is not negative; it is a good
    approximation for phi much below 1.

    Examples:
        >>> round(next_norm_simplified(1.0, s=0.01, phi=0.001, a=0.0), 5)
        0.99905
    """
    _require_step(r, s, phi)
    squared = (1.0 - 2.0 * phi) * r**2 - 2.0 * s * a * r + s**2
    require("(1 - 2*phi)*r^2 - 2*s*a*r + s^2 >= 0", squared >= 0.0, r=r, s=s, phi=phi, a=a)
    return _sqrt(squared)


def steady_state_norm(*, s: Number, phi: Number, a: Number) -> Number:
    """The norm r* that the simplified recursion leaves unchanged: `s/(2 phi) (-a + sqrt(a^2 + 2 phi))`.

    Holds for either sign of a; an inward push is computed in the form that does not cancel.

    Hypotheses: s >= 0, phi > 0.

    Examples:
        >>> steady_state_norm(s=0.25, phi=0.5, a=0.0), steady_state_norm(s=0.25, phi=0.5, a=0.75)
        (0.25, 0.125)
    """
    require("s >= 0", s >= 0.0, s=s)
    require("phi > 0", phi > 0.0, phi=phi)
    h = abs(a) + _sqrt(a**2 + 2.0 * phi)
    outward, inward = s * h / (2.0 * phi), s / h
    if isinstance(a, torch.Tensor):
        return torch.where(a > 0.0, inward, outward)
    return inward if a > 0.0 else outward


def relaxation_time(phi: Number) -> Number:
    """Steps in which the norm closes most of its distance to r*: `tau = 1/(2 phi)`.

    Hypotheses: phi > 0, and an alignment that follows the relative update, a proportional to s/r. For an
    alignment that does not react to r see `relaxation_time_fixed_alignment`.

    Examples:
        >>> relaxation_time(0.0005)
        1000.0
    """
    require("phi > 0", phi > 0.0, phi=phi)
    return 1.0 / (2.0 * phi)


def relaxation_time_fixed_alignment(*, s: Number, phi: Number, a: Number) -> Number:
    """The relaxation time near r* when the alignment stays as it is: `tau = 1/(phi + s^2/(2 r*^2))`.

    Both times agree where a = 0; an outward push makes this one longer, an inward push shorter.

    Hypotheses: s > 0, phi > 0.

    Examples:
        >>> relaxation_time_fixed_alignment(s=0.25, phi=0.5, a=0.0)
        1.0
    """
    require("s > 0", s > 0.0, s=s)
    r_star = steady_state_norm(s=s, phi=phi, a=a)
    return 1.0 / (phi + s**2 / (2.0 * r_star**2))


def scaled_decay_norm_limit(*, lam: float, eta_max: float, k: float, update: float = 0.2) -> float:
    """Where scaled decay lets the norm settle, at any learning rate.

    The limit is `update eta_max/(2 lambda) (k + sqrt(k^2 + 2 lambda/eta_max))`.

    Hypotheses: lambda > 0, eta_max > 0, and an alignment proportional to the learning rate, `a = -k eta`.
    Then the learning rate cancels.

    Args:
        lam: The weight decay.
        eta_max: The peak learning rate.
        k: Slope of the alignment.
        update: RMS of an update at learning rate 1.

    Examples:
        >>> round(scaled_decay_norm_limit(lam=0.1, eta_max=4.8e-3, k=20.8), 3)
        0.204
    """
    require_decay(lam)
    require("eta_max > 0", 0.0 < eta_max < math.inf, eta_max=eta_max)
    # At eta = eta_max: the limit is the steady state at any learning rate.
    return steady_state_norm(s=update * eta_max, phi=lam * eta_max, a=-k * eta_max)


def constant_decay_norm_limit(*, lam: float, a0: float, update: float = 0.2) -> float:
    """Where constant decay drives the norm as the learning rate vanishes: `update a0 / lambda`.

    Hypotheses: lambda > 0, and an alignment that tends to `-a0` with `a0 >= 0`.

    Args:
        lam: The weight decay.
        a0: What is left of the outward alignment at learning rate 0.
        update: RMS of an update at learning rate 1.

    Examples:
        >>> round(constant_decay_norm_limit(lam=0.1, a0=7.4e-3), 4)
        0.0148
    """
    require_decay(lam)
    require_at_least("a0", a0, 0)
    return update * a0 / lam


def noise_norm(*, s: float, phi: float, beta: float) -> float:
    """Where the norm settles on pure noise: `s sqrt((1 + a b)/((1 - a^2)(1 - a b)))` with `a = 1 - phi`, `b = beta`.

    Hypotheses: s >= 0, 0 < phi <= 1, and updates k steps apart that have the cosine `beta^k`, as momentum over
    independent gradients has it.

    Examples:
        >>> noise_norm(s=1.0, phi=1.0, beta=0.9), round(noise_norm(s=0.6, phi=0.2, beta=0.0), 12)
        (1.0, 1.0)
    """
    a = _remaining(phi, beta)
    return s * math.sqrt((1.0 + a * beta) / ((1.0 - a**2) * (1.0 - a * beta)))


def noise_alignment(*, phi: float, beta: float) -> float:
    """The cosine between weight and update there: `-b sqrt((1 - a^2)/((1 + a b)(1 - a b)))`.

    Examples:
        >>> noise_alignment(phi=0.01, beta=0.0) == 0.0, round(noise_alignment(phi=0.01, beta=0.95), 3)
        (True, -0.394)
    """
    a = _remaining(phi, beta)
    return -beta * math.sqrt((1.0 - a**2) / ((1.0 + a * beta) * (1.0 - a * beta)))


def noise_rotation(*, phi: float, beta: float) -> float:
    """How far a step turns the weight there, its part across the weight over the norm.

    `sqrt((1 - a^2)(1 - b^2))/(1 + a b)`: the effective learning rate, which depends on the decay of a step alone.

    Examples:
        >>> round(noise_rotation(phi=0.01, beta=0.95), 4)
        0.0227
    """
    a = _remaining(phi, beta)
    return math.sqrt((1.0 - a**2) * (1.0 - beta**2)) / (1.0 + a * beta)


def _remaining(phi: float, beta: float) -> float:
    require("0 < phi <= 1", 0.0 < phi <= 1.0, phi=phi)
    require("0 <= beta < 1", 0.0 <= beta < 1.0, beta=beta)
    return 1.0 - phi


def relaxation_number(phis: Steps) -> float:
    """How many relaxation times a run lasts: `N = 2 sum phi_t`.

    Runs with equal N forget their initial norm equally well.

    Examples:
        >>> relaxation_number([0.25] * 4)
        2.0
    """
    return 2.0 * math.fsum(step_sizes(phis))


def _require_step(r: Number, s: Number, phi: Number) -> None:
    require("r >= 0", r >= 0.0, r=r)
    require("s >= 0", s >= 0.0, s=s)
    require("0 <= phi <= 1", phi >= 0.0, phi=phi)
    require("0 <= phi <= 1", phi <= 1.0, phi=phi)


def _sqrt(x: Number) -> Number:
    if isinstance(x, torch.Tensor):
        return torch.sqrt(x)
    return math.sqrt(x)
