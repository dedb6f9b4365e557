"""The two small layers everything is built from; neither initialises itself, `initialize` does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from muonsw.lab.model.precision import at_least_float32


class Linear(nn.Module):
    """Bias-free linear layer whose weight is (out, in)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last axis."""
        return functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, its statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale the last axis to unit mean square."""
        wide = at_least_float32(x)
        return functional.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)
