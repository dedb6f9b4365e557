"""The average gradient norm that `decay="gradient_norm"` divides by.

Before each step a hook averages the group's mean squared gradient over steps, with AdamW's second beta.
`gradient_average` holds this average and its total weight. Their quotient equals the mean of AdamW's corrected average
squares, because averages over elements and over steps commute, so the rule needs no other state and works with every
algorithm. Gradients that are not finite are left out.

The mean is over all shards of a DTensor. Plain parameters count as equal on every rank, so an expert that only one rank
holds needs a separate group. Reading the mean waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muonsw.decay import DECAY_RULES, decays
from muonsw.distributed.shards import is_dtensor, local
from muonsw.work import Group

if TYPE_CHECKING:
    from muonsw.optimizer import ScaledDecayOptimizer


def attach(optimizer: ScaledDecayOptimizer) -> None:
    for group in optimizer.param_groups:
        if DECAY_RULES[group["decay"]].uses_gradient:
            group.setdefault("gradient_average", [0.0, 0.0])
    if any(map(_follows_gradient, optimizer.param_groups)) and "gradient norm" not in optimizer._addons:
        optimizer._addons.add("gradient norm")
        before: dict[int, tuple[int, list[float]]] = {}
        optimizer.register_step_pre_hook(lambda *_: _average(optimizer.param_groups, before))


def _follows_gradient(group: Group) -> bool:
    return DECAY_RULES[group["decay"]].uses_gradient and decays(group)


def _average(groups: list[Group], before: dict[int, tuple[int, list[float]]]) -> None:
    """Add this step's gradients to each group's average; `before` holds the step count and average of the last call."""
    for number, group in enumerate(groups):
        if not _follows_gradient(group) or not float(group["lr"]) > 0:  # a step at rate zero does not count
            continue
        step, average = before.get(number, (-1, []))
        if step != group["step_count"]:  # else the last step raised, so undo its average
            average = group["gradient_average"]
        before[number], group["gradient_average"] = (group["step_count"], average), average
        params = [param for param in group["params"] if param.grad is not None]
        total = sum(float(_sum_of_squares(param)) for param in params)
        if params and math.isfinite(total):
            mean, beta = total / sum(param.numel() for param in params), group["betas"][1]
            group["gradient_average"] = [beta * average[0] + (1 - beta) * mean, beta * average[1] + (1 - beta)]


def _sum_of_squares(param: Tensor) -> Tensor:
    assert param.grad is not None
    grad = local(param.grad)
    squares: Tensor = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)).square()
    if not is_dtensor(param.grad):
        return squares
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # Test for replicas, because is_shard() is false for shards of tensor parallelism before FSDP.
    places = [Replicate() if place.is_replicate() else Partial() for place in param.grad.placements]
    total: Tensor = DTensor.from_local(squares, param.grad.device_mesh, places, run_check=False).full_tensor()
    return total
