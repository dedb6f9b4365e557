"""Which precision a computation runs in: autocast's where it is on, and never below float32 for statistics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or as it is where it is wider."""
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
