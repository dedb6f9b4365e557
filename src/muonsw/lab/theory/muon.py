"""Theorems 3.3 and 3.4, Lemmas D.2 and D.3: how small the gradient gets under Muon with scaled decay.

The step is `W <- W - eta O - q eta^2 W` with `q = lambda / eta_max`. O is the polar factor of the momentum buffer, and
its rank is at most `r = min(m, n)`. The gradient's noise satisfies `E|xi|_F^2 <= sigma^2 / B` for the batch size B, so
sigma is for the whole matrix, not an element. The tracking error E_t is the normalized momentum minus the gradient.
f is L-smooth and `E|W_t|_F^2 <= bound^2`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Source, at_least, at_most, mean_of, t_interval
from muonsw.lab.theory.chains import CONSTANT, SCALED, Chains, Experiment, gaussian
from muonsw.lab.theory.hypotheses import Steps, check_rates, require, require_at_least, require_positive, robbins_monro

# The orthogonalizer `exact` agrees with the SVD to 2e-10, so a polar factor's norm may exceed 1 by that much.
POLAR = Tolerance(1e-9, "the polar factor is exact to 2e-10")
HOVERING = Tolerance(0.0, "steps of length eta_T make every direction hover by up to 2 eta_T/(1 - beta): an estimate")


def tracking_error_limit(*, sigma: float, beta: float, B: float) -> float:
    """Lemma D.3: the mean squared tracking error as eta vanishes, at most `(1 - beta) sigma^2 / B`."""
    require_at_least("sigma", sigma, 0)
    require_positive("B", B)
    require("0 <= beta < 1", 0.0 <= beta < 1.0, beta=beta)
    return (1.0 - beta) * sigma**2 / B


def noise_floor(*, sigma: float, beta: float, r: int, B: float) -> float:
    """Theorem 3.3: the limit of the eta-weighted nuclear norm of the gradient, `2 sigma sqrt((1 - beta) r / B)`."""
    require_at_least("r", r, 1)
    return 2.0 * math.sqrt(r * tracking_error_limit(sigma=sigma, beta=beta, B=B))


def tracking_error_bounds(
    etas: Steps, *, grad_start: float, sigma: float, beta: float, B: float, L: float, r: int, q: float, bound: float
) -> list[float]:
    """Bound the mean squared tracking error `u_t = E|E_t|_F^2` at every step, as the proof of Lemma D.3 does.

    With an empty buffer before step 0, `u_0 <= beta^2 |grad f(W_0)|_F^2 + (1 - beta)^2 sigma^2/B`. Then `u_t <= beta
    u_{t-1} + 2 beta^2 L^2 (r eta^2 + q^2 eta^4 bound^2)/(1 - beta) + (1 - beta)^2 sigma^2/B`, with the eta of
    the step before.
    """
    require("0 <= beta < 1", 0.0 <= beta < 1.0, beta=beta)
    noise = (1.0 - beta) ** 2 * sigma**2 / B
    bounds = [beta**2 * grad_start**2 + noise]
    for eta in check_rates(etas)[:-1]:
        drift = 2.0 * L**2 * (r * eta**2 + q**2 * eta**4 * bound**2)
        bounds.append(beta * bounds[-1] + beta**2 / (1.0 - beta) * drift + noise)
    return bounds


def descent_bound(
    etas: Steps, errors: Iterable[float], *, f_drop: float, q: float, grad_zero: float, L: float, r: int, bound: float
) -> float:
    """Bound `sum eta_t E|grad f(W_t)|_*` over any finite run, as the proof of Theorem 3.3 does.

    The bound is `f_drop + 2 sqrt(r) sum eta E|E_t|_F + (q C_W + L r) sum eta^2 + L q^2 bound^2 sum eta^4`, where
    `f_drop` is f at the start minus f at the end, and `C_W = |grad f(0)|_F bound + L bound^2` bounds `E|<grad f(W),
    W>|`. Decay enters only at second order. It also holds on a single path without E, with the path's errors and norms.
    """
    rates = check_rates(etas)
    C_W = grad_zero * bound + L * bound**2
    tracking = 2.0 * math.sqrt(r) * math.fsum(eta * error for eta, error in zip(rates, errors, strict=True))
    second = (q * C_W + L * r) * math.fsum(eta**2 for eta in rates)
    fourth = L * q**2 * bound**2 * math.fsum(eta**4 for eta in rates)
    return f_drop + tracking + second + fourth


# ---- Stacks of matrices: the run shared by all matrix experiments, and its measurements


@dataclass(frozen=True)
class MuonRun(Experiment):
    """Muon under `eta0/(1 + t)` towards a target whose largest singular value is `sigma_max` radii `1/lambda`."""

    lam: float = 0.5
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 2000
    chains: int = 4
    start_std: float = 0.02

    @property
    def radius(self) -> float:
        """The largest spectral norm of weights under constant decay."""
        require_positive("lambda", self.lam)
        return 1.0 / self.lam

    @cached_property
    def etas(self) -> list[float]:
        """The learning rates, with every hypothesis about them checked."""
        return check_rates(robbins_monro(self.steps, self.eta0), {"eta*lambda <= 1": self.radius})

    def draw(self, chains: int, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A target with a spectrum close to Marchenko-Pastur, (m, n), and starts near zero, (chains, m, n)."""
        A = gaussian((rows, columns), generator)
        A = A * (self.sigma_max * self.radius / spectral_norm(A))
        return A, gaussian((chains, rows, columns), generator, std=self.start_std)


@dataclass(frozen=True)
class Stack:
    """Chains of matrices that share a rule, a momentum and an objective with smoothness 1 and minimum 0 at A."""

    rule: str  # `"constant"` or `"scaled"`
    beta: float
    A: Tensor  # the minimizer, (m, n)
    starts: Tensor  # (chains, m, n)
    noise: Tensor | None = None  # per chain, the standard deviation of the noise in a gradient element
    huber: bool = False  # `sum sqrt(1 + (W - A)^2) - 1` instead of `1/2 |W - A|_F^2`

    @property
    def rank(self) -> int:
        return min(self.A.shape)

    def loss(self, W: Tensor) -> Tensor:
        squares = (W - self.A).square()
        return ((1.0 + squares).sqrt() - 1.0).sum((-2, -1)) if self.huber else 0.5 * squares.sum((-2, -1))

    def slope(self, W: Tensor) -> Tensor:
        D = W - self.A
        return D / (1.0 + D.square()).sqrt() if self.huber else D


class Move(NamedTuple):
    """A step of a stack; `after` is the live weight, which changes in the next step."""

    t: int  # from 1
    eta: float
    phi: float
    before: Tensor  # the weights before it
    slope: Tensor  # the gradient there, without noise
    after: Tensor
    momentum: Tensor  # the momentum after it


def descend(stacks: Mapping[Any, Stack], s: MuonRun, generator: torch.Generator) -> Iterator[tuple[Any, Move]]:
    """Run Muon on all stacks together, and yield every step of each."""
    groups = {
        key: {"params": stack.starts, "decay": stack.rule, "momentum": stack.beta} for key, stack in stacks.items()
    }
    chains = Chains("muon", groups, peak=max(s.etas), lam=s.lam)
    for t, eta in enumerate(s.etas, 1):
        before = {key: weight.clone() for key, weight in chains.weights.items()}
        slopes = {key: stack.slope(before[key]) for key, stack in stacks.items()}
        gradients = dict(slopes)
        for key, stack in stacks.items():
            if stack.noise is not None:
                gradients[key] = slopes[key] + gaussian(slopes[key].shape, generator) * stack.noise[:, None, None]
        chains.step(eta, gradients)
        for key in stacks:
            momentum = chains.optimizer.state[chains.params[key]]["momentum_buffer"]
            phi, after = chains.phi(key, eta), chains.weights[key]
            yield key, Move(t, eta, phi, before[key], slopes[key], after, momentum)


@dataclass(frozen=True)
class Trajectory:
    """Measurements of one stack, (steps, chains)."""

    stack: Stack
    losses: Tensor  # `f(W_t)`, with the end of the run as one more step
    norms: Tensor  # `|W_t|_F`, with the end of the run as one more step
    nuclear: Tensor  # `|grad f(W_t)|_*`
    errors: Tensor  # `|E_t|_F`, the normalized momentum minus the gradient
    margins: Tensor  # `<grad f(W_t), O_t>` minus its lower bound in the alignment lemma


def follow(stacks: Mapping[Any, Stack], s: MuonRun, generator: torch.Generator) -> dict[Any, Trajectory]:
    """Run all stacks together and measure the quantities of Theorem 3.3's lemmas at every step."""
    measured: dict[Any, list[tuple[Tensor, ...]]] = {key: [] for key in stacks}
    for key, move in descend(stacks, s, generator):
        stack, nuclear = stacks[key], matrix_norm(move.slope, "nuc")
        # Computed from the weights, so that it is what the optimizer did.
        O = ((1.0 - move.phi) * move.before - move.after) / move.eta  # noqa: E741 (the paper's name)
        error = matrix_norm((1.0 - stack.beta) * move.momentum - move.slope)
        # Lemma D.2: <grad f, O> >= |grad f|_* - 2 sqrt(r) |E|_F
        margin = (move.slope * O).sum((-2, -1)) - (nuclear - 2.0 * math.sqrt(stack.rank) * error)
        measured[key].append((stack.loss(move.after), matrix_norm(move.after), nuclear, error, margin))
    paths = {}
    for key, stack in stacks.items():
        losses, norms, nuclear, errors, margins = map(torch.stack, zip(*measured[key], strict=True))
        losses = torch.cat([stack.loss(stack.starts)[None], losses])
        norms = torch.cat([matrix_norm(stack.starts)[None], norms])
        paths[key] = Trajectory(stack, losses, norms, nuclear, errors, margins)
    return paths


def hover_loss(r: int, eta: float, beta: float) -> float:
    """The loss of hovering around the target in all r directions: `r/2 (2 eta/(1 - beta))^2`.

    A step has length eta in each direction for any gradient, and an overshoot lasts for the memory of the momentum,
    `1/(1 - beta)` steps. This is an estimate with a factor of two to spare, not a theorem.
    """
    return r / 2.0 * (2.0 * eta / (1.0 - beta)) ** 2


def hover_gradient(r: int, etas: Sequence[float], beta: float) -> float:
    """The eta-weighted nuclear norm of the gradient while hovering, over steps with these learning rates."""
    return 2.0 * r / (1.0 - beta) * math.fsum(eta**2 for eta in etas) / math.fsum(etas)


def weighted_mean(values: Tensor, etas: Sequence[float], *, start: int = 0) -> Tensor:
    """The eta-weighted mean over the steps from `start` on, for each chain."""
    weights = values.new_tensor(etas[start:]).unsqueeze(1)
    mean: Tensor = (weights * values[start:]).sum(0) / weights.sum()
    return mean


def spectral_norm(matrices: Tensor) -> Tensor:
    """The largest singular value of each wide matrix, from its Gram matrix: exact to rounding, and fast."""
    largest: Tensor = torch.linalg.eigvalsh(matrices @ matrices.mT)[..., -1]
    return largest.clamp(min=0.0).sqrt()


# ---- Theorem 3.3 with noise


ASSUMED = "L-smooth, noise of variance sigma^2/B, iterates bounded, sum eta = infinity, sum eta^2 < infinity"


@dataclass(frozen=True)
class MuonNoise(MuonRun):
    """A grid of momentum, batch size and rank on the matrix quadratic; matrices are (rank, 2 rank).

    `sigma` is the noise of the whole matrix: the standard deviation of an element is `sigma / sqrt(B m n)`. All batch
    sizes share a stack.
    """

    name: str = "muon-noise"
    title: str = "Muon with noise: the floor for a grid of momentum, batch and rank, and the lemmas on every path"
    steps: int = 1500
    chains: int = 6
    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    batches: tuple[int, ...] = (1, 4, 16)
    ranks: tuple[int, ...] = (4, 8)
    sigma: float = 2.0

    def by_batch(self, values: Tensor) -> dict[int, Tensor]:
        """Split the chains of a stack, the last axis, by batch size."""
        return dict(zip(self.batches, values.chunk(len(self.batches), dim=-1), strict=True))

    def judge(self, generator: torch.Generator) -> Evidence:
        """Test scaled decay over the whole grid, and constant decay at the largest momentum for contrast."""
        stacks = dict[tuple[str, float, int], Stack]()
        for rank in self.ranks:
            A, starts = self.draw(len(self.batches) * self.chains, rank, 2 * rank, generator)
            sizes = torch.tensor(self.batches, dtype=torch.float64).repeat_interleave(self.chains)
            noise = self.sigma / (sizes * A.numel()).sqrt()
            for rule, beta in [*((SCALED, beta) for beta in self.betas), (CONSTANT, self.betas[-1])]:
                stacks[rule, beta, rank] = Stack(rule, beta, A, starts, noise)
        paths = follow(stacks, self, generator)
        scaled = [path for (rule, _, _), path in paths.items() if rule == SCALED]
        claims = [floor_claim(self, beta, [path for path in scaled if path.stack.beta == beta]) for beta in self.betas]

        # Constant decay, at the smallest floor of the grid.
        beta, rank, B = self.betas[-1], self.ranks[-1], self.batches[-1]
        means = weighted_mean(paths[CONSTANT, beta, rank].nuclear, self.etas, start=self.steps // 2)
        floor, constant = noise_floor(sigma=self.sigma, beta=beta, r=rank, B=B), mean_of(self.by_batch(means)[B])
        contrast = "contrast of Proposition 3.2 and Theorem 3.3"
        outside = Source(contrast, "sigma_max(A) > 1/lambda, sum eta = infinity")
        stays = f"constant decay stays above that floor when the target is outside its ball (B={B}, r={rank})"
        above = Tolerance(0.0, "the lower end of the interval must be above")
        claims.append(at_least("constant-above-floor", stays, outside, constant, floor, above))

        # The alignment lemma, at every step of every path of either rule.
        lemma = Source("Lemma D.2", "O is the polar factor of the momentum")
        aligned = "<grad f, O> is at least |grad f|_* - 2 sqrt(r) |E|_F (smallest margin over all steps and chains)"
        read_off = "the polar factor is exact to 2e-10; O is read off the weights, which costs |W| ulp/eta"
        smallest = min(float(path.margins.min()) for path in paths.values())
        claims.append(at_least("alignment", aligned, lemma, smallest, 0.0, Tolerance(1e-8, read_off)))
        return Evidence([*claims, descent_claim(self, scaled), tracking_claim(self, scaled)])


def floor_claim(s: MuonNoise, beta: float, paths: Iterable[Trajectory]) -> Claim:
    """For one momentum, the cell that comes closest to its floor."""
    cells = []
    for path in paths:
        means = weighted_mean(path.nuclear, s.etas, start=s.steps // 2)
        for B, chains in s.by_batch(means).items():
            floor = noise_floor(sigma=s.sigma, beta=beta, r=path.stack.rank, B=B)
            cells.append((t_interval(chains).high / floor, floor, chains, B, path.stack.rank))
    _, floor, chains, B, rank = max(cells, key=lambda cell: cell[0])
    statement = (
        f"with beta {beta:g} the eta-weighted nuclear norm of the gradient is under 2 sigma sqrt((1 - beta) r/B) "
        f"(second half; shown: B={B}, r={rank}, the closest of {len(cells)} cells)"
    )
    theorem, below = Source("Theorem 3.3", ASSUMED), Tolerance(0.0, "the upper end of the interval must be below")
    return at_most(f"noise-floor-beta{beta:g}", statement, theorem, mean_of(chains), floor, below)


def descent_claim(s: MuonNoise, paths: Iterable[Trajectory]) -> Claim:
    """The descent inequality, summed over the run, with the errors and norms of each path."""
    ratios = list[float]()
    for path in paths:
        constants = {"q": s.lam / s.eta0, "grad_zero": float(matrix_norm(path.stack.A)), "L": 1.0}
        sums = (path.nuclear * path.nuclear.new_tensor(s.etas).unsqueeze(1)).sum(0).tolist()
        drops, tops = (path.losses[0] - path.losses[-1]).tolist(), path.norms.amax(0).tolist()
        for total, drop, top, errors in zip(sums, drops, tops, path.errors.T.tolist(), strict=True):
            bound = descent_bound(s.etas, errors, f_drop=drop, r=path.stack.rank, bound=top, **constants)
            ratios.append(total / bound)
    proof = Source("proof of Theorem 3.3", "L-smooth; no expectation needed")
    descends = "sum eta |grad f|_* is under the finite-T bound, on every single path (largest ratio)"
    return at_most("descent-inequality", descends, proof, max(ratios), 1.0, POLAR)


def tracking_claim(s: MuonNoise, paths: Iterable[Trajectory]) -> Claim:
    """Measured mean squared tracking errors over their bounds, summed over the run."""
    ratios = list[float]()
    for path in paths:
        size, norms = float(matrix_norm(path.stack.A)), s.by_batch(path.norms)
        constants = {"sigma": s.sigma, "beta": path.stack.beta, "L": 1.0, "q": s.lam / s.eta0}
        for B, errors in s.by_batch(path.errors).items():
            bound, start = math.sqrt(float(norms[B].square().mean(1).max())), size + float(norms[B][0].max())
            bounds = tracking_error_bounds(s.etas, grad_start=start, B=B, r=path.stack.rank, bound=bound, **constants)
            ratios.append(float(errors.square().mean(1).sum()) / math.fsum(bounds))
    tracks = "the mean squared tracking error is under its bound, summed over the run (largest ratio of the grid)"
    elements = 2 * min(s.ranks) ** 2  # of the smallest matrices; over half a run
    error = 4.0 * math.sqrt(2.0 / (elements * s.chains * s.steps / 2.0))
    sampling = Tolerance(error, "with beta = 0 both sides are equal in expectation; four relative standard errors")
    return at_most("tracking-bound", tracks, Source("Lemma D.3", ASSUMED), max(ratios), 1.0, sampling)


@dataclass(frozen=True)
class MuonDeterministic(MuonRun):
    """The quadratic for several momenta, and the pseudo-Huber loss `sum sqrt(1 + (W - A)^2) - 1`."""

    name: str = "muon-deterministic"
    title: str = "Muon without noise: the gradient vanishes, and the best iterate of a convex loss reaches the minimum"
    rows: int = 8
    columns: int = 16
    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    convex_beta: float = 0.5

    def judge(self, generator: torch.Generator) -> Evidence:
        """Test scaled decay on both objectives; the target is outside the ball of constant decay."""
        A, starts = self.draw(self.chains, self.rows, self.columns, generator)
        stacks = {f"{beta:g}": Stack(SCALED, beta, A, starts) for beta in self.betas}
        stacks["convex"] = Stack(SCALED, self.convex_beta, A, starts, huber=True)
        paths, half, claims = follow(stacks, self, generator), self.steps // 2, list[Claim]()

        # The second half of the run, compared with hovering by a step.
        no_noise = "sigma = 0, L-smooth, iterates bounded, sum eta = infinity, sum eta^2 < infinity"
        theorem = Source("Theorem 3.3 with sigma = 0", no_noise)
        estimate = "each of r directions hovers by up to 2 eta/(1 - beta), which goes to zero with eta: an estimate"
        for beta in self.betas:
            path = paths[f"{beta:g}"]
            bound = hover_gradient(path.stack.rank, self.etas[half:], beta)
            late = float(weighted_mean(path.nuclear, self.etas, start=half).max())
            falls = f"without noise and with beta {beta:g} the eta-weighted nuclear norm falls to the size of a step"
            claims.append(at_most(f"vanishes-beta{beta:g}", falls, theorem, late, bound, Tolerance(0.0, estimate)))

        # A convex loss that is not a quadratic.
        path = paths["convex"]
        initial, lowest = float(path.losses[0].mean()), float(path.losses.amin(0).max())
        bound = hover_loss(path.stack.rank, self.etas[-1], self.convex_beta) / initial
        convex = Source("Theorem 3.4", "f convex, sigma = 0, iterates bounded")
        reaches = "the best iterate of a convex loss reaches the minimum (pseudo-Huber, over the initial loss)"
        claims.append(at_most("best-iterate", reaches, convex, lowest / initial, bound, HOVERING))
        return Evidence(claims)
