"""Where the two decay rules end up on quadratics: the scalar one under SGD, the matrix one under Muon.

The scalar loss is `a/2 (w - c)^2`, the matrix loss `1/2 |W - A|_F^2`. Both are free of noise.
"""

from collections.abc import Iterable
from itertools import accumulate
from math import inf, prod

import torch

from muonsw.lab.theory.hypotheses import (
    Number,
    Steps,
    require,
    require_at_least,
    require_curvature,
    require_decay,
    require_largest,
    step_sizes,
)


def constant_decay_fixed_point(*, a: float, c: float, lam: float) -> float:
    """Where SGD with constant decay settles: `a c / (a + lambda)`, short of the minimizer `c`.

    Hypotheses: a > 0, lambda > 0. The limit is reached from every start when `0 < eta <= 1/(a + lambda)`
    and the learning rates have an infinite sum.

    Examples:
        >>> constant_decay_fixed_point(a=1.0, c=3.0, lam=0.5)
        2.0
    """
    require_curvature(a)
    require_decay(lam)
    return a * c / (a + lam)


def constant_decay_loss_gap(*, a: float, c: float, lam: float) -> float:
    """What constant decay costs on the scalar quadratic: `a/2 (lambda c / (a + lambda))^2`.

    Hypotheses: as for `constant_decay_fixed_point`.

    Examples:
        >>> constant_decay_loss_gap(a=1.0, c=3.0, lam=0.5)
        0.5
    """
    return a / 2.0 * (c - constant_decay_fixed_point(a=a, c=c, lam=lam)) ** 2


def scaled_decay_error(t: float, *, a: float, c: float, lam: float, gamma: float, t0: float) -> float:
    """How far SGD with scaled decay is from the minimizer after t steps, `c - w_t`, to leading order.

    The schedule is `eta_t = gamma/(t + t0)` with `eta_max = gamma/t0`, and the error `lambda gamma t0 c /
    ((a gamma - 1)(t + t0))`. It solves `e_{t+1} = (1 - a eta - q eta^2) e_t + q eta^2 c` up to order
    `1/t^2`, and forgets the start like `t^(-a gamma)`.

    Hypotheses: a > 0, lambda > 0, t0 > 0, a gamma > 1. (For `a gamma <= 1` the start decays more slowly than
    this term, so it does not lead.)

    Examples:
        >>> f"{scaled_decay_error(100_000, a=1.0, c=1.0, lam=0.1, gamma=2.0, t0=4.0):.2e}"
        '8.00e-06'
    """
    require_curvature(a)
    require_decay(lam)
    require("t0 > 0", 0.0 < t0 < inf, t0=t0)
    require("a*gamma > 1", 1.0 < a * gamma < inf, a=a, gamma=gamma)
    require_at_least("t", t, 0)
    return lam * gamma * t0 * c / ((a * gamma - 1.0) * (t + t0))


def frozen_point(w0: Number, etas: Steps, *, a: float, c: float, lam: float) -> Number:
    """Where constant decay stands after finitely many steps: `wbar + (w0 - wbar) prod(1 - eta (a + lambda))`.

    If the learning rates have a finite sum the product stays positive, and this is where the iterate freezes.

    Hypotheses: a > 0, lambda > 0, 0 <= eta <= 1/(a + lambda).

    Args:
        w0: The start, a float or a tensor of starts.
        etas: The learning rate of each step.
        a: Curvature of the loss.
        c: Its minimizer.
        lam: The weight decay.

    Examples:
        >>> frozen_point(0.0, [0.5, 0.25], a=0.75, c=1.0, lam=0.25)
        0.46875
    """
    wbar = constant_decay_fixed_point(a=a, c=c, lam=lam)
    steps = step_sizes(etas)
    require_largest("eta <= 1/(a + lambda)", steps, 1.0 / (a + lam))
    return wbar + (w0 - wbar) * prod(1.0 - eta * (a + lam) for eta in steps)


def muon_radius(lam: float, *, scale: float = 1.0) -> float:
    """The spectral radius that constant decay does not let Muon's weights leave: `scale / lambda`.

    Hypothesis: lambda > 0; the update is `eta * scale * O` with `|O|_op <= 1`. An approximate
    orthogonalizer may exceed 1: multiply `scale` by its largest singular value.

    Examples:
        >>> muon_radius(0.1), muon_radius(0.1, scale=0.5)
        (10.0, 5.0)
    """
    require_decay(lam)
    require_at_least("scale", scale, 0)
    return scale / lam


def muon_norm_bounds(z0: float, etas: Steps, *, lam: float, scale: float = 1.0) -> list[float]:
    """Bound Muon's spectral norm under constant decay at each step: `R + (z0 - R)_+ prod(1 - eta lambda)`.

    Whatever the gradients, the momentum and the start, `|W_t|_op` is at most entry t. R is `muon_radius`.

    Hypotheses: lambda > 0, 0 <= eta, eta lambda <= 1.

    Args:
        z0: Spectral norm of the start.
        etas: The learning rate of each step.
        lam: The weight decay.
        scale: Factor on the update.

    Returns:
        One bound more than there are steps; the first is for the start.

    Examples:
        >>> muon_norm_bounds(6.0, [0.5, 0.5], lam=0.5)
        [6.0, 5.0, 4.25]
    """
    radius = muon_radius(lam, scale=scale)
    require_at_least("z0", z0, 0)
    steps = step_sizes(etas)
    require_largest("eta*lambda <= 1", steps, 1.0 / lam)
    excess = max(z0 - radius, 0.0)
    return [radius + d for d in accumulate(steps, lambda d, eta: d * (1.0 - eta * lam), initial=excess)]


def muon_separation(sigma_max: float, *, lam: float, scale: float = 1.0) -> float:
    """How far, in spectral norm, constant decay keeps Muon from a target: `(sigma_max(A) - R)_+`.

    Hypothesis: lambda > 0. Inside the radius the bound is 0 and says nothing.

    Examples:
        >>> muon_separation(12.0, lam=0.1)
        2.0
    """
    require_at_least("sigma_max", sigma_max, 0)
    return max(sigma_max - muon_radius(lam, scale=scale), 0.0)


def muon_loss_floor(singular_values: Iterable[float] | torch.Tensor, *, lam: float, scale: float = 1.0) -> float:
    """The loss below which constant decay does not let Muon settle: `1/2 sum (sigma_i(A) - R)_+^2`.

    Hypotheses: lambda > 0, eta lambda <= 1, learning rates of infinite sum.

    Examples:
        >>> muon_loss_floor([12.0, 11.0, 3.0], lam=0.1)
        2.5
    """
    sigmas = singular_values.tolist() if isinstance(singular_values, torch.Tensor) else singular_values
    return 0.5 * sum(muon_separation(sigma, lam=lam, scale=scale) ** 2 for sigma in sigmas)


def clip_projection(A: torch.Tensor, radius: float) -> torch.Tensor:
    """The matrix nearest to A, in Frobenius norm, whose spectral norm is at most `radius`.

    Args:
        A: Shape (..., m, n).
        radius: Where singular values are clipped, at least 0.

    Returns:
        A with the same singular vectors and the clipped singular values.

    Examples:
        >>> clip_projection(torch.diag(torch.tensor([3.0, 1.0])), 2.0)
        tensor([[2., 0.],
                [0., 1.]])
    """
    require_at_least("radius", radius, 0)
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    clipped: torch.Tensor = (U * S.clamp(max=radius).unsqueeze(-2)) @ Vh
    return clipped
