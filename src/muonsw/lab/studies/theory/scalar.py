"""The shifted scalar quadratic `a/2 (w - c)^2`: where each rule settles, and where a short schedule freezes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from muonsw.lab import theory
from muonsw.lab.claims.claim import Claim, Evidence, Series, Source, at_most, within_share
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

Number = TypeVar("Number", float, Tensor)
HYPOTHESES = ("a > 0", "lambda > 0", "0 < eta <= 1/(a + lambda)")
STOPS = "0 < eta <= 1/(a + lambda), sum eta = infinity"
PROPOSITION = Source("Proposition 3.1", STOPS)
REMARK = "remark after Proposition 3.1"
ROUNDING = Tolerance(1e-11, "rounding: each step adds an ulp of w, and the contraction forgets old ones")


@dataclass(frozen=True)
class Quadratic:
    """The objective `a/2 (w - c)^2`, the decay, and chains that start near zero."""

    a: float = 1.0
    c: float = 1.0
    lam: float = 0.1
    rules: Rules = TRUE_RULES
    chains: int = 100
    start_std: float = 0.02

    @property
    def fixed_point(self) -> float:
        """Where constant decay settles."""
        return theory.constant_decay_fixed_point(a=self.a, c=self.c, lam=self.lam)

    @property
    def gap(self) -> float:
        """The loss that constant decay settles at."""
        return theory.constant_decay_loss_gap(a=self.a, c=self.c, lam=self.lam)

    def loss(self, w: Tensor) -> Tensor:
        """The objective."""
        return self.a / 2.0 * (w - self.c).square()

    def frozen(self, w0: Number, etas: Sequence[float]) -> Number:
        """Where constant decay stands after all steps."""
        return theory.frozen_point(w0, etas, a=self.a, c=self.c, lam=self.lam)

    def starts(self, generator: torch.Generator) -> Tensor:
        """Where the chains start."""
        return gaussian((self.chains,), generator, std=self.start_std)


@dataclass(frozen=True)
class ScalarSettings(Quadratic):
    """The schedule `gamma/(t + t0)` and the schedules `freeze_eta0 (1 + t)^-p` that freeze."""

    gamma: float = 2.0
    t0: float = 4.0
    steps: int = 30_000
    freeze_eta0: float = 0.5
    freeze_exponents: tuple[float, ...] = (1.5, 2.0)
    freeze_steps: int = 5_000


@dataclass(frozen=True)
class ScalarFigureSettings(Quadratic):
    """The left panel of the convergence figure: `eta0/(1 + t)` from many starts near zero."""

    eta0: float = 0.9
    steps: int = 100_000
    points: int = 150


def descend(
    starts: Mapping[str, Tensor],
    etas: Sequence[float],
    s: Quadratic,
    context: Context,
    *,
    part: tuple[float, float] = (0.0, 1.0),
    keep: Collection[int] = (),
) -> dict[str, Tensor]:
    """Run all chains under each rule; return where they are after the steps in `keep` and after the last.

    The shape is (chains, kept steps).
    """
    weights = {name: chain(start) for name, start in starts.items()}
    groups = [{"params": [w], "decay": s.rules[name]} for name, w in weights.items()]
    optimizer = sgd(groups, peak=max(etas), lam=s.lam)
    wanted = {*keep, len(etas)}
    kept = {name: [start] if 0 in wanted else [] for name, start in starts.items()}
    for t in march(optimizer, etas, context.progress, part=part):
        for w in weights.values():
            torch.sub(w, s.c, out=gradient(w)).mul_(s.a)
        optimizer.step()
        if t + 1 in wanted:
            for name, w in weights.items():
                kept[name].append(w.detach().clone())
    return {name: torch.stack(seen, 1) for name, seen in kept.items()}


def run_scalar(s: ScalarSettings, context: Context) -> Evidence:
    """Both rules under `gamma/(t + t0)`, then constant decay under schedules of finite sum."""
    etas = [s.gamma / (t + s.t0) for t in range(s.steps)]
    theory.check_schedule(etas, a=s.a, lam=s.lam).require()
    starts = s.starts(context.generator)
    error = theory.scaled_decay_error(s.steps, a=s.a, c=s.c, lam=s.lam, gamma=s.gamma, t0=s.t0)
    seen = descend(dict.fromkeys(BOTH, starts), etas, s, context, part=(0.0, 0.9))
    ends = {rule: w[:, -1] for rule, w in seen.items()}
    settled, gap = farthest(ends[CONSTANT], s.fixed_point), farthest(s.loss(ends[CONSTANT]), s.gap)
    left = farthest(s.c - ends[SCALED], error)
    corollary = Source("Corollary 3.1, to leading order", "sum eta = infinity, sum eta^2 < infinity, a gamma > 1")
    settles = "SGD with constant decay settles at a c/(a + lambda), not at the minimizer c"
    costs = "the loss it settles at is a/2 (lambda c/(a + lambda))^2 above the minimum"
    arrives = "SGD with scaled decay approaches c up to lambda gamma t0 c/((a gamma - 1)(t + t0))"
    limits = "a finite run shows the rate at which the error falls, not its limit"
    start = Tolerance(1e-6, "the start is forgotten like (t0/T)^(gamma (a + lambda)), 3e-9 here")
    squared = "an error of 1e-6 in w counts (a + lambda)/lambda times in w - c and twice in its square"
    doubled = Tolerance(2e-6 * (s.a + s.lam) / s.lam, squared)
    leading = Tolerance(0.01, "terms of relative order t0/T, and the start, forgotten like (t0/T)^(a gamma - 1)")
    claims = [
        within_share("constant-fixed-point", settles, PROPOSITION, settled, s.fixed_point, start),
        within_share("constant-loss-gap", costs, PROPOSITION, gap, s.gap, doubled),
        within_share("scaled-error", arrives, corollary, left, error, leading, limits=limits),
    ]
    share = 0.1 / len(s.freeze_exponents)
    for number, p in enumerate(s.freeze_exponents):
        claims += freeze_claims(s, p, starts, context, part=(0.9 + number * share, 0.9 + (number + 1) * share))
    return Evidence(claims)


def freeze_claims(
    s: ScalarSettings, p: float, starts: Tensor, context: Context, *, part: tuple[float, float]
) -> list[Claim]:
    """Constant decay under `eta0 (1 + t)^-p` with p > 1: the sum of all steps is finite, so w stops on its way."""
    law = theory.PowerLaw(s.freeze_eta0, p)
    etas = [law(t) for t in range(s.freeze_steps)]
    left = s.frozen(s.fixed_point + 1.0, etas) - s.fixed_point
    tuned = starts.new_tensor([s.fixed_point + (s.c - s.fixed_point) / left])
    begin = torch.cat([starts, tuned])
    end = descend({CONSTANT: begin}, etas, s, context, part=part)[CONSTANT][:, -1]
    expected = s.frozen(begin, etas)
    worst = int((end - expected)[:-1].abs().argmax())
    finite = Source(REMARK, "sum eta < infinity, eta <= 1/(a + lambda)")
    lucky = Source(REMARK, "sum eta < infinity, w0 = wbar + (c - wbar)/prod(1 - eta (a + lambda))")
    freezes = f"with eta ~ t^-{p:g} the iterate freezes at wbar + (w0 - wbar) prod(1 - eta (a + lambda))"
    lands = "one finely tuned start lands on the minimizer all the same"
    return [
        within_share(f"freeze-p{p:g}", freezes, finite, float(end[worst]), float(expected[worst]), ROUNDING),
        within_share(f"tuned-start-p{p:g}", lands, lucky, float(end[-1]), s.c, ROUNDING),
    ]


def run_scalar_figure(s: ScalarFigureSettings, context: Context) -> Evidence:
    """The schedule of the figure, whose constant-decay chains flatten at the gap while the others fall on."""
    etas = robbins_monro(s.steps, s.eta0)
    theory.check_schedule(etas, a=s.a, lam=s.lam).require()
    starts = s.starts(context.generator)
    steps = [0, *log_spaced(s.steps, s.points)]
    seen = descend(dict.fromkeys(BOTH, starts), etas, s, context, keep=steps)
    initial, losses = float(s.loss(starts).mean()), {rule: s.loss(w) for rule, w in seen.items()}
    gap, bound = s.gap / initial, s.a / 2.0 * error_bound(s, etas, starts) ** 2 / initial
    flat, lowest = farthest(losses[CONSTANT][:, -1] / initial, gap), float(losses[SCALED][:, -1].max()) / initial
    forgotten = 2.0 * float((s.frozen(starts, etas) - s.fixed_point).abs().max()) / abs(s.c - s.fixed_point)
    left = Source("Figure 2 (left), Proposition 3.1", STOPS)
    corollary = Source("Figure 2 (left), Corollary 3.1", "sum eta = infinity, sum eta^2 < infinity")
    flattens = "left panel: constant decay flattens at its loss gap"
    falls = "left panel: scaled decay drives the loss towards zero"
    limits = "the loss falls like t^(-2 a eta0); zero itself is out of reach of a finite run"
    start = "what the product of 1 - eta (a + lambda) leaves of the start, counted twice in the square"
    worst = Tolerance(1e-9, "the bound |e| <- (1 - a eta)|e| + q eta^2 |c| of the proof, from the worst start")
    claims = [
        within_share("figure-constant", flattens, left, flat, gap, Tolerance(1.01 * forgotten + 1e-9, start)),
        at_most("figure-scaled", falls, corollary, lowest, bound, worst, limits=limits),
    ]
    levels, times = {CONSTANT: gap}, [1 + t for t in steps]
    curves = {rule: (loss / initial).tolist() for rule, loss in losses.items()}
    return Evidence(
        claims, [Series(f"scalar/{rule}", rule, times, values, levels.get(rule)) for rule, values in curves.items()]
    )


def error_bound(s: ScalarFigureSettings, etas: Sequence[float], starts: Tensor) -> float:
    """Bound the error of scaled decay after all steps by the recursion of Lemma D.1."""
    bound = float((starts - s.c).abs().max())
    q = s.lam / max(etas)
    for eta in etas:
        bound = (1.0 - s.a * eta) * bound + q * eta**2 * abs(s.c)
    return bound


SCALAR = Experiment(
    name="scalar",
    title="scalar quadratic: constant decay stops short, scaled decay arrives, short schedules freeze",
    hypotheses=(*HYPOTHESES, "a gamma > 1"),
    settings=ScalarSettings(),
    function=run_scalar,
    cost=7.0,
)
SCALAR_FIGURE = Experiment(
    name="scalar-figure",
    title="scalar quadratic under eta0/(1 + t), many starts: the left panel of the figure",
    hypotheses=(*HYPOTHESES, "sum eta = infinity", "sum eta^2 < infinity"),
    settings=ScalarFigureSettings(),
    function=run_scalar_figure,
    cost=24.0,
)
