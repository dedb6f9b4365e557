"""How theorems are tested: experiments, and chains: many runs in one float64 tensor, stepped by the library.

`s` is always an experiment, which holds its settings.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muonsw import SGDSW, MuonSW, decay_factor
from muonsw.lab.stats import Evidence
from muonsw.lab.theory.hypotheses import require_positive
from muonsw.optimizer import ScaledDecayOptimizer

CONSTANT, SCALED = RULES = ("constant", "scaled")
# Muon as in the theory: exact polar factor, heavy ball, no shape scale.
KINDS: Mapping[str, Callable[..., ScaledDecayOptimizer]] = {
    "sgd": SGDSW,
    "muon": partial(
        MuonSW, orthogonalizer="exact", momentum_form="heavy_ball", nesterov=False, scale="none", matrix="stack"
    ),
}


@dataclass(frozen=True)
class Experiment(ABC):
    """A computation and the claims that it checks; the fields of a subclass are its settings."""

    name: str  # within the study
    title: str  # one line for lists

    @abstractmethod
    def judge(self, generator: torch.Generator) -> Evidence:
        """Compute with this generator of all random numbers; may raise `HypothesisError`."""

    def run(self, seed: int = 0) -> Evidence:
        """Run with random numbers that depend only on the seed and the name, not on other experiments."""
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") >> 1  # the same on every machine
        return self.judge(torch.Generator().manual_seed(number))


class Chains:
    """Stacks of chains by key, stepped together by the library's `sgd` or `muon`.

    A stack is a param group with its own options, whose `params` is the tensor of all starts; Muon's has the shape
    (chains, m, n). `weights` holds the live weights, which change with every step.
    """

    def __init__(self, kind: str, stacks: Mapping[Any, Mapping[str, Any]], *, peak: float, lam: float) -> None:
        require_positive("lambda", lam)
        params = {key: nn.Parameter(stack["params"].clone()) for key, stack in stacks.items()}
        groups = [{**stack, "params": [params[key]]} for key, stack in stacks.items()]
        self.optimizer = KINDS[kind](groups, lr=peak, peak_lr=peak, weight_decay=lam, nonfinite="propagate")
        self.weights: dict[Any, Tensor] = {key: param.detach() for key, param in params.items()}
        self.params = params
        self._decays, self._peak, self._lam = {key: stack["decay"] for key, stack in stacks.items()}, peak, lam

    def step(self, eta: float, gradients: Mapping[Any, Tensor]) -> None:
        """Take a step of every stack with this learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = eta
        for key, param in self.params.items():
            param.grad = gradients[key]
        self.optimizer.step()

    def phi(self, key: Any, eta: float) -> float:
        """The decay factor of a stack's step with this learning rate."""
        return float(decay_factor(self._decays[key], self._lam, eta, self._peak))


def log_spaced(steps: int, count: int) -> list[int]:
    """About `count` steps from 1 to `steps`, evenly spaced in the logarithm, both ends included."""
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return sorted({round(float(steps**x)) for x in exponents})


def farthest(values: Tensor, target: float) -> float:
    """The value farthest from the target: the worst of all chains."""
    return float(values[(values - target).abs().argmax()])


def gaussian(shape: Sequence[int], generator: torch.Generator, *, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)
