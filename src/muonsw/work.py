"""What one step has to do: the parameters that have gradients, by group and device."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from muonsw.algorithms import Item
from muonsw.algorithms.base import Group

Work = list[tuple[Group, list[Item]]]


def work_of(optimizer: Optimizer) -> Work:
    """The parameters that have gradients, by group and device; refuses what no algorithm can use."""
    position = 0
    work: Work = []
    for number, group in enumerate(optimizer.param_groups):
        batches: dict[torch.device, list[Item]] = {}
        names = group.get("param_names")
        for place, param in enumerate(group["params"]):
            if param.grad is not None:
                name = names[place] if names else f"parameter {place} of group {number}"
                if param.grad.layout != torch.strided:
                    raise ValueError(f"the gradient of {name} is sparse; make it dense, or freeze the parameter")
                item = Item(position + place, name, param, param.grad, optimizer.state[param])
                batches.setdefault(param.device, []).append(item)
        position += len(group["params"])
        work += [(group, items) for items in batches.values()]
    return work
