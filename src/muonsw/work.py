"""What one step works on: parameters with their gradients, in batches, and the context of each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from muonsw.matrices import MatrixView
    from muonsw.nonfinite import Flag

Group = dict[str, Any]
State = dict[str, Tensor]


class Item(NamedTuple):
    """One parameter with a gradient, at one step.

    For a sharded parameter, `param`, `grad` and `state` are local, and `dtensor` is the DTensor.
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
    """Parameters of one group, device and dtype, which are updated together.

    `group` is the planned copy of group `number`, with the peak and counters of this step. `items` are what this rank
    holds of `parameters`. `view` says how a matrix algorithm sees them at this step.
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
    """What the update of a batch needs to know about its step."""

    eta: float | Tensor  # the learning rate; in a CUDA graph, a scalar on the device
    phi: float | Tensor  # the fraction by which decay shrinks each weight; likewise
    chunk_bytes: int  # temporary memory that one chunk may use
    flag: Flag | None = None  # set if only the device knows whether gradients are finite; if not, nothing may change

    @property
    def ok(self) -> Tensor | None:
        return None if self.flag is None else self.flag.ok

    def applied(self, dtype: torch.dtype) -> tuple[float | Tensor, float | Tensor]:
        """Learning rate and decay for weights of this dtype; zero if the flag cancels the step."""
        if self.flag is None:
            return self.eta, self.phi
        factor = self.flag.factor(dtype)
        return factor * self.eta, factor * self.phi


def label_of(group: Group, number: int) -> str:
    """The name of a param group in messages."""
    return f"param group {number}" + (f" ({group['role']})" if group.get("role") else "")


def named_params(group: Group, number: int) -> Iterator[tuple[str, Tensor]]:
    """A group's parameters with their names, or their positions if the names are missing or outdated."""
    params, names = group["params"], group.get("param_names") or ()
    if len(names) != len(params):
        names = [f"parameter {place} of group {number}" for place in range(len(params))]
    return zip(names, params, strict=True)


def items_of(batches: Sequence[Batch]) -> list[Item]:
    return [item for batch in batches for item in batch.items]


# Small steps are bound by Python, so the functions below avoid a Python call per tensor.


def one_dtype(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors}) == 1


def all_contiguous(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors))


def any_dtensor(tensors: Sequence[Tensor]) -> bool:
    """Whether any tensor is a DTensor; checks each type once, not every tensor."""
    return True in [hasattr(kind, "device_mesh") for kind in set(map(type, tensors))]


def elements(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.numel() for tensor in tensors])
