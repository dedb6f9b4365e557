"""Proposition 3.1 and Corollary 3.1: the scalar quadratic `a/2 (w - c)^2` under SGD, and the left panel of Figure 2.

`a` is the curvature, `c` the minimizer, `lam` the weight decay lambda. Constant decay stops short of `c`, scaled decay
reaches it, and a schedule of finite sum freezes on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Series, Source, at_most, within_share
from muonsw.lab.theory.chains import CONSTANT, RULES, SCALED, Chains, Experiment, farthest, gaussian, log_spaced
from muonsw.lab.theory.hypotheses import (
    Steps,
    check_rates,
    require,
    require_at_least,
    require_positive,
    robbins_monro,
)


def constant_decay_fixed_point(*, a: float, c: float, lam: float) -> float:
    """Where SGD with constant decay settles: `wbar = a c / (a + lambda)`, short of the minimizer `c`.

    Hypotheses: a > 0, lambda > 0. Every start converges to it if `0 < eta <= 1/(a + lambda)` and eta sums to infinity.

    Examples:
        >>> constant_decay_fixed_point(a=1.0, c=3.0, lam=0.5)
        2.0
    """
    require_positive("a", a)
    require_positive("lambda", lam)
    return a * c / (a + lam)


def constant_decay_loss_gap(*, a: float, c: float, lam: float) -> float:
    """The loss at `constant_decay_fixed_point`: `a/2 (lambda c / (a + lambda))^2`.

    Examples:
        >>> constant_decay_loss_gap(a=1.0, c=3.0, lam=0.5)
        0.5
    """
    return a / 2.0 * (c - constant_decay_fixed_point(a=a, c=c, lam=lam)) ** 2


def frozen_point(w0: Tensor, etas: Steps, *, a: float, c: float, lam: float) -> Tensor:
    """Where constant decay is after finitely many steps: `wbar + (w0 - wbar) prod(1 - eta (a + lambda))`.

    If the sum of eta is finite, the product stays positive and the iterate freezes here.

    Hypotheses: a > 0, lambda > 0, 0 <= eta <= 1/(a + lambda).
    """
    wbar = constant_decay_fixed_point(a=a, c=c, lam=lam)
    rates = check_rates(etas, {"eta <= 1/(a + lambda)": 1.0 / (a + lam)})
    return wbar + (w0 - wbar) * prod(1.0 - eta * (a + lam) for eta in rates)


def scaled_decay_error(t: float, *, a: float, c: float, lam: float, gamma: float, t0: float) -> float:
    """The distance of SGD with scaled decay from the minimizer after t steps, `c - w_t`, to leading order.

    The schedule is `eta_t = gamma/(t + t0)`, so that `q = lambda t0 / gamma`, and the error `lambda gamma t0 c /
    ((a gamma - 1)(t + t0))` solves `e_{t+1} = (1 - a eta - q eta^2) e_t + q eta^2 c` up to order `1/t^2`.

    Hypotheses: a > 0, lambda > 0, t0 > 0, and a gamma > 1, since the start is forgotten like `t^(-a gamma)`.
    """
    for name, value in {"a": a, "lambda": lam, "t0": t0, "gamma": gamma}.items():
        require_positive(name, value)
    require("a*gamma > 1", a * gamma > 1.0, a=a, gamma=gamma)
    require_at_least("t", t, 0)
    return lam * gamma * t0 * c / ((a * gamma - 1.0) * (t + t0))


STOPS = "0 < eta <= 1/(a + lambda), sum eta = infinity"
ROUNDING = Tolerance(1e-11, "rounding: each step adds an ulp of w, and the contraction forgets old ones")


@dataclass(frozen=True)
class Quadratic(Experiment):
    """The objective, the decay, and the chains, which start near zero."""

    a: float = 1.0
    c: float = 1.0
    lam: float = 0.1
    chains: int = 100
    start_std: float = 0.02

    @property
    def constants(self) -> dict[str, float]:
        return {"a": self.a, "c": self.c, "lam": self.lam}

    def loss(self, w: Tensor) -> Tensor:
        return self.a / 2.0 * (w - self.c).square()


@dataclass(frozen=True)
class Scalar(Quadratic):
    """The schedule `gamma/(t + t0)`, and the schedules `freeze_eta0 (1 + t)^-p`, which freeze."""

    name: str = "scalar"
    title: str = "scalar quadratic: constant decay stops short, scaled decay arrives, short schedules freeze"
    gamma: float = 2.0
    t0: float = 4.0
    steps: int = 30_000
    freeze_eta0: float = 0.5
    freeze_exponents: tuple[float, ...] = (1.5, 2.0)
    freeze_steps: int = 5_000

    def judge(self, generator: torch.Generator) -> Evidence:
        """Test both rules under `gamma/(t + t0)`, then constant decay under schedules of finite sum."""
        wbar = constant_decay_fixed_point(**self.constants)
        etas = [self.gamma / (t + self.t0) for t in range(self.steps)]
        check_rates(etas, {"eta <= 1/(a + lambda)": 1.0 / (self.a + self.lam)})
        error = scaled_decay_error(self.steps, gamma=self.gamma, t0=self.t0, **self.constants)
        starts = gaussian((self.chains,), generator, std=self.start_std)
        ends = {rule: w[:, -1] for rule, w in descend(dict.fromkeys(RULES, starts), etas, self).items()}
        settled, left = farthest(ends[CONSTANT], wbar), farthest(self.c - ends[SCALED], error)

        proposition = Source("Proposition 3.1", STOPS)
        corollary = Source("Corollary 3.1, to leading order", "sum eta = infinity, sum eta^2 < infinity, a gamma > 1")
        settles = "SGD with constant decay settles at a c/(a + lambda), not at the minimizer c"
        arrives = "SGD with scaled decay approaches c up to lambda gamma t0 c/((a gamma - 1)(t + t0))"
        start = Tolerance(1e-6, "the start is forgotten like (t0/T)^(gamma (a + lambda)), 3e-9 here")
        leading = Tolerance(0.01, "terms of relative order t0/T, and the start, forgotten like (t0/T)^(a gamma - 1)")
        claims = [
            within_share("constant-fixed-point", settles, proposition, settled, wbar, start),
            within_share("scaled-error", arrives, corollary, left, error, leading),
        ]
        return Evidence([*claims, *(freeze_claim(self, p, starts) for p in self.freeze_exponents)])


@dataclass(frozen=True)
class ScalarFigure(Quadratic):
    """The left panel of the convergence figure: `eta0/(1 + t)` from many starts."""

    name: str = "scalar-figure"
    title: str = "scalar quadratic under eta0/(1 + t), many starts: the left panel of the figure"
    eta0: float = 0.9
    steps: int = 100_000
    points: int = 150

    def judge(self, generator: torch.Generator) -> Evidence:
        """The schedule of the figure: constant decay flattens at the gap, scaled decay keeps falling."""
        wbar = constant_decay_fixed_point(**self.constants)
        etas = robbins_monro(self.steps, self.eta0)
        starts = gaussian((self.chains,), generator, std=self.start_std)
        # Before the run, because it checks the learning rates.
        forgotten = 2.0 * float((frozen_point(starts, etas, **self.constants) - wbar).abs().max()) / abs(self.c - wbar)
        steps = [0, *log_spaced(self.steps, self.points)]
        paths = descend(dict.fromkeys(RULES, starts), etas, self, keep=steps)
        initial = float(self.loss(starts).mean())
        losses = {rule: self.loss(w) / initial for rule, w in paths.items()}
        gap = constant_decay_loss_gap(**self.constants) / initial
        # The proof's recursion for the error of scaled decay, from the worst start.
        error, q = float((starts - self.c).abs().max()), self.lam / max(etas)
        for eta in etas:
            error = (1.0 - self.a * eta) * error + q * eta**2 * abs(self.c)
        bound = self.a / 2.0 * error**2 / initial
        flat, lowest = farthest(losses[CONSTANT][:, -1], gap), float(losses[SCALED][:, -1].max())

        left = Source("Figure 2 (left), Proposition 3.1", STOPS)
        corollary = Source("Figure 2 (left), Corollary 3.1", "sum eta = infinity, sum eta^2 < infinity")
        flattens = "left panel: constant decay flattens at its loss gap"
        falls = "left panel: scaled decay drives the loss towards zero"
        start = "what the product of 1 - eta (a + lambda) leaves of the start, counted twice in the square"
        worst = Tolerance(1e-9, "the bound |e| <- (1 - a eta)|e| + q eta^2 |c| of the proof, from the worst start")
        claims = [
            within_share("figure-constant", flattens, left, flat, gap, Tolerance(1.01 * forgotten + 1e-9, start)),
            at_most("figure-scaled", falls, corollary, lowest, bound, worst),
        ]
        levels, times = {CONSTANT: gap}, [1 + t for t in steps]
        series = [Series(f"scalar/{rule}", rule, times, losses[rule].tolist(), levels.get(rule)) for rule in losses]
        return Evidence(claims, series)


def descend(
    starts: Mapping[str, Tensor], etas: Sequence[float], s: Quadratic, *, keep: Collection[int] = ()
) -> dict[str, Tensor]:
    """Run all chains under each rule; return the weights after the steps in `keep` and the last, (chains, steps)."""
    stacks = {rule: {"params": start, "decay": rule} for rule, start in starts.items()}
    chains, recorded = Chains("sgd", stacks, peak=max(etas), lam=s.lam), {*keep, len(etas)}
    points = {rule: [start] if 0 in recorded else [] for rule, start in starts.items()}
    for t, eta in enumerate(etas, 1):
        chains.step(eta, {rule: s.a * (w - s.c) for rule, w in chains.weights.items()})
        if t in recorded:
            for rule, w in chains.weights.items():
                points[rule].append(w.clone())
    return {rule: torch.stack(path, 1) for rule, path in points.items()}


def freeze_claim(s: Scalar, p: float, starts: Tensor) -> Claim:
    """Constant decay under `eta0 (1 + t)^-p` with p > 1: the sum of eta is finite, so w stops before it arrives."""
    etas = [s.freeze_eta0 * (1.0 + t) ** -p for t in range(s.freeze_steps)]
    end = descend({CONSTANT: starts}, etas, s)[CONSTANT][:, -1]
    expected = frozen_point(starts, etas, **s.constants)
    worst = int((end - expected).abs().argmax())
    finite = Source("remark after Proposition 3.1", "sum eta < infinity, eta <= 1/(a + lambda)")
    freezes = f"with eta ~ t^-{p:g} the iterate freezes at wbar + (w0 - wbar) prod(1 - eta (a + lambda))"
    return within_share(f"freeze-p{p:g}", freezes, finite, float(end[worst]), float(expected[worst]), ROUNDING)
