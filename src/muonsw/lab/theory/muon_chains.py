"""Muon on stacks of matrices: the run that the matrix experiments share, and what they measure of it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from muonsw import decay_factor
from muonsw.lab.paper import Tolerance
from muonsw.lab.theory.experiment import Settings, chain, gaussian, gradient, march, muon
from muonsw.lab.theory.hypotheses import check_rates, require_positive, robbins_monro

# The orthogonalizer `exact` agrees with the SVD to 2e-10, so a polar factor may be that much longer than 1.
POLAR = Tolerance(1e-9, "the polar factor is exact to 2e-10")
HOVERING = Tolerance(0.0, "steps of length eta_T make every direction hover by up to 2 eta_T/(1 - beta): an estimate")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class MuonRun(Settings):
    """Muon under `eta0/(1 + t)` towards a target whose largest singular value is `sigma_max` radii `1/lambda`."""

    lam: float = 0.5
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 2000
    chains: int = 4
    start_std: float = 0.02

    @property
    def radius(self) -> float:
        """The spectral norm that constant decay does not let the weights exceed."""
        require_positive("lambda", self.lam)
        return 1.0 / self.lam

    @cached_property
    def etas(self) -> list[float]:
        """The learning rates, after a check of every hypothesis that they must satisfy."""
        return check_rates(robbins_monro(self.steps, self.eta0), {"eta*lambda <= 1": self.radius})

    def draw(self, chains: int, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A target with a spectrum close to Marchenko-Pastur, (m, n), and starts near zero, (chains, m, n)."""
        A = gaussian((rows, columns), generator)
        A = A * (self.sigma_max * self.radius / spectral_norm(A))
        return A, gaussian((chains, rows, columns), generator, std=self.start_std)


@dataclass(frozen=True)
class Stack:
    """Chains of matrices that share a rule, a momentum and an objective with smoothness 1 and its minimum 0 at A."""

    rule: str  # `"constant"` or `"scaled"`
    beta: float
    A: Tensor  # the minimizer, (m, n)
    starts: Tensor  # (chains, m, n)
    noise: Tensor | None = None  # standard deviation of an element of the gradient's noise, one for each chain
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
    """A step of a stack; `after` is the live weight, which the next step changes."""

    t: int
    eta: float
    phi: float
    before: Tensor  # the weights that it started from
    slope: Tensor  # the gradient there, without noise
    after: Tensor
    momentum: Tensor  # the momentum after it


def descend(stacks: Mapping[Key, Stack], s: MuonRun, generator: torch.Generator) -> Iterator[dict[Key, Move]]:
    """Run Muon on all stacks together, and yield every step of each."""
    etas, peak = s.etas, max(s.etas)
    weights = {key: chain(stack.starts) for key, stack in stacks.items()}
    groups = [
        {"params": [weights[key]], "decay": s.rule(stack.rule), "momentum": stack.beta} for key, stack in stacks.items()
    ]
    optimizer = muon(groups, peak=peak, lam=s.lam)
    for t in march(optimizer, etas):
        before = {key: weight.detach().clone() for key, weight in weights.items()}
        slopes = {key: stack.slope(before[key]) for key, stack in stacks.items()}
        for key, stack in stacks.items():
            written = gradient(weights[key]).copy_(slopes[key])
            if stack.noise is not None:
                written.add_(gaussian(written.shape, generator) * stack.noise[:, None, None])
        optimizer.step()
        moves = {}
        for key, stack in stacks.items():
            phi = float(decay_factor(s.rule(stack.rule), s.lam, etas[t], peak))
            after, momentum = weights[key].detach(), optimizer.state[weights[key]]["momentum_buffer"]
            moves[key] = Move(t, etas[t], phi, before[key], slopes[key], after, momentum)
        yield moves


@dataclass(frozen=True)
class Trajectory:
    """What was measured of a stack; the first axis counts steps, the second chains."""

    stack: Stack
    losses: Tensor  # `f(W_t)`, one more than there are steps
    norms: Tensor  # `|W_t|_F`, one more than there are steps
    nuclear: Tensor  # `|grad f(W_t)|_*`
    errors: Tensor  # `|E_t|_F`, the normalized momentum minus the gradient
    margins: Tensor  # `<grad f(W_t), O_t>` minus its lower bound in the alignment lemma


def follow(stacks: Mapping[Key, Stack], s: MuonRun, generator: torch.Generator) -> dict[Key, Trajectory]:
    """Run all stacks together and measure what the lemmas of Theorem 3.3 speak of at every step.

    The direction O of a step is computed from the weights, so that it is what the optimizer did.
    """
    measured: dict[Key, list[tuple[Tensor, ...]]] = {key: [] for key in stacks}
    ends: dict[Key, Tensor] = {}
    for moves in descend(stacks, s, generator):
        for key, move in moves.items():
            stack, nuclear = stacks[key], nuclear_norm(move.slope)
            O = ((1.0 - move.phi) * move.before - move.after) / move.eta  # noqa: E741 (the paper's name)
            error = frobenius_norm((1.0 - stack.beta) * move.momentum - move.slope)
            # Lemma D.2: <grad f, O> >= |grad f|_* - 2 sqrt(r) |E|_F
            margin = (move.slope * O).sum((-2, -1)) - (nuclear - 2.0 * math.sqrt(stack.rank) * error)
            measured[key].append((stack.loss(move.before), frobenius_norm(move.before), nuclear, error, margin))
            ends[key] = move.after
    paths = {}
    for key, stack in stacks.items():
        losses, norms, nuclear, errors, margins = map(torch.stack, zip(*measured[key], strict=True))
        losses = torch.cat([losses, stack.loss(ends[key])[None]])
        norms = torch.cat([norms, frobenius_norm(ends[key])[None]])
        paths[key] = Trajectory(stack, losses, norms, nuclear, errors, margins)
    return paths


def hover_loss(r: int, eta: float, beta: float) -> float:
    """The loss of hovering around the target in all r directions: `r/2 (2 eta/(1 - beta))^2`.

    A step has length eta in each direction whatever the gradient, and an overshoot lasts for the memory of
    the momentum, `1/(1 - beta)` steps. An estimate with a factor of two to spare, not a theorem.
    """
    return r / 2.0 * (2.0 * eta / (1.0 - beta)) ** 2


def hover_gradient(r: int, etas: Sequence[float], beta: float) -> float:
    """The eta-weighted nuclear norm of the gradient of the same hovering, over steps with these learning rates."""
    return 2.0 * r / (1.0 - beta) * math.fsum(eta**2 for eta in etas) / math.fsum(etas)


def weighted_mean(values: Tensor, etas: Sequence[float], *, start: int = 0) -> Tensor:
    """The eta-weighted mean over the steps from `start` on, for each chain."""
    weights = values.new_tensor(etas[start:]).unsqueeze(1)
    mean: Tensor = (weights * values[start:]).sum(0) / weights.sum()
    return mean


def frobenius_norm(matrices: Tensor) -> Tensor:
    return matrices.square().sum((-2, -1)).sqrt()


def nuclear_norm(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.svdvals(matrices).sum(-1)
    return norms


def spectral_norm(matrices: Tensor) -> Tensor:
    """The largest singular value of each wide matrix, from its Gram matrix: exact to rounding, and fast."""
    largest: Tensor = torch.linalg.eigvalsh(matrices @ matrices.mT)[..., -1]
    return largest.clamp(min=0.0).sqrt()
