"""The shifted scalar quadratic `a/2 (w - c)^2`: where each rule settles, and where a short schedule freezes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab.claims.claim import Claim, Comparison, Outcome
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
    march,
    sgd,
)
from muonsw.theory import (
    PowerLaw,
    check_schedule,
    constant_decay_fixed_point,
    constant_decay_loss_gap,
    frozen_point,
    scaled_decay_error,
)

ROUNDING = "rounding: each step adds an ulp of w, and the contraction forgets old ones"


@dataclass(frozen=True)
class Quadratic:
    """The objective `a/2 (w - c)^2`, the decay, and which rule stands behind which name."""

    a: float = 1.0
    c: float = 1.0
    lam: float = 0.1
    rules: Rules = TRUE_RULES


@dataclass(frozen=True)
class ScalarSettings(Quadratic):
    """The schedule `gamma/(t + t0)` and the schedules `freeze_eta0 (1 + t)^-p` that freeze."""

    gamma: float = 2.0
    t0: float = 4.0
    steps: int = 30_000
    chains: int = 100
    start_std: float = 0.02
    freeze_eta0: float = 0.5
    freeze_exponents: tuple[float, ...] = (1.5, 2.0)
    freeze_steps: int = 5_000


def descend(
    starts: dict[str, Tensor],
    etas: Sequence[float],
    setting: Quadratic,
    context: Context,
    *,
    part: tuple[float, float] = (0.0, 1.0),
    keep: Sequence[int] = (),
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run all chains of both rules; return where they end and where they were after the steps in `keep`."""
    weights = {name: chain(start) for name, start in starts.items()}
    groups = [{"params": [w], "decay": setting.rules[name]} for name, w in weights.items()]
    optimizer = sgd(groups, peak=max(etas), lam=setting.lam)
    wanted = set(keep)
    kept = {name: [start.clone()] if 0 in wanted else list[Tensor]() for name, start in starts.items()}
    for t in march(optimizer, etas, context.progress, part=part):
        for w in weights.values():
            torch.sub(w, setting.c, out=gradient(w)).mul_(setting.a)
        optimizer.step()
        if t + 1 in wanted:
            for name, w in weights.items():
                kept[name].append(w.detach().clone())
    ends = {name: w.detach() for name, w in weights.items()}
    return ends, {name: torch.stack(seen, 1) for name, seen in kept.items() if seen}


def run_scalar(setting: ScalarSettings, context: Context) -> Outcome:
    """Both rules under `gamma/(t + t0)`, then constant decay under schedules of finite sum."""
    s = setting
    etas = harmonic(s.steps, gamma=s.gamma, t0=s.t0)
    check_schedule(etas, a=s.a, lam=s.lam).require()
    starts = gaussian((s.chains,), context.generator, std=s.start_std)
    error = scaled_decay_error(s.steps, a=s.a, c=s.c, lam=s.lam, gamma=s.gamma, t0=s.t0)
    ends, _ = descend({CONSTANT: starts, SCALED: starts}, etas, s, context, part=(0.0, 0.9))
    fixed = constant_decay_fixed_point(a=s.a, c=s.c, lam=s.lam)
    gap = constant_decay_loss_gap(a=s.a, c=s.c, lam=s.lam)
    loss = s.a / 2.0 * (ends[CONSTANT] - s.c).square()
    claims = [
        Claim(
            id="constant-fixed-point",
            statement="SGD with constant decay settles at a c/(a + lambda), not at the minimizer c",
            reference="Proposition 3.1",
            hypothesis="0 < eta <= 1/(a + lambda), sum eta = infinity",
            predicted=fixed,
            measured=farthest(ends[CONSTANT], fixed),
            comparison=Comparison.RELATIVE,
            tolerance=1e-6,
            because="the start is forgotten like (t0/T)^(gamma (a + lambda)), 3e-9 here",
        ),
        Claim(
            id="constant-loss-gap",
            statement="the loss it settles at is a/2 (lambda c/(a + lambda))^2 above the minimum",
            reference="Proposition 3.1",
            hypothesis="0 < eta <= 1/(a + lambda), sum eta = infinity",
            predicted=gap,
            measured=farthest(loss, gap),
            comparison=Comparison.RELATIVE,
            tolerance=2e-6 * (s.a + s.lam) / s.lam,
            because="an error of 1e-6 in w counts (a + lambda)/lambda times in w - c and twice in its square",
        ),
        Claim(
            id="scaled-error",
            statement="SGD with scaled decay approaches c up to lambda gamma t0 c/((a gamma - 1)(t + t0))",
            reference="Corollary 3.1, to leading order",
            hypothesis="sum eta = infinity, sum eta^2 < infinity, a gamma > 1",
            predicted=error,
            measured=farthest(s.c - ends[SCALED], error),
            comparison=Comparison.RELATIVE,
            tolerance=0.01,
            because="terms of relative order t0/T, and the start, forgotten like (t0/T)^(a gamma - 1)",
            limits="a finite run shows the rate at which the error falls, not its limit",
        ),
    ]
    return Outcome(claims + freeze(setting, starts, context))


def freeze(setting: ScalarSettings, starts: Tensor, context: Context) -> list[Claim]:
    """Constant decay under `eta0 (1 + t)^-p` with p > 1: the step budget runs out."""
    s, claims = setting, []
    share = 0.1 / len(s.freeze_exponents)
    for number, p in enumerate(s.freeze_exponents):
        law = PowerLaw(s.freeze_eta0, p)
        etas = [law(t) for t in range(s.freeze_steps)]
        fixed = constant_decay_fixed_point(a=s.a, c=s.c, lam=s.lam)
        left = float(frozen_point(fixed + 1.0, etas, a=s.a, c=s.c, lam=s.lam)) - fixed
        tuned = starts.new_tensor([fixed + (s.c - fixed) / left])
        begin = torch.cat([starts, tuned])
        part = (0.9 + number * share, 0.9 + (number + 1) * share)
        end = descend({CONSTANT: begin}, etas, s, context, part=part)[0][CONSTANT]
        expected = frozen_point(begin, etas, a=s.a, c=s.c, lam=s.lam)
        worst = int((end - expected)[:-1].abs().argmax())
        claims += [
            Claim(
                id=f"freeze-p{p:g}",
                statement=f"with eta ~ t^-{p:g} the iterate freezes at wbar + (w0 - wbar) prod(1 - eta (a + lambda))",
                reference="remark after Proposition 3.1",
                hypothesis="sum eta < infinity, eta <= 1/(a + lambda)",
                predicted=float(expected[worst]),
                measured=float(end[worst]),
                comparison=Comparison.RELATIVE,
                tolerance=1e-11,
                because=ROUNDING,
            ),
            Claim(
                id=f"tuned-start-p{p:g}",
                statement="one finely tuned start lands on the minimizer all the same",
                reference="remark after Proposition 3.1",
                hypothesis="sum eta < infinity, w0 = wbar + (c - wbar)/prod(1 - eta (a + lambda))",
                predicted=s.c,
                measured=float(end[-1]),
                comparison=Comparison.RELATIVE,
                tolerance=1e-11,
                because=ROUNDING,
            ),
        ]
    return claims


def farthest(values: Tensor, target: float) -> float:
    """The value that is farthest from the target: one number that speaks for all chains."""
    return float(values[(values - target).abs().argmax()])


HYPOTHESES = ("a > 0", "lambda > 0", "0 < eta <= 1/(a + lambda)")

SCALAR = Experiment(
    name="scalar",
    title="scalar quadratic: constant decay stops short, scaled decay arrives, short schedules freeze",
    hypotheses=(*HYPOTHESES, "a gamma > 1"),
    settings=ScalarSettings(),
    function=run_scalar,
    cost=7.0,
)
