"""Questions about lists of tensors, which every step asks of all of them: no Python function runs for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row", bound=tuple[Any, ...])


def rows_of(kind: type[Row], rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    """Complete rows as named tuples, without the Python of their constructor for each."""
    if torch.compiler.is_compiling():
        return [kind(*row) for row in rows]
    return list(map(partial(tuple.__new__, kind), rows))


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
