"""SGD with noise: the weighted gradient on a nonconvex objective, and the 1/t rate on a strongly convex one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import torch
from torch import Tensor

from muonsw.lab import theory
from muonsw.lab.claims.claim import Claim, Evidence, Source, at_most, below, covered, within, within_share
from muonsw.lab.claims.statistics import log_log_slope, mean_of
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
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
    robbins_monro,
    sgd,
)
from muonsw.lab.theory.hypotheses import require, require_noise

RIPPLE, FREQUENCY = 0.9, 3.0
THEOREM = Source(
    "Theorem 3.1", "unbiased gradients of bounded variance, iterates bounded, sum eta = infinity, sum eta^2 < infinity"
)


@dataclass(frozen=True)
class NonconvexSettings:
    """Coordinates in a rippled bowl around `c`, started all over it, under `eta0 (1 + t)^-p`.

    Each coordinate pays `(1 - RIPPLE) y^2/2 - RIPPLE cos(3 y)/9` for `y = x - c`: smoothness 1, and several wells.
    """

    c: float = 1.0
    lam: float = 0.1
    sigma: float = 0.3
    eta0: float = 0.25
    p: float = 0.6
    steps: int = 10_000
    chains: int = 400
    start_std: float = 1.0
    rules: Rules = TRUE_RULES

    @cached_property
    def etas(self) -> list[float]:
        """The learning rates."""
        return robbins_monro(self.steps, self.eta0, self.p)


def ripple_loss(y: Tensor) -> Tensor:
    """The rippled bowl, zero at its deepest point."""
    return (1.0 - RIPPLE) * y.square() / 2.0 + RIPPLE * (1.0 - (FREQUENCY * y).cos()) / FREQUENCY**2


def ripple_gradient(y: Tensor) -> Tensor:
    """Its derivative."""
    return (1.0 - RIPPLE) * y + RIPPLE * (FREQUENCY * y).sin() / FREQUENCY


def ripple_curvature(y: Tensor) -> Tensor:
    """Its second derivative, between `1 - 2 RIPPLE` and 1."""
    return (1.0 - RIPPLE) + RIPPLE * (FREQUENCY * y).cos()


@dataclass(frozen=True)
class Stationarity:
    """What was seen of the chains of one rule."""

    end: Tensor  # where they are after the run
    squares: list[float]  # the squared gradient at each step, averaged over chains
    weighted: Tensor  # for each decade of steps and each chain, the eta-weighted mean of the squared gradient
    second_moment: float  # the largest mean of `x^2` over all steps


def decade_edges(steps: int) -> list[int]:
    """Where decades start and end, the first from step 0.

    Examples:
        >>> decade_edges(3000)
        [0, 10, 100, 1000, 3000]
    """
    powers = [10**k for k in range(1, math.ceil(math.log10(steps)))]
    return [0, *powers, steps]


def wander(s: NonconvexSettings, starts: Tensor, context: Context) -> dict[str, Stationarity]:
    """Both rules from the same starts with the same noise."""
    etas, edges = s.etas, decade_edges(s.steps)
    weights = {rule: chain(starts) for rule in BOTH}
    optimizer = sgd([{"params": [w], "decay": s.rules[rule]} for rule, w in weights.items()], peak=s.eta0, lam=s.lam)
    sums = {rule: torch.zeros(len(edges) - 1, starts.numel(), dtype=torch.float64) for rule in BOTH}
    squares, moments, decade = {rule: list[float]() for rule in BOTH}, dict.fromkeys(BOTH, 0.0), 0
    for t in march(optimizer, etas, context.progress):
        decade += t == edges[decade + 1]
        noise = gaussian(starts.shape, context.generator, std=s.sigma)
        for rule, w in weights.items():
            slope = ripple_gradient(w - s.c)
            squared = slope.square()
            sums[rule][decade].add_(squared, alpha=etas[t])
            squares[rule].append(float(squared.mean()))
            moments[rule] = max(moments[rule], float(w.square().mean()))
            torch.add(slope, noise, out=gradient(w))
        optimizer.step()
    totals = torch.tensor([math.fsum(etas[a:b]) for a, b in pairwise(edges)]).unsqueeze(1)
    return {
        rule: Stationarity(w.detach(), squares[rule], sums[rule] / totals, moments[rule]) for rule, w in weights.items()
    }


def run_nonconvex(s: NonconvexSettings, context: Context) -> Evidence:
    """The weighted gradient falls decade by decade under scaled decay, and stops under constant decay."""
    require_noise(s.sigma)
    require("more than one decade", s.steps > 100, steps=s.steps)
    starts = s.c + gaussian((s.chains,), context.generator, std=s.start_std)
    seen = wander(s, starts, context)
    drops = [mean_of(after - before) for before, after in pairwise(seen[SCALED].weighted)]
    falls = "scaled: the eta-weighted squared gradient falls from decade {} to decade {} of steps"
    negative = Tolerance(0.0, "the upper end of the interval of the paired difference must be negative")
    falling = [
        below(f"decade-{k}-falls", falls.format(k - 1, k), THEOREM, drop, 0.0, negative)
        for k, drop in enumerate(drops, 1)
    ]
    return Evidence([*falling, *last_decade_claims(s, seen), inequality_claim(s, seen[SCALED], starts)])


def last_decade_claims(s: NonconvexSettings, seen: dict[str, Stationarity]) -> list[Claim]:
    """Scaled decay against constant decay, and constant decay against the gradient that balances its decay."""
    etas = s.etas[decade_edges(s.steps)[-2] :]
    curvature = float(ripple_curvature(seen[SCALED].end - s.c).mean())
    sustained = curvature * s.sigma**2 / 2.0 * math.fsum(eta**2 for eta in etas) / math.fsum(etas)
    balance = float((s.lam * seen[CONSTANT].end).square().mean())
    contrast = Source("contrast to Theorem 3.1", "sum eta = infinity")
    tenth = "scaled: in the last decade at most a tenth of constant decay's squared gradient is left"
    stays = "constant: the squared gradient stays at (lambda x)^2, where it balances the decay"
    limits = (
        f"noise alone sustains h eta sigma^2/2 = {sustained:.1e} at these learning rates; the rest are chains that "
        "still roll off a hilltop. Averages over all steps keep the first ones and fall more slowly, with harmonic "
        "steps like 1/log T"
    )
    under = Tolerance(0.0, "the upper end of the interval must be below")
    noise = Tolerance(0.05, "what the noise adds at the learning rates of the last decade")
    constant, scaled = (mean_of(seen[rule].weighted[-1]) for rule in BOTH)
    return [
        at_most("tail", tenth, THEOREM, scaled, 0.1 * constant.value, under, limits=limits),
        within_share("constant-stays", stays, contrast, constant, balance, noise),
    ]


def inequality_claim(s: NonconvexSettings, seen: Stationarity, starts: Tensor) -> Claim:
    """The summed descent inequality of the proof at finite T."""
    f_gap, size = float(ripple_loss(starts - s.c).mean()), math.sqrt(seen.second_moment)
    bound = theory.stationarity_bound(s.etas, f_gap=f_gap, L=1.0, q=s.lam / s.eta0, sigma=s.sigma, bound=size)
    found = math.fsum(eta * g for eta, g in zip(s.etas, seen.squares, strict=True))
    proof = Source("proof of Theorem 3.1", "eta <= 1/(4 L), E x^2 bounded")
    under = "scaled: sum eta E|grad F|^2 is under the finite-T bound of the proof"
    because = "a bound on a mean over chains; the sampling error is far below the distance to it"
    return at_most("descent-inequality", under, proof, found, bound, Tolerance(0.0, because))


NONCONVEX = Experiment(
    name="sgd-nonconvex",
    title="SGD with noise in a rippled bowl: the weighted gradient vanishes under scaled decay only",
    hypotheses=("lambda > 0", "sigma >= 0", "sum eta = infinity", "sum eta^2 < infinity", "eta <= 1/(4 L)"),
    settings=NonconvexSettings(),
    function=run_nonconvex,
    cost=3.0,
)


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

    @cached_property
    def etas(self) -> list[float]:
        """The learning rates, after a check of every hypothesis that they must satisfy."""
        etas = [self.gamma / (t + self.t0) for t in range(self.steps)]
        theory.check_schedule(etas, lam=self.lam, mu=self.mu).require()
        return etas

    @property
    def curvature(self) -> Tensor:
        """The curvature of each coordinate."""
        return torch.linspace(self.mu, self.L, self.dimension, dtype=torch.float64)


def run_strongly_convex(s: StronglyConvexSettings, context: Context) -> Evidence:
    """Mean squared distance to the minimizer, with and without noise, for both rules; then Lemma D.1."""
    require_noise(s.sigma)
    require("mu*gamma > 1", s.mu * s.gamma > 1.0, mu=s.mu, gamma=s.gamma)
    require("0 < mu <= L", 0.0 < s.mu <= s.L, mu=s.mu, L=s.L)
    require(f"chains are a multiple of {BATCHES}", s.chains % BATCHES == 0, chains=s.chains)
    first = theory.first_contracting_step(gamma=s.gamma, t0=s.t0, mu=s.mu, L=s.L, q=s.lam / max(s.etas))
    steps = sorted({t for t in log_spaced(s.steps, 200) if t > first} | {first})
    seen = distances(s, steps, context)
    return Evidence([*rate_claims(s, seen, steps), *bound_claims(s, seen, steps), *recursion_claims(s, context)])


def distances(s: StronglyConvexSettings, steps: Sequence[int], context: Context) -> dict[str, Tensor]:
    """The squared distance after each of `steps`, the last being that of the run; averaged in batches of chains."""
    wanted = set(steps)
    begin = torch.zeros(s.chains, s.dimension, dtype=torch.float64)
    weights = {rule: chain(begin) for rule in BOTH} | {rule + NOISELESS: chain(begin[:1]) for rule in BOTH}
    groups = [{"params": [w], "decay": s.rules[name.removesuffix(NOISELESS)]} for name, w in weights.items()]
    optimizer = sgd(groups, peak=max(s.etas), lam=s.lam)
    kept = {name: list[Tensor]() for name in weights}

    def look(name: str) -> None:
        squares = (weights[name].detach() - s.c).square().sum(1)
        kept[name].append(squares.view(min(BATCHES, len(squares)), -1).mean(1))

    for t in march(optimizer, s.etas, context.progress, part=(0.0, 0.8)):
        noise = gaussian(begin.shape, context.generator, std=s.sigma / s.dimension**0.5)
        for name, w in weights.items():
            if t in wanted:
                look(name)
            torch.sub(w, s.c, out=gradient(w)).mul_(s.curvature)
            if not name.endswith(NOISELESS):
                gradient(w).add_(noise)
        optimizer.step()
    for name in weights:
        look(name)
    return {name: torch.stack(seen, 1) for name, seen in kept.items()}


def rate_claims(s: StronglyConvexSettings, seen: dict[str, Tensor], steps: Sequence[int]) -> list[Claim]:
    """How fast the distance falls in the last decade, with noise and without, and the constant in front of 1/t."""
    decade = [k for k, t in enumerate(steps) if t >= s.steps / 10]
    shifted = torch.tensor([steps[k] + s.t0 for k in decade], dtype=torch.float64)
    noisy, noiseless = (seen[name][:, decade] for name in (SCALED, SCALED + NOISELESS))
    rate, free_rate = log_log_slope(shifted, noisy), float(log_log_slope(shifted, noiseless).mean())
    variance = float((s.sigma**2 / s.dimension * s.gamma**2 / (2.0 * s.curvature * s.gamma - 1.0)).sum())
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
    last = mean_of(noisy[:, -1] * (s.steps + s.t0), CONFIDENCE)
    return [
        covered("rate-with-noise", falls, theorem, mean_of(rate, CONFIDENCE), -1.0, pull, limits=limits),
        within("rate-without-noise", faster, corollary, free_rate, -2.0, bend),
        covered("variance", tends, leading, last, variance, covers),
    ]


def bound_claims(s: StronglyConvexSettings, seen: dict[str, Tensor], steps: Sequence[int]) -> list[Claim]:
    """The explicit bound of the proof, at every kept step; and where constant decay stops."""
    squares = seen[SCALED].mean(0)
    constants = {"gamma": s.gamma, "t0": s.t0, "mu": s.mu, "L": s.L, "q": s.lam * s.t0 / s.gamma, "sigma": s.sigma}
    x_star, u1, t1 = abs(s.c) * s.dimension**0.5, float(squares[0]), steps[0]
    bounds = [theory.strongly_convex_bound(t, u1=u1, t1=t1, x_star=x_star, **constants) for t in steps]
    largest, last = float((squares / squares.new_tensor(bounds)).max()), mean_of(seen[CONSTANT][:, -1], CONFIDENCE)
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


def recursion_claims(s: StronglyConvexSettings, context: Context) -> list[Claim]:
    """Lemma D.1 with equality: `u <- (1 - alpha eta) u + kappa eta^2`, an SGD step with gradient `alpha u - kappa eta`.

    The optimizer's own decay is off; all constants run as one vector.
    """
    etas, gamma, t0 = s.etas, s.gamma, s.t0
    grid = torch.tensor(list(product(ALPHAS, KAPPAS, STARTS)), dtype=torch.float64)
    alpha, kappa, start = grid.unbind(1)
    constants = [theory.sa_constant(u1=u, t1=0, alpha=a, kappa=k, gamma=gamma, t0=t0) for a, k, u in grid.tolist()]
    nu, u = grid.new_tensor(constants), chain(start)
    optimizer = sgd([{"params": [u], "decay": "none"}], peak=max(etas), lam=1.0)
    largest = (start * t0 / nu).max()
    for t in march(optimizer, etas, context.progress, part=(0.8, 1.0)):
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
