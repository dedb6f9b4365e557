"""Theorems 3.1 and 3.2, Lemma D.1: SGD with noise and scaled decay, `x <- x - eta g - q eta^2 x`.

The weighted gradient of a smooth F vanishes, and a strongly convex F converges to its minimizer like 1/t. The gradient
g is unbiased and `E|g|^2 <= sigma^2 + rho |grad F|^2`; `q = lambda / eta_max`. The rate follows from the recursion of
stochastic approximation, `u_{t+1} <= (1 - alpha eta_t) u_t + kappa eta_t^2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Source, at_most, covered, log_log_slope, mean_of, within_share
from muonsw.lab.theory.chains import CONSTANT, RULES, SCALED, Chains, Experiment, gaussian, log_spaced
from muonsw.lab.theory.hypotheses import (
    ROUNDING,
    Steps,
    check_rates,
    require,
    require_at_least,
    require_positive,
    robbins_monro,
)


def stationarity_bound(
    etas: Steps, *, f_gap: float, L: float, q: float, sigma: float, rho: float = 1.0, bound: float
) -> float:
    """Bound `sum eta_t E|grad F(x_t)|^2` by `2 (f_gap + L sigma^2 S2 + q^2 bound^2 (S3 + L S4))`, Sk summing `eta^k`.

    `f_gap` is F at the start minus its infimum, and `E|x_t|^2 <= bound^2`. Decay enters from the third power on.
    """
    require_positive("L", L)
    require_at_least("sigma", sigma, 0)
    require_at_least("rho", rho, 1)
    rates = check_rates(etas, {"eta <= 1/(4*L*rho)": 1.0 / (4.0 * L * rho)})
    S2, S3, S4 = (math.fsum(eta**k for eta in rates) for k in (2, 3, 4))
    return 2.0 * (f_gap + L * sigma**2 * S2 + q**2 * bound**2 * (S3 + L * S4))


# A bowl with several wells whose second derivative is between 1 - 2 RIPPLE and 1, so that L = 1.
RIPPLE, FREQUENCY = 0.9, 3.0


def ripple_loss(y: Tensor) -> Tensor:
    """The rippled bowl, zero at its deepest point."""
    return (1.0 - RIPPLE) * y.square() / 2.0 + RIPPLE * (1.0 - (FREQUENCY * y).cos()) / FREQUENCY**2


def ripple_gradient(y: Tensor) -> Tensor:
    return (1.0 - RIPPLE) * y + RIPPLE * (FREQUENCY * y).sin() / FREQUENCY


@dataclass(frozen=True)
class Nonconvex(Experiment):
    """Chains in a rippled bowl around `c`, with starts all over it, under `eta0 (1 + t)^-p`."""

    name: str = "sgd-nonconvex"
    title: str = "SGD with noise in a rippled bowl: the weighted gradient vanishes under scaled decay only"
    c: float = 1.0
    lam: float = 0.1
    sigma: float = 0.3
    eta0: float = 0.25
    p: float = 0.6
    steps: int = 10_000
    chains: int = 400
    start_std: float = 1.0

    @cached_property
    def etas(self) -> list[float]:
        return robbins_monro(self.steps, self.eta0, self.p)

    def judge(self, generator: torch.Generator) -> Evidence:
        """Run both rules from the same starts with the same noise; only scaled decay's weighted gradient vanishes."""
        starts = self.c + gaussian((self.chains,), generator, std=self.start_std)
        chains = Chains(
            "sgd", {rule: {"params": starts, "decay": rule} for rule in RULES}, peak=self.eta0, lam=self.lam
        )
        last_decade = 10 ** (math.ceil(math.log10(self.steps)) - 1)
        sums = {rule: torch.zeros_like(starts) for rule in RULES}  # eta-weighted squared gradients of the last decade
        squares, second_moment = list[float](), 0.0  # of scaled decay: E|grad F|^2 at every step, the largest E x^2
        for t, eta in enumerate(self.etas):
            slopes = {rule: ripple_gradient(w - self.c) for rule, w in chains.weights.items()}
            squares.append(float(slopes[SCALED].square().mean()))
            second_moment = max(second_moment, float(chains.weights[SCALED].square().mean()))
            if t >= last_decade:
                for rule, slope in slopes.items():
                    sums[rule].add_(slope.square(), alpha=eta)
            noise = gaussian(starts.shape, generator, std=self.sigma)
            chains.step(eta, {rule: slope + noise for rule, slope in slopes.items()})
        constant, scaled = (mean_of(sums[rule] / math.fsum(self.etas[last_decade:])) for rule in RULES)
        balance = float((self.lam * chains.weights[CONSTANT]).square().mean())

        # The summed descent inequality of the proof at finite T.
        f_gap, size = float(ripple_loss(starts - self.c).mean()), math.sqrt(second_moment)
        bound = stationarity_bound(self.etas, f_gap=f_gap, L=1.0, q=self.lam / self.eta0, sigma=self.sigma, bound=size)
        total = math.fsum(eta * square for eta, square in zip(self.etas, squares, strict=True))

        assumed = "unbiased gradients of bounded variance, iterates bounded, sum eta = infinity, sum eta^2 < infinity"
        theorem, contrast = Source("Theorem 3.1", assumed), Source("contrast to Theorem 3.1", "sum eta = infinity")
        proof = Source("proof of Theorem 3.1", "eta <= 1/(4 L), E x^2 bounded")
        tenth = "scaled: in the last decade at most a tenth of constant decay's squared gradient is left"
        stays = "constant: the squared gradient stays at (lambda x)^2, where it balances the decay"
        descends = "scaled: sum eta E|grad F|^2 is under the finite-T bound of the proof"
        under = Tolerance(0.0, "the upper end of the interval must be below")
        noisy = Tolerance(0.05, "what the noise adds at the learning rates of the last decade")
        far = Tolerance(0.0, "a bound on a mean over chains; the sampling error is far below the distance to it")
        return Evidence(
            [
                at_most("tail", tenth, theorem, scaled, 0.1 * constant.value, under),
                within_share("constant-stays", stays, contrast, constant, balance, noisy),
                at_most("descent-inequality", descends, proof, total, bound, far),
            ]
        )


def sa_constant(*, u1: float, t1: float, alpha: float, kappa: float, gamma: float, t0: float) -> float:
    """The nu of Lemma D.1, with `u_t <= nu/(t + t0)`: `max{(t1 + t0) u1, kappa gamma^2 / (alpha gamma - 1)}`.

    u_t is nonnegative, equals u1 at t1, and satisfies the recursion with `eta_t = gamma/(t + t0)` from there on.
    """
    require_positive("alpha", alpha)
    require_positive("t1 + t0", t1 + t0)
    require("alpha*gamma > 1", 1.0 < alpha * gamma < math.inf, alpha=alpha, gamma=gamma)
    require("alpha*eta <= 1", alpha * gamma <= (t1 + t0) * (1.0 + ROUNDING), alpha=alpha, eta=gamma / (t1 + t0))
    require_at_least("kappa", kappa, 0)
    require_at_least("u1", u1, 0)
    return max((t1 + t0) * u1, kappa * gamma**2 / (alpha * gamma - 1.0))


# Means over batches of chains are close to normal, which makes a t interval valid.
BATCHES = 20
# Only one interval in a thousand misses the true value, so false alarms are rare in a table of them.
CONFIDENCE = 0.999
# The grid of constants for the recursion of Lemma D.1.
ALPHAS, KAPPAS, STARTS = (1.0, 1.5, 3.0), (0.5, 2.0), (0.0, 0.1, 1.0)


@dataclass(frozen=True)
class StronglyConvex(Experiment):
    """`1/2 sum h_i (x_i - c)^2` with curvatures from mu to L under `gamma/(t + t0)`; sigma^2 is the total variance."""

    name: str = "sgd-strongly-convex"
    title: str = "SGD with noise on a strongly convex quadratic: the 1/t rate, its constant, and Lemma D.1"
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

    def judge(self, generator: torch.Generator) -> Evidence:
        """Mean squared distance to the minimizer for both rules; then Lemma D.1."""
        steps = log_spaced(self.steps, 200)
        squares = distances(self, steps, generator)
        return Evidence([*rate_claims(self, squares, steps), recursion_claim(self)])


def distances(s: StronglyConvex, steps: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
    """The squared distance after each of `steps`, averaged over batches of chains."""
    measured, etas = set(steps), s.etas
    begin = torch.zeros(s.chains, s.dimension, dtype=torch.float64)
    stacks = {rule: {"params": begin, "decay": rule} for rule in RULES}
    chains, means = Chains("sgd", stacks, peak=max(etas), lam=s.lam), {rule: list[Tensor]() for rule in RULES}
    for t in range(s.steps + 1):
        distances = {rule: w - s.c for rule, w in chains.weights.items()}
        if t in measured:
            for rule, e in distances.items():
                means[rule].append(e.square().sum(1).view(BATCHES, -1).mean(1))
        if t < s.steps:
            noise = gaussian(begin.shape, generator, std=s.sigma / s.dimension**0.5)
            chains.step(etas[t], {rule: s.curvature * e + noise for rule, e in distances.items()})
    return {rule: torch.stack(values, 1) for rule, values in means.items()}


def rate_claims(s: StronglyConvex, squares: dict[str, Tensor], steps: Sequence[int]) -> list[Claim]:
    """How fast the distance falls in the last decade, the constant of the 1/t rate, and where constant decay stops."""
    decade = [k for k, t in enumerate(steps) if t >= s.steps / 10]
    shifted = torch.tensor([steps[k] + s.t0 for k in decade], dtype=torch.float64)
    scaled = squares[SCALED][:, decade]
    rate = mean_of(log_log_slope(shifted, scaled), CONFIDENCE)
    variance = float((s.sigma**2 / s.dimension * s.gamma**2 / (2.0 * s.curvature * s.gamma - 1.0)).sum())
    last = mean_of(scaled[:, -1] * (s.steps + s.t0), CONFIDENCE)
    constant = mean_of(squares[CONSTANT][:, -1], CONFIDENCE)
    stopped = float((s.lam * s.c / (s.curvature + s.lam)).square().sum())

    theorem = Source("Theorem 3.2", "mu-strongly convex, L-smooth, eta = gamma/(t + t0), mu gamma > 1")
    leading = Source("Theorem 3.2, to leading order", "quadratic with curvatures h_i, mu gamma > 1")
    proposition = Source("Proposition 3.1, coordinate by coordinate", "eta <= 1/(L + lambda), sum eta = infinity")
    falls = "scaled: the mean squared distance falls like 1/t (slope in the last decade, log-log)"
    tends = "scaled: t times the mean squared distance tends to sum gamma^2 sigma_i^2/(2 h_i gamma - 1)"
    stops = "constant: the mean squared distance stops at sum (lambda c/(h_i + lambda))^2"
    pull = Tolerance(0.0, "the interval over batches of chains covers -1; the pull of the decay adds some -0.001")
    covers = Tolerance(0.0, "the interval over batches of chains covers it")
    noise = Tolerance(0.05, "the variance that the noise still sustains at the last step, and sampling")
    return [
        covered("rate-with-noise", falls, theorem, rate, -1.0, pull),
        covered("variance", tends, leading, last, variance, covers),
        within_share("constant-stays", stops, proposition, constant, stopped, noise),
    ]


def recursion_claim(s: StronglyConvex) -> Claim:
    """Lemma D.1 with equality: `u <- (1 - alpha eta) u + kappa eta^2`, an SGD step with gradient `alpha u - kappa eta`.

    The optimizer does not decay; all constants run as one vector.
    """
    etas, gamma, t0 = s.etas, s.gamma, s.t0
    grid = torch.tensor(list(product(ALPHAS, KAPPAS, STARTS)), dtype=torch.float64)
    alpha, kappa, start = grid.unbind(1)
    constants = [sa_constant(u1=u, t1=0, alpha=a, kappa=k, gamma=gamma, t0=t0) for a, k, u in grid.tolist()]
    chains = Chains("sgd", {"u": {"params": start, "decay": "none"}}, peak=max(etas), lam=1.0)
    nu, u = grid.new_tensor(constants), chains.weights["u"]
    largest = (start * t0 / nu).max()
    for t, eta in enumerate(etas, 1):
        chains.step(eta, {"u": alpha * u - kappa * eta})
        largest = torch.maximum(largest, (u * (t + t0) / nu).max())

    lemma = Source("Lemma D.1", "alpha gamma > 1, alpha eta <= 1")
    stays = "u <- (1 - alpha eta) u + kappa eta^2 stays under nu/(t + t0), for a grid of constants"
    equal = Tolerance(1e-12, "rounding; nu/(t + t0) is met at the first step where the start dominates")
    return at_most("recursion-bound", stays, lemma, float(largest), 1.0, equal)
