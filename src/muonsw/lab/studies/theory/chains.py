"""Many runs in one tensor, stepped by the library's own optimizers: what every test of the theory runs on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from muonsw import SGDSW, MuonSW, decay_factor
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Progress
from muonsw.lab.theory import PowerLaw, check_schedule, muon_radius
from muonsw.lab.theory.hypotheses import require_decay
from muonsw.optimizer import ScaledDecayOptimizer

CONSTANT, SCALED = "constant", "scaled"
BOTH = (CONSTANT, SCALED)
# `exact` agrees with the SVD to 2e-10, so a polar factor may be that much longer than 1.
POLAR = Tolerance(1e-9, "the polar factor is exact to 2e-10")
HOVERING = Tolerance(0.0, "steps of length eta_T make every direction hover by up to 2 eta_T/(1 - beta): an estimate")


@dataclass(frozen=True)
class Rules:
    """Which decay rule stands behind each of the two names; swapped, the claims must notice."""

    constant: str = CONSTANT
    scaled: str = SCALED

    def __getitem__(self, name: str) -> str:
        return {CONSTANT: self.constant, SCALED: self.scaled}[name]


TRUE_RULES = Rules()


def chain(start: Tensor) -> torch.nn.Parameter:
    """A float64 parameter that holds many chains, with room for a gradient that is written by hand."""
    weight = torch.nn.Parameter(start.to(torch.float64).clone())
    weight.grad = torch.zeros_like(weight)
    return weight


def gradient(weight: torch.nn.Parameter) -> Tensor:
    """Where the gradient of a chain is written."""
    assert weight.grad is not None
    return weight.grad


def sgd(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> SGDSW:
    """The library's SGD over groups of chains, each with `params` and `decay`."""
    require_decay(lam)
    return SGDSW([dict(group) for group in groups], lr=peak, peak_lr=peak, weight_decay=lam, nonfinite="propagate")


def muon(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> MuonSW:
    """The library's Muon as the theory has it: exact polar factor, heavy ball, no shape scale.

    Each group has `params` of shape (chains, m, n), `decay` and `momentum`.
    """
    require_decay(lam)
    return MuonSW(
        [dict(group) for group in groups],
        lr=peak,
        peak_lr=peak,
        weight_decay=lam,
        orthogonalizer="exact",
        momentum_form="heavy_ball",
        nesterov=False,
        scale="none",
        matrix="stack",
        nonfinite="propagate",
    )


def march(
    optimizer: ScaledDecayOptimizer, etas: Sequence[float], progress: Progress, *, part: tuple[float, float] = (0, 1)
) -> Iterator[int]:
    """Set the learning rate of each step in turn; the body writes gradients and calls `optimizer.step()`.

    `part` says from where to where in the whole experiment this march goes, for the fraction that is done.
    """
    start, end = part
    every = max(1, len(etas) // 100)
    with torch.no_grad():
        for t, eta in enumerate(etas):
            for group in optimizer.param_groups:
                group["lr"] = eta
            yield t
            if t % every == 0:
                progress(start + (end - start) * t / len(etas))
    progress(end)


@dataclass(frozen=True)
class Objective:
    """A convex function of `D = W - A` with smoothness 1 and its minimum, zero, at `D = 0`."""

    loss: Callable[[Tensor], Tensor]  # its value for each matrix of a stack
    slope: Callable[[Tensor], Tensor]


QUADRATIC = Objective(loss=lambda D: 0.5 * D.square().sum((-2, -1)), slope=lambda D: D)
PSEUDO_HUBER = Objective(
    loss=lambda D: ((1.0 + D.square()).sqrt() - 1.0).sum((-2, -1)), slope=lambda D: D / (1.0 + D.square()).sqrt()
)


@dataclass(frozen=True)
class Stack:
    """Chains of matrices that share a rule, a momentum and a target."""

    rule: str  # `"constant"` or `"scaled"`
    beta: float
    A: Tensor  # the minimizer, (m, n)
    starts: Tensor  # (chains, m, n)
    noise: Tensor | None = None  # standard deviation of an entry of the gradient's noise, one for each chain
    objective: Objective = QUADRATIC

    @property
    def rank(self) -> int:
        """The number of singular values."""
        return min(self.A.shape)

    def loss(self, W: Tensor) -> Tensor:
        """The loss of each chain."""
        return self.objective.loss(W - self.A)


class Move(NamedTuple):
    """One step of a stack; `after` is the live weight, which the next step changes."""

    t: int  # the number of the step
    eta: float  # its learning rate
    phi: float  # its decay
    before: Tensor  # the weights that it started from
    slope: Tensor  # the gradient there, without noise
    after: Tensor  # the weights that it led to
    momentum: Tensor  # the momentum after it


@dataclass(frozen=True)
class MuonRun:
    """Muon under `eta0/(1 + t)` towards a target whose largest singular value is `sigma_max` radii `1/lambda`."""

    lam: float = 0.5
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 2000
    chains: int = 4
    start_std: float = 0.02
    rules: Rules = TRUE_RULES

    @cached_property
    def etas(self) -> list[float]:
        """The learning rates, after a check of every hypothesis that they must satisfy."""
        etas = robbins_monro(self.steps, self.eta0)
        check_schedule(etas, lam=self.lam).require()
        return etas

    def draw(self, chains: int, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A target with a spectrum close to Marchenko-Pastur, (m, n), and starts near zero, (chains, m, n)."""
        A = gaussian((rows, columns), generator)
        A = A * (self.sigma_max * muon_radius(self.lam) / spectral_norm(A))
        return A, gaussian((chains, rows, columns), generator, std=self.start_std)


Key = TypeVar("Key", bound=Hashable)


def descend(
    stacks: Mapping[Key, Stack], s: MuonRun, context: Context, *, part: tuple[float, float] = (0, 1)
) -> Iterator[dict[Key, Move]]:
    """Run Muon on all stacks as one program, and show every step of each."""
    etas, peak = s.etas, max(s.etas)
    weights = {key: chain(stack.starts) for key, stack in stacks.items()}
    groups = [
        {"params": [weights[key]], "decay": s.rules[stack.rule], "momentum": stack.beta}
        for key, stack in stacks.items()
    ]
    optimizer = muon(groups, peak=peak, lam=s.lam)
    for t in march(optimizer, etas, context.progress, part=part):
        before = {key: weight.detach().clone() for key, weight in weights.items()}
        slopes = {key: stack.objective.slope(before[key] - stack.A) for key, stack in stacks.items()}
        for key, stack in stacks.items():
            written = gradient(weights[key]).copy_(slopes[key])
            if stack.noise is not None:
                written.add_(gaussian(written.shape, context.generator) * stack.noise[:, None, None])
        optimizer.step()
        moves = {}
        for key, stack in stacks.items():
            phi = float(decay_factor(s.rules[stack.rule], s.lam, etas[t], peak))
            after, momentum = weights[key].detach(), optimizer.state[weights[key]]["momentum_buffer"]
            moves[key] = Move(t, etas[t], phi, before[key], slopes[key], after, momentum)
        yield moves


def robbins_monro(steps: int, eta0: float, p: float = 1.0) -> list[float]:
    """The learning rates `eta0 (1 + t)^-p`, after a check that they add up to infinity and their squares do not."""
    law = PowerLaw(eta0, p)
    law.require_robbins_monro()
    return [law(t) for t in range(steps)]


def remaining(etas: Sequence[float], lam: float) -> float:
    """What constant decay leaves of a start: `prod(1 - eta lambda)`."""
    left = 1.0
    for eta in etas:
        left *= 1.0 - eta * lam
    return left


def jitter_loss(r: int, eta: float, beta: float) -> float:
    """The loss of hovering around the target in all r directions: `r/2 (2 eta/(1 - beta))^2`.

    A step has length eta in each direction whatever the gradient, and an overshoot lasts for the memory of
    the momentum, `1/(1 - beta)` steps. An estimate with a factor of two to spare, not a theorem.
    """
    return r / 2.0 * (2.0 * eta / (1.0 - beta)) ** 2


def weighted_mean(values: Tensor, etas: Sequence[float], *, start: int = 0) -> Tensor:
    """The eta-weighted mean over the steps from `start` on, for each chain."""
    weights = values.new_tensor(etas[start:]).unsqueeze(1)
    mean: Tensor = (weights * values[start:]).sum(0) / weights.sum()
    return mean


def log_spaced(steps: int, count: int) -> list[int]:
    """About `count` steps from 1 to `steps`, evenly spread in the logarithm, both ends included.

    Examples:
        >>> log_spaced(1000, 7)
        [1, 3, 10, 32, 100, 316, 1000]
    """
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return sorted({round(float(steps**x)) for x in exponents})


def log_extremes(values: Tensor, bins: int) -> tuple[list[int], list[list[float]]]:
    """Keep, in each of `bins` log-spaced bins of steps, the steps where some curve is extreme.

    All curves share their steps, so the extremes are those of the smallest and the largest curve; every kept
    value is a value of the run, never an average. The shape of `values` is (curves, steps), and steps count from 1.

    Examples:
        >>> log_extremes(torch.tensor([[5.0, 4.0, 9.0, 4.0, 1.0]]), bins=1)
        ([1, 3, 5], [[5.0, 9.0, 1.0]])
    """
    count = values.shape[1]
    low, high = values.amin(0), values.amax(0)
    kept = {1, count}
    for start, end in pairwise(log_spaced(count, bins + 1)):
        inside = slice(start - 1, end)
        kept |= {start, start + int(low[inside].argmin()), start + int(high[inside].argmax())}
    steps = sorted(kept)
    return steps, values[:, torch.tensor(steps) - 1].tolist()


def farthest(values: Tensor, target: float) -> float:
    """The value that is farthest from the target: one number that speaks for all chains."""
    return float(values[(values - target).abs().argmax()])


def gaussian(shape: Sequence[int], generator: torch.Generator, *, std: float = 1.0) -> Tensor:
    """Independent normal entries in float64."""
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)


def frobenius_norm(matrices: Tensor) -> Tensor:
    """The root of the sum of squares of each matrix."""
    return matrices.square().sum((-2, -1)).sqrt()


def nuclear_norm(matrices: Tensor) -> Tensor:
    """The sum of singular values of each matrix."""
    norms: Tensor = torch.linalg.svdvals(matrices).sum(-1)
    return norms


def spectral_norm(matrices: Tensor) -> Tensor:
    """The largest singular value of each wide matrix, from its Gram matrix: exact to rounding, and fast."""
    largest: Tensor = torch.linalg.eigvalsh(matrices @ matrices.mT)[..., -1]
    return largest.clamp(min=0.0).sqrt()
