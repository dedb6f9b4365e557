"""What everything is built from: two small layers, and the precision that a computation runs in.

Layers do not initialise themselves, `initialize` does. Products run in autocast's precision where it is on; statistics
never run below float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """Bias-free linear layer whose weight is (out, in)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, its statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return functional.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if its type is wider already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off for this tensor's device; the meta device has none."""
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of matrix products with this tensor, for functions that autocast does not know."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
