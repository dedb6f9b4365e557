"""What one step works on: parameters with their gradients, in batches, and what every batch must know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

if TYPE_CHECKING:
    from muonsw.matrices import MatrixView
    from muonsw.nonfinite import Flag

Group = dict[str, Any]
State = dict[str, Tensor]


class Item(NamedTuple):
    """One parameter with a gradient, at one step.

    Of a sharded parameter, `param`, `grad` and `state` are what this rank holds, and `dtensor` is the DTensor.
    """

    position: int
    name: str
    param: Tensor
    grad: Tensor
    state: State
    dtensor: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        return self.param if self.dtensor is None else self.dtensor


class Batch(NamedTuple):
    """Parameters that are updated together: of one group, on one device, in one dtype.

    `group` is the planned copy of group `number`: its peak and counters are those of this step. `parameters` are those
    of the group, `items` what this rank works on. `view` is how a rule of matrices sees them at this step.
    """

    number: int
    group: Group
    device: torch.device
    dtype: torch.dtype
    parameters: list[Tensor]
    items: list[Item]
    view: MatrixView | None = None

    @property
    def grads(self) -> list[Tensor]:
        return [item.grad for item in self.items]


class StepContext(NamedTuple):
    """What the update of a batch must know about its step."""

    eta: float | Tensor  # the learning rate; in a CUDA graph a scalar on the device
    phi: float | Tensor  # the fraction of each weight that decay takes, likewise
    chunk_bytes: int  # temporary memory that one chunk may take
    flag: Flag | None = None  # where only the device knows whether gradients are finite; if not, nothing may change

    @property
    def ok(self) -> Tensor | None:
        return None if self.flag is None else self.flag.ok

    def applied(self, dtype: torch.dtype) -> tuple[float | Tensor, float | Tensor]:
        """Learning rate and decay for weights of this dtype, zero where the flag forbids the step."""
        if self.flag is None:
            return self.eta, self.phi
        factor = self.flag.factor(dtype)
        return factor * self.eta, factor * self.phi


def label_of(group: Group, number: int) -> str:
    """What messages call a param group."""
    return f"param group {number}" + (f" ({group['role']})" if group.get("role") else "")


def names_of(group: Group, number: int) -> list[str]:
    """The names of a group's parameters, or their places where it has none or has been given other parameters."""
    names = group.get("param_names") or ()
    if len(names) == len(group["params"]):
        return list(names)
    return [f"parameter {place} of group {number}" for place in range(len(group["params"]))]


def items_of(batches: Sequence[Batch]) -> list[Item]:
    return [item for batch in batches for item in batch.items]


# A small step takes as long as its Python: the functions below avoid a Python call per tensor.


def dtypes_of(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}


def one_dtype(tensors: Sequence[Tensor]) -> bool:
    return len(dtypes_of(tensors)) == 1


def all_contiguous(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors))


def any_dtensor(tensors: Sequence[Tensor]) -> bool:
    """Whether any tensor is a DTensor; asks their few types, not every tensor."""
    return True in [hasattr(kind, "device_mesh") for kind in set(map(type, tensors))]


def elements(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.numel() for tensor in tensors])


def copied_to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor to another device; only a copy to the host is waited for."""
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors of one dtype as one vector: a view of a single tensor without gaps, else a copy."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def copy_flattened_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    pieces = _unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    torch._foreach_copy_(list(tensors), list(pieces))
