"""Schedule-Free in float64 with all three sequences, and the problem on which its authors' code was recorded."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SHAPES, STEPS = ((4, 3), (5,)), 12


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.float64)


def gradient(y, step):
    """A noisy gradient at y."""
    generator = torch.Generator().manual_seed(31 * step + len(y))
    return y - 1 + 0.5 * torch.randn(y.shape, generator=generator, dtype=torch.float64)


@dataclass
class ReferenceScheduleFree:
    """One parameter; `base` is a reference optimizer, whose W is z."""

    base: Any
    beta: float = 0.9
    warmup: int = 0
    r: float = 0.0
    power: float = 2.0
    weights: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x = self.base.W.clone()

    @property
    def y(self) -> Tensor:
        return self.beta * self.x + (1 - self.beta) * self.base.W

    def step(self, G: Tensor | None, eta: float) -> None:
        """Take a step with the gradient at y; without a gradient, count the step but move nothing."""
        k = len(self.rates) + 1
        self.rates.append(eta * min(1.0, k / self.warmup) if self.warmup else eta)
        self.weights.append(k**self.r * max(self.rates) ** self.power)
        if G is not None:
            self.base.step(G, self.rates[-1])
            c = self.weights[-1] / sum(self.weights)
            self.x = (1 - c) * self.x + c * self.base.W
