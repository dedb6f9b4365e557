"""What one step has to do: the parameters that have gradients, in batches that share a group, a device and a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw.algorithms import Item
from muonsw.algorithms.base import Group
from muonsw.distributed.shards import any_spread, is_spread, local_item
from muonsw.tensors import rows_of

States = dict[Tensor, dict[str, Any]]


class Batch(NamedTuple):
    """Parameters that are updated together: of one group, on one device, in one dtype.

    Kernels and coefficients are chosen for a whole batch, so nothing in it may ask for another choice. `parameters` are
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


def items_of(work: Sequence[Batch]) -> list[Item]:
    """The items of all batches."""
    return [item for batch in work for item in batch.items]


def work_of(optimizer: Optimizer, absent: Sequence[Tensor] = (), *, here: bool = False) -> list[Batch]:
    """The parameters that have gradients, in batches; refuses what no algorithm can use.

    Of a parameter that is spread over ranks, this is the part that this rank holds.

    Args:
        optimizer: whose parameters they are.
        absent: parameters that have a gradient on other ranks alone, which is zero here.
        here: the promise that all parameters are whole on this rank, so that nobody need look.
    """
    zero = {id(param) for param in absent}
    numbered = _numbered if torch.compiler.is_compiling() else _remembered_numbers
    position = 0
    work: list[Batch] = []
    for number, group in enumerate(optimizer.param_groups):
        params = group["params"]
        names = group.get("param_names")
        if names is None or len(names) != len(params):  # somebody has put other parameters there, as ZeRO does
            names = numbered(number, len(params))
        places = range(position, position + len(params))
        if not here and (zero or any_spread(params)):
            items = _items_over_ranks(places, names, params, optimizer.state, zero)
        else:
            items = _items(places, names, params, optimizer.state)
        work += _batches(number, group, items)
        position += len(params)
    return work


def _numbered(number: int, count: int) -> list[str]:
    """Names for the parameters of a group that have none."""
    return [f"parameter {place} of group {number}" for place in range(count)]


_remembered_numbers = lru_cache(maxsize=128)(_numbered)


def _items(places: Sequence[int], names: Sequence[str], params: Sequence[Tensor], state: States) -> list[Item]:
    """The parameters that have a gradient.

    A small step takes as long as its Python, so this is written for speed: no function is called for each of them.
    """
    columns = zip(places, names, params, [param.grad for param in params], strict=True)
    rows = [(place, name, param, grad, state[param], None) for place, name, param, grad in columns if grad is not None]
    for name, grad in [(row[1], row[3]) for row in rows if row[3].layout is not torch.strided]:
        _refuse_layout(name, grad)
    return rows_of(Item, rows)


def _items_over_ranks(
    places: Sequence[int], names: Sequence[str], params: Sequence[Tensor], state: States, zero: set[int]
) -> list[Item]:
    """The same of parameters that may be spread over ranks, or have a gradient on other ranks alone."""
    items: list[Item] = []
    for place, name, param in zip(places, names, params, strict=True):
        grad = param.grad
        if grad is None and id(param) not in zero:
            continue
        if grad is not None:
            _refuse_layout(name, grad)
        if is_spread(param):
            items.append(local_item(place, name, param, grad, state[param]))
        else:
            items.append(Item(place, name, param, torch.zeros_like(param) if grad is None else grad, state[param]))
    return items


def _refuse_layout(name: str, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is sparse; make it dense, or freeze the parameter")


def _batches(number: int, group: Group, items: list[Item]) -> list[Batch]:
    """The items of a group, those of one device and dtype together, in the order in which they come first."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Item]] = {}
    kinds = [(item.param.device, item.param.dtype) for item in items]
    if len(set(kinds)) == 1:  # nearly always
        by_kind[kinds[0]] = items
    else:
        for kind, item in zip(kinds, items, strict=True):
            by_kind.setdefault(kind, []).append(item)
    batches = [Batch(number, group, *kind, _whole_parameters(of_kind), of_kind) for kind, of_kind in by_kind.items()]
    for batch in batches:
        if batch.device.type == "meta":
            raise ValueError(
                f"{batch.items[0].name} is on the meta device and has no values to change; give the model memory with "
                f"model.to_empty(device=...), initialize it, and build the optimizer after that"
            )
    return batches


def _whole_parameters(items: Sequence[Item]) -> list[Tensor]:
    return [item.param if item.whole is None else item.whole for item in items]
