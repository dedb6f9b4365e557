"""At a fixed learning rate both rules are the same; and the counterexample to a claim about constant decay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab.claims.claim import Claim, Evidence, Stated, at_least, at_most, within, within_share
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    BOTH,
    CONSTANT,
    POLAR,
    SCALED,
    MuonRun,
    Stack,
    chain,
    descend,
    gradient,
    march,
    muon,
    nuclear_norm,
    remaining,
    sgd,
    spectral_norm,
    weighted_mean,
)
from muonsw.theory import check_schedule, muon_radius
from muonsw.theory.hypotheses import require

REMARK = Stated(
    "remark after Proposition 3.2 (Sato et al., Lemma C.1 and Theorem C.1, as the paper reports them)",
    "lambda < 1, sigma_max(A) > 1/lambda, eta lambda <= 1, sum eta = infinity",
)


@dataclass(frozen=True)
class FixedRateSettings(MuonRun):
    """A fixed learning rate for both optimizers, and a target of twice the radius for the counterexample."""

    rows: int = 8
    columns: int = 16
    eta: float = 0.02
    beta: float = 0.9
    fixed_steps: int = 500


def run_fixed_rate(setting: FixedRateSettings, context: Context) -> Evidence:
    """The same chains under both rules at one learning rate, then the counterexample under a decaying one."""
    s = setting
    require("lambda < 1", s.lam < 1.0, lam=s.lam)
    check_schedule([s.eta], a=1.0, lam=s.lam).require()
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    claims = [
        within(
            f"fixed-rate-{name}",
            f"at a fixed learning rate both rules give the same bits ({name}, largest difference)",
            Stated("end of section 3.3", "eta = eta_max at every step"),
            fixed_gap(s, name, A, starts, context, peak_factor=1.0, part=part),
            0.0,
            Tolerance(0.0, "eta/eta_max is exactly 1"),
        )
        for name, part in {"sgd": (0.0, 0.05), "muon": (0.05, 0.15)}.items()
    ]
    claims.append(
        within(
            "fixed-rate-rescaled",
            "at half the declared peak, scaled decay with 2 lambda is constant decay (largest difference)",
            Stated("end of section 3.3", "eta = eta_max/2 at every step"),
            fixed_gap(s, "muon", A, starts, context, peak_factor=2.0, part=(0.15, 0.25)),
            0.0,
            Tolerance(1e-12, "rounding"),
        )
    )
    return Evidence([*claims, *counterexample(s, A, starts, context)])


def fixed_gap(
    setting: FixedRateSettings,
    name: str,
    A: Tensor,
    starts: Tensor,
    context: Context,
    *,
    peak_factor: float,
    part: tuple[float, float],
) -> float:
    """How far the rules are apart after a run at a fixed rate.

    The peak is a multiple of that rate; scaled decay gets as much more lambda.
    """
    s = setting
    weights, lams = {rule: chain(starts) for rule in BOTH}, {CONSTANT: s.lam, SCALED: peak_factor * s.lam}
    groups = [
        {"params": [w], "decay": s.rules[rule], "weight_decay": lams[rule], "momentum": s.beta}
        for rule, w in weights.items()
    ]
    optimizer = {"sgd": sgd, "muon": muon}[name](groups, peak=peak_factor * s.eta, lam=s.lam)
    for _ in march(optimizer, [s.eta] * s.fixed_steps, context.progress, part=part):
        for w in weights.values():
            torch.sub(w, A, out=gradient(w))
        optimizer.step()
    return float((weights[CONSTANT].detach() - weights[SCALED].detach()).abs().max())


def counterexample(setting: FixedRateSettings, A: Tensor, starts: Tensor, context: Context) -> list[Claim]:
    """Constant decay fills the ball of radius 1/lambda, and its gradient stays: what the refuted claim needs, fails."""
    s, half, radius = setting, setting.steps // 2, muon_radius(setting.lam)
    stacks, largest = {rule: Stack(rule, s.beta, A, starts) for rule in BOTH}, 0.0
    nuclear: dict[str, list[Tensor]] = {rule: [] for rule in BOTH}
    for moves in descend(stacks, s, context, part=(0.25, 1.0)):
        for rule, move in moves.items():
            nuclear[rule].append(nuclear_norm(move.slope))
        largest = max(largest, float(spectral_norm(moves[CONSTANT].after).max()))
    means = {rule: weighted_mean(torch.stack(norms), s.etas, start=half) for rule, norms in nuclear.items()}
    missing = 2.0 * remaining(s.etas, s.lam) + POLAR.size
    hover = 2.0 * s.rows / (1.0 - s.beta) * sum(e**2 for e in s.etas[half:]) / sum(s.etas[half:])
    return [
        within_share(
            "refuted-norm-bound",
            "|W_t|_op under constant decay grows to 1/lambda; it is not bounded by 1",
            REMARK,
            largest,
            radius,
            Tolerance(missing, "prod(1 - eta lambda) of the radius is still missing, up to the start"),
        ),
        within(
            "refuted-descent",
            "so the coefficient 1 - lambda |W_t|_op, which a descent argument needs positive, falls to zero",
            REMARK,
            1.0 - s.lam * largest,
            0.0,
            Tolerance(missing, "prod(1 - eta lambda) is still missing, up to the start"),
        ),
        at_least(
            "refuted-stationarity",
            "the eta-weighted nuclear norm of the gradient stays at sum (sigma_i(A) - 1/lambda)_+ or more",
            REMARK,
            float(means[CONSTANT].min()),
            float((torch.linalg.svdvals(A) - radius).clamp(min=0.0).sum()),
            Tolerance(POLAR.size, "inside the ball |A - W|_* cannot be less"),
        ),
        at_most(
            "scaled-stationarity",
            "on the same problem scaled decay brings it down to the size of a step",
            Stated("Theorem 3.3 with sigma = 0", "sum eta = infinity, sum eta^2 < infinity"),
            float(means[SCALED].max()),
            hover,
            Tolerance(0.0, "each of r directions hovers by up to 2 eta/(1 - beta): an estimate"),
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
