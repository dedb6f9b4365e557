"""Muon with scaled decay: how far down the gradient comes with noise, and that it vanishes without."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab import theory
from muonsw.lab.claims.claim import Claim, Evidence, Source, at_least, at_most, within_share
from muonsw.lab.claims.statistics import mean_of, t_interval
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    CONSTANT,
    HOVERING,
    POLAR,
    PSEUDO_HUBER,
    SCALED,
    Key,
    MuonRun,
    Stack,
    descend,
    frobenius_norm,
    jitter_loss,
    nuclear_norm,
    weighted_mean,
)
from muonsw.lab.theory.hypotheses import require_noise

ASSUMED = "L-smooth, noise of variance sigma^2/B, iterates bounded, sum eta = infinity, sum eta^2 < infinity"
THEOREM_WITHOUT_NOISE = "Theorem 3.3 with sigma = 0"
NO_NOISE = "sigma = 0, L-smooth, iterates bounded, sum eta = infinity, sum eta^2 < infinity"


@dataclass(frozen=True)
class MuonSettings(MuonRun):
    """A grid of momentum, batch size and rank on the matrix quadratic; matrices are (rank, 2 rank).

    `sigma` is the noise of the whole matrix, so that an entry deviates by `sigma / sqrt(B m n)`. The chains of all
    batch sizes share a stack.
    """

    steps: int = 1500
    chains: int = 6
    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    batches: tuple[int, ...] = (1, 4, 16)
    ranks: tuple[int, ...] = (4, 8)
    sigma: float = 2.0

    def by_batch(self, values: Tensor) -> dict[int, Tensor]:
        """Split the chains of a stack by batch size, the last axis being chains."""
        return dict(zip(self.batches, values.chunk(len(self.batches), dim=-1), strict=True))

    @property
    def sampling_error(self) -> float:
        """Four relative standard errors of a mean square over half a run of the smallest matrices."""
        entries = 2 * min(self.ranks) ** 2
        return 4.0 * math.sqrt(2.0 / (entries * self.chains * self.steps / 2.0))


@dataclass(frozen=True)
class Trajectory:
    """What was seen of a stack; the first axis counts steps, the second chains."""

    stack: Stack
    losses: Tensor  # `f(W_t)`, one more than there are steps
    norms: Tensor  # `|W_t|_F`, one more than there are steps
    nuclear: Tensor  # `|grad f(W_t)|_*`
    errors: Tensor  # `|E_t|_F`, the normalized momentum minus the gradient
    margins: Tensor  # what `<grad f(W_t), O_t>` has above the bound of the alignment lemma


def follow(stacks: Mapping[Key, Stack], s: MuonRun, context: Context) -> dict[Key, Trajectory]:
    """Run all stacks as one program, closely enough to check each lemma at every step.

    The direction O of a step is read off the weights, so that it is what the optimizer did.
    """
    seen: dict[Key, list[tuple[Tensor, ...]]] = {key: [] for key in stacks}
    ends: dict[Key, Tensor] = {}
    for moves in descend(stacks, s, context):
        for key, move in moves.items():
            stack, nuclear = stacks[key], nuclear_norm(move.slope)
            O = ((1.0 - move.phi) * move.before - move.after) / move.eta  # noqa: E741 (the paper's name)
            error = frobenius_norm((1.0 - stack.beta) * move.momentum - move.slope)
            margin = (move.slope * O).sum((-2, -1)) - theory.alignment_bound(nuclear, error, r=stack.rank)
            seen[key].append((stack.loss(move.before), frobenius_norm(move.before), nuclear, error, margin))
            ends[key] = move.after
    paths = {}
    for key, stack in stacks.items():
        losses, norms, nuclear, errors, margins = map(torch.stack, zip(*seen[key], strict=True))
        losses = torch.cat([losses, stack.loss(ends[key])[None]])
        norms = torch.cat([norms, frobenius_norm(ends[key])[None]])
        paths[key] = Trajectory(stack, losses, norms, nuclear, errors, margins)
    return paths


def run_muon(s: MuonSettings, context: Context) -> Evidence:
    """Scaled decay over the whole grid, and constant decay at the largest momentum for contrast."""
    stacks = dict[tuple[str, float, int], Stack]()
    require_noise(s.sigma)
    for rank in s.ranks:
        A, starts = s.draw(len(s.batches) * s.chains, rank, 2 * rank, context.generator)
        sizes = torch.tensor(s.batches, dtype=torch.float64).repeat_interleave(s.chains)
        noise = s.sigma / (sizes * A.numel()).sqrt()
        for rule, beta in [*((SCALED, beta) for beta in s.betas), (CONSTANT, s.betas[-1])]:
            stacks[rule, beta, rank] = Stack(rule, beta, A, starts, noise)
    paths = follow(stacks, s, context)
    scaled = [path for (rule, _, _), path in paths.items() if rule == SCALED]
    claims = [floor_claim(s, beta, [path for path in scaled if path.stack.beta == beta]) for beta in s.betas]
    claims += [contrast_claim(s, paths[CONSTANT, s.betas[-1], s.ranks[-1]]), alignment_claim(paths.values())]
    claims += [descent_claim(s, scaled), tracking_claim(s, scaled)]
    return Evidence([*claims, *(settled_claim(s, paths[SCALED, beta, s.ranks[0]]) for beta in s.betas)])


def floor_claim(s: MuonSettings, beta: float, paths: Iterable[Trajectory]) -> Claim:
    """The cell that comes closest to its floor, for one momentum."""
    cells = []
    for path in paths:
        means = weighted_mean(path.nuclear, s.etas, start=s.steps // 2)
        for B, chains in s.by_batch(means).items():
            floor = theory.noise_floor(sigma=s.sigma, beta=beta, r=path.stack.rank, B=B)
            cells.append((t_interval(chains).high / floor, floor, chains, B, path.stack.rank))
    _, floor, chains, B, rank = max(cells, key=lambda cell: cell[0])
    comes_down = (
        f"with beta {beta:g} the eta-weighted nuclear norm of the gradient is under 2 sigma sqrt((1 - beta) r/B)"
    )
    shown = f"(second half; shown: B={B}, r={rank}, the closest of {len(cells)} cells)"
    theorem, below = Source("Theorem 3.3", ASSUMED), Tolerance(0.0, "the upper end of the interval must be below")
    limits = "over the whole run the average keeps the transient, whose share dies only like 1/log T"
    id, found = f"noise-floor-beta{beta:g}", mean_of(chains)
    return at_most(id, f"{comes_down} {shown}", theorem, found, floor, below, limits=limits)


def contrast_claim(s: MuonSettings, path: Trajectory) -> Claim:
    """Constant decay at the smallest floor of the grid."""
    B, rank = s.batches[-1], path.stack.rank
    means = weighted_mean(path.nuclear, s.etas, start=s.steps // 2)
    floor = theory.noise_floor(sigma=s.sigma, beta=path.stack.beta, r=rank, B=B)
    contrast = "contrast of Proposition 3.2 and Theorem 3.3"
    outside = Source(contrast, "sigma_max(A) > 1/lambda, sum eta = infinity")
    stays = f"constant decay stays above that floor when the target is outside its ball (B={B}, r={rank})"
    above = Tolerance(0.0, "the lower end of the interval must be above")
    return at_least("constant-above-floor", stays, outside, mean_of(s.by_batch(means)[B]), floor, above)


def alignment_claim(paths: Iterable[Trajectory]) -> Claim:
    """The lemma, at every step of every path of either rule."""
    lemma = Source("Lemma D.2", "O is the polar factor of the momentum")
    aligned = "<grad f, O> is at least |grad f|_* - 2 sqrt(r) |E|_F (smallest margin over all steps and chains)"
    read_off = "the polar factor is exact to 2e-10; O is read off the weights, which costs |W| ulp/eta"
    smallest = min(float(path.margins.min()) for path in paths)
    return at_least("alignment", aligned, lemma, smallest, 0.0, Tolerance(1e-8, read_off))


def descent_claim(s: MuonSettings, paths: Iterable[Trajectory]) -> Claim:
    """The descent inequality, summed over the run with the path's own errors and norms."""
    q, ratios = s.lam / s.eta0, list[float]()
    for path in paths:
        size, r = float(frobenius_norm(path.stack.A)), path.stack.rank
        sums = (path.nuclear * path.nuclear.new_tensor(s.etas).unsqueeze(1)).sum(0).tolist()
        drops, tops = (path.losses[0] - path.losses[-1]).tolist(), path.norms.amax(0).tolist()
        for total, drop, top, errors in zip(sums, drops, tops, path.errors.T.tolist(), strict=True):
            C_W = theory.shrink_constant(grad_zero=size, L=1.0, bound=top)
            ratios.append(
                total / theory.descent_bound(s.etas, errors, f_drop=drop, q=q, C_W=C_W, L=1.0, r=r, bound=top)
            )
    proof = Source("proof of Theorem 3.3", "L-smooth; no expectation needed")
    descends = "sum eta |grad f|_* is under the finite-T bound, on every single path (largest ratio)"
    return at_most("descent-inequality", descends, proof, max(ratios), 1.0, POLAR)


def tracking_claim(s: MuonSettings, paths: Iterable[Trajectory]) -> Claim:
    """Measured mean squared tracking errors over the bound's, summed over the run."""
    ratios = list[float]()
    constants = {"sigma": s.sigma, "L": 1.0, "q": s.lam / s.eta0}
    for path in paths:
        beta, r, size = path.stack.beta, path.stack.rank, float(frobenius_norm(path.stack.A))
        norms = s.by_batch(path.norms)
        for B, errors in s.by_batch(path.errors).items():
            bound, start = math.sqrt(float(norms[B].square().mean(1).max())), size + float(norms[B][0].max())
            bounds = theory.tracking_error_bounds(
                s.etas, grad_start=start, beta=beta, B=B, r=r, bound=bound, **constants
            )
            ratios.append(float(errors.square().mean(1).sum()) / math.fsum(bounds))
    tracks = "the mean squared tracking error is under its bound, summed over the run (largest ratio of the grid)"
    equal = "with beta = 0 both sides are equal in expectation; four standard errors of the sample mean"
    sampling = Tolerance(s.sampling_error, equal)
    return at_most("tracking-bound", tracks, Source("Lemma D.3", ASSUMED), max(ratios), 1.0, sampling)


def settled_claim(s: MuonSettings, path: Trajectory) -> Claim:
    """Where the tracking error settles, for one momentum: below the lemma's limit."""
    half, beta, B = s.steps // 2, path.stack.beta, s.batches[0]
    limit = theory.tracking_error_limit(sigma=s.sigma, beta=beta, B=B)
    settled = limit / (1.0 + beta)
    sampling = s.sampling_error * math.sqrt((1.0 + beta**2) / (1.0 - beta**2))
    size = math.sqrt(settled / path.stack.rank) or math.inf
    drift = 2.0 * beta**2 * math.fsum(s.etas[half:]) / len(s.etas[half:]) / (size * (1.0 - beta**2))
    found = mean_of(s.by_batch(path.errors)[B][half:].square().mean(0))
    independent = f"noise independent between steps, eta -> 0 (B={B}, r={path.stack.rank})"
    statement = (
        f"with beta {beta:g} and independent noise the squared tracking error settles at "
        f"(1 - beta)/(1 + beta) sigma^2/B, below the lemma's limit {limit:g}"
    )
    because = (
        "four standard errors, errors being correlated over 1/(1 - beta) steps, and the drift of W: a "
        "step follows the error, which adds 2 beta^2 eta/(s (1 - beta^2)) for singular values of size s"
    )
    lemma, slack = Source("Lemma D.3, sharpened", independent), Tolerance(drift + sampling, because)
    return within_share(f"tracking-settles-beta{beta:g}", statement, lemma, found, settled, slack)


MUON = Experiment(
    name="muon-noise",
    title="Muon with noise: the floor for a grid of momentum, batch and rank, and the lemmas on every path",
    hypotheses=("lambda > 0", "sigma >= 0", "0 <= beta < 1", "sum eta = infinity", "sum eta^2 < infinity"),
    settings=MuonSettings(),
    function=run_muon,
    cost=17.0,
)


@dataclass(frozen=True)
class DeterministicSettings(MuonRun):
    """The quadratic for several momenta, and the pseudo-Huber loss `sum sqrt(1 + (W - A)^2) - 1`."""

    rows: int = 8
    columns: int = 16
    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    convex_beta: float = 0.5


def run_deterministic(s: DeterministicSettings, context: Context) -> Evidence:
    """Scaled decay on both objectives; the target is outside the ball that would hold constant decay."""
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    stacks = {f"{beta:g}": Stack(SCALED, beta, A, starts) for beta in s.betas}
    stacks["convex"] = Stack(SCALED, s.convex_beta, A, starts, objective=PSEUDO_HUBER)
    paths = follow(stacks, s, context)
    claims = [vanishing_claim(paths[f"{beta:g}"], s.etas) for beta in s.betas]
    claims.append(transient_claim(paths[f"{s.betas[-1]:g}"], s.etas))
    return Evidence(claims + convex_claims(paths["convex"], s.etas))


def vanishing_claim(path: Trajectory, etas: Sequence[float]) -> Claim:
    """The second half of the run, against hovering at the length of a step."""
    half, beta = len(etas) // 2, path.stack.beta
    hover, late = 2.0 * path.stack.rank / (1.0 - beta), etas[half:]
    bound = hover * math.fsum(eta**2 for eta in late) / math.fsum(late)
    found = float(weighted_mean(path.nuclear, etas, start=half).max())
    theorem = Source(THEOREM_WITHOUT_NOISE, NO_NOISE)
    falls = f"without noise and with beta {beta:g} the eta-weighted nuclear norm falls to the size of a step"
    because = "each of r directions hovers by up to 2 eta/(1 - beta), which goes to zero with eta: an estimate"
    return at_most(f"vanishes-beta{beta:g}", falls, theorem, found, bound, Tolerance(0.0, because))


def transient_claim(path: Trajectory, etas: Sequence[float]) -> Claim:
    """How slowly the average over a whole run falls, once the gradient is gone."""
    half = len(etas) // 2
    weights = path.nuclear.new_tensor(etas).unsqueeze(1)
    sums, totals = (weights * path.nuclear).cumsum(0).mean(1), weights.cumsum(0).squeeze(1)
    averages = sums / totals
    found, slower = float(averages[-1] / averages[half - 1]), float(totals[half - 1] / totals[-1])
    theorem = Source(THEOREM_WITHOUT_NOISE, "harmonic schedule; the sum of eta |grad f|_* has converged")
    slowly = "over the whole run the average falls only as 1/S_T, like 1/log T (last over half way)"
    limits = "so the statement about whole runs is out of reach of any run; the second half is what shows it"
    added = Tolerance(0.01, "what the second half still adds to the sum")
    return within_share("transient", slowly, theorem, found, slower, added, limits=limits)


def convex_claims(path: Trajectory, etas: Sequence[float]) -> list[Claim]:
    """The best-iterate theorem, on a convex loss that is not a quadratic."""
    stack, initial = path.stack, float(path.losses[0].mean())
    gaps, slopes = weighted_mean(path.losses[:-1], etas), weighted_mean(path.nuclear, etas)
    bound = theory.convex_gap_bound(slopes, bound=float(path.norms.max()), target=float(frobenius_norm(stack.A)))
    ratio, lowest = float((gaps / bound).max()), float(path.losses.amin(0).max()) / initial
    hovering = jitter_loss(stack.rank, etas[-1], stack.beta) / initial
    proof = Source("proof of Theorem 3.4", "f convex, |W_t|_F <= bound")
    theorem = Source("Theorem 3.4", "f convex, sigma = 0, iterates bounded")
    under = "the eta-weighted loss is under (bound + |W*|_F) times the weighted nuclear norm (largest ratio)"
    reaches = "the best iterate of a convex loss reaches the minimum (pseudo-Huber, over the initial loss)"
    limits = "the theorem is about the limit inferior; a finite run shows how far down the best iterate is"
    return [
        at_most("convex-gap", under, proof, ratio, 1.0, Tolerance(1e-12, "rounding")),
        at_most("best-iterate", reaches, theorem, lowest, hovering, HOVERING, limits=limits),
    ]


DETERMINISTIC = Experiment(
    name="muon-deterministic",
    title="Muon without noise: the gradient vanishes, and the best iterate of a convex loss reaches the minimum",
    hypotheses=("lambda > 0", "0 <= beta < 1", "sum eta = infinity", "sum eta^2 < infinity"),
    settings=DeterministicSettings(),
    function=run_deterministic,
    cost=8.0,
)
