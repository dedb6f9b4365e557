"""Proposition 3.2 and Corollary 3.2: Muon on the quadratic `1/2 |W - A|_F^2`, and the right panel of Figure 2.

Constant decay traps the weights in a ball of spectral radius `1/lambda`; scaled decay reaches targets outside it. Also
tested: a fixed learning rate, where both rules are the same, and a counterexample to a claim about constant decay (Sato
et al., as the paper reports it) that assumes the norm bound 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Series, Source, at_least, at_most, within, within_share
from muonsw.lab.theory.chains import CONSTANT, RULES, SCALED, Chains, gaussian, log_spaced
from muonsw.lab.theory.hypotheses import Steps, check_rates, require, require_at_least, require_positive
from muonsw.lab.theory.muon import HOVERING, POLAR, MuonRun, Stack, descend, hover_loss, spectral_norm, weighted_mean


def muon_norm_bounds(z0: float, etas: Steps, *, lam: float) -> list[float]:
    """Bound Muon's spectral norm under constant decay: `1/lambda + (z0 - 1/lambda)_+ prod(1 - eta lambda)`.

    For any gradients and momentum, `|W_t|_op` is at most entry t; entry 0 is the start, of spectral norm `z0`. An
    approximate orthogonalizer may exceed norm 1, and enlarges the ball by the same factor.
    """
    require_positive("lambda", lam)
    require_at_least("z0", z0, 0)
    radius = 1.0 / lam
    rates = check_rates(etas, {"eta*lambda <= 1": radius})
    excess = accumulate(rates, lambda d, eta: d * (1.0 - eta * lam), initial=max(z0 - radius, 0.0))
    return [radius + d for d in excess]


def muon_loss_floor(singular_values: Iterable[float], *, lam: float) -> float:
    """The lowest loss at which Muon with constant decay can settle: `1/2 sum (sigma_i(A) - 1/lambda)_+^2`.

    Hypotheses: lambda > 0, eta lambda <= 1, an infinite sum of learning rates.
    """
    require_positive("lambda", lam)
    return 0.5 * sum(max(float(sigma) - 1.0 / lam, 0.0) ** 2 for sigma in singular_values)


TRAPPED = "0 < eta lambda <= 1, sum eta = infinity"
ROBBINS_MONRO = "sum eta = infinity, sum eta^2 < infinity, iterates bounded"


@dataclass(frozen=True)
class MatrixQuadratic(MuonRun):
    """Several momenta, from near zero and from outside the ball; norms are in units of the radius `1/lambda`."""

    name: str = "matrix"
    title: str = "matrix quadratic: radius, floor and limit for several momenta, and a start outside the ball"
    lam: float = 0.1
    eta0: float = 9.0
    steps: int = 1200
    rows: int = 8
    columns: int = 16
    outside_start: float = 3.0
    betas: tuple[float, ...] = (0.0, 0.5, 0.95)

    def judge(self, generator: torch.Generator) -> Evidence:
        """Test several momenta, and a start outside the ball, all in one run."""
        A, starts = self.draw(self.chains, self.rows, self.columns, generator)
        far = gaussian(starts.shape, generator)
        far = far * (self.outside_start * self.radius / spectral_norm(far)[:, None, None])
        stacks = {("outside", CONSTANT): Stack(CONSTANT, self.betas[-1], A, far)}
        stacks |= {(f"{beta:g}", rule): Stack(rule, beta, A, starts) for beta in self.betas for rule in RULES}
        observed = observe(stacks, self, generator)
        claims = [radius_claim(observed.values(), "from every start and for every momentum")]
        for beta in self.betas:
            both = {rule: observed[f"{beta:g}", rule] for rule in RULES}
            claims += limit_claims(f"-beta{beta:g}", both, A, beta, self)
        return Evidence(claims)


@dataclass(frozen=True)
class MatrixFigure(MuonRun):
    """The right panel of the convergence figure."""

    name: str = "matrix-figure"
    title: str = "matrix quadratic, many starts: the right panel of the figure"
    lam: float = 0.1
    eta0: float = 9.0
    steps: int = 3000
    chains: int = 16
    rows: int = 32
    columns: int = 64
    beta: float = 0.9
    points: int = 300

    def judge(self, generator: torch.Generator) -> Evidence:
        """Test many starts at one momentum; losses at log-spaced steps make the right panel."""
        A, starts = self.draw(self.chains, self.rows, self.columns, generator)
        observed = observe({rule: Stack(rule, self.beta, A, starts) for rule in RULES}, self, generator)
        constant, sigmas = observed[CONSTANT], torch.linalg.svdvals(A)
        floor, initial = muon_loss_floor(sigmas, lam=self.lam), float(constant.losses[0].mean())

        # Starts are inside the ball, so these two bounds hold from the first step on.
        outside = Source("Proposition 3.2", f"{TRAPPED}, sigma_max(A) > 1/lambda, start inside the ball")
        started = Source("Proposition 3.2", f"{TRAPPED}, start inside the ball")
        apart = "constant decay keeps |W_t - A|_op at least sigma_max(A) - 1/lambda"
        stays = "the loss of constant decay never crosses 1/2 sum (sigma_i(A) - 1/lambda)_+^2"
        claims = [
            radius_claim(observed.values(), "at every step"),
            at_least("separation", apart, outside, constant.separation, float(sigmas[0]) - self.radius, POLAR),
            at_least("floor-from-above", stays, started, float(constant.losses.min()), floor, POLAR),
            *limit_claims("", observed, A, self.beta, self),
        ]
        levels, times = {CONSTANT: floor / initial}, log_spaced(self.steps + 1, self.points)
        places = torch.tensor(times) - 1
        curves = {rule: (result.losses[places].T / initial).tolist() for rule, result in observed.items()}
        series = [Series(f"matrix/{rule}", rule, times, curves[rule], levels.get(rule)) for rule in RULES]
        return Evidence(claims, series)


@dataclass
class Observations:
    """Measurements of one stack."""

    losses: Tensor  # before the first step and after each, (steps + 1, chains)
    radius_excess: float = -1.0  # of constant decay: the largest `|W_t|_op / bound_t - 1` over all steps
    separation: float = torch.inf  # the smallest `|W_t - A|_op` over about 50 log-spaced steps


def observe(stacks: Mapping[Any, Stack], s: MuonRun, generator: torch.Generator) -> dict[Any, Observations]:
    """Run the stacks together; record losses, the largest norm and the distance to the target."""
    observed, bounds, looks = dict[Any, Observations](), dict[Any, list[float]](), set(log_spaced(s.steps, 50))
    for key, stack in stacks.items():
        observed[key] = Observations(stack.starts.new_empty(s.steps + 1, len(stack.starts)))
        observed[key].losses[0] = stack.loss(stack.starts)
        bounds[key] = muon_norm_bounds(float(spectral_norm(stack.starts).max()), s.etas, lam=s.lam)
    for key, move in descend(stacks, s, generator):
        stack, result = stacks[key], observed[key]
        result.losses[move.t] = stack.loss(move.after)
        if stack.rule == CONSTANT:
            largest = float(spectral_norm(move.after).max())
            result.radius_excess = max(result.radius_excess, largest / bounds[key][move.t] - 1.0)
        if move.t in looks:
            result.separation = min(result.separation, float(spectral_norm(move.after - stack.A).min()))
    return observed


def radius_claim(observed: Iterable[Observations], where: str) -> Claim:
    """The bound of the proof, at every step of every constant-decay chain."""
    bound = "1/lambda + (|W_0| - 1/lambda)_+ prod(1 - eta lambda)"
    largest = 1.0 + max(result.radius_excess for result in observed)
    statement = f"constant decay keeps |W_t|_op under {bound}, {where}"
    return at_most("radius", statement, Source("Proposition 3.2", TRAPPED), largest, 1.0, POLAR)


def limit_claims(suffix: str, observed: Mapping[str, Observations], A: Tensor, beta: float, s: MuonRun) -> list[Claim]:
    """Constant decay ends at its floor, scaled decay below it."""
    sigmas, initial = torch.linalg.svdvals(A), float(observed[SCALED].losses[0].mean())
    floor, excess = muon_loss_floor(sigmas, lam=s.lam), floor_excess(sigmas, s.etas, s.lam)
    hovering = hover_loss(min(A.shape), s.etas[-1], beta) / initial
    constant, scaled = (float(observed[rule].losses[-1].max()) for rule in RULES)

    proposition = Source("Proposition 3.2, Figure 2 (right)", f"{TRAPPED}, sigma_max(A) > 1/lambda")
    corollary = Source("Corollary 3.2, Figure 2 (right)", ROBBINS_MONRO)
    stops = f"with beta {beta:g} constant decay comes down to its floor (loss over floor, worst chain)"
    falls = f"with beta {beta:g} scaled decay drives the loss to zero (over the initial one, worst chain)"
    tenth = "a tenth of the excess that prod(1 - eta lambda) still leaves: the starts are not exactly zero"
    near, met = Tolerance(0.1 * excess / floor, tenth), 1.0 + excess / floor
    return [
        within_share(f"floor-met{suffix}", stops, proposition, constant / floor, met, near),
        at_most(f"scaled-to-zero{suffix}", falls, corollary, scaled / initial, hovering, HOVERING),
    ]


def floor_excess(singular_values: Tensor, etas: Sequence[float], lam: float) -> float:
    """How far a run from near zero still is from the floor of constant decay.

    A direction of A outside the radius R is pushed outward at every step, so it has reached `R (1 - prod(1 -
    eta lambda))`; directions inside the radius have arrived.
    """
    missing = prod(1.0 - eta * lam for eta in etas) / lam
    outside = (singular_values - 1.0 / lam).clamp(min=0.0)
    return float((outside * missing + (outside > 0) * missing**2 / 2.0).sum())


@dataclass(frozen=True)
class FixedRate(MuonRun):
    """A fixed learning rate for both optimizers, and for the counterexample a target of twice the radius."""

    name: str = "fixed-rate"
    title: str = "a fixed learning rate, where the rules coincide; and the counterexample to Sato et al."
    rows: int = 8
    columns: int = 16
    eta: float = 0.02
    beta: float = 0.9
    fixed_steps: int = 500

    def judge(self, generator: torch.Generator) -> Evidence:
        """Test the same chains under both rules at a fixed learning rate, then the counterexample at a decaying one."""
        require("lambda < 1", self.lam < 1.0, lam=self.lam)
        check_rates([self.eta], {"eta <= 1/(a + lambda)": 1.0 / (1.0 + self.lam)})  # the quadratic has curvature a = 1
        A, starts = self.draw(self.chains, self.rows, self.columns, generator)
        full, half = (Source("end of section 3.3", f"eta = {peak} at every step") for peak in ("eta_max", "eta_max/2"))
        same = "at a fixed learning rate both rules give the same bits ({}, largest difference)"
        rescaled = "at half the declared peak, scaled decay with 2 lambda is constant decay (largest difference)"
        exact, rounding = Tolerance(0.0, "eta/eta_max is exactly 1"), Tolerance(1e-12, "rounding")
        sgd_gap, muon_gap = (rule_gap(self, kind, A, starts) for kind in ("sgd", "muon"))
        rescaled_gap = rule_gap(self, "muon", A, starts, peak_factor=2.0)
        claims = [
            within("fixed-rate-sgd", same.format("sgd"), full, sgd_gap, 0.0, exact),
            within("fixed-rate-muon", same.format("muon"), full, muon_gap, 0.0, exact),
            within("fixed-rate-rescaled", rescaled, half, rescaled_gap, 0.0, rounding),
        ]
        return Evidence([*claims, *counterexample(self, A, starts, generator)])


def rule_gap(s: FixedRate, kind: str, A: Tensor, starts: Tensor, *, peak_factor: float = 1.0) -> float:
    """The largest difference between the rules after a run at a fixed rate.

    The peak is a multiple of that rate, and lambda of scaled decay the same multiple.
    """
    stacks = {
        rule: {"params": starts, "decay": rule, "weight_decay": lam, "momentum": s.beta}
        for rule, lam in {CONSTANT: s.lam, SCALED: peak_factor * s.lam}.items()
    }
    chains = Chains(kind, stacks, peak=peak_factor * s.eta, lam=s.lam)
    for _ in range(s.fixed_steps):
        chains.step(s.eta, {rule: w - A for rule, w in chains.weights.items()})
    return float((chains.weights[CONSTANT] - chains.weights[SCALED]).abs().max())


def counterexample(s: FixedRate, A: Tensor, starts: Tensor, generator: torch.Generator) -> list[Claim]:
    """The refuted claim assumes the norm bound 1, but constant decay reaches norm 1/lambda and keeps a gradient."""
    nuclear, largest = list[Tensor](), 0.0
    for _, move in descend({CONSTANT: Stack(CONSTANT, s.beta, A, starts)}, s, generator):
        nuclear.append(matrix_norm(move.slope, "nuc"))
        largest = max(largest, float(spectral_norm(move.after).max()))
    late = float(weighted_mean(torch.stack(nuclear), s.etas, start=s.steps // 2).min())
    trapped = float((torch.linalg.svdvals(A) - s.radius).clamp(min=0.0).sum())

    remark = Source(
        "remark after Proposition 3.2 (Sato et al., Lemma C.1 and Theorem C.1, as the paper reports them)",
        "lambda < 1, sigma_max(A) > 1/lambda, eta lambda <= 1, sum eta = infinity",
    )
    grows = "|W_t|_op under constant decay grows to 1/lambda; it is not bounded by 1"
    stays = "the eta-weighted nuclear norm of the gradient stays at sum (sigma_i(A) - 1/lambda)_+ or more"
    missing = 2.0 * prod(1.0 - eta * s.lam for eta in s.etas) + POLAR.size
    left = Tolerance(missing, "prod(1 - eta lambda) of the radius is still missing, up to the start")
    inside = Tolerance(POLAR.size, "inside the ball |A - W|_* cannot be less")
    return [
        within_share("refuted-norm-bound", grows, remark, largest, s.radius, left),
        at_least("refuted-stationarity", stays, remark, late, trapped, inside),
    ]
