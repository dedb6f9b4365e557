"""MuonBP in float64, one matrix and one block at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.reference import Decay, ns5


@dataclass
class ReferenceMuonBP:
    """Heavy ball without Nesterov, as the paper has it; `sizes` are those of the blocks along `axis`."""

    W: Tensor
    decay: Decay
    sizes: tuple[int, ...]
    period: int
    axis: int = 0
    mu: float = 0.95
    stretch: str = "match_rms_adamw"

    def __post_init__(self):
        self.W, self.M, self.t = self.W.double().clone(), torch.zeros_like(self.W, dtype=torch.float64), 0

    def step(self, G, eta):
        self.t += 1
        self.M = self.mu * self.M + G.double()
        if self.t % self.period == 0:
            moves = self.scaled(self.M)
        else:
            moves = torch.cat([self.scaled(block) for block in self.M.split(self.sizes, self.axis)], self.axis)
        self.W = self.decay.move(self.W, G.double(), moves, eta, eta, cautious=False)

    def scaled(self, M):
        m, n = M.shape
        return ns5(M) * (0.2 * max(m, n) ** 0.5 if self.stretch == "match_rms_adamw" else (m / n) ** 0.5)
