"""Shared by all theorems: checks of hypotheses, experiments as data, and chains.

Chains are many runs in one float64 tensor, stepped by the library's optimizers. `s` is always the settings.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from muonsw import SGDSW, MuonSW
from muonsw.lab.stats import Evidence
from muonsw.optimizer import ScaledDecayOptimizer

CONSTANT, SCALED = BOTH = ("constant", "scaled")
Number = TypeVar("Number", float, torch.Tensor)
Steps: TypeAlias = Iterable[float]  # learning rates, step by step
# Relative rounding allowed for a learning rate at its limit.
ROUNDING = 1e-12


class HypothesisError(ValueError):
    """A closed form was used although a hypothesis that the message names, such as lambda > 0, does not hold."""


def require(hypothesis: str, holds: bool | Tensor, **values: float | Tensor) -> None:
    """Raise `HypothesisError` unless the hypothesis holds, for a tensor in every element."""
    if not (bool(holds.all()) if isinstance(holds, Tensor) else holds):
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        raise HypothesisError(f"the hypothesis {hypothesis} does not hold" + (f": {shown}" if shown else ""))


def require_positive(name: str, value: float) -> None:
    require(f"{name} > 0", 0.0 < value < math.inf, **{name: value})


def require_at_least(name: str, value: float, least: float) -> None:
    require(f"{name} >= {least:g}", least <= value < math.inf, **{name: value})


def check_rates(etas: Steps, limits: Mapping[str, float] | None = None) -> list[float]:
    """Return the learning rates as floats; refuse negative rates and rates above a limit of a named hypothesis."""
    rates = [float(eta) for eta in etas]
    for step, eta in enumerate(rates):
        require("eta >= 0", 0.0 <= eta < math.inf, eta=eta, step=step)
    largest = max(rates, default=0.0)
    for hypothesis, limit in (limits or {}).items():
        require(hypothesis, largest <= limit * (1.0 + ROUNDING), largest_eta=largest, limit=limit)
    return rates


def robbins_monro(steps: int, eta0: float, p: float = 1.0) -> list[float]:
    """The learning rates `eta0 (1 + t)^-p`: their sum is infinite, the sum of their squares is not.

    Hypotheses: eta0 > 0, and 1/2 < p <= 1, which is when both hold.
    """
    require_positive("eta0", eta0)
    require("sum eta = infinity", p <= 1.0, p=p)
    require("sum eta^2 < infinity", p > 0.5, p=p)
    return [float(eta0 * (1.0 + t) ** -p) for t in range(steps)]


@dataclass(frozen=True)
class Experiment:
    """A computation and the claims that it checks."""

    name: str  # within the study
    title: str  # one line for lists
    settings: Any  # a frozen dataclass, for theory a `Settings`
    # Gets the settings and the generator of all random numbers; may raise `HypothesisError`.
    function: Callable[[Any, torch.Generator], Evidence]
    cost: float = 1.0  # rough seconds; the longest starts first

    def run(self, seed: int = 0) -> Evidence:
        """Run with random numbers that depend only on the seed and the name, not on other experiments."""
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") >> 1  # the same on every machine
        return self.function(self.settings, torch.Generator().manual_seed(number))


@dataclass(frozen=True)
class Settings:
    """The base of all settings."""

    swapped: bool = False  # run each rule under the other's name, which must make claims fail

    def rule(self, name: str) -> str:
        return BOTH[1 - BOTH.index(name)] if self.swapped else name


def chain(start: Tensor) -> torch.nn.Parameter:
    """A parameter that holds many chains; the caller sets its gradient."""
    return torch.nn.Parameter(start.clone())


def sgd(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> SGDSW:
    """The library's SGD over groups of chains, each with `params` and `decay`."""
    require_positive("lambda", lam)
    return SGDSW([dict(group) for group in groups], lr=peak, peak_lr=peak, weight_decay=lam, nonfinite="propagate")


def muon(groups: Sequence[Mapping[str, Any]], *, peak: float, lam: float) -> MuonSW:
    """The library's Muon as in the theory: exact polar factor, heavy ball, no shape scale.

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
    """Set the learning rate of each step; the caller's loop sets gradients and calls `optimizer.step()`."""
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
    """The value farthest from the target: the worst of all chains."""
    return float(values[(values - target).abs().argmax()])


def gaussian(shape: Sequence[int], generator: torch.Generator, *, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)
