"""Bounds for stochastic Muon with scaled decay, `W <- W - eta O - q eta^2 W` with `q = lambda / eta_max`.

O is the polar factor of the momentum buffer, `r = min(m, n)` bounds its rank, and the gradient's noise
satisfies `E|xi|_F^2 <= sigma^2 / B` for the batch size B: sigma belongs to the whole matrix, not to an
entry. The tracking error E_t is the normalized momentum minus the gradient. f is L-smooth and `E|W_t|_F^2
<= bound^2`.
"""

from collections.abc import Iterable
from math import fsum, sqrt

from muonsw.lab.theory.hypotheses import (
    Number,
    Steps,
    require,
    require_at_least,
    require_momentum,
    require_noise,
    step_sizes,
)


def tracking_error_limit(*, sigma: float, beta: float, B: float) -> float:
    """The mean squared tracking error that is left when eta vanishes: at most `(1 - beta) sigma^2 / B`.

    Hypotheses: sigma >= 0, 0 <= beta < 1, B > 0, eta -> 0.

    Examples:
        >>> tracking_error_limit(sigma=2.0, beta=0.75, B=4)
        0.25
    """
    _require_noise_model(sigma=sigma, beta=beta, B=B)
    return (1.0 - beta) * sigma**2 / B


def noise_floor(*, sigma: float, beta: float, r: int, B: float) -> float:
    """Where the eta-weighted nuclear norm of the gradient falls to: `2 sigma sqrt((1 - beta) r / B)`.

    Hypotheses: sigma >= 0, 0 <= beta < 1, r >= 1, B > 0, and a Robbins-Monro schedule.

    Examples:
        >>> noise_floor(sigma=2.0, beta=0.75, r=4, B=4)
        2.0
    """
    require_at_least("r", r, 1)
    return 2.0 * sqrt(r * tracking_error_limit(sigma=sigma, beta=beta, B=B))


def tracking_error_bounds(
    etas: Steps,
    *,
    grad_start: float,
    sigma: float,
    beta: float,
    B: float,
    L: float,
    r: int,
    q: float,
    bound: float,
) -> list[float]:
    """Bound the mean squared tracking error `E|E_t|_F^2` at every step of a run.

    With an empty buffer before step 0 the first is `beta^2 |grad f(W_0)|_F^2 + (1 - beta)^2 sigma^2/B`. Then
    `u_t = beta u_{t-1} + 2 beta^2 L^2 (r eta^2 + q^2 eta^4 bound^2)/(1 - beta) + (1 - beta)^2 sigma^2/B`, eta
    being that of the step before.

    Hypotheses: sigma >= 0, 0 <= beta < 1, B > 0, L > 0, r >= 1, q >= 0.

    Args:
        etas: The learning rate of each step.
        grad_start: Frobenius norm of the gradient at the start.
        sigma: Noise of the gradient.
        beta: Momentum.
        B: Batch size.
        L: Smoothness of f.
        r: The smaller side of the matrix.
        q: `lambda / eta_max`.
        bound: A number with `E|W_t|_F^2 <= bound^2` for all t.

    Returns:
        One bound for each step.

    Examples:
        >>> setting = dict(sigma=0.0, beta=0.5, B=1, L=1.0, r=1, q=0.0, bound=1.0)
        >>> tracking_error_bounds([0.5, 0.25, 0.25], grad_start=2.0, **setting)
        [1.0, 0.75, 0.4375]
    """
    _require_noise_model(sigma=sigma, beta=beta, B=B)
    _require_smooth(L=L, r=r, q=q)
    noise = (1.0 - beta) ** 2 * sigma**2 / B
    bounds = [beta**2 * grad_start**2 + noise]
    for eta in step_sizes(etas)[:-1]:
        drift = 2.0 * L**2 * (r * eta**2 + q**2 * eta**4 * bound**2)
        bounds.append(beta * bounds[-1] + beta**2 / (1.0 - beta) * drift + noise)
    return bounds


def alignment_bound(grad_nuclear: Number, error: Number, *, r: int) -> Number:
    """What the alignment lemma leaves of the descent: `<grad f, O> >= |grad f|_* - 2 sqrt(r) |E|_F`.

    Hypothesis: O is the exact polar factor of the momentum buffer, whose normalized form is off by E.

    Args:
        grad_nuclear: Nuclear norm of the gradient, a float or a tensor of them.
        error: Frobenius norm of the tracking error.
        r: The smaller side of the matrix.

    Examples:
        >>> alignment_bound(5.0, 1.0, r=4)
        1.0
    """
    require_at_least("r", r, 1)
    require("|grad f|_* >= 0", grad_nuclear >= 0.0, grad_nuclear=grad_nuclear)
    require("|E|_F >= 0", error >= 0.0, error=error)
    return grad_nuclear - 2.0 * sqrt(r) * error


def shrink_constant(*, grad_zero: float, L: float, bound: float) -> float:
    """The constant C_W that bounds `E|<grad f(W), W>|`: `|grad f(0)|_F bound + L bound^2`.

    Hypotheses: f is L-smooth, `E|W|_F^2 <= bound^2`.

    Examples:
        >>> shrink_constant(grad_zero=1.0, L=2.0, bound=3.0)
        21.0
    """
    require("L > 0", L > 0.0, L=L)
    require_at_least("bound", bound, 0)
    require_at_least("grad_zero", grad_zero, 0)
    return grad_zero * bound + L * bound**2


def descent_bound(
    etas: Steps,
    errors: Iterable[float],
    *,
    f_drop: float,
    q: float,
    C_W: float,
    L: float,
    r: int,
    bound: float,
) -> float:
    """Bound `sum eta_t E|grad f(W_t)|_*` over any finite run.

    The bound is `f_drop + 2 sqrt(r) sum eta E|E_t|_F + (q C_W + L r) sum eta^2 + L q^2 bound^2 sum eta^4`.
    The decay enters at the second order only. On one path, with its own errors and norms, it holds without
    E.

    Hypotheses: L > 0, r >= 1, q >= 0, eta >= 0.

    Args:
        etas: The learning rate of each step.
        errors: The expected Frobenius norm of the tracking error at each step; the root of
            `tracking_error_bounds` is one.
        f_drop: f at the start minus f at the end, or minus its infimum.
        q: `lambda / eta_max`.
        C_W: `shrink_constant`.
        L: Smoothness of f.
        r: The smaller side of the matrix.
        bound: A number with `E|W_t|_F^2 <= bound^2` for all t.

    Examples:
        >>> descent_bound([0.5, 0.5], [0.0, 0.0], f_drop=1.0, q=0.0, C_W=0.0, L=1.0, r=2, bound=1.0)
        2.0
    """
    _require_smooth(L=L, r=r, q=q)
    steps = step_sizes(etas)
    tracking = 2.0 * sqrt(r) * fsum(eta * error for eta, error in zip(steps, errors, strict=True))
    second = (q * C_W + L * r) * fsum(eta**2 for eta in steps)
    fourth = L * q**2 * bound**2 * fsum(eta**4 for eta in steps)
    return f_drop + tracking + second + fourth


def convex_gap_bound(grad_nuclear: Number, *, bound: float, target: float) -> Number:
    """Bound the loss above the minimum of a convex f: `|grad f(W)|_* (bound + |W*|_F)`.

    Hypotheses: f is convex with a minimizer W*, and `|W|_F <= bound`.

    Args:
        grad_nuclear: Nuclear norm of the gradient, a float or a tensor of them.
        bound: Bound on the Frobenius norm of W.
        target: Frobenius norm of W*.

    Examples:
        >>> convex_gap_bound(0.5, bound=3.0, target=1.0)
        2.0
    """
    require_at_least("bound", bound, 0)
    require_at_least("target", target, 0)
    require("|grad f|_* >= 0", grad_nuclear >= 0.0, grad_nuclear=grad_nuclear)
    return grad_nuclear * (bound + target)


def _require_noise_model(*, sigma: float, beta: float, B: float) -> None:
    require_noise(sigma)
    require_momentum(beta)
    require("B > 0", B > 0.0, B=B)


def _require_smooth(*, L: float, r: int, q: float) -> None:
    require("L > 0", L > 0.0, L=L)
    require_at_least("r", r, 1)
    require_at_least("q", q, 0)
