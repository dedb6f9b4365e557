"""Experiments as data, and chains: many runs in one float64 tensor that the library's optimizers step.

In every experiment `s` are the settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonsw import SGDSW, MuonSW
from muonsw.lab.stats import Evidence
from muonsw.lab.theory.hypotheses import require_positive
from muonsw.optimizer import ScaledDecayOptimizer

CONSTANT, SCALED = BOTH = ("constant", "scaled")


@dataclass(frozen=True)
class Experiment:
    """A block of claims that are checked together."""

    name: str  # its name within the study
    title: str  # one line for lists
    settings: Any  # a frozen dataclass, for theory a `Settings`
    # Runs it, given the settings and the source of all its random numbers; raises `HypothesisError`.
    function: Callable[[Any, torch.Generator], Evidence]
    cost: float = 1.0  # rough seconds, so that the longest is started first

    def run(self, seed: int = 0) -> Evidence:
        """Run with random numbers that depend on the seed and the name alone, so that order does not matter."""
        return self.function(self.settings, torch.Generator().manual_seed(seed_for(seed, self.name)))


def seed_for(seed: int, name: str) -> int:
    """A separate seed for each experiment, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Settings:
    """The base of all settings."""

    swapped: bool = False  # run each rule under the other's name, to see that the claims then fail

    def rule(self, name: str) -> str:
        return BOTH[1 - BOTH.index(name)] if self.swapped else name


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


def march(optimizer: ScaledDecayOptimizer, etas: Sequence[float]) -> Iterator[int]:
    """Set the learning rate of each step in turn; the caller's loop writes gradients and calls `optimizer.step()`."""
    with torch.no_grad():
        for t, eta in enumerate(etas):
            for group in optimizer.param_groups:
                group["lr"] = eta
            yield t


def log_spaced(steps: int, count: int) -> list[int]:
    """About `count` steps from 1 to `steps`, evenly spaced in the logarithm, both ends included."""
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return sorted({round(float(steps**x)) for x in exponents})


def farthest(values: Tensor, target: float) -> float:
    """The value that is farthest from the target: the worst of all chains."""
    return float(values[(values - target).abs().argmax()])


def gaussian(shape: Sequence[int], generator: torch.Generator, *, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)
