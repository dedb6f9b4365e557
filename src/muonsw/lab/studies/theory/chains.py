"""Many runs in one tensor, stepped by the library's own optimizers: the ground on which theory is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonsw import SGDSW, MuonSW
from muonsw.lab.studies.experiment import Progress
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.theory.hypotheses import require_decay

CONSTANT, SCALED = "constant", "scaled"


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


def harmonic(steps: int, *, gamma: float, t0: float) -> list[float]:
    """The learning rates `gamma / (t + t0)`."""
    return [gamma / (t + t0) for t in range(steps)]


def log_spaced(steps: int, count: int) -> list[int]:
    """About `count` steps from 1 to `steps`, evenly spread in the logarithm, both ends included.

    Examples:
        >>> log_spaced(1000, 7)
        [1, 3, 10, 32, 100, 316, 1000]
    """
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return sorted({round(float(steps**x)) for x in exponents})


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
