"""A parameter that is spread over ranks, seen from one of them: the local shard, its gradient and its state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from muonsw.algorithms.base import Item
from muonsw.distributed.boxes import box_at, cutting_order
from muonsw.precision import LOW_PRECISION

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, as FSDP2 and tensor parallelism make; importing their module would be slow."""
    return hasattr(tensor, "device_mesh")


def any_spread(tensors: Sequence[Tensor]) -> bool:
    """Whether any tensor is a DTensor: asked of their few types, because every step asks it of all parameters."""
    return any(hasattr(kind, "device_mesh") for kind in set(map(type, tensors)))


def as_spread(tensor: Tensor) -> DTensor:
    """The same tensor, for the type checker."""
    return cast("DTensor", tensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; all of it where it is not spread."""
    return as_spread(tensor).to_local() if is_spread(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor brought together from all ranks; a collective where it is spread."""
    return as_spread(tensor.detach()).full_tensor() if is_spread(tensor) else tensor


def local_gradient(name: str, param: Tensor, grad: Tensor) -> Tensor:
    """The gradient of this rank's shard; one that lies otherwise than its parameter is brought into its place."""
    if not is_spread(grad):
        raise ValueError(
            f"{name} is a DTensor and its gradient a plain tensor; give it a gradient that is spread alike"
        )
    found, like = as_spread(grad), as_spread(param)
    if found.placements != like.placements:
        found = found.redistribute(like.device_mesh, like.placements)
    return found.to_local()


def spread_like(param: Tensor, shard: Tensor) -> Tensor:
    """A tensor that is spread like `param`, of which this rank holds `shard`."""
    from torch.distributed.tensor import DTensor

    like = as_spread(param)
    return cast(
        "Tensor",
        DTensor.from_local(
            shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ),
    )


def put_like(param: Tensor, value: Tensor) -> Tensor:
    """A saved tensor, whole or spread, in the form of a parameter: spread like it, or whole.

    A whole tensor is cut where it is, without asking other ranks, which have loaded the same.
    """
    if not is_spread(param):
        return whole(value)
    from torch.distributed.tensor import distribute_tensor

    like = as_spread(param)
    if is_spread(value):
        if (as_spread(value).device_mesh, as_spread(value).placements) == (like.device_mesh, like.placements):
            return value
        value = whole(value)
    moved = value.to(like.to_local().device)
    return cast("Tensor", distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None))


def offset(param: Tensor) -> tuple[int, ...]:
    """Where this rank's shard begins in the whole, along each axis; zeros where shards are not contiguous."""
    nowhere = (0,) * param.dim()
    if not is_spread(param):
        return nowhere
    like = as_spread(param)
    order, mine = cutting_order(like.placements, like.device_mesh.shape), like.device_mesh.get_coordinate()
    if order is None or mine is None:
        return nowhere
    return box_at(mine, like.shape, like.placements, like.device_mesh.shape, order).starts


def noise_place(param: Tensor) -> int:
    """A number for the place of this shard in the whole: shards are rounded with noise of their own, copies alike."""
    if param.dtype not in LOW_PRECISION:
        return 0
    return sum(begin * math.prod(param.shape[axis + 1 :]) for axis, begin in enumerate(offset(param)))


def local_item(position: int, name: str, param: Tensor, grad: Tensor | None, state: dict[str, Any]) -> Item:
    """The shard of a spread parameter at one step; without a gradient on this rank, its gradient is zero."""
    shard = local(param)
    gradient = torch.zeros_like(shard) if grad is None else local_gradient(name, param, grad)
    return Item(position + noise_place(param), name, shard, gradient, LocalState(state, param), param)


class LocalState(dict[str, Tensor]):
    """The state of a spread parameter as this rank's shards; what is put in is kept spread like the parameter.

    So distributed checkpoint saves it as it is, and can load it on another number of ranks.
    """

    def __init__(self, state: dict[str, Any], param: Tensor) -> None:
        super().__init__((key, local(value)) for key, value in state.items())
        self._state = state
        self._param = param

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        self._state[key] = value if key == "step" else spread_like(self._param, value)
