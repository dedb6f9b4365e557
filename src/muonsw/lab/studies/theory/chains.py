"""Many runs in one tensor, stepped by the library's own optimizers: what every test of the theory runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from muonsw import SGDSW, MuonSW, decay_factor
from muonsw.lab.studies.experiment import Context, Progress
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.theory import PowerLaw, check_schedule
from muonsw.theory.hypotheses import require_decay

CONSTANT, SCALED = "constant", "scaled"
# `exact` agrees with the SVD to 2e-10, so a polar factor may be that much longer than 1.
POLAR_ERROR = 1e-9


@dataclass(frozen=True)
class Rules:
    """Which decay rule stands behind each of the two names.

    Swapping them is how a test shows that the claims would notice.
    """

    constant: str = CONSTANT
    scaled: str = SCALED

    def __getitem__(self, name: str) -> str:
        return {CONSTANT: self.constant, SCALED: self.scaled}[name]


TRUE_RULES = Rules()
SWAPPED = Rules(constant=SCALED, scaled=CONSTANT)


def chain(start: Tensor) -> torch.nn.Parameter:
    """A float64 parameter that holds many chains, with room for a gradient that is written by hand."""
    weight = torch.nn.Parameter(start.to(torch.float64).clone())
    weight.grad = torch.zeros_like(weight)
    return weight


def gradient(weight: torch.nn.Parameter) -> Tensor:
    """Where the gradient of a chain is written."""
    if weight.grad is None:
        raise ValueError("this chain has no room for a gradient; make it with chain()")
    return weight.grad


def sgd(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> SGDSW:
    """The library's SGD over groups of chains, each with `params` and `decay`."""
    require_decay(lam)
    return SGDSW([dict(group) for group in groups], lr=peak, peak_lr=peak, weight_decay=lam, nonfinite="propagate")


def muon(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> MuonSW:
    """The library's Muon as the theory has it: exact polar factor, heavy ball, no shape scale.

    Args:
        groups: Each with `params` of shape (chains, m, n), `decay` and `momentum`.
        peak: The highest learning rate.
        lam: The weight decay.
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

    Args:
        optimizer: Whose groups all get the same learning rate.
        etas: The learning rate of each step.
        progress: Told the fraction done, about a hundred times.
        part: From where to where in the whole experiment this march goes.
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


Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """A convex function of `D = W - A` with smoothness 1 and its minimum, zero, at `D = 0`.

    Attributes:
        loss: Its value for each matrix of a stack.
        slope: Its gradient.
    """

    loss: Function
    slope: Function


QUADRATIC = Objective(loss=lambda D: 0.5 * D.square().sum((-2, -1)), slope=lambda D: D)
PSEUDO_HUBER = Objective(
    loss=lambda D: ((1.0 + D.square()).sqrt() - 1.0).sum((-2, -1)), slope=lambda D: D / (1.0 + D.square()).sqrt()
)


@dataclass(frozen=True)
class Stack:
    """Chains of matrices that share a rule, a momentum and a target.

    Attributes:
        rule: `"constant"` or `"scaled"`.
        beta: Momentum.
        A: The minimizer, (m, n).
        starts: Shape (chains, m, n).
        noise: Standard deviation of each entry of a gradient's noise, one for each chain; none if absent.
        objective: What is minimized.
    """

    rule: str
    beta: float
    A: Tensor
    starts: Tensor
    noise: Tensor | None = None
    objective: Objective = QUADRATIC


Found = TypeVar("Found")


@dataclass(frozen=True)
class Step:
    """A step that was taken: its number, learning rate and decay, and the momentum after it."""

    t: int
    eta: float
    phi: float
    momentum: Tensor


class Watcher(Generic[Found]):
    """Writes the gradients of one stack; a subclass keeps what it sees in `after` and reports it.

    Attributes:
        stack: The chains.
        weight: Where they are.
        slope: The gradient without noise at the latest step.
    """

    slope: Tensor

    def __init__(self, stack: Stack) -> None:
        self.stack, self.weight = stack, chain(stack.starts)

    def before(self, generator: torch.Generator) -> None:
        """Write the gradient of the next step."""
        self.slope = self.stack.objective.slope(self.weight.detach() - self.stack.A)
        written = gradient(self.weight).copy_(self.slope)
        if self.stack.noise is not None:
            written.add_(gaussian(written.shape, generator) * self.stack.noise[:, None, None])

    def after(self, step: Step) -> None:
        """Look at the weights after a step."""

    def report(self) -> Found:
        """What was seen."""
        raise NotImplementedError


def descend(
    watchers: Mapping[str, Watcher[Found]], etas: Sequence[float], lam: float, rules: Rules, context: Context
) -> dict[str, Found]:
    """Run Muon on the stacks of all watchers as one program, and let each watch every step."""
    groups = [
        {"params": [watcher.weight], "decay": rules[watcher.stack.rule], "momentum": watcher.stack.beta}
        for watcher in watchers.values()
    ]
    optimizer = muon(groups, peak=max(etas), lam=lam)
    for t in march(optimizer, etas, context.progress):
        for watcher in watchers.values():
            watcher.before(context.generator)
        optimizer.step()
        for watcher in watchers.values():
            phi = float(decay_factor(rules[watcher.stack.rule], lam, etas[t], max(etas)))
            watcher.after(Step(t, etas[t], phi, optimizer.state[watcher.weight]["momentum_buffer"]))
    return {name: watcher.report() for name, watcher in watchers.items()}


def harmonic(steps: int, *, gamma: float, t0: float) -> list[float]:
    """The learning rates `gamma / (t + t0)`."""
    return [gamma / (t + t0) for t in range(steps)]


def robbins_monro(steps: int, eta0: float, lam: float) -> list[float]:
    """The learning rates `eta0 / (1 + t)`, after a check of every hypothesis that they must satisfy."""
    law = PowerLaw(eta0, 1.0)
    law.require_robbins_monro()
    etas = [law(t) for t in range(steps)]
    check_schedule(etas, lam=lam).require()
    return etas


def remaining(etas: Sequence[float], lam: float) -> float:
    """What constant decay leaves of a start: `prod(1 - eta lambda)`."""
    left = 1.0
    for eta in etas:
        left *= 1.0 - eta * lam
    return left


def target(rows: int, columns: int, sigma_max: float, generator: torch.Generator) -> Tensor:
    """A Gaussian matrix, whose spectrum is close to Marchenko-Pastur, scaled to a largest singular value."""
    A = gaussian((rows, columns), generator)
    return A * (sigma_max / spectral_norm(A))


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


def farthest(values: Tensor, target: float) -> float:
    """The value that is farthest from the target: one number that speaks for all chains."""
    return float(values[(values - target).abs().argmax()])


def gaussian(shape: Sequence[int], generator: torch.Generator, *, std: float = 1.0) -> Tensor:
    """Independent normal entries in float64."""
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)


def nuclear_norm(matrices: Tensor) -> Tensor:
    """The sum of singular values of each matrix."""
    norms: Tensor = torch.linalg.svdvals(matrices).sum(-1)
    return norms


def spectral_norm(matrices: Tensor) -> Tensor:
    """The largest singular value of each wide matrix, from its Gram matrix: exact to rounding, and fast."""
    largest: Tensor = torch.linalg.eigvalsh(matrices @ matrices.mT)[..., -1]
    return largest.clamp(min=0.0).sqrt()
