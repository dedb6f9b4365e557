"""Muon on the matrix quadratic `1/2 |W - A|_F^2`: the ball that constant decay cannot leave, and the target beyond.

At the end: a claim about constant decay that the ball refutes, and fixed learning rates, where both rules are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab import theory
from muonsw.lab.claims.claim import Claim, Evidence, Series, Source, at_least, at_most, within, within_share
from muonsw.lab.paper import Tolerance
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
    chain,
    descend,
    gaussian,
    gradient,
    jitter_loss,
    log_extremes,
    log_spaced,
    march,
    muon,
    nuclear_norm,
    remaining,
    sgd,
    spectral_norm,
    weighted_mean,
)
from muonsw.lab.theory.hypotheses import require
from muonsw.optimizer import ScaledDecayOptimizer

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
class Observations:
    """What was seen of one stack of chains."""

    losses: Tensor  # before the first step and after each, (steps + 1, chains)
    radius_excess: float = -1.0  # of constant decay: the largest `|W_t|_op / bound_t - 1` over all steps
    separation: float = torch.inf  # the smallest `|W_t - A|_op` over about 50 log-spaced steps


def watch(stacks: Mapping[Key, Stack], s: MuonRun, context: Context) -> dict[Key, Observations]:
    """Run the stacks together; follow their losses, the edge of their ball, and how near they come to the target."""
    etas, seen, bounds = s.etas, dict[Key, Observations](), dict[Key, list[float]]()
    looks = set(log_spaced(len(etas), 50))
    for key, stack in stacks.items():
        seen[key] = Observations(stack.starts.new_empty(len(etas) + 1, len(stack.starts)))
        seen[key].losses[0] = stack.loss(stack.starts)
        bounds[key] = theory.muon_norm_bounds(float(spectral_norm(stack.starts).max()), etas, lam=s.lam)
    for moves in descend(stacks, s, context):
        for key, move in moves.items():
            stack, one, step = stacks[key], seen[key], move.t + 1
            one.losses[step] = stack.loss(move.after)
            if stack.rule == CONSTANT:
                largest = float(spectral_norm(move.after).max())
                one.radius_excess = max(one.radius_excess, largest / bounds[key][step] - 1.0)
            if step in looks:
                one.separation = min(one.separation, float(spectral_norm(move.after - stack.A).min()))
    return seen


def run_matrix(s: MatrixSettings, context: Context) -> Evidence:
    """Several momenta, a target inside the radius, and a start outside it, all in one program."""
    radius = theory.muon_radius(s.lam)
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


def run_matrix_figure(s: MatrixFigureSettings, context: Context) -> Evidence:
    """Many starts at one momentum; losses are kept for the right panel, thinned to the extremes of bins of steps."""
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    seen = watch({rule: Stack(rule, s.beta, A, starts) for rule in BOTH}, s, context)
    claims = [radius_claim(seen.values(), "at every step"), *below_claims(seen[CONSTANT], A, s.lam)]
    claims += limit_claims("", seen, A, s.beta, s)
    initial = float(seen[CONSTANT].losses[0].mean())
    levels = {CONSTANT: theory.muon_loss_floor(torch.linalg.svdvals(A), lam=s.lam) / initial}
    curves = {rule: log_extremes(stack.losses.T / initial, s.bins) for rule, stack in seen.items()}
    return Evidence(claims, [Series(f"matrix/{rule}", rule, *curves[rule], levels.get(rule)) for rule in curves])


def radius_claim(seen: Iterable[Observations], where: str) -> Claim:
    """The bound of the proof, at every step of every constant-decay chain."""
    bound = "1/lambda + (|W_0| - 1/lambda)_+ prod(1 - eta lambda)"
    statement, largest = f"constant decay keeps |W_t|_op under {bound}, {where}", max(one.radius_excess for one in seen)
    return at_most("radius", statement, Source("Proposition 3.2", TRAPPED), 1.0 + largest, 1.0, POLAR)


def below_claims(seen: Observations, A: Tensor, lam: float) -> list[Claim]:
    """Bounds that hold from the first step on, as the starts are inside the ball."""
    sigmas, lowest = torch.linalg.svdvals(A), float(seen.losses.min())
    distance, floor = theory.muon_separation(float(sigmas[0]), lam=lam), theory.muon_loss_floor(sigmas, lam=lam)
    outside = Source("Proposition 3.2", f"{TRAPPED}, sigma_max(A) > 1/lambda, start inside the ball")
    started = Source("Proposition 3.2", f"{TRAPPED}, start inside the ball")
    apart = "constant decay keeps |W_t - A|_op at least sigma_max(A) - 1/lambda"
    stays = "the loss of constant decay never crosses 1/2 sum (sigma_i(A) - 1/lambda)_+^2"
    return [
        at_least("separation", apart, outside, seen.separation, distance, POLAR),
        at_least("floor-from-above", stays, started, lowest, floor, POLAR),
    ]


def limit_claims(suffix: str, seen: Mapping[str, Observations], A: Tensor, beta: float, s: MuonRun) -> list[Claim]:
    """Constant decay ends on its floor, scaled decay passes through it."""
    etas, lam, sigmas = s.etas, s.lam, torch.linalg.svdvals(A)
    floor, initial = theory.muon_loss_floor(sigmas, lam=lam), float(seen[SCALED].losses[0].mean())
    excess, hovering = floor_excess(sigmas, etas, lam), jitter_loss(min(A.shape), etas[-1], beta) / initial
    constant, scaled = (float(seen[rule].losses[-1].max()) for rule in BOTH)
    proposition = Source("Proposition 3.2, Figure 2 (right)", f"{TRAPPED}, sigma_max(A) > 1/lambda")
    corollary = Source("Corollary 3.2, Figure 2 (right)", ROBBINS_MONRO)
    stops = f"with beta {beta:g} constant decay comes down to its floor (loss over floor, worst chain)"
    falls = f"with beta {beta:g} scaled decay drives the loss to zero (over the initial one, worst chain)"
    below = "the proposition bounds the loss from below; that it is met is seen here, on this objective"
    last = "the corollary promises a subsequence; the finite run shows the loss of its last step"
    tenth = "a tenth of the excess that prod(1 - eta lambda) still leaves: the starts are not exactly zero"
    near, met = Tolerance(0.1 * excess / floor, tenth), 1.0 + excess / floor
    return [
        within_share(f"floor-met{suffix}", stops, proposition, constant / floor, met, near, limits=below),
        at_most(f"scaled-to-zero{suffix}", falls, corollary, scaled / initial, hovering, HOVERING, limits=last),
    ]


def floor_excess(singular_values: Tensor, etas: Sequence[float], lam: float) -> float:
    """How far above its floor the loss of constant decay still is after a run from near zero.

    A direction of A outside the radius R is pushed outward at every step, so it stands at `R (1 - prod(1 -
    eta lambda))`; those inside the radius have arrived.
    """
    missing = remaining(etas, lam) / lam
    outside = (singular_values - 1.0 / lam).clamp(min=0.0)
    return float((outside * missing + (outside > 0) * missing**2 / 2.0).sum())


def inside_claim(rule: str, seen: Observations, s: MatrixSettings) -> Claim:
    """A target inside the ball is reached by both rules."""
    initial = seen.losses[0].mean()
    reached = f"a target with all singular values under 1/lambda is reached with {rule} decay too"
    case = Source("Proposition 3.2, the case it leaves open", "sigma_max(A) < 1/lambda")
    bound = jitter_loss(min(s.rows, s.columns), s.etas[-1], s.betas[0]) / float(initial)
    return at_most(f"inside-{rule}", reached, case, float(seen.losses[-1].max() / initial), bound, HOVERING)


def projection_claims(A: Tensor, radius: float, generator: torch.Generator) -> list[Claim]:
    """Clipping singular values is the projection onto the ball; certified by duality, and by rivals."""
    P = theory.clip_projection(A, radius)
    D = A - P
    rivals = gaussian((1000, *A.shape), generator, std=1e-3 * radius) + P
    rivals = theory.clip_projection(rivals, radius)
    distance, nearest = float(D.square().sum()), float((rivals - A).square().sum((-2, -1)).min())
    floor = 2.0 * theory.muon_loss_floor(torch.linalg.svdvals(A), lam=1.0 / radius)
    attained, most = float((D * P).sum()), radius * float(nuclear_norm(D))
    proof = Source("proof of Proposition 3.2", "rho >= 0")
    away = "the clipped matrix is sum (sigma_i - rho)_+^2 away from A"
    optimal = "no matrix of the ball is nearer: max over the ball of <A - P, W> is attained at W = P"
    farther = "a thousand random matrices of the ball near it are all farther from A"
    equal = Tolerance(1e-12, "rounding of the SVD; equality certifies the projection")
    return [
        within_share("clip-distance", away, proof, distance, floor, SVD),
        within_share("clip-optimal", optimal, proof, attained, most, equal),
        at_least("clip-rivals", farther, proof, nearest, distance, SVD),
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


REMARK = Source(
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


def run_fixed_rate(s: FixedRateSettings, context: Context) -> Evidence:
    """The same chains under both rules at one learning rate, then the counterexample under a decaying one."""
    require("lambda < 1", s.lam < 1.0, lam=s.lam)
    theory.check_schedule([s.eta], a=1.0, lam=s.lam).require()
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    full, half = (Source("end of section 3.3", f"eta = {peak} at every step") for peak in ("eta_max", "eta_max/2"))
    same = "at a fixed learning rate both rules give the same bits ({}, largest difference)"
    rescaled = "at half the declared peak, scaled decay with 2 lambda is constant decay (largest difference)"
    exact, rounding = Tolerance(0.0, "eta/eta_max is exactly 1"), Tolerance(1e-12, "rounding")
    sgd_gap = fixed_gap(s, sgd, A, starts, context, peak_factor=1.0, part=(0.0, 0.05))
    muon_gap = fixed_gap(s, muon, A, starts, context, peak_factor=1.0, part=(0.05, 0.15))
    rescaled_gap = fixed_gap(s, muon, A, starts, context, peak_factor=2.0, part=(0.15, 0.25))
    claims = [
        within("fixed-rate-sgd", same.format("sgd"), full, sgd_gap, 0.0, exact),
        within("fixed-rate-muon", same.format("muon"), full, muon_gap, 0.0, exact),
        within("fixed-rate-rescaled", rescaled, half, rescaled_gap, 0.0, rounding),
    ]
    return Evidence([*claims, *counterexample(s, A, starts, context)])


def fixed_gap(
    s: FixedRateSettings,
    build: Callable[..., ScaledDecayOptimizer],
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
    weights, lams = {rule: chain(starts) for rule in BOTH}, {CONSTANT: s.lam, SCALED: peak_factor * s.lam}
    groups = [
        {"params": [w], "decay": s.rules[rule], "weight_decay": lams[rule], "momentum": s.beta}
        for rule, w in weights.items()
    ]
    optimizer = build(groups, peak=peak_factor * s.eta, lam=s.lam)
    for _ in march(optimizer, [s.eta] * s.fixed_steps, context.progress, part=part):
        for w in weights.values():
            torch.sub(w, A, out=gradient(w))
        optimizer.step()
    return float((weights[CONSTANT].detach() - weights[SCALED].detach()).abs().max())


def counterexample(s: FixedRateSettings, A: Tensor, starts: Tensor, context: Context) -> list[Claim]:
    """Constant decay fills the ball of radius 1/lambda, and its gradient stays: what the refuted claim needs, fails."""
    half, radius = s.steps // 2, theory.muon_radius(s.lam)
    stacks, largest = {rule: Stack(rule, s.beta, A, starts) for rule in BOTH}, 0.0
    nuclear: dict[str, list[Tensor]] = {rule: [] for rule in BOTH}
    for moves in descend(stacks, s, context, part=(0.25, 1.0)):
        for rule, move in moves.items():
            nuclear[rule].append(nuclear_norm(move.slope))
        largest = max(largest, float(spectral_norm(moves[CONSTANT].after).max()))
    means = {rule: weighted_mean(torch.stack(norms), s.etas, start=half) for rule, norms in nuclear.items()}
    missing = 2.0 * remaining(s.etas, s.lam) + POLAR.size
    hover = 2.0 * s.rows / (1.0 - s.beta) * sum(e**2 for e in s.etas[half:]) / sum(s.etas[half:])
    trapped = float((torch.linalg.svdvals(A) - radius).clamp(min=0.0).sum())
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
        within_share("refuted-norm-bound", grows, REMARK, largest, radius, radius_left),
        within("refuted-descent", falls, REMARK, 1.0 - s.lam * largest, 0.0, left),
        at_least("refuted-stationarity", stays, REMARK, float(means[CONSTANT].min()), trapped, inside),
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
