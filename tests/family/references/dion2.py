"""Dion2 in float64, one matrix and one slice at a time."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.reference import Decay
from tests.family.references.coefficients import orthogonalize


@dataclass
class ReferenceDion2:
    W: Tensor
    decay: Decay
    fraction: float = 0.25
    mu: float = 0.95
    stretch: str = "match_rms_adamw"
    cautious: bool = False

    def __post_init__(self):
        self.W, self.M = self.W.double().clone(), torch.zeros_like(self.W, dtype=torch.float64)

    def step(self, G, eta):
        m, n = self.W.shape
        self.M = self.M + G.double()
        M = self.M if m <= n else self.M.T  # a view: what is written to it is written to self.M
        k = max(1, math.ceil(self.fraction * min(m, n)))
        chosen = sorted(range(min(m, n)), key=lambda i: -float(M[i].abs().sum()))[:k]
        polar = orthogonalize("polar_express_5", torch.stack([M[i] for i in chosen]))
        U = torch.zeros_like(M)
        for place, i in enumerate(chosen):
            U[i] = polar[place]
            M[i] *= self.mu
        scale = 0.2 * max(m, n) ** 0.5 if self.stretch == "match_rms_adamw" else (m / n) ** 0.5
        self.W = self.decay.move(self.W, G.double(), U if m <= n else U.T, eta, eta * scale, self.cautious)
