"""Theorem 3.1: under SGD with scaled decay, `x <- x - eta g - q eta^2 x`, the weighted gradient of a smooth F vanishes.

The gradient g is unbiased and `E|g|^2 <= sigma^2 + rho |grad F|^2`; `q = lambda / eta_max`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Evidence, Source, at_most, below, mean_of, within_share
from muonsw.lab.theory.chains import BOTH, CONSTANT, SCALED, TRUE_RULES, Rules, chain, gaussian, gradient, march, sgd
from muonsw.lab.theory.experiment import Context, Experiment
from muonsw.lab.theory.hypotheses import Steps, check_rates, require, require_at_least, require_positive, robbins_monro


def stationarity_bound(
    etas: Steps, *, f_gap: float, L: float, q: float, sigma: float, rho: float = 1.0, bound: float
) -> float:
    """Bound `sum eta_t E|grad F(x_t)|^2` by `2 (f_gap + L sigma^2 S2 + q^2 bound^2 (S3 + L S4))`, Sk summing `eta^k`.

    `f_gap` is F at the start minus its infimum, and `E|x_t|^2 <= bound^2`. Decay enters only from the third power on.
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


def ripple_curvature(y: Tensor) -> Tensor:
    return (1.0 - RIPPLE) + RIPPLE * (FREQUENCY * y).cos()


@dataclass(frozen=True)
class NonconvexSettings:
    """Coordinates in a rippled bowl around `c`, started all over it, under `eta0 (1 + t)^-p`."""

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
        return robbins_monro(self.steps, self.eta0, self.p)

    @property
    def decades(self) -> list[int]:
        """Where decades of steps start and end, the first from step 0."""
        return [0, *(10**k for k in range(1, math.ceil(math.log10(self.steps)))), self.steps]


@dataclass(frozen=True)
class Stationarity:
    """What was measured of the chains of one rule."""

    end: Tensor  # where they are after the run
    squares: list[float]  # the squared gradient at each step, averaged over chains
    weighted: Tensor  # for each decade of steps and each chain, the eta-weighted mean of the squared gradient
    second_moment: float  # the largest mean of `x^2` over all steps


def wander(s: NonconvexSettings, starts: Tensor, context: Context) -> dict[str, Stationarity]:
    """Both rules from the same starts with the same noise."""
    etas, edges = s.etas, s.decades
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
    require_at_least("sigma", s.sigma, 0)
    require("more than one decade", s.steps > 100, steps=s.steps)
    starts = s.c + gaussian((s.chains,), context.generator, std=s.start_std)
    measured = wander(s, starts, context)
    assumed = "unbiased gradients of bounded variance, iterates bounded, sum eta = infinity, sum eta^2 < infinity"
    theorem = Source("Theorem 3.1", assumed)

    negative = Tolerance(0.0, "the upper end of the interval of the paired difference must be negative")
    claims = []
    for k, (before, after) in enumerate(pairwise(measured[SCALED].weighted), 1):
        falls = f"scaled: the eta-weighted squared gradient falls from decade {k - 1} to decade {k} of steps"
        claims.append(below(f"decade-{k}-falls", falls, theorem, mean_of(after - before), 0.0, negative))

    # The last decade: scaled decay against constant decay, which stays where the gradient balances it.
    etas = s.etas[s.decades[-2] :]
    constant, scaled = (mean_of(measured[rule].weighted[-1]) for rule in BOTH)
    curvature = float(ripple_curvature(measured[SCALED].end - s.c).mean())
    sustained = curvature * s.sigma**2 / 2.0 * math.fsum(eta**2 for eta in etas) / math.fsum(etas)
    balance = float((s.lam * measured[CONSTANT].end).square().mean())
    tenth = "scaled: in the last decade at most a tenth of constant decay's squared gradient is left"
    limits = (
        f"noise alone sustains h eta sigma^2/2 = {sustained:.1e} at these learning rates; the rest are chains that "
        "still roll off a hilltop. Averages over all steps keep the first ones and fall more slowly, with harmonic "
        "steps like 1/log T"
    )
    under = Tolerance(0.0, "the upper end of the interval must be below")
    claims.append(at_most("tail", tenth, theorem, scaled, 0.1 * constant.value, under, limits=limits))
    contrast = Source("contrast to Theorem 3.1", "sum eta = infinity")
    stays = "constant: the squared gradient stays at (lambda x)^2, where it balances the decay"
    noise = Tolerance(0.05, "what the noise adds at the learning rates of the last decade")
    claims.append(within_share("constant-stays", stays, contrast, constant, balance, noise))

    # The summed descent inequality of the proof at finite T.
    f_gap, size = float(ripple_loss(starts - s.c).mean()), math.sqrt(measured[SCALED].second_moment)
    bound = stationarity_bound(s.etas, f_gap=f_gap, L=1.0, q=s.lam / s.eta0, sigma=s.sigma, bound=size)
    total = math.fsum(eta * g for eta, g in zip(s.etas, measured[SCALED].squares, strict=True))
    proof = Source("proof of Theorem 3.1", "eta <= 1/(4 L), E x^2 bounded")
    descends = "scaled: sum eta E|grad F|^2 is under the finite-T bound of the proof"
    because = "a bound on a mean over chains; the sampling error is far below the distance to it"
    claims.append(at_most("descent-inequality", descends, proof, total, bound, Tolerance(0.0, because)))
    return Evidence(claims)


NONCONVEX = Experiment(
    name="sgd-nonconvex",
    title="SGD with noise in a rippled bowl: the weighted gradient vanishes under scaled decay only",
    hypotheses=("lambda > 0", "sigma >= 0", "sum eta = infinity", "sum eta^2 < infinity", "eta <= 1/(4 L)"),
    settings=NonconvexSettings(),
    function=run_nonconvex,
    cost=3.0,
)
