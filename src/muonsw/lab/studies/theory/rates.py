"""The 1/t rate: stochastic approximation's recursion by itself, and SGD with noise on a strongly convex objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab.claims.claim import Claim, Comparison, Outcome
from muonsw.lab.claims.statistics import log_log_slope, t_interval
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    CONSTANT,
    SCALED,
    TRUE_RULES,
    Rules,
    chain,
    gaussian,
    gradient,
    harmonic,
    log_spaced,
    march,
    sgd,
)
from muonsw.lab.studies.theory.recursion import recursion_claims
from muonsw.theory import check_schedule, first_contracting_step, strongly_convex_bound
from muonsw.theory.hypotheses import require, require_noise

BATCHES = 20
# One interval in a thousand misses the truth, so that a table of them hardly ever shows a false alarm.
CONFIDENCE = 0.999
NOISELESS = "/noiseless"


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


def run_strongly_convex(setting: StronglyConvexSettings, context: Context) -> Outcome:
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
    return Outcome(claims + recursion_claims(etas, gamma=s.gamma, t0=s.t0, context=context))


def distances(
    setting: StronglyConvexSettings, etas: Sequence[float], steps: Sequence[int], context: Context
) -> dict[str, Tensor]:
    """The squared distance after each of `steps`, averaged within each of 20 batches of chains."""
    s = setting
    curvature = torch.linspace(s.mu, s.L, s.dimension, dtype=torch.float64)
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
            torch.sub(w, s.c, out=gradient(w)).mul_(curvature)
            if not name.endswith(NOISELESS):
                gradient(w).add_(noise)
        optimizer.step()
    for name, w in weights.items():
        squares = (w.detach() - s.c).square().sum(1)
        kept[name].append(squares.view(min(BATCHES, len(squares)), -1).mean(1))
    return {name: torch.stack(seen, 1) for name, seen in kept.items()}


def slope_claim(late: Tensor, shifted: Tensor) -> Claim:
    """The rate with noise."""
    slopes = log_log_slope(shifted, late)
    return Claim(
        id="rate-with-noise",
        statement="scaled: the mean squared distance falls like 1/t (slope in the last decade, log-log)",
        reference="Theorem 3.2",
        hypothesis="mu-strongly convex, L-smooth, eta = gamma/(t + t0), mu gamma > 1",
        predicted=-1.0,
        measured=float(slopes.mean()),
        comparison=Comparison.INSIDE,
        tolerance=0.0,
        because="the interval over batches of chains covers -1; the pull of the decay adds some -0.001",
        interval=t_interval(slopes, CONFIDENCE),
        limits="O(1/t) is an upper bound; that the rate is attained is seen here, where the noise is isotropic",
    )


def noiseless_claim(late: Tensor, shifted: Tensor) -> Claim:
    """The rate without noise."""
    return Claim(
        id="rate-without-noise",
        statement="scaled, without noise: the squared distance falls like 1/t^2",
        reference="Corollary 3.1, to leading order",
        hypothesis="sigma = 0, mu gamma > 1",
        predicted=-2.0,
        measured=float(log_log_slope(shifted, late).mean()),
        comparison=Comparison.ABSOLUTE,
        tolerance=0.02,
        because="the start, forgotten like (t0/t)^(mu gamma - 1), still bends the line by about t0/t",
    )


def variance_claim(setting: StronglyConvexSettings, last: Tensor) -> Claim:
    """The constant in front of 1/t."""
    s = setting
    curvature = torch.linspace(s.mu, s.L, s.dimension, dtype=torch.float64)
    per_entry = s.sigma**2 / s.dimension
    expected = float((per_entry * s.gamma**2 / (2.0 * curvature * s.gamma - 1.0)).sum())
    scaled = last * (s.steps + s.t0)
    return Claim(
        id="variance",
        statement="scaled: t times the mean squared distance tends to sum gamma^2 sigma_i^2/(2 h_i gamma - 1)",
        reference="Theorem 3.2, to leading order",
        hypothesis="quadratic with curvatures h_i, mu gamma > 1",
        predicted=expected,
        measured=float(scaled.mean()),
        comparison=Comparison.INSIDE,
        tolerance=0.0,
        because="the interval over batches of chains covers it",
        interval=t_interval(scaled, CONFIDENCE),
    )


def bound_claim(setting: StronglyConvexSettings, squares: Tensor, steps: Sequence[int]) -> Claim:
    """The explicit bound of the proof, at every kept step."""
    s = setting
    constants = {"gamma": s.gamma, "t0": s.t0, "mu": s.mu, "L": s.L, "q": s.lam * s.t0 / s.gamma, "sigma": s.sigma}
    x_star, u1, t1 = abs(s.c) * s.dimension**0.5, float(squares[0]), steps[0]
    bounds = [strongly_convex_bound(t, u1=u1, t1=t1, x_star=x_star, **constants) for t in steps]
    return Claim(
        id="explicit-bound",
        statement="scaled: the mean squared distance is under the proof's nu/(t + t0) (largest ratio over steps)",
        reference="proof of Theorem 3.2",
        hypothesis="from the first step at which K1 eta + K2 eta^3 <= mu",
        predicted=1.0,
        measured=float((squares / squares.new_tensor(bounds)).max()),
        comparison=Comparison.AT_MOST,
        tolerance=1e-12,
        because="rounding; the two may be equal at the first step",
    )


def constant_claim(setting: StronglyConvexSettings, last: Tensor) -> Claim:
    """Constant decay stops at the shifted point."""
    s = setting
    curvature = torch.linspace(s.mu, s.L, s.dimension, dtype=torch.float64)
    return Claim(
        id="constant-stays",
        statement="constant: the mean squared distance stops at sum (lambda c/(h_i + lambda))^2",
        reference="Proposition 3.1, coordinate by coordinate",
        hypothesis="eta <= 1/(L + lambda), sum eta = infinity",
        predicted=float((s.lam * s.c / (curvature + s.lam)).square().sum()),
        measured=float(last.mean()),
        comparison=Comparison.RELATIVE,
        tolerance=0.05,
        because="the variance that the noise still sustains at the last step, and sampling",
        interval=t_interval(last, CONFIDENCE),
    )


STRONGLY_CONVEX = Experiment(
    name="sgd-strongly-convex",
    title="SGD with noise on a strongly convex quadratic: the 1/t rate, its constant, and Lemma D.1",
    hypotheses=("lambda > 0", "sigma >= 0", "0 < mu <= L", "mu gamma > 1", "mu eta <= 1"),
    settings=StronglyConvexSettings(),
    function=run_strongly_convex,
    cost=8.0,
)
