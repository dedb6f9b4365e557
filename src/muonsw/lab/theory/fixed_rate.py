"""A fixed learning rate, at which both rules are the same, and a counterexample to a claim about constant decay.

The claim (Sato et al., as the paper reports it) rests on the norm bound 1; Proposition 3.2 gives `1/lambda`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Source, at_least, at_most, within, within_share
from muonsw.lab.theory.chains import BOTH, CONSTANT, SCALED, chain, gradient, march, muon, sgd
from muonsw.lab.theory.experiment import Context, Experiment
from muonsw.lab.theory.hypotheses import check_rates, require
from muonsw.lab.theory.muon_chains import (
    POLAR,
    MuonRun,
    Stack,
    descend,
    hover_gradient,
    nuclear_norm,
    spectral_norm,
    weighted_mean,
)
from muonsw.optimizer import ScaledDecayOptimizer


@dataclass(frozen=True)
class FixedRateSettings(MuonRun):
    """A fixed learning rate for both optimizers, and a target of twice the radius for the counterexample."""

    rows: int = 8
    columns: int = 16
    eta: float = 0.02
    beta: float = 0.9
    fixed_steps: int = 500


def run_fixed_rate(s: FixedRateSettings, context: Context) -> Evidence:
    """The same chains under both rules at one learning rate, then the counterexample under a decaying one."""
    require("lambda < 1", s.lam < 1.0, lam=s.lam)
    check_rates([s.eta], {"eta <= 1/(a + lambda)": 1.0 / (1.0 + s.lam)})  # the quadratic has curvature a = 1
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    full, half = (Source("end of section 3.3", f"eta = {peak} at every step") for peak in ("eta_max", "eta_max/2"))
    same = "at a fixed learning rate both rules give the same bits ({}, largest difference)"
    rescaled = "at half the declared peak, scaled decay with 2 lambda is constant decay (largest difference)"
    exact, rounding = Tolerance(0.0, "eta/eta_max is exactly 1"), Tolerance(1e-12, "rounding")
    sgd_gap, muon_gap = (rule_gap(s, build, A, starts) for build in (sgd, muon))
    rescaled_gap = rule_gap(s, muon, A, starts, peak_factor=2.0)
    claims = [
        within("fixed-rate-sgd", same.format("sgd"), full, sgd_gap, 0.0, exact),
        within("fixed-rate-muon", same.format("muon"), full, muon_gap, 0.0, exact),
        within("fixed-rate-rescaled", rescaled, half, rescaled_gap, 0.0, rounding),
    ]
    return Evidence([*claims, *counterexample(s, A, starts, context)])


def rule_gap(
    s: FixedRateSettings,
    build: Callable[..., ScaledDecayOptimizer],
    A: Tensor,
    starts: Tensor,
    *,
    peak_factor: float = 1.0,
) -> float:
    """How far the rules are apart after a run at a fixed rate.

    The peak is a multiple of that rate, and scaled decay gets as much more lambda.
    """
    weights, lams = {rule: chain(starts) for rule in BOTH}, {CONSTANT: s.lam, SCALED: peak_factor * s.lam}
    groups = [
        {"params": [w], "decay": s.rules[rule], "weight_decay": lams[rule], "momentum": s.beta}
        for rule, w in weights.items()
    ]
    optimizer = build(groups, peak=peak_factor * s.eta, lam=s.lam)
    for _ in march(optimizer, [s.eta] * s.fixed_steps):
        for w in weights.values():
            torch.sub(w, A, out=gradient(w))
        optimizer.step()
    return float((weights[CONSTANT].detach() - weights[SCALED].detach()).abs().max())


def counterexample(s: FixedRateSettings, A: Tensor, starts: Tensor, context: Context) -> list[Claim]:
    """Constant decay fills the ball of radius 1/lambda, and its gradient stays: what the refuted claim needs, fails."""
    half, largest = s.steps // 2, 0.0
    nuclear: dict[str, list[Tensor]] = {rule: [] for rule in BOTH}
    for moves in descend({rule: Stack(rule, s.beta, A, starts) for rule in BOTH}, s, context):
        for rule, move in moves.items():
            nuclear[rule].append(nuclear_norm(move.slope))
        largest = max(largest, float(spectral_norm(moves[CONSTANT].after).max()))
    means = {rule: weighted_mean(torch.stack(norms), s.etas, start=half) for rule, norms in nuclear.items()}
    missing = 2.0 * prod(1.0 - eta * s.lam for eta in s.etas) + POLAR.size
    hover = hover_gradient(s.rows, s.etas[half:], s.beta)
    trapped = float((torch.linalg.svdvals(A) - s.radius).clamp(min=0.0).sum())

    remark = Source(
        "remark after Proposition 3.2 (Sato et al., Lemma C.1 and Theorem C.1, as the paper reports them)",
        "lambda < 1, sigma_max(A) > 1/lambda, eta lambda <= 1, sum eta = infinity",
    )
    theorem = Source("Theorem 3.3 with sigma = 0", "sum eta = infinity, sum eta^2 < infinity")
    grows = "|W_t|_op under constant decay grows to 1/lambda; it is not bounded by 1"
    falls = "so the coefficient 1 - lambda |W_t|_op, which a descent argument needs positive, falls to zero"
    stays = "the eta-weighted nuclear norm of the gradient stays at sum (sigma_i(A) - 1/lambda)_+ or more"
    vanishes = "on the same problem scaled decay brings it down to the size of a step"
    radius_left = Tolerance(missing, "prod(1 - eta lambda) of the radius is still missing, up to the start")
    left = Tolerance(missing, "prod(1 - eta lambda) is still missing, up to the start")
    inside = Tolerance(POLAR.size, "inside the ball |A - W|_* cannot be less")
    estimate = Tolerance(0.0, "each of r directions hovers by up to 2 eta/(1 - beta): an estimate")
    return [
        within_share("refuted-norm-bound", grows, remark, largest, s.radius, radius_left),
        within("refuted-descent", falls, remark, 1.0 - s.lam * largest, 0.0, left),
        at_least("refuted-stationarity", stays, remark, float(means[CONSTANT].min()), trapped, inside),
        at_most("scaled-stationarity", vanishes, theorem, float(means[SCALED].max()), hover, estimate),
    ]


FIXED_RATE = Experiment(
    name="fixed-rate",
    title="a fixed learning rate, where the rules coincide; and the counterexample to Sato et al.",
    hypotheses=("0 < lambda < 1", "eta <= 1/(1 + lambda)", "eta lambda <= 1", "sum eta = infinity"),
    settings=FixedRateSettings(),
    function=run_fixed_rate,
    cost=6.0,
)
