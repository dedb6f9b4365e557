"""Muon with scaled decay: how far down the gradient comes with noise, and that it vanishes without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab.claims.claim import Claim, Evidence, Stated, at_least, at_most, within_share
from muonsw.lab.claims.statistics import mean_of, t_interval
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    CONSTANT,
    POLAR_ERROR,
    PSEUDO_HUBER,
    SCALED,
    TRUE_RULES,
    Rules,
    Stack,
    Step,
    Watcher,
    descend,
    gaussian,
    jitter_loss,
    nuclear_norm,
    robbins_monro,
    target,
    weighted_mean,
)
from muonsw.theory import (
    alignment_bound,
    convex_gap_bound,
    descent_bound,
    muon_radius,
    noise_floor,
    shrink_constant,
    tracking_error_bounds,
    tracking_error_limit,
)
from muonsw.theory.hypotheses import require_noise

ASSUMED = "L-smooth, noise of variance sigma^2/B, iterates bounded, sum eta = infinity, sum eta^2 < infinity"


@dataclass(frozen=True)
class MuonSettings:
    """A grid of momentum, batch size and rank on the matrix quadratic; matrices are (rank, 2 rank).

    `sigma` is the noise of the whole matrix, so that an entry deviates by `sigma / sqrt(B m n)`.
    """

    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    batches: tuple[int, ...] = (1, 4, 16)
    ranks: tuple[int, ...] = (4, 8)
    sigma: float = 2.0
    lam: float = 0.5
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 1500
    chains: int = 6
    start_std: float = 0.02
    rules: Rules = TRUE_RULES

    @property
    def cells(self) -> list[tuple[float, int]]:
        """Every pair of momentum and rank; batch sizes share a stack."""
        return [(beta, rank) for beta in self.betas for rank in self.ranks]

    def by_batch(self, values: Tensor) -> dict[int, Tensor]:
        """Split the chains of a stack by batch size, the last axis being chains."""
        return dict(zip(self.batches, values.chunk(len(self.batches), dim=-1), strict=True))


@dataclass(frozen=True)
class Trajectory:
    """What was seen of a stack; the first axis counts steps, the second chains.

    Attributes:
        losses: `f(W_t)`, one more than there are steps.
        nuclear: `|grad f(W_t)|_*`.
        errors: `|E_t|_F`, the normalized momentum minus the gradient.
        margins: What `<grad f(W_t), O_t>` has above the bound of the alignment lemma.
        norms: `|W_t|_F`, one more than there are steps.
    """

    losses: Tensor
    nuclear: Tensor
    errors: Tensor
    margins: Tensor
    norms: Tensor


class PathWatcher(Watcher[Trajectory]):
    """Records the path of one stack closely enough to check each lemma at every step."""

    old: Tensor

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        self.seen: dict[str, list[Tensor]] = {key: [] for key in ("losses", "nuclear", "errors", "margins", "norms")}

    def before(self, generator: torch.Generator) -> None:
        """Write the gradient of the next step, and remember where it starts from."""
        self._look()
        self.old = self.weight.detach().clone()
        super().before(generator)

    def after(self, step: Step) -> None:
        """Compare the step that was taken, read off the weights, with the gradient it should follow."""
        direction = ((1.0 - step.phi) * self.old - self.weight.detach()) / step.eta
        nuclear = nuclear_norm(self.slope)
        error = ((1.0 - self.stack.beta) * step.momentum - self.slope).square().sum((-2, -1)).sqrt()
        aligned = (self.slope * direction).sum((-2, -1))
        self.seen["nuclear"].append(nuclear)
        self.seen["errors"].append(error)
        self.seen["margins"].append(aligned - alignment_bound(nuclear, error, r=min(self.stack.A.shape)))

    def _look(self) -> None:
        W = self.weight.detach()
        self.seen["losses"].append(self.stack.objective.loss(W - self.stack.A))
        self.seen["norms"].append(W.square().sum((-2, -1)).sqrt())

    def report(self) -> Trajectory:
        """What was seen."""
        self._look()
        return Trajectory(**{key: torch.stack(values) for key, values in self.seen.items()})


def watch_paths(
    stacks: Mapping[str, Stack], etas: Sequence[float], lam: float, rules: Rules, context: Context
) -> dict[str, Trajectory]:
    """Run all stacks as one program and watch every step."""
    return descend({name: PathWatcher(stack) for name, stack in stacks.items()}, etas, lam, rules, context)


def run_muon(setting: MuonSettings, context: Context) -> Evidence:
    """Scaled decay over the whole grid, and constant decay at the largest momentum for contrast."""
    s, stacks = setting, dict[str, Stack]()
    require_noise(s.sigma)
    etas = robbins_monro(s.steps, s.eta0, s.lam)
    for rank in s.ranks:
        A = target(rank, 2 * rank, s.sigma_max * muon_radius(s.lam), context.generator)
        starts = gaussian((len(s.batches) * s.chains, rank, 2 * rank), context.generator, std=s.start_std)
        sizes = torch.tensor(s.batches, dtype=torch.float64).repeat_interleave(s.chains)
        noise = s.sigma / (sizes * A.numel()).sqrt()
        for beta in s.betas:
            stacks[f"{SCALED}/{beta:g}/{rank}"] = Stack(SCALED, beta, A, starts, noise)
        stacks[f"{CONSTANT}/{s.betas[-1]:g}/{rank}"] = Stack(CONSTANT, s.betas[-1], A, starts, noise)
    paths = watch_paths(stacks, etas, s.lam, s.rules, context)
    scaled = {cell: paths[f"{SCALED}/{cell[0]:g}/{cell[1]}"] for cell in s.cells}
    targets = {rank: stacks[f"{SCALED}/{s.betas[0]:g}/{rank}"].A for rank in s.ranks}
    claims = [floor_claim(setting, scaled, etas, beta) for beta in s.betas]
    claims.append(contrast_claim(setting, paths, etas))
    claims += [alignment_claim(paths), descent_claim(setting, scaled, targets, etas)]
    claims.append(tracking_claim(setting, scaled, targets, etas))
    return Evidence([*claims, *settled_claims(setting, scaled, etas)])


def floor_claim(
    setting: MuonSettings, paths: Mapping[tuple[float, int], Trajectory], etas: Sequence[float], beta: float
) -> Claim:
    """The cell that comes closest to its floor, for one momentum."""
    s, half, cells = setting, setting.steps // 2, []
    for rank in s.ranks:
        means = weighted_mean(paths[beta, rank].nuclear, etas, start=half)
        for B, chains in s.by_batch(means).items():
            floor = noise_floor(sigma=s.sigma, beta=beta, r=rank, B=B)
            cells.append((t_interval(chains).high / floor, floor, chains, B, rank))
    _, floor, chains, B, rank = max(cells, key=lambda cell: cell[0])
    return at_most(
        f"noise-floor-beta{beta:g}",
        f"with beta {beta:g} the eta-weighted nuclear norm of the gradient is under "
        f"2 sigma sqrt((1 - beta) r/B) (second half; shown: B={B}, r={rank}, the closest of {len(cells)} cells)",
        Stated("Theorem 3.3", ASSUMED),
        mean_of(chains),
        floor,
        Tolerance(0.0, "the upper end of the interval must be below"),
        limits="over the whole run the average keeps the transient, whose share dies only like 1/log T",
    )


def contrast_claim(setting: MuonSettings, paths: Mapping[str, Trajectory], etas: Sequence[float]) -> Claim:
    """Constant decay at the smallest floor of the grid."""
    s, beta, B = setting, setting.betas[-1], setting.batches[-1]
    rank = s.ranks[-1]
    means = weighted_mean(paths[f"{CONSTANT}/{beta:g}/{rank}"].nuclear, etas, start=s.steps // 2)
    return at_least(
        "constant-above-floor",
        f"constant decay stays above that floor when the target is outside its ball (B={B}, r={rank})",
        Stated("contrast of Proposition 3.2 and Theorem 3.3", "sigma_max(A) > 1/lambda, sum eta = infinity"),
        mean_of(s.by_batch(means)[B]),
        noise_floor(sigma=s.sigma, beta=beta, r=rank, B=B),
        Tolerance(0.0, "the lower end of the interval must be above"),
    )


def alignment_claim(paths: Mapping[str, Trajectory]) -> Claim:
    """The lemma, at every step of every path of either rule."""
    return at_least(
        "alignment",
        "<grad f, O> is at least |grad f|_* - 2 sqrt(r) |E|_F (smallest margin over all steps and chains)",
        Stated("Lemma D.2", "O is the polar factor of the momentum"),
        min(float(path.margins.min()) for path in paths.values()),
        0.0,
        Tolerance(1e-8, "the polar factor is exact to 2e-10; O is read off the weights, which costs |W| ulp/eta"),
    )


def descent_claim(
    setting: MuonSettings,
    paths: Mapping[tuple[float, int], Trajectory],
    targets: Mapping[int, Tensor],
    etas: Sequence[float],
) -> Claim:
    """The descent inequality, summed over the run with the path's own errors and norms."""
    s, ratios = setting, list[float]()
    for (_, rank), path in paths.items():
        size = float(targets[rank].square().sum().sqrt())
        sums = (path.nuclear * path.nuclear.new_tensor(etas).unsqueeze(1)).sum(0).tolist()
        drops, tops = (path.losses[0] - path.losses[-1]).tolist(), path.norms.amax(0).tolist()
        for total, drop, top, errors in zip(sums, drops, tops, path.errors.T.tolist(), strict=True):
            C_W = shrink_constant(grad_zero=size, L=1.0, bound=top)
            q = s.lam / s.eta0
            ratios.append(total / descent_bound(etas, errors, f_drop=drop, q=q, C_W=C_W, L=1.0, r=rank, bound=top))
    return at_most(
        "descent-inequality",
        "sum eta |grad f|_* is under the finite-T bound, on every single path (largest ratio)",
        Stated("proof of Theorem 3.3", "L-smooth; no expectation needed"),
        max(ratios),
        1.0,
        Tolerance(POLAR_ERROR, "the polar factor is exact to 2e-10"),
    )


def tracking_claim(
    setting: MuonSettings,
    paths: Mapping[tuple[float, int], Trajectory],
    targets: Mapping[int, Tensor],
    etas: Sequence[float],
) -> Claim:
    """Measured mean squared tracking errors over the bound's, summed over the run."""
    s, ratios = setting, list[float]()
    for (beta, rank), path in paths.items():
        size, q = float(targets[rank].square().sum().sqrt()), s.lam / s.eta0
        norms = s.by_batch(path.norms)
        for B, errors in s.by_batch(path.errors).items():
            bound, start = math.sqrt(float(norms[B].square().mean(1).max())), size + float(norms[B][0].max())
            bounds = tracking_error_bounds(
                etas, grad_start=start, sigma=s.sigma, beta=beta, B=B, L=1.0, r=rank, q=q, bound=bound
            )
            ratios.append(float(errors.square().mean(1).sum()) / math.fsum(bounds))
    return at_most(
        "tracking-bound",
        "the mean squared tracking error is under its bound, summed over the run (largest ratio of the grid)",
        Stated("Lemma D.3", ASSUMED),
        max(ratios),
        1.0,
        Tolerance(
            sampling_error(setting),
            "with beta = 0 both sides are equal in expectation; four standard errors of the sample mean",
        ),
    )


def settled_claims(
    setting: MuonSettings, paths: Mapping[tuple[float, int], Trajectory], etas: Sequence[float]
) -> list[Claim]:
    """Where the tracking error settles, for each momentum: below the lemma's limit."""
    s, claims = setting, []
    rank, B = s.ranks[0], s.batches[0]
    for beta in s.betas:
        late = s.by_batch(paths[beta, rank].errors)[B][s.steps // 2 :].square().mean(0)
        limit = tracking_error_limit(sigma=s.sigma, beta=beta, B=B)
        sampling = sampling_error(setting) * math.sqrt((1.0 + beta**2) / (1.0 - beta**2))
        claims.append(
            within_share(
                f"tracking-settles-beta{beta:g}",
                f"with beta {beta:g} and independent noise the squared tracking error settles at "
                f"(1 - beta)/(1 + beta) sigma^2/B, below the lemma's limit {limit:g}",
                Stated("Lemma D.3, sharpened", f"noise independent between steps, eta -> 0 (B={B}, r={rank})"),
                mean_of(late),
                limit / (1.0 + beta),
                Tolerance(
                    drift(setting, limit / (1.0 + beta), beta, etas) + sampling,
                    "four standard errors, errors being correlated over 1/(1 - beta) steps, and the drift of W: a "
                    "step follows the error, which adds 2 beta^2 eta/(s (1 - beta^2)) for singular values of size s",
                ),
            )
        )
    return claims


def drift(setting: MuonSettings, squared_error: float, beta: float, etas: Sequence[float]) -> float:
    """How much the moving target adds to the squared tracking error over the second half, relative to it."""
    late = etas[setting.steps // 2 :]
    size = math.sqrt(squared_error / setting.ranks[0]) or math.inf
    return 2.0 * beta**2 * math.fsum(late) / len(late) / (size * (1.0 - beta**2))


def sampling_error(setting: MuonSettings) -> float:
    """Four relative standard errors of a mean square over half a run of the smallest matrices."""
    entries = 2 * min(setting.ranks) ** 2
    return 4.0 * math.sqrt(2.0 / (entries * setting.chains * setting.steps / 2.0))


MUON = Experiment(
    name="muon-noise",
    title="Muon with noise: the floor for a grid of momentum, batch and rank, and the lemmas on every path",
    hypotheses=("lambda > 0", "sigma >= 0", "0 <= beta < 1", "sum eta = infinity", "sum eta^2 < infinity"),
    settings=MuonSettings(),
    function=run_muon,
    cost=17.0,
)


THEOREM_WITHOUT_NOISE = "Theorem 3.3 with sigma = 0"
NO_NOISE = "sigma = 0, L-smooth, iterates bounded, sum eta = infinity, sum eta^2 < infinity"


@dataclass(frozen=True)
class DeterministicSettings:
    """The quadratic for several momenta, and the pseudo-Huber loss `sum sqrt(1 + (W - A)^2) - 1`."""

    rows: int = 8
    columns: int = 16
    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    convex_beta: float = 0.5
    lam: float = 0.5
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 2000
    chains: int = 4
    start_std: float = 0.02
    rules: Rules = TRUE_RULES


def run_deterministic(setting: DeterministicSettings, context: Context) -> Evidence:
    """Scaled decay on both objectives; the target is outside the ball that would hold constant decay."""
    s = setting
    etas = robbins_monro(s.steps, s.eta0, s.lam)
    A = target(s.rows, s.columns, s.sigma_max * muon_radius(s.lam), context.generator)
    starts = gaussian((s.chains, s.rows, s.columns), context.generator, std=s.start_std)
    stacks = {f"{beta:g}": Stack(SCALED, beta, A, starts) for beta in s.betas}
    stacks["convex"] = Stack(SCALED, s.convex_beta, A, starts, objective=PSEUDO_HUBER)
    paths = watch_paths(stacks, etas, s.lam, s.rules, context)
    claims = [vanishing_claim(paths[f"{beta:g}"], etas, beta, s.rows) for beta in s.betas]
    claims.append(transient_claim(paths[f"{s.betas[-1]:g}"], etas))
    return Evidence(claims + convex_claims(setting, paths["convex"], A, etas))


def vanishing_claim(path: Trajectory, etas: Sequence[float], beta: float, r: int) -> Claim:
    """The second half of the run, against hovering at the length of a step."""
    half = len(etas) // 2
    hover, late = 2.0 * r / (1.0 - beta), etas[half:]
    return at_most(
        f"vanishes-beta{beta:g}",
        f"without noise and with beta {beta:g} the eta-weighted nuclear norm falls to the size of a step",
        Stated(THEOREM_WITHOUT_NOISE, NO_NOISE),
        float(weighted_mean(path.nuclear, etas, start=half).max()),
        hover * math.fsum(eta**2 for eta in late) / math.fsum(late),
        Tolerance(
            0.0, "each of r directions hovers by up to 2 eta/(1 - beta), which goes to zero with eta: an estimate"
        ),
    )


def transient_claim(path: Trajectory, etas: Sequence[float]) -> Claim:
    """How slowly the average over a whole run falls, once the gradient is gone."""
    half = len(etas) // 2
    weights = path.nuclear.new_tensor(etas).unsqueeze(1)
    sums = (weights * path.nuclear).cumsum(0).mean(1)
    totals = weights.cumsum(0).squeeze(1)
    averages = sums / totals
    return within_share(
        "transient",
        "over the whole run the average falls only as 1/S_T, like 1/log T (last over half way)",
        Stated(THEOREM_WITHOUT_NOISE, "harmonic schedule; the sum of eta |grad f|_* has converged"),
        float(averages[-1] / averages[half - 1]),
        float(totals[half - 1] / totals[-1]),
        Tolerance(0.01, "what the second half still adds to the sum"),
        limits="so the statement about whole runs is out of reach of any run; the second half is what shows it",
    )


def convex_claims(setting: DeterministicSettings, path: Trajectory, A: Tensor, etas: Sequence[float]) -> list[Claim]:
    """The best-iterate theorem, on a convex loss that is not a quadratic."""
    s = setting
    gaps, slopes = weighted_mean(path.losses[:-1], etas), weighted_mean(path.nuclear, etas)
    size = float(A.square().sum().sqrt())
    bound = convex_gap_bound(slopes, bound=float(path.norms.max()), target=size)
    initial = float(path.losses[0].mean())
    return [
        at_most(
            "convex-gap",
            "the eta-weighted loss is under (bound + |W*|_F) times the weighted nuclear norm (largest ratio)",
            Stated("proof of Theorem 3.4", "f convex, |W_t|_F <= bound"),
            float((gaps / bound).max()),
            1.0,
            Tolerance(1e-12, "rounding"),
        ),
        at_most(
            "best-iterate",
            "the best iterate of a convex loss reaches the minimum (pseudo-Huber, over the initial loss)",
            Stated("Theorem 3.4", "f convex, sigma = 0, iterates bounded"),
            float(path.losses.amin(0).max()) / initial,
            jitter_loss(s.rows, etas[-1], s.convex_beta) / initial,
            Tolerance(0.0, "steps of length eta_T make every direction hover by up to 2 eta_T/(1 - beta): an estimate"),
            limits="the theorem is about the limit inferior; a finite run shows how far down the best iterate is",
        ),
    ]


DETERMINISTIC = Experiment(
    name="muon-deterministic",
    title="Muon without noise: the gradient vanishes, and the best iterate of a convex loss reaches the minimum",
    hypotheses=("lambda > 0", "0 <= beta < 1", "sum eta = infinity", "sum eta^2 < infinity"),
    settings=DeterministicSettings(),
    function=run_deterministic,
    cost=8.0,
)
