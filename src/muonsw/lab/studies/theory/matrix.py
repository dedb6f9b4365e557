"""Muon on the matrix quadratic `1/2 |W - A|_F^2`: the ball that constant decay cannot leave, and the target beyond."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw import theory
from muonsw.lab.claims.claim import Claim, Evidence, Series, Stated, at_least, at_most, within_share
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs.curves import log_extremes
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    BOTH,
    CONSTANT,
    HOVERING,
    POLAR,
    SCALED,
    Key,
    MuonRun,
    Stack,
    descend,
    gaussian,
    jitter_loss,
    log_spaced,
    nuclear_norm,
    remaining,
    spectral_norm,
)

HYPOTHESES = ("lambda > 0", "eta lambda <= 1", "sum eta = infinity", "sum eta^2 < infinity")
TRAPPED = "0 < eta lambda <= 1, sum eta = infinity"
ROBBINS_MONRO = "sum eta = infinity, sum eta^2 < infinity, iterates bounded"
SVD = Tolerance(1e-12, "rounding of the SVD")


@dataclass(frozen=True)
class MatrixSettings(MuonRun):
    """Targets of one shape, inside and outside the ball; singular values are in units of the radius `1/lambda`."""

    lam: float = 0.1
    eta0: float = 9.0
    steps: int = 1200
    rows: int = 8
    columns: int = 16
    inside_sigma_max: float = 0.8
    outside_start: float = 3.0
    betas: tuple[float, ...] = (0.0, 0.5, 0.95)


@dataclass(frozen=True)
class MatrixFigureSettings(MuonRun):
    """The right panel of the convergence figure."""

    lam: float = 0.1
    eta0: float = 9.0
    steps: int = 3000
    chains: int = 16
    rows: int = 32
    columns: int = 64
    beta: float = 0.9
    bins: int = 120


@dataclass
class Seen:
    """What was seen of one stack of chains.

    Attributes:
        losses: Before the first step and after each, (steps + 1, chains).
        radius_excess: The largest `|W_t|_op / bound_t - 1` over all steps of constant decay, against
            `muon_norm_bounds`.
        separation: The smallest `|W_t - A|_op` over about 50 log-spaced steps.
    """

    losses: Tensor
    radius_excess: float = -1.0
    separation: float = torch.inf


def watch(stacks: Mapping[Key, Stack], setting: MuonRun, context: Context) -> dict[Key, Seen]:
    """Run the stacks together; follow their losses, the edge of their ball, and how near they come to the target."""
    etas, seen, bounds = setting.etas, dict[Key, Seen](), dict[Key, list[float]]()
    looks = set(log_spaced(len(etas), 50))
    for key, stack in stacks.items():
        seen[key] = Seen(stack.starts.new_empty(len(etas) + 1, len(stack.starts)))
        seen[key].losses[0] = stack.loss(stack.starts)
        bounds[key] = theory.muon_norm_bounds(float(spectral_norm(stack.starts).max()), etas, lam=setting.lam)
    for moves in descend(stacks, setting, context):
        for key, move in moves.items():
            stack, one, step = stacks[key], seen[key], move.t + 1
            one.losses[step] = stack.loss(move.after)
            if stack.rule == CONSTANT:
                largest = float(spectral_norm(move.after).max())
                one.radius_excess = max(one.radius_excess, largest / bounds[key][step] - 1.0)
            if step in looks:
                one.separation = min(one.separation, float(spectral_norm(move.after - stack.A).min()))
    return seen


def run_matrix(setting: MatrixSettings, context: Context) -> Evidence:
    """Several momenta, a target inside the radius, and a start outside it, all in one program."""
    s, radius = setting, theory.muon_radius(setting.lam)
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    inside = A * (s.inside_sigma_max / s.sigma_max)
    far = gaussian(starts.shape, context.generator)
    far = far * (s.outside_start * radius / spectral_norm(far)[:, None, None])
    stacks = {("outside", CONSTANT): Stack(CONSTANT, s.betas[-1], A, far)}
    stacks |= {("inside", rule): Stack(rule, s.betas[0], inside, starts) for rule in BOTH}
    stacks |= {(f"{beta:g}", rule): Stack(rule, beta, A, starts) for beta in s.betas for rule in BOTH}
    seen = watch(stacks, s, context)
    claims = [radius_claim(seen.values(), "from every start and for every momentum")]
    for beta in s.betas:
        claims += limit_claims(f"-beta{beta:g}", {rule: seen[f"{beta:g}", rule] for rule in BOTH}, A, beta, s)
    claims += [inside_claim(rule, seen["inside", rule], s) for rule in BOTH]
    return Evidence(claims + projection_claims(A, radius, context.generator))


def run_matrix_figure(setting: MatrixFigureSettings, context: Context) -> Evidence:
    """Many starts at one momentum; losses are kept for the right panel, thinned to the extremes of bins of steps."""
    s = setting
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    seen = watch({rule: Stack(rule, s.beta, A, starts) for rule in BOTH}, s, context)
    claims = [radius_claim(seen.values(), "at every step"), *below_claims(seen[CONSTANT], A, s.lam)]
    claims += limit_claims("", seen, A, s.beta, s)
    initial = float(seen[CONSTANT].losses[0].mean())
    levels = {CONSTANT: theory.muon_loss_floor(torch.linalg.svdvals(A), lam=s.lam) / initial}
    curves = {rule: log_extremes(stack.losses.T / initial, s.bins) for rule, stack in seen.items()}
    return Evidence(claims, [Series(f"matrix/{rule}", rule, *curves[rule], levels.get(rule)) for rule in curves])


def radius_claim(seen: Iterable[Seen], where: str) -> Claim:
    """The bound of the proof, at every step of every constant-decay chain."""
    return at_most(
        "radius",
        f"constant decay keeps |W_t|_op under 1/lambda + (|W_0| - 1/lambda)_+ prod(1 - eta lambda), {where}",
        Stated("Proposition 3.2", TRAPPED),
        1.0 + max(stack.radius_excess for stack in seen),
        1.0,
        POLAR,
    )


def below_claims(seen: Seen, A: Tensor, lam: float) -> list[Claim]:
    """Bounds that hold from the first step on, as the starts are inside the ball."""
    sigmas = torch.linalg.svdvals(A)
    return [
        at_least(
            "separation",
            "constant decay keeps |W_t - A|_op at least sigma_max(A) - 1/lambda",
            Stated("Proposition 3.2", f"{TRAPPED}, sigma_max(A) > 1/lambda, start inside the ball"),
            seen.separation,
            theory.muon_separation(float(sigmas[0]), lam=lam),
            POLAR,
        ),
        at_least(
            "floor-from-above",
            "the loss of constant decay never crosses 1/2 sum (sigma_i(A) - 1/lambda)_+^2",
            Stated("Proposition 3.2", f"{TRAPPED}, start inside the ball"),
            float(seen.losses.min()),
            theory.muon_loss_floor(sigmas, lam=lam),
            POLAR,
        ),
    ]


def limit_claims(suffix: str, seen: Mapping[str, Seen], A: Tensor, beta: float, setting: MuonRun) -> list[Claim]:
    """Constant decay ends on its floor, scaled decay passes through it."""
    etas, lam, sigmas = setting.etas, setting.lam, torch.linalg.svdvals(A)
    floor, excess = theory.muon_loss_floor(sigmas, lam=lam), floor_excess(sigmas, etas, lam)
    initial = float(seen[SCALED].losses[0].mean())
    return [
        within_share(
            f"floor-met{suffix}",
            f"with beta {beta:g} constant decay comes down to its floor (loss over floor, worst chain)",
            Stated("Proposition 3.2, Figure 2 (right)", f"{TRAPPED}, sigma_max(A) > 1/lambda"),
            float(seen[CONSTANT].losses[-1].max()) / floor,
            1.0 + excess / floor,
            Tolerance(
                0.1 * excess / floor,
                "a tenth of the excess that prod(1 - eta lambda) still leaves: the starts are not exactly zero",
            ),
            limits="the proposition bounds the loss from below; that it is met is seen here, on this objective",
        ),
        at_most(
            f"scaled-to-zero{suffix}",
            f"with beta {beta:g} scaled decay drives the loss to zero (over the initial one, worst chain)",
            Stated("Corollary 3.2, Figure 2 (right)", ROBBINS_MONRO),
            float(seen[SCALED].losses[-1].max()) / initial,
            jitter_loss(min(A.shape), etas[-1], beta) / initial,
            HOVERING,
            limits="the corollary promises a subsequence; the finite run shows the loss of its last step",
        ),
    ]


def floor_excess(singular_values: Tensor, etas: Sequence[float], lam: float) -> float:
    """How far above its floor the loss of constant decay still is after a run from near zero.

    A direction of A outside the radius R is pushed outward at every step, so it stands at `R (1 - prod(1 -
    eta lambda))`; those inside the radius have arrived.
    """
    missing = remaining(etas, lam) / lam
    outside = (singular_values - 1.0 / lam).clamp(min=0.0)
    return float((outside * missing + (outside > 0) * missing**2 / 2.0).sum())


def inside_claim(rule: str, seen: Seen, setting: MatrixSettings) -> Claim:
    """A target inside the ball is reached by both rules."""
    s, initial = setting, seen.losses[0].mean()
    return at_most(
        f"inside-{rule}",
        f"a target with all singular values under 1/lambda is reached with {rule} decay too",
        Stated("Proposition 3.2, the case it leaves open", "sigma_max(A) < 1/lambda"),
        float(seen.losses[-1].max() / initial),
        jitter_loss(min(s.rows, s.columns), s.etas[-1], s.betas[0]) / float(initial),
        HOVERING,
    )


def projection_claims(A: Tensor, radius: float, generator: torch.Generator) -> list[Claim]:
    """Clipping singular values is the projection onto the ball; certified by duality, and by rivals."""
    P = theory.clip_projection(A, radius)
    D = A - P
    rivals = gaussian((1000, *A.shape), generator, std=1e-3 * radius) + P
    rivals = theory.clip_projection(rivals, radius)
    proof = Stated("proof of Proposition 3.2", "rho >= 0")
    return [
        within_share(
            "clip-distance",
            "the clipped matrix is sum (sigma_i - rho)_+^2 away from A",
            proof,
            float(D.square().sum()),
            2.0 * theory.muon_loss_floor(torch.linalg.svdvals(A), lam=1.0 / radius),
            SVD,
        ),
        within_share(
            "clip-optimal",
            "no matrix of the ball is nearer: max over the ball of <A - P, W> is attained at W = P",
            proof,
            float((D * P).sum()),
            radius * float(nuclear_norm(D)),
            Tolerance(1e-12, "rounding of the SVD; equality certifies the projection"),
        ),
        at_least(
            "clip-rivals",
            "a thousand random matrices of the ball near it are all farther from A",
            proof,
            float((rivals - A).square().sum((-2, -1)).min()),
            float(D.square().sum()),
            SVD,
        ),
    ]


MATRIX = Experiment(
    name="matrix",
    title="matrix quadratic: radius, floor and limit for several momenta, targets inside and outside the ball",
    hypotheses=HYPOTHESES,
    settings=MatrixSettings(),
    function=run_matrix,
    cost=11.0,
)
MATRIX_FIGURE = Experiment(
    name="matrix-figure",
    title="matrix quadratic, many starts: the right panel of the figure",
    hypotheses=HYPOTHESES,
    settings=MatrixFigureSettings(),
    function=run_matrix_figure,
    cost=45.0,
)
