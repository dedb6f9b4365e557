"""What one step works on: parameters with their gradients, in batches, and quick questions about lists of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

Group = dict[str, Any]
State = dict[str, Tensor]
# Tensors of state as they begin, each with the state that is to keep it and its key there.
MissingState = list[tuple[State, str, Tensor]]
Row = TypeVar("Row", bound=tuple[Any, ...])


class Item(NamedTuple):
    """One parameter with a gradient, at one step.

    Of a sharded parameter, `param`, `grad` and `state` are what this rank holds, `whole` is the DTensor itself.
    """

    position: int
    name: str
    param: Tensor
    grad: Tensor
    state: State
    whole: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        """The parameter as it stands in its group."""
        return self.param if self.whole is None else self.whole


class Batch(NamedTuple):
    """Parameters that are updated together: of one group, on one device, in one dtype.

    Kernels and rates are chosen for a whole batch, so nothing in it may ask for another choice. `parameters` are
    those of the group, `items` what this rank works on, with gradients.
    """

    number: int
    group: Group
    device: torch.device
    dtype: torch.dtype
    parameters: list[Tensor]
    items: list[Item]

    @property
    def grads(self) -> list[Tensor]:
        """The gradients."""
        return [item.grad for item in self.items]


def label_of(group: Group, number: int) -> str:
    """What messages call a param group."""
    return f"param group {number}" + (f" ({group['role']})" if group["role"] else "")


def names_of(group: Group, number: int) -> list[str]:
    """The names of a group's parameters, or their places where it has none."""
    names = group.get("param_names")
    return list(names) if names else [f"parameter {i} of group {number}" for i in range(len(group["params"]))]


def items_of(work: Sequence[Batch]) -> list[Item]:
    """The items of all batches."""
    return [item for batch in work for item in batch.items]


# A small step takes as long as its Python: the functions below avoid a Python call per tensor.


def rows_of(kind: type[Row], rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    """Complete rows as named tuples, without the Python of their constructor for each."""
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


def any_dtensor(tensors: Sequence[Tensor]) -> bool:
    """Whether any tensor is a DTensor, as FSDP2 and tensor parallelism make; asked of their few types."""
    return True in [hasattr(kind, "device_mesh") for kind in set(map(type, tensors))]


def elements(tensors: Sequence[Tensor]) -> int:
    """How many elements tensors have together."""
    return sum([tensor.numel() for tensor in tensors])


def copied_to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on another device; only a copy to the host is waited for, else it would be read before it has ended."""
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors of one dtype as one vector: a view where it is one tensor without gaps, else a copy."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def copy_flattened_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Write the elements of a vector back into tensors."""
    pieces = _unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    torch._foreach_copy_(list(tensors), list(pieces))
