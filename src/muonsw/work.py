"""What one step has to do: the parameters that have gradients, in batches that share a group, a device and a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from muonsw.algorithms import Item
from muonsw.algorithms.base import Group
from muonsw.distributed.shards import is_spread, local_item


class Batch(NamedTuple):
    """Parameters that are updated together: of one group, on one device, in one dtype.

    Kernels and coefficients are chosen for a whole batch, so nothing in it may ask for another choice.
    """

    number: int
    group: Group
    items: list[Item]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.items[0].param.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.items[0].param.dtype


def work_of(optimizer: Optimizer, absent: Sequence[torch.Tensor] = ()) -> list[Batch]:
    """The parameters that have gradients, in batches; refuses what no algorithm can use.

    Of a parameter that is spread over ranks, this is the part that this rank holds; those that are `absent` have a
    gradient on other ranks alone, which is zero here.
    """
    zero = {id(param) for param in absent}
    position = 0
    work: list[Batch] = []
    for number, group in enumerate(optimizer.param_groups):
        batches: dict[tuple[torch.device, torch.dtype], list[Item]] = {}
        names = group.get("param_names")
        for place, param in enumerate(group["params"]):
            if param.grad is not None or id(param) in zero:
                name = names[place] if names else f"parameter {place} of group {number}"
                _refuse(name, param)
                item = _item(position + place, name, param, optimizer.state[param])
                batches.setdefault((param.device, param.dtype), []).append(item)
        position += len(group["params"])
        work += [Batch(number, group, items) for items in batches.values()]
    return work


def _item(position: int, name: str, param: torch.Tensor, state: dict[str, Any]) -> Item:
    if is_spread(param):
        return local_item(position, name, param, param.grad, state)
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    return Item(position, name, param, grad, state)


def _refuse(name: str, param: torch.Tensor) -> None:
    if param.grad is not None and param.grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is sparse; make it dense, or freeze the parameter")
    if param.device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device and has no values to change; give the model memory with "
            f"model.to_empty(device=...), initialize it, and build the optimizer after that"
        )
