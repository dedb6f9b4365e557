"""Theorem 3.2 and Lemma D.1: SGD with scaled decay on a strongly convex F reaches the minimizer like 1/t.

The gradient g is unbiased and `E|g|^2 <= sigma^2 + rho |grad F|^2`; `q = lambda / eta_max`. Everything follows from
the recursion of stochastic approximation, `u_{t+1} <= (1 - alpha eta_t) u_t + kappa eta_t^2`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf

import torch
from torch import Tensor

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Source, at_most, covered, log_log_slope, mean_of, within, within_share
from muonsw.lab.theory.chains import (
    BOTH,
    CONSTANT,
    SCALED,
    TRUE_RULES,
    Rules,
    chain,
    farthest,
    gaussian,
    gradient,
    log_spaced,
    march,
    sgd,
)
from muonsw.lab.theory.experiment import Context, Experiment
from muonsw.lab.theory.hypotheses import ROUNDING, check_rates, require, require_at_least, require_positive


def sa_constant(*, u1: float, t1: float, alpha: float, kappa: float, gamma: float, t0: float) -> float:
    """Lemma D.1's nu with `u_t <= nu/(t + t0)`: `max{(t1 + t0) u1, kappa gamma^2 / (alpha gamma - 1)}`.

    u_t is nonnegative, equals u1 at t1, and satisfies the recursion with `eta_t = gamma/(t + t0)` from there on.
    """
    require_positive("alpha", alpha)
    require_positive("t1 + t0", t1 + t0)
    require("alpha*gamma > 1", 1.0 < alpha * gamma < inf, alpha=alpha, gamma=gamma)
    require("alpha*eta <= 1", alpha * gamma <= (t1 + t0) * (1.0 + ROUNDING), alpha=alpha, eta=gamma / (t1 + t0))
    require_at_least("kappa", kappa, 0)
    require_at_least("u1", u1, 0)
    return max((t1 + t0) * u1, kappa * gamma**2 / (alpha * gamma - 1.0))


def strongly_convex_kappa(
    eta: float, *, mu: float, L: float, q: float, sigma: float, rho: float = 1.0, x_star: float
) -> float:
    """The kappa with `E|e_{t+1}|^2 <= (1 - mu eta_t) E|e_t|^2 + kappa eta_t^2`, once `eta_t <= eta`.

    Here e is the distance to the minimizer, whose norm is `x_star`, and `kappa = 2 sigma^2 + q |x*|^2 (1 + 4 q eta^2)`:
    the gradient's noise, and the pull of the decay on a minimizer that is not at the origin.
    """
    require("0 < mu <= L", 0.0 < mu <= L < inf, mu=mu, L=L)
    require_at_least("sigma", sigma, 0)
    require_at_least("rho", rho, 1)
    require("mu*eta <= 1", 0.0 <= mu * eta <= 1.0, mu=mu, eta=eta)
    require("K1*eta + K2*eta^3 <= mu", _contracts(eta, mu=mu, L=L, q=q, rho=rho), eta=eta, mu=mu)
    return 2.0 * sigma**2 + q * x_star**2 * (1.0 + 4.0 * q * eta**2)


def first_contracting_step(*, gamma: float, t0: float, mu: float, L: float, q: float, rho: float = 1.0) -> int:
    """The first step from which `strongly_convex_kappa` applies to the schedule `gamma/(t + t0)`."""
    require("0 < mu <= L", 0.0 < mu <= L < inf, mu=mu, L=L)
    require_positive("gamma", gamma)
    require_positive("t0", t0)
    return bisect_left(range(2**53), True, key=lambda t: _contracts(gamma / (t + t0), mu=mu, L=L, q=q, rho=rho))


def _contracts(eta: float, *, mu: float, L: float, q: float, rho: float) -> bool:
    """Whether squares leave a contraction: `0 <= 1 - 2 mu eta + K1 eta^2 + K2 eta^4 <= 1 - mu eta`."""
    K1, K2 = max(2.0 * rho * L**2 - q, 0.0), 4.0 * q**2
    return mu * eta <= 1.0 and K1 * eta + K2 * eta**3 <= mu


@dataclass(frozen=True)
class StronglyConvexSettings:
    """`1/2 sum h_i (x_i - c)^2` with curvatures from mu to L under `gamma/(t + t0)`; sigma^2 is the total variance."""

    mu: float = 1.0
    L: float = 2.0
    dimension: int = 4
    c: float = 1.0
    lam: float = 0.1
    sigma: float = 1.0
    gamma: float = 2.0
    t0: float = 8.0
    steps: int = 10_000
    chains: int = 1_000
    rules: Rules = TRUE_RULES

    @cached_property
    def etas(self) -> list[float]:
        """The learning rates, after a check of every hypothesis that they must satisfy."""
        require_positive("lambda", self.lam)
        require("mu*gamma > 1", self.mu * self.gamma > 1.0, mu=self.mu, gamma=self.gamma)
        limits = {"eta*lambda <= 1": 1.0 / self.lam, "mu*eta <= 1": 1.0 / self.mu}
        return check_rates([self.gamma / (t + self.t0) for t in range(self.steps)], limits)

    @property
    def curvature(self) -> Tensor:
        return torch.linspace(self.mu, self.L, self.dimension, dtype=torch.float64)


# Chains are averaged in batches, whose means are close to normal, so that a t interval is valid.
BATCHES = 20
# One interval in a thousand misses the truth, so that a table of them hardly ever shows a false alarm.
CONFIDENCE = 0.999
NOISELESS = "/noiseless"
# The grid of constants on which the recursion of Lemma D.1 is run.
ALPHAS, KAPPAS, STARTS = (1.0, 1.5, 3.0), (0.5, 2.0), (0.0, 0.1, 1.0)


def run_strongly_convex(s: StronglyConvexSettings, context: Context) -> Evidence:
    """Mean squared distance to the minimizer, with and without noise, for both rules; then Lemma D.1."""
    require_at_least("sigma", s.sigma, 0)
    require(f"chains are a multiple of {BATCHES}", s.chains % BATCHES == 0, chains=s.chains)
    first = first_contracting_step(gamma=s.gamma, t0=s.t0, mu=s.mu, L=s.L, q=s.lam / max(s.etas))
    steps = sorted({t for t in log_spaced(s.steps, 200) if t > first} | {first})
    squares = distances(s, steps, context)
    return Evidence([*rate_claims(s, squares, steps), *bound_claims(s, squares, steps), *recursion_claims(s)])


def distances(s: StronglyConvexSettings, steps: Sequence[int], context: Context) -> dict[str, Tensor]:
    """The squared distance after each of `steps`, the last being that of the run; averaged in batches of chains."""
    wanted = set(steps)
    begin = torch.zeros(s.chains, s.dimension, dtype=torch.float64)
    weights = {rule: chain(begin) for rule in BOTH} | {rule + NOISELESS: chain(begin[:1]) for rule in BOTH}
    groups = [{"params": [w], "decay": s.rules[name.removesuffix(NOISELESS)]} for name, w in weights.items()]
    optimizer = sgd(groups, peak=max(s.etas), lam=s.lam)
    means = {name: list[Tensor]() for name in weights}

    def measure(name: str) -> None:
        squares = (weights[name].detach() - s.c).square().sum(1)
        means[name].append(squares.view(min(BATCHES, len(squares)), -1).mean(1))

    for t in march(optimizer, s.etas, context.progress):
        noise = gaussian(begin.shape, context.generator, std=s.sigma / s.dimension**0.5)
        for name, w in weights.items():
            if t in wanted:
                measure(name)
            torch.sub(w, s.c, out=gradient(w)).mul_(s.curvature)
            if not name.endswith(NOISELESS):
                gradient(w).add_(noise)
        optimizer.step()
    for name in weights:
        measure(name)
    return {name: torch.stack(values, 1) for name, values in means.items()}


def rate_claims(s: StronglyConvexSettings, squares: dict[str, Tensor], steps: Sequence[int]) -> list[Claim]:
    """How fast the distance falls in the last decade, with noise and without, and the constant in front of 1/t."""
    decade = [k for k, t in enumerate(steps) if t >= s.steps / 10]
    shifted = torch.tensor([steps[k] + s.t0 for k in decade], dtype=torch.float64)
    noisy, noiseless = (squares[name][:, decade] for name in (SCALED, SCALED + NOISELESS))
    rate, free_rate = log_log_slope(shifted, noisy), float(log_log_slope(shifted, noiseless).mean())
    variance = float((s.sigma**2 / s.dimension * s.gamma**2 / (2.0 * s.curvature * s.gamma - 1.0)).sum())
    last = mean_of(noisy[:, -1] * (s.steps + s.t0), CONFIDENCE)

    theorem = Source("Theorem 3.2", "mu-strongly convex, L-smooth, eta = gamma/(t + t0), mu gamma > 1")
    leading = Source("Theorem 3.2, to leading order", "quadratic with curvatures h_i, mu gamma > 1")
    corollary = Source("Corollary 3.1, to leading order", "sigma = 0, mu gamma > 1")
    falls = "scaled: the mean squared distance falls like 1/t (slope in the last decade, log-log)"
    faster = "scaled, without noise: the squared distance falls like 1/t^2"
    tends = "scaled: t times the mean squared distance tends to sum gamma^2 sigma_i^2/(2 h_i gamma - 1)"
    limits = "O(1/t) is an upper bound; that the rate is attained is seen here, where the noise is isotropic"
    pull = Tolerance(0.0, "the interval over batches of chains covers -1; the pull of the decay adds some -0.001")
    bend = Tolerance(0.02, "the start, forgotten like (t0/t)^(mu gamma - 1), still bends the line by about t0/t")
    covers = Tolerance(0.0, "the interval over batches of chains covers it")
    return [
        covered("rate-with-noise", falls, theorem, mean_of(rate, CONFIDENCE), -1.0, pull, limits=limits),
        within("rate-without-noise", faster, corollary, free_rate, -2.0, bend),
        covered("variance", tends, leading, last, variance, covers),
    ]


def bound_claims(s: StronglyConvexSettings, squares: dict[str, Tensor], steps: Sequence[int]) -> list[Claim]:
    """The explicit bound of the proof, at every kept step; and where constant decay stops."""
    scaled, t1, q = squares[SCALED].mean(0), steps[0], s.lam * s.t0 / s.gamma
    x_star = abs(s.c) * s.dimension**0.5
    kappa = strongly_convex_kappa(s.gamma / (t1 + s.t0), mu=s.mu, L=s.L, q=q, sigma=s.sigma, x_star=x_star)
    nu = sa_constant(u1=float(scaled[0]), t1=t1, alpha=s.mu, kappa=kappa, gamma=s.gamma, t0=s.t0)
    largest = float((scaled / scaled.new_tensor([nu / (t + s.t0) for t in steps])).max())
    last = mean_of(squares[CONSTANT][:, -1], CONFIDENCE)
    shifted = float((s.lam * s.c / (s.curvature + s.lam)).square().sum())

    proof = Source("proof of Theorem 3.2", "from the first step at which K1 eta + K2 eta^3 <= mu")
    proposition = Source("Proposition 3.1, coordinate by coordinate", "eta <= 1/(L + lambda), sum eta = infinity")
    under = "scaled: the mean squared distance is under the proof's nu/(t + t0) (largest ratio over steps)"
    stops = "constant: the mean squared distance stops at sum (lambda c/(h_i + lambda))^2"
    equal = Tolerance(1e-12, "rounding; the two may be equal at the first step")
    noise = Tolerance(0.05, "the variance that the noise still sustains at the last step, and sampling")
    return [
        at_most("explicit-bound", under, proof, largest, 1.0, equal),
        within_share("constant-stays", stops, proposition, last, shifted, noise),
    ]


def recursion_claims(s: StronglyConvexSettings) -> list[Claim]:
    """Lemma D.1 with equality: `u <- (1 - alpha eta) u + kappa eta^2`, an SGD step with gradient `alpha u - kappa eta`.

    The optimizer's own decay is off; all constants run as one vector.
    """
    etas, gamma, t0 = s.etas, s.gamma, s.t0
    grid = torch.tensor(list(product(ALPHAS, KAPPAS, STARTS)), dtype=torch.float64)
    alpha, kappa, start = grid.unbind(1)
    constants = [sa_constant(u1=u, t1=0, alpha=a, kappa=k, gamma=gamma, t0=t0) for a, k, u in grid.tolist()]
    nu, u = grid.new_tensor(constants), chain(start)
    optimizer = sgd([{"params": [u], "decay": "none"}], peak=max(etas), lam=1.0)
    largest = (start * t0 / nu).max()
    for t in march(optimizer, etas):
        torch.mul(u, alpha, out=gradient(u)).sub_(kappa, alpha=etas[t])
        optimizer.step()
        largest = torch.maximum(largest, (u * (t + 1 + t0) / nu).max())
    limit = farthest(u.detach() * (len(etas) + t0) / (kappa * gamma**2 / (alpha * gamma - 1.0)), 1.0)

    lemma = Source("Lemma D.1", "alpha gamma > 1, alpha eta <= 1")
    stays = "u <- (1 - alpha eta) u + kappa eta^2 stays under nu/(t + t0), for a grid of constants"
    tends = "(t + t0) u tends to kappa gamma^2/(alpha gamma - 1), so nu cannot be improved"
    equal = Tolerance(1e-12, "rounding; nu/(t + t0) is met at the first step where the start dominates")
    forgotten = Tolerance(0.02, "the start, forgotten like (t0/t)^(alpha gamma - 1), 0.4% at the slowest")
    return [
        at_most("recursion-bound", stays, lemma, float(largest), 1.0, equal),
        within_share("recursion-constant", tends, lemma, limit, 1.0, forgotten),
    ]


STRONGLY_CONVEX = Experiment(
    name="sgd-strongly-convex",
    title="SGD with noise on a strongly convex quadratic: the 1/t rate, its constant, and Lemma D.1",
    hypotheses=("lambda > 0", "sigma >= 0", "0 < mu <= L", "mu gamma > 1", "mu eta <= 1"),
    settings=StronglyConvexSettings(),
    function=run_strongly_convex,
    cost=8.0,
)
