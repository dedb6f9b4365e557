"""Muon on the matrix quadratic `1/2 |W - A|_F^2`: the ball that constant decay cannot leave, and the target beyond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab.claims.claim import Claim, Evidence, Series, Stated, at_least, at_most, within_share
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs.curves import log_extremes
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    CONSTANT,
    POLAR_ERROR,
    SCALED,
    TRUE_RULES,
    Rules,
    Stack,
    Step,
    Watcher,
    descend,
    gaussian,
    jitter_loss,
    log_spaced,
    nuclear_norm,
    remaining,
    robbins_monro,
    spectral_norm,
    target,
)
from muonsw.theory import clip_projection, muon_loss_floor, muon_norm_bounds, muon_radius, muon_separation

HYPOTHESES = ("lambda > 0", "eta lambda <= 1", "sum eta = infinity", "sum eta^2 < infinity")
TRAPPED = "0 < eta lambda <= 1, sum eta = infinity"
ROBBINS_MONRO = "sum eta = infinity, sum eta^2 < infinity, iterates bounded"
POLAR = Tolerance(POLAR_ERROR, "the polar factor is exact to 2e-10")
HOVERING = Tolerance(0.0, "steps of length eta_T make every direction hover by up to 2 eta_T/(1 - beta): an estimate")
SVD = Tolerance(1e-12, "rounding of the SVD")


@dataclass(frozen=True)
class MatrixSettings:
    """Targets of one shape under `eta0/(1 + t)`; singular values are in units of the radius `1/lambda`."""

    rows: int = 8
    columns: int = 16
    lam: float = 0.1
    eta0: float = 9.0
    sigma_max: float = 2.0
    inside_sigma_max: float = 0.8
    outside_start: float = 3.0
    betas: tuple[float, ...] = (0.0, 0.5, 0.95)
    steps: int = 1200
    chains: int = 4
    start_std: float = 0.02
    rules: Rules = TRUE_RULES


@dataclass(frozen=True)
class MatrixFigureSettings:
    """The right panel of the convergence figure."""

    rows: int = 32
    columns: int = 64
    lam: float = 0.1
    eta0: float = 9.0
    sigma_max: float = 2.0
    beta: float = 0.9
    steps: int = 3000
    chains: int = 16
    start_std: float = 0.02
    bins: int = 120
    rules: Rules = TRUE_RULES


@dataclass(frozen=True)
class Seen:
    """What was seen of one stack of chains.

    Attributes:
        losses: After each step, and before the first, (steps + 1, chains).
        radius_excess: The largest `|W_t|_op / bound_t - 1` over all steps, against `muon_norm_bounds`.
        separation: The smallest `|W_t - A|_op` over about 50 log-spaced steps.
    """

    losses: Tensor
    radius_excess: float
    separation: float


class BallWatcher(Watcher[Seen]):
    """Follows losses, and how near a stack comes to the edge of its ball and to its target."""

    def __init__(self, stack: Stack, etas: Sequence[float], lam: float) -> None:
        super().__init__(stack)
        self.bounds = muon_norm_bounds(float(spectral_norm(stack.starts).max()), etas, lam=lam)
        self.looks = set(log_spaced(len(etas), 50))
        self.losses = [self._loss()]
        self.excess, self.separation = -1.0, torch.inf

    def _loss(self) -> Tensor:
        return self.stack.objective.loss(self.weight.detach() - self.stack.A)

    def after(self, step: Step) -> None:
        """Look at the weights after a step."""
        self.losses.append(self._loss())
        if self.stack.rule == CONSTANT:
            largest = float(spectral_norm(self.weight.detach()).max())
            self.excess = max(self.excess, largest / self.bounds[step.t + 1] - 1.0)
        if step.t + 1 in self.looks:
            distance = float(spectral_norm(self.weight.detach() - self.stack.A).min())
            self.separation = min(self.separation, distance)

    def report(self) -> Seen:
        """What was seen."""
        return Seen(torch.stack(self.losses), self.excess, self.separation)


def watch(
    stacks: Mapping[str, Stack], etas: Sequence[float], lam: float, rules: Rules, context: Context
) -> dict[str, Seen]:
    """Run the stacks together."""
    watchers = {name: BallWatcher(stack, etas, lam) for name, stack in stacks.items()}
    return descend(watchers, etas, lam, rules, context)


def both_rules(prefix: str, beta: float, A: Tensor, starts: Tensor) -> dict[str, Stack]:
    """The same starts under constant and under scaled decay."""
    return {f"{prefix}{rule}": Stack(rule, beta, A, starts) for rule in (CONSTANT, SCALED)}


def run_matrix(setting: MatrixSettings, context: Context) -> Evidence:
    """Several momenta, a target inside the radius, and a start outside it, all in one program."""
    s, etas = setting, robbins_monro(setting.steps, setting.eta0, setting.lam)
    radius = muon_radius(s.lam)
    shape = (s.chains, s.rows, s.columns)
    A = target(s.rows, s.columns, s.sigma_max * radius, context.generator)
    inside = A * (s.inside_sigma_max / s.sigma_max)
    starts = gaussian(shape, context.generator, std=s.start_std)
    far = gaussian(shape, context.generator)
    far = far * (s.outside_start * radius / spectral_norm(far)[:, None, None])
    stacks = {"outside": Stack(CONSTANT, s.betas[-1], A, far), **both_rules("inside/", s.betas[0], inside, starts)}
    for beta in s.betas:
        stacks |= both_rules(f"{beta:g}/", beta, A, starts)
    seen = watch(stacks, etas, s.lam, s.rules, context)
    claims = [radius_claim("radius", seen, "from every start and for every momentum")]
    for beta in s.betas:
        both = {rule: seen[f"{beta:g}/{rule}"] for rule in (CONSTANT, SCALED)}
        claims += limit_claims(f"-beta{beta:g}", both, A, etas, s.lam, beta)
    claims += inside_claims(setting, {rule: seen[f"inside/{rule}"] for rule in (CONSTANT, SCALED)}, etas)
    return Evidence(claims + projection_claims(A, radius, context.generator))


def run_matrix_figure(setting: MatrixFigureSettings, context: Context) -> Evidence:
    """Many starts at one momentum; losses are kept for the right panel."""
    s, etas = setting, robbins_monro(setting.steps, setting.eta0, setting.lam)
    A = target(s.rows, s.columns, s.sigma_max * muon_radius(s.lam), context.generator)
    starts = gaussian((s.chains, s.rows, s.columns), context.generator, std=s.start_std)
    seen = watch(both_rules("", s.beta, A, starts), etas, s.lam, s.rules, context)
    claims = [radius_claim("radius", seen, "at every step"), *below_claims(seen[CONSTANT], A, s.lam)]
    claims += limit_claims("", seen, A, etas, s.lam, s.beta)
    initial = float(seen[CONSTANT].losses[0].mean())
    floor = muon_loss_floor(torch.linalg.svdvals(A), lam=s.lam) / initial
    return Evidence(claims, [panel_series(rule, seen[rule], initial, floor, s.bins) for rule in seen])


def panel_series(rule: str, seen: Seen, initial: float, floor: float, bins: int) -> Series:
    """Normalized losses over 1 + t, thinned to the extremes of each bin of steps."""
    steps, values = log_extremes(seen.losses.T / initial, bins)
    return Series(f"matrix/{rule}", rule, steps, values, floor if rule == CONSTANT else None)


def radius_claim(name: str, seen: Mapping[str, Seen], where: str) -> Claim:
    """The bound of the proof, at every step of every constant-decay chain."""
    return at_most(
        name,
        f"constant decay keeps |W_t|_op under 1/lambda + (|W_0| - 1/lambda)_+ prod(1 - eta lambda), {where}",
        Stated("Proposition 3.2", TRAPPED),
        1.0 + max(stack.radius_excess for stack in seen.values()),
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
            muon_separation(float(sigmas[0]), lam=lam),
            POLAR,
        ),
        at_least(
            "floor-from-above",
            "the loss of constant decay never crosses 1/2 sum (sigma_i(A) - 1/lambda)_+^2",
            Stated("Proposition 3.2", f"{TRAPPED}, start inside the ball"),
            float(seen.losses.min()),
            muon_loss_floor(sigmas, lam=lam),
            POLAR,
        ),
    ]


def limit_claims(
    suffix: str, seen: Mapping[str, Seen], A: Tensor, etas: Sequence[float], lam: float, beta: float
) -> list[Claim]:
    """Constant decay ends on its floor, scaled decay passes through it."""
    sigmas = torch.linalg.svdvals(A)
    floor, excess = muon_loss_floor(sigmas, lam=lam), floor_excess(sigmas, etas, lam)
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


def inside_claims(setting: MatrixSettings, seen: Mapping[str, Seen], etas: Sequence[float]) -> list[Claim]:
    """A target inside the ball is reached by both rules."""
    s = setting
    return [
        at_most(
            f"inside-{rule}",
            f"a target with all singular values under 1/lambda is reached with {rule} decay too",
            Stated("Proposition 3.2, the case it leaves open", "sigma_max(A) < 1/lambda"),
            float(stack.losses[-1].max() / stack.losses[0].mean()),
            jitter_loss(min(s.rows, s.columns), etas[-1], s.betas[0]) / float(stack.losses[0].mean()),
            HOVERING,
        )
        for rule, stack in seen.items()
    ]


def projection_claims(A: Tensor, radius: float, generator: torch.Generator) -> list[Claim]:
    """Clipping singular values is the projection onto the ball; certified by duality, and by rivals."""
    P = clip_projection(A, radius)
    D = A - P
    rivals = gaussian((1000, *A.shape), generator, std=1e-3 * radius) + P
    rivals = clip_projection(rivals, radius)
    proof = Stated("proof of Proposition 3.2", "rho >= 0")
    return [
        within_share(
            "clip-distance",
            "the clipped matrix is sum (sigma_i - rho)_+^2 away from A",
            proof,
            float(D.square().sum()),
            2.0 * muon_loss_floor(torch.linalg.svdvals(A), lam=1.0 / radius),
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
