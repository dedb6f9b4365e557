"""At a fixed learning rate the rules are one; and the counterexample to a claim about constant decay."""

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
    march,
    muon,
    nuclear_norm,
    sgd,
    spectral_norm,
)
from muonsw.lab.studies.theory.muon import schedule
from muonsw.lab.studies.theory.paths import weighted_mean
from muonsw.lab.studies.theory.quadratic import POLAR_ERROR, target
from muonsw.theory import check_schedule, muon_radius
from muonsw.theory.hypotheses import require

SATO = "Sato et al., Lemma C.1 and Theorem C.1, as the paper reports them"


@dataclass(frozen=True)
class FixedRateSettings:
    """A fixed learning rate for both optimizers, and a target of twice the radius for the counterexample."""

    rows: int = 8
    columns: int = 16
    lam: float = 0.5
    eta: float = 0.02
    beta: float = 0.9
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 2000
    fixed_steps: int = 500
    chains: int = 4
    start_std: float = 0.02
    rules: Rules = TRUE_RULES


def run_fixed_rate(setting: FixedRateSettings, context: Context) -> Outcome:
    """The same chains under both rules at one learning rate, then the counterexample under a decaying one."""
    s = setting
    require("lambda < 1", s.lam < 1.0, lam=s.lam)
    check_schedule([s.eta], a=1.0, lam=s.lam).require()
    A = target(s.rows, s.columns, s.sigma_max * muon_radius(s.lam), context.generator)
    starts = gaussian((s.chains, s.rows, s.columns), context.generator, std=s.start_std)
    claims = []
    for name, part in {"sgd": (0.0, 0.05), "muon": (0.05, 0.15)}.items():
        ends = fixed_ends(setting, name, A, starts, peak_factor=1.0, context=context, part=part)
        claims.append(coincide_claim(name, ends))
    ends = fixed_ends(setting, "muon", A, starts, peak_factor=2.0, context=context, part=(0.15, 0.25))
    return Outcome([*claims, rescaled_claim(ends), *counterexample(setting, A, starts, context)])


def fixed_ends(
    setting: FixedRateSettings,
    name: str,
    A: Tensor,
    starts: Tensor,
    *,
    peak_factor: float,
    context: Context,
    part: tuple[float, float],
) -> dict[str, Tensor]:
    """Run at a fixed rate under a peak that is a multiple of it; scaled decay gets as much more lambda."""
    s = setting
    weights = {rule: chain(starts) for rule in (CONSTANT, SCALED)}
    lams = {CONSTANT: s.lam, SCALED: peak_factor * s.lam}
    groups = [
        {"params": [w], "decay": s.rules[rule], "weight_decay": lams[rule], "momentum": s.beta}
        for rule, w in weights.items()
    ]
    optimizer = {"sgd": sgd, "muon": muon}[name](groups, peak=peak_factor * s.eta, lam=s.lam)
    for _ in march(optimizer, [s.eta] * s.fixed_steps, context.progress, part=part):
        for w in weights.values():
            torch.sub(w, A, out=gradient(w))
        optimizer.step()
    return {rule: w.detach() for rule, w in weights.items()}


def coincide_claim(name: str, ends: dict[str, Tensor]) -> Claim:
    """No bit differs when the learning rate is its own peak."""
    return Claim(
        id=f"fixed-rate-{name}",
        statement=f"at a fixed learning rate both rules give the same bits ({name}, largest difference)",
        reference="end of section 3.3",
        hypothesis="eta = eta_max at every step",
        predicted=0.0,
        measured=float((ends[CONSTANT] - ends[SCALED]).abs().max()),
        comparison=Comparison.ABSOLUTE,
        tolerance=0.0,
        because="eta/eta_max is exactly 1",
    )


def rescaled_claim(ends: dict[str, Tensor]) -> Claim:
    """Under a peak twice as high, scaled decay needs twice the lambda."""
    return Claim(
        id="fixed-rate-rescaled",
        statement="at half the declared peak, scaled decay with 2 lambda is constant decay (largest difference)",
        reference="end of section 3.3",
        hypothesis="eta = eta_max/2 at every step",
        predicted=0.0,
        measured=float((ends[CONSTANT] - ends[SCALED]).abs().max()),
        comparison=Comparison.ABSOLUTE,
        tolerance=1e-12,
        because="rounding",
    )


@dataclass(frozen=True)
class Seen:
    """What the counterexample shows: the largest norms over the run, and nuclear norms of the gradient by step."""

    spectral: float
    nuclear: Tensor


def counterexample(setting: FixedRateSettings, A: Tensor, starts: Tensor, context: Context) -> list[Claim]:
    """Constant decay fills the ball of radius 1/lambda, and its gradient stays."""
    s = setting
    etas = schedule(s.steps, s.eta0, s.lam)
    weights = {rule: chain(starts) for rule in (CONSTANT, SCALED)}
    groups = [{"params": [w], "decay": s.rules[rule], "momentum": s.beta} for rule, w in weights.items()]
    optimizer = muon(groups, peak=max(etas), lam=s.lam)
    nuclear, largest = {rule: list[Tensor]() for rule in weights}, dict.fromkeys(weights, 0.0)
    for _ in march(optimizer, etas, context.progress, part=(0.25, 1.0)):
        for rule, w in weights.items():
            nuclear[rule].append(nuclear_norm(torch.sub(w, A, out=gradient(w))))
        optimizer.step()
        for rule, w in weights.items():
            largest[rule] = max(largest[rule], float(spectral_norm(w.detach()).max()))
    seen = {rule: Seen(largest[rule], torch.stack(nuclear[rule])) for rule in weights}
    return counterexample_claims(setting, seen, A, etas)


def counterexample_claims(
    setting: FixedRateSettings, seen: dict[str, Seen], A: Tensor, etas: Sequence[float]
) -> list[Claim]:
    """What the claim needs, and what happens."""
    s, half = setting, setting.steps // 2
    radius, left = muon_radius(s.lam), 1.0
    for eta in etas:
        left *= 1.0 - eta * s.lam
    trapped = float((torch.linalg.svdvals(A) - radius).clamp(min=0.0).sum())
    hover = 2.0 * s.rows / (1.0 - s.beta) * sum(e**2 for e in etas[half:]) / sum(etas[half:])
    means = {rule: weighted_mean(stack.nuclear, etas, start=half) for rule, stack in seen.items()}
    hypothesis = "lambda < 1, sigma_max(A) > 1/lambda, eta lambda <= 1, sum eta = infinity"
    return [
        Claim(
            id="refuted-norm-bound",
            statement="|W_t|_op under constant decay grows to 1/lambda; it is not bounded by 1",
            reference=f"remark after Proposition 3.2 ({SATO})",
            hypothesis=hypothesis,
            predicted=radius,
            measured=seen[CONSTANT].spectral,
            comparison=Comparison.RELATIVE,
            tolerance=2.0 * left + POLAR_ERROR,
            because="prod(1 - eta lambda) of the radius is still missing, up to the start",
        ),
        Claim(
            id="refuted-descent",
            statement="so the coefficient 1 - lambda |W_t|_op, which a descent argument needs positive, falls to zero",
            reference=f"remark after Proposition 3.2 ({SATO})",
            hypothesis=hypothesis,
            predicted=0.0,
            measured=1.0 - s.lam * seen[CONSTANT].spectral,
            comparison=Comparison.ABSOLUTE,
            tolerance=2.0 * left + POLAR_ERROR,
            because="prod(1 - eta lambda) is still missing, up to the start",
        ),
        Claim(
            id="refuted-stationarity",
            statement="the eta-weighted nuclear norm of the gradient stays at sum (sigma_i(A) - 1/lambda)_+ or more",
            reference=f"remark after Proposition 3.2 ({SATO})",
            hypothesis=hypothesis,
            predicted=trapped,
            measured=float(means[CONSTANT].min()),
            comparison=Comparison.AT_LEAST,
            tolerance=POLAR_ERROR,
            because="inside the ball |A - W|_* cannot be less",
        ),
        Claim(
            id="scaled-stationarity",
            statement="on the same problem scaled decay brings it down to the size of a step",
            reference="Theorem 3.3 with sigma = 0",
            hypothesis="sum eta = infinity, sum eta^2 < infinity",
            predicted=hover,
            measured=float(means[SCALED].max()),
            comparison=Comparison.AT_MOST,
            tolerance=0.0,
            because="each of r directions hovers by up to 2 eta/(1 - beta): an estimate",
        ),
    ]


FIXED_RATE = Experiment(
    name="fixed-rate",
    title="a fixed learning rate, where the rules coincide; and the counterexample to Sato et al.",
    hypotheses=("0 < lambda < 1", "eta <= 1/(1 + lambda)", "eta lambda <= 1", "sum eta = infinity"),
    settings=FixedRateSettings(),
    function=run_fixed_rate,
    cost=6.0,
)
