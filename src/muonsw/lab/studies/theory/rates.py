"""The 1/t rate: stochastic approximation's recursion by itself, and SGD with noise on a strongly convex objective."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab.claims.claim import Claim, Evidence, Stated, at_most, covered, within, within_share
from muonsw.lab.claims.statistics import log_log_slope, mean_of
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    CONSTANT,
    SCALED,
    TRUE_RULES,
    Rules,
    chain,
    farthest,
    gaussian,
    gradient,
    harmonic,
    log_spaced,
    march,
    sgd,
)
from muonsw.theory import check_schedule, first_contracting_step, sa_constant, strongly_convex_bound
from muonsw.theory.hypotheses import require, require_noise

BATCHES = 20
# One interval in a thousand misses the truth, so that a table of them hardly ever shows a false alarm.
CONFIDENCE = 0.999
NOISELESS = "/noiseless"
# The grid of constants on which the recursion of Lemma D.1 is run.
ALPHAS, KAPPAS, STARTS = (1.0, 1.5, 3.0), (0.5, 2.0), (0.0, 0.1, 1.0)


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

    @property
    def curvature(self) -> Tensor:
        """The curvature of each coordinate."""
        return torch.linspace(self.mu, self.L, self.dimension, dtype=torch.float64)


def run_strongly_convex(setting: StronglyConvexSettings, context: Context) -> Evidence:
    """Mean squared distance to the minimizer, with and without noise, for both rules; then Lemma D.1."""
    s = setting
    require_noise(s.sigma)
    require("mu*gamma > 1", s.mu * s.gamma > 1.0, mu=s.mu, gamma=s.gamma)
    require("0 < mu <= L", 0.0 < s.mu <= s.L, mu=s.mu, L=s.L)
    require(f"chains are a multiple of {BATCHES}", s.chains % BATCHES == 0, chains=s.chains)
    etas = harmonic(s.steps, gamma=s.gamma, t0=s.t0)
    check_schedule(etas, lam=s.lam, mu=s.mu).require()
    first = first_contracting_step(gamma=s.gamma, t0=s.t0, mu=s.mu, L=s.L, q=s.lam / max(etas))
    steps = sorted({t for t in log_spaced(s.steps, 200) if t > first} | {first})
    seen = distances(setting, etas, steps, context)
    decade = [k for k, t in enumerate(steps) if t >= s.steps / 10]
    shifted = torch.tensor([steps[k] + s.t0 for k in decade], dtype=torch.float64)
    late = {name: squares[:, decade] for name, squares in seen.items()}
    claims = [
        slope_claim(late[SCALED], shifted),
        noiseless_claim(late[SCALED + NOISELESS], shifted),
        variance_claim(setting, late[SCALED][:, -1]),
        bound_claim(setting, seen[SCALED].mean(0), steps),
        constant_claim(setting, late[CONSTANT][:, -1]),
    ]
    return Evidence(claims + recursion_claims(etas, gamma=s.gamma, t0=s.t0, context=context))


def distances(
    setting: StronglyConvexSettings, etas: Sequence[float], steps: Sequence[int], context: Context
) -> dict[str, Tensor]:
    """The squared distance after each of `steps`, averaged within each of 20 batches of chains."""
    s = setting
    begin = torch.zeros(s.chains, s.dimension, dtype=torch.float64)
    weights = {rule: chain(begin) for rule in (CONSTANT, SCALED)}
    weights |= {rule + NOISELESS: chain(begin[:1]) for rule in (CONSTANT, SCALED)}
    groups = [{"params": [w], "decay": s.rules[name.split("/")[0]]} for name, w in weights.items()]
    optimizer = sgd(groups, peak=max(etas), lam=s.lam)
    wanted, kept = set(steps), {name: list[Tensor]() for name in weights}
    for t in march(optimizer, etas, context.progress, part=(0.0, 0.8)):
        noise = gaussian(begin.shape, context.generator, std=s.sigma / s.dimension**0.5)
        for name, w in weights.items():
            if t in wanted:
                squares = (w.detach() - s.c).square().sum(1)
                kept[name].append(squares.view(min(BATCHES, len(squares)), -1).mean(1))
            torch.sub(w, s.c, out=gradient(w)).mul_(s.curvature)
            if not name.endswith(NOISELESS):
                gradient(w).add_(noise)
        optimizer.step()
    for name, w in weights.items():
        squares = (w.detach() - s.c).square().sum(1)
        kept[name].append(squares.view(min(BATCHES, len(squares)), -1).mean(1))
    return {name: torch.stack(seen, 1) for name, seen in kept.items()}


def slope_claim(late: Tensor, shifted: Tensor) -> Claim:
    """The rate with noise."""
    return covered(
        "rate-with-noise",
        "scaled: the mean squared distance falls like 1/t (slope in the last decade, log-log)",
        Stated("Theorem 3.2", "mu-strongly convex, L-smooth, eta = gamma/(t + t0), mu gamma > 1"),
        mean_of(log_log_slope(shifted, late), CONFIDENCE),
        -1.0,
        Tolerance(0.0, "the interval over batches of chains covers -1; the pull of the decay adds some -0.001"),
        limits="O(1/t) is an upper bound; that the rate is attained is seen here, where the noise is isotropic",
    )


def noiseless_claim(late: Tensor, shifted: Tensor) -> Claim:
    """The rate without noise."""
    return within(
        "rate-without-noise",
        "scaled, without noise: the squared distance falls like 1/t^2",
        Stated("Corollary 3.1, to leading order", "sigma = 0, mu gamma > 1"),
        float(log_log_slope(shifted, late).mean()),
        -2.0,
        Tolerance(0.02, "the start, forgotten like (t0/t)^(mu gamma - 1), still bends the line by about t0/t"),
    )


def variance_claim(setting: StronglyConvexSettings, last: Tensor) -> Claim:
    """The constant in front of 1/t."""
    s = setting
    per_entry = s.sigma**2 / s.dimension
    return covered(
        "variance",
        "scaled: t times the mean squared distance tends to sum gamma^2 sigma_i^2/(2 h_i gamma - 1)",
        Stated("Theorem 3.2, to leading order", "quadratic with curvatures h_i, mu gamma > 1"),
        mean_of(last * (s.steps + s.t0), CONFIDENCE),
        float((per_entry * s.gamma**2 / (2.0 * s.curvature * s.gamma - 1.0)).sum()),
        Tolerance(0.0, "the interval over batches of chains covers it"),
    )


def bound_claim(setting: StronglyConvexSettings, squares: Tensor, steps: Sequence[int]) -> Claim:
    """The explicit bound of the proof, at every kept step."""
    s = setting
    constants = {"gamma": s.gamma, "t0": s.t0, "mu": s.mu, "L": s.L, "q": s.lam * s.t0 / s.gamma, "sigma": s.sigma}
    x_star, u1, t1 = abs(s.c) * s.dimension**0.5, float(squares[0]), steps[0]
    bounds = [strongly_convex_bound(t, u1=u1, t1=t1, x_star=x_star, **constants) for t in steps]
    return at_most(
        "explicit-bound",
        "scaled: the mean squared distance is under the proof's nu/(t + t0) (largest ratio over steps)",
        Stated("proof of Theorem 3.2", "from the first step at which K1 eta + K2 eta^3 <= mu"),
        float((squares / squares.new_tensor(bounds)).max()),
        1.0,
        Tolerance(1e-12, "rounding; the two may be equal at the first step"),
    )


def constant_claim(setting: StronglyConvexSettings, last: Tensor) -> Claim:
    """Constant decay stops at the shifted point."""
    s = setting
    return within_share(
        "constant-stays",
        "constant: the mean squared distance stops at sum (lambda c/(h_i + lambda))^2",
        Stated("Proposition 3.1, coordinate by coordinate", "eta <= 1/(L + lambda), sum eta = infinity"),
        mean_of(last, CONFIDENCE),
        float((s.lam * s.c / (s.curvature + s.lam)).square().sum()),
        Tolerance(0.05, "the variance that the noise still sustains at the last step, and sampling"),
    )


def recursion_claims(etas: Sequence[float], *, gamma: float, t0: float, context: Context) -> list[Claim]:
    """Lemma D.1 with equality: `u <- (1 - alpha eta) u + kappa eta^2`, an SGD step with gradient `alpha u - kappa eta`.

    The optimizer's own decay is off; all constants run as one vector.
    """
    grid = torch.tensor(list(itertools.product(ALPHAS, KAPPAS, STARTS)), dtype=torch.float64)
    alpha, kappa, start = grid.unbind(1)
    nu = torch.tensor(
        [sa_constant(u1=u, t1=0, alpha=a, kappa=k, gamma=gamma, t0=t0) for a, k, u in grid.tolist()],
        dtype=torch.float64,
    )
    u = chain(start)
    optimizer = sgd([{"params": [u], "decay": "none"}], peak=max(etas), lam=1.0)
    largest = (start * t0 / nu).max()
    for t in march(optimizer, etas, context.progress, part=(0.8, 1.0)):
        torch.mul(u, alpha, out=gradient(u)).sub_(kappa, alpha=etas[t])
        optimizer.step()
        largest = torch.maximum(largest, (u * (t + 1 + t0) / nu).max())
    limit = kappa * gamma**2 / (alpha * gamma - 1.0)
    lemma = Stated("Lemma D.1", "alpha gamma > 1, alpha eta <= 1")
    return [
        at_most(
            "recursion-bound",
            "u <- (1 - alpha eta) u + kappa eta^2 stays under nu/(t + t0), for a grid of constants",
            lemma,
            float(largest),
            1.0,
            Tolerance(1e-12, "rounding; nu/(t + t0) is met at the first step where the start dominates"),
        ),
        within_share(
            "recursion-constant",
            "(t + t0) u tends to kappa gamma^2/(alpha gamma - 1), so nu cannot be improved",
            lemma,
            farthest(u.detach() * (len(etas) + t0) / limit, 1.0),
            1.0,
            Tolerance(0.02, "the start, forgotten like (t0/t)^(alpha gamma - 1), 0.4% at the slowest"),
        ),
    ]


STRONGLY_CONVEX = Experiment(
    name="sgd-strongly-convex",
    title="SGD with noise on a strongly convex quadratic: the 1/t rate, its constant, and Lemma D.1",
    hypotheses=("lambda > 0", "sigma >= 0", "0 < mu <= L", "mu gamma > 1", "mu eta <= 1"),
    settings=StronglyConvexSettings(),
    function=run_strongly_convex,
    cost=8.0,
)
