"""Questions about lists of tensors, which every step asks of all of them: no Python function runs for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dtypes_of(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    """The dtypes among tensors."""
    return {tensor.dtype for tensor in tensors}


def one_dtype(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have the dtype of the first."""
    return len(dtypes_of(tensors)) == 1


def all_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor has gaps."""
    return all(map(Tensor.is_contiguous, tensors))


def entries(tensors: Sequence[Tensor]) -> int:
    """How many entries tensors have together."""
    return sum([tensor.numel() for tensor in tensors])
