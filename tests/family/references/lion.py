"""Lion in float64, one tensor at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.reference import Decay


@dataclass
class ReferenceLion:
    W: Tensor
    decay: Decay
    betas: tuple[float, float] = (0.9, 0.99)
    cautious: bool = False

    def __post_init__(self):
        self.W, self.M = self.W.double().clone(), torch.zeros_like(self.W, dtype=torch.float64)

    def step(self, G, eta):
        G, (b1, b2) = G.double(), self.betas
        C = b1 * self.M + (1 - b1) * G
        U = (C > 0).double() - (C < 0).double()
        self.M = b2 * self.M + (1 - b2) * G
        self.W = self.decay.move(self.W, G, U, eta, eta, self.cautious)
