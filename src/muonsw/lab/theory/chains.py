"""Many runs, called chains, in one float64 tensor that the library's optimizers step.

In every experiment `s` are the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonsw import SGDSW, MuonSW
from muonsw.lab.theory.experiment import Progress, silent
from muonsw.lab.theory.hypotheses import require_positive
from muonsw.optimizer import ScaledDecayOptimizer

CONSTANT, SCALED = BOTH = ("constant", "scaled")


@dataclass(frozen=True)
class Rules:
    """Which decay rule each of the two names stands for; claims must fail when they are swapped."""

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
    assert weight.grad is not None
    return weight.grad


def sgd(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> SGDSW:
    """The library's SGD over groups of chains, each with `params` and `decay`."""
    require_positive("lambda", lam)
    return SGDSW([dict(group) for group in groups], lr=peak, peak_lr=peak, weight_decay=lam, nonfinite="propagate")


def muon(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> MuonSW:
    """The library's Muon as the theory has it: exact polar factor, heavy ball, no shape scale.

    Each group has `params` of shape (chains, m, n), `decay` and `momentum`.
    """
    require_positive("lambda", lam)
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


def march(optimizer: ScaledDecayOptimizer, etas: Sequence[float], progress: Progress = silent) -> Iterator[int]:
    """Set the learning rate of each step in turn; the caller's loop writes gradients and calls `optimizer.step()`."""
    every = max(1, len(etas) // 100)
    with torch.no_grad():
        for t, eta in enumerate(etas):
            for group in optimizer.param_groups:
                group["lr"] = eta
            yield t
            if t % every == 0:
                progress(t / len(etas))


def log_spaced(steps: int, count: int) -> list[int]:
    """About `count` steps from 1 to `steps`, evenly spaced in the logarithm, both ends included."""
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return sorted({round(float(steps**x)) for x in exponents})


def farthest(values: Tensor, target: float) -> float:
    """The value that is farthest from the target: the worst of all chains."""
    return float(values[(values - target).abs().argmax()])


def gaussian(shape: Sequence[int], generator: torch.Generator, *, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)
