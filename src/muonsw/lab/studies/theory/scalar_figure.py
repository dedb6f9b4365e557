"""The scalar quadratic under `eta0/(1 + t)` from many starts: the left panel of the convergence figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from muonsw.lab.claims.claim import Claim, Comparison, Outcome, Series
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import CONSTANT, SCALED, gaussian, log_spaced
from muonsw.lab.studies.theory.scalar import HYPOTHESES, Quadratic, descend, farthest
from muonsw.theory import (
    PowerLaw,
    check_schedule,
    constant_decay_fixed_point,
    constant_decay_loss_gap,
    frozen_point,
)


@dataclass(frozen=True)
class ScalarFigureSettings(Quadratic):
    """The left panel of the convergence figure: `eta0/(1 + t)` from many starts near zero."""

    eta0: float = 0.9
    steps: int = 100_000
    chains: int = 100
    start_std: float = 0.02
    points: int = 150


def run_scalar_figure(setting: ScalarFigureSettings, context: Context) -> Outcome:
    """The schedule of the figure, whose constant-decay chains flatten at the gap while the others fall on."""
    s = setting
    law = PowerLaw(s.eta0, 1.0)
    law.require_robbins_monro()
    etas = [law(t) for t in range(s.steps)]
    check_schedule(etas, a=s.a, lam=s.lam).require()
    starts = gaussian((s.chains,), context.generator, std=s.start_std)
    steps = [0, *log_spaced(s.steps, s.points)]
    _, seen = descend({CONSTANT: starts, SCALED: starts}, etas, s, context, keep=steps)
    losses = {name: s.a / 2.0 * (w - s.c).square() for name, w in seen.items()}
    initial = float((s.a / 2.0 * (starts - s.c).square()).mean())
    gap = constant_decay_loss_gap(a=s.a, c=s.c, lam=s.lam)
    claims = figure_claims(setting, etas, starts, {name: loss[:, -1] for name, loss in losses.items()}, initial)
    levels = {CONSTANT: gap / initial}
    series = [
        Series(f"scalar/{name}", name, [1 + t for t in steps], (loss / initial).tolist(), levels.get(name))
        for name, loss in losses.items()
    ]
    return Outcome(claims, series)


def figure_claims(
    setting: ScalarFigureSettings, etas: Sequence[float], starts: Tensor, ends: dict[str, Tensor], initial: float
) -> list[Claim]:
    """Where the curves of the left panel end."""
    s = setting
    fixed = constant_decay_fixed_point(a=s.a, c=s.c, lam=s.lam)
    gap = constant_decay_loss_gap(a=s.a, c=s.c, lam=s.lam)
    left = frozen_point(starts, etas, a=s.a, c=s.c, lam=s.lam) - fixed
    forgotten = 2.0 * float(left.abs().max()) / abs(s.c - fixed)
    return [
        Claim(
            id="figure-constant",
            statement="left panel: constant decay flattens at its loss gap",
            reference="Figure 2 (left), Proposition 3.1",
            hypothesis="0 < eta <= 1/(a + lambda), sum eta = infinity",
            predicted=gap / initial,
            measured=farthest(ends[CONSTANT] / initial, gap / initial),
            comparison=Comparison.RELATIVE,
            tolerance=1.01 * forgotten + 1e-9,
            because="what the product of 1 - eta (a + lambda) leaves of the start, counted twice in the square",
        ),
        Claim(
            id="figure-scaled",
            statement="left panel: scaled decay drives the loss towards zero",
            reference="Figure 2 (left), Corollary 3.1",
            hypothesis="sum eta = infinity, sum eta^2 < infinity",
            predicted=s.a / 2.0 * error_bound(setting, etas, starts) ** 2 / initial,
            measured=float(ends[SCALED].max()) / initial,
            comparison=Comparison.AT_MOST,
            tolerance=1e-9,
            because="the bound |e| <- (1 - a eta)|e| + q eta^2 |c| of the proof, from the worst start",
            limits="the loss falls like t^(-2 a eta0); zero itself is out of reach of a finite run",
        ),
    ]


def error_bound(setting: ScalarFigureSettings, etas: Sequence[float], starts: Tensor) -> float:
    """Bound the error of scaled decay after all steps by the recursion of Lemma D.1."""
    bound = float((starts - setting.c).abs().max())
    q = setting.lam / max(etas)
    for eta in etas:
        bound = (1.0 - setting.a * eta) * bound + q * eta**2 * abs(setting.c)
    return bound


SCALAR_FIGURE = Experiment(
    name="scalar-figure",
    title="scalar quadratic under eta0/(1 + t), many starts: the left panel of the figure",
    hypotheses=(*HYPOTHESES, "sum eta = infinity", "sum eta^2 < infinity"),
    settings=ScalarFigureSettings(),
    function=run_scalar_figure,
    cost=24.0,
)
