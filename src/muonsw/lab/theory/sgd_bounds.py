"""Bounds for SGD with scaled decay, `x <- x - eta g - q eta^2 x` with `q = lambda / eta_max`.

The gradient g is unbiased and `E|g|^2 <= sigma^2 + rho |grad F|^2`; F is L-smooth. For an objective that is
also strongly convex, everything follows from the recursion of stochastic approximation,
`u_{t+1} <= (1 - alpha eta_t) u_t + kappa eta_t^2`.
"""

from bisect import bisect_left
from math import fsum, inf

from muonsw.lab.theory.hypotheses import (
    Steps,
    at_most,
    require,
    require_at_least,
    require_largest,
    require_noise,
    step_sizes,
)


def stationarity_bound(
    etas: Steps, *, f_gap: float, L: float, q: float, sigma: float, rho: float = 1.0, bound: float
) -> float:
    """Bound `sum eta_t E|grad F(x_t)|^2` over a run; divided by the sum of eta it tends to zero.

    The bound is `2 (f_gap + L sigma^2 S2 + q^2 bound^2 (S3 + L S4))`, where Sk is the sum of `eta^k`. The
    decay enters only from the third power on.

    Hypotheses: eta <= 1/(4 L rho), sigma >= 0, rho >= 1.

    Args:
        etas: The learning rate of each step.
        f_gap: F at the start minus its infimum.
        L: Smoothness of F.
        q: `lambda / eta_max`.
        sigma: Noise of the gradient.
        rho: Factor of the gradient's own square in its second moment.
        bound: A number with `E|x_t|^2 <= bound^2` for all t.

    Examples:
        >>> stationarity_bound([0.25, 0.125], f_gap=1.0, L=1.0, q=0.0, sigma=0.0, bound=1.0)
        2.0
    """
    require_noise(sigma)
    _require_sgd(L=L, q=q, rho=rho)
    require_at_least("f_gap", f_gap, 0)
    steps = step_sizes(etas)
    require_largest("eta <= 1/(4*L*rho)", steps, 1.0 / (4.0 * L * rho))
    power_sum = {k: fsum(eta**k for eta in steps) for k in (2, 3, 4)}
    shrink = q**2 * bound**2 * (power_sum[3] + L * power_sum[4])
    return 2.0 * (f_gap + L * sigma**2 * power_sum[2] + shrink)


def sa_constant(*, u1: float, t1: float, alpha: float, kappa: float, gamma: float, t0: float) -> float:
    """The nu with `u_t <= nu/(t + t0)`: `max{(t1 + t0) u1, kappa gamma^2 / (alpha gamma - 1)}`.

    Hypotheses: u_t is nonnegative and satisfies the recursion with `eta_t = gamma/(t + t0)` from t1 on;
    alpha > 0, kappa >= 0, alpha gamma > 1, and alpha eta <= 1 at t1.

    Args:
        u1: The value of u at t1.
        t1: The first step from which the recursion holds.
        alpha: Its contraction.
        kappa: Its noise.
        gamma: Numerator of the schedule.
        t0: Its offset.

    Examples:
        >>> sa_constant(u1=1.0, t1=0, alpha=1.0, kappa=3.0, gamma=2.0, t0=4.0)
        12.0
    """
    require("alpha > 0", 0.0 < alpha < inf, alpha=alpha)
    require("alpha*gamma > 1", 1.0 < alpha * gamma < inf, alpha=alpha, gamma=gamma)
    require("t1 + t0 > 0", 0.0 < t1 + t0 < inf, t1=t1, t0=t0)
    require("alpha*eta <= 1", at_most(alpha * gamma, t1 + t0), alpha=alpha, eta=gamma / (t1 + t0))
    require_at_least("kappa", kappa, 0)
    require_at_least("u1", u1, 0)
    return max((t1 + t0) * u1, kappa * gamma**2 / (alpha * gamma - 1.0))


def sa_bound(t: float, *, u1: float, t1: float, alpha: float, kappa: float, gamma: float, t0: float) -> float:
    """Bound the recursion's u_t by `nu/(t + t0)`, for t from t1 on.

    Hypotheses and arguments: as for `sa_constant`.

    Examples:
        >>> sa_bound(20, u1=1.0, t1=0, alpha=1.0, kappa=3.0, gamma=2.0, t0=4.0)
        0.5
    """
    require("t >= t1", t >= t1, t=t, t1=t1)
    return sa_constant(u1=u1, t1=t1, alpha=alpha, kappa=kappa, gamma=gamma, t0=t0) / (t + t0)


def strongly_convex_kappa(
    eta: float, *, mu: float, L: float, q: float, sigma: float, rho: float = 1.0, x_star: float
) -> float:
    """The kappa with `E|e_{t+1}|^2 <= (1 - mu eta_t) E|e_t|^2 + kappa eta_t^2`, once `eta_t <= eta`.

    Here e is the distance to the minimizer, and `kappa = 2 sigma^2 + q |x*|^2 (1 + 4 q eta^2)`: the
    gradient's noise, and the pull of the decay on a minimizer that is not at the origin.

    Hypotheses: 0 < mu <= L, sigma >= 0, rho >= 1, mu eta <= 1, and eta small enough that the squares do not
    eat the contraction, `K1 eta + K2 eta^3 <= mu` with `K1 = max(2 rho L^2 - q, 0)` and `K2 = 4 q^2`.

    Args:
        eta: The largest learning rate that is used.
        mu: Strong convexity of F.
        L: Its smoothness.
        q: `lambda / eta_max`.
        sigma: Noise of the gradient.
        rho: Factor of the gradient's own square in its second moment.
        x_star: Norm of the minimizer.

    Examples:
        >>> strongly_convex_kappa(0.25, mu=1.0, L=1.0, q=1.0, sigma=0.5, x_star=1.0)
        1.75
    """
    require_noise(sigma)
    _require_strongly_convex(mu=mu, L=L, q=q, rho=rho)
    require_at_least("x_star", x_star, 0)
    require("mu*eta <= 1", 0.0 <= mu * eta <= 1.0, mu=mu, eta=eta)
    require("K1*eta + K2*eta^3 <= mu", _contracts(eta, mu=mu, L=L, q=q, rho=rho), eta=eta, mu=mu)
    return 2.0 * sigma**2 + q * x_star**2 * (1.0 + 4.0 * q * eta**2)


def first_contracting_step(*, gamma: float, t0: float, mu: float, L: float, q: float, rho: float = 1.0) -> int:
    """The first step from which `strongly_convex_kappa` applies to the schedule `gamma/(t + t0)`.

    Hypotheses: 0 < mu <= L, rho >= 1, gamma > 0, t0 > 0.

    Examples:
        >>> first_contracting_step(gamma=2.0, t0=8.0, mu=1.0, L=2.0, q=0.4)
        8
    """
    _require_strongly_convex(mu=mu, L=L, q=q, rho=rho)
    require("gamma > 0", 0.0 < gamma < inf, gamma=gamma)
    require("t0 > 0", 0.0 < t0 < inf, t0=t0)

    def small_enough(t: int) -> bool:
        return _contracts(gamma / (t + t0), mu=mu, L=L, q=q, rho=rho)

    return bisect_left(range(2**53), True, key=small_enough)


def strongly_convex_bound(
    t: float,
    *,
    u1: float,
    t1: float,
    gamma: float,
    t0: float,
    mu: float,
    L: float,
    q: float,
    sigma: float,
    rho: float = 1.0,
    x_star: float,
) -> float:
    """Bound `E|x_t - x*|^2` for `eta_t = gamma/(t + t0)` by a multiple of `1/(t + t0)`.

    Hypotheses: mu gamma > 1, and those of `strongly_convex_kappa` at t1; `first_contracting_step` finds a t1.

    Args:
        t: The step, at least t1.
        u1: The mean squared distance at t1.
        t1: Where the bound starts.
        gamma: Numerator of the schedule.
        t0: Its offset.
        mu: Strong convexity of F.
        L: Its smoothness.
        q: `lambda / eta_max`, which is `lambda t0 / gamma`.
        sigma: Noise of the gradient.
        rho: Factor of the gradient's own square in its second moment.
        x_star: Norm of the minimizer.

    Examples:
        >>> setting = dict(gamma=2.0, t0=8.0, mu=1.0, L=2.0, q=0.4, sigma=1.0, x_star=1.0)
        >>> round(strongly_convex_bound(9992, u1=0.5, t1=8, **setting), 6)
        0.000964
    """
    require("mu*gamma > 1", 1.0 < mu * gamma < inf, mu=mu, gamma=gamma)
    require("t1 + t0 > 0", t1 + t0 > 0.0, t1=t1, t0=t0)
    kappa = strongly_convex_kappa(gamma / (t1 + t0), mu=mu, L=L, q=q, sigma=sigma, rho=rho, x_star=x_star)
    return sa_bound(t, u1=u1, t1=t1, alpha=mu, kappa=kappa, gamma=gamma, t0=t0)


def _contracts(eta: float, *, mu: float, L: float, q: float, rho: float) -> bool:
    """Whether `1 - 2 mu eta + K1 eta^2 + K2 eta^4 <= 1 - mu eta`, and that is not negative."""
    K1 = max(2.0 * rho * L**2 - q, 0.0)
    return mu * eta <= 1.0 and K1 * eta + 4.0 * q**2 * eta**3 <= mu


def _require_sgd(*, L: float, q: float, rho: float) -> None:
    require("L > 0", 0.0 < L < inf, L=L)
    require_at_least("q", q, 0)
    require_at_least("rho", rho, 1)


def _require_strongly_convex(*, mu: float, L: float, q: float, rho: float) -> None:
    require("0 < mu <= L", 0.0 < mu <= L, mu=mu, L=L)
    _require_sgd(L=L, q=q, rho=rho)
