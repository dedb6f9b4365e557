"""Decay that follows the norm of the gradient: the average that `decay="gradient_norm"` divides by.

Before each step a hook takes the mean squared gradient of the group into `gradient_average`, which holds two scalars:
that mean, averaged over steps with AdamW's second beta, and the weight of the average. For AdamW the first over the
second is exactly the mean of its corrected average squares, as averaging over elements and over steps commute; so the
rule needs no other state and works with every algorithm. Gradients that are not finite do not enter the average.

On many ranks the mean is over all shards of a DTensor; plain parameters count as the same on every rank, so an expert
that only one rank holds needs a group of its own. Reading the mean waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muonsw.decay import DECAY_RULES, decays
from muonsw.distributed.shards import as_dtensor, is_dtensor, local
from muonsw.work import Group

if TYPE_CHECKING:
    from muonsw.optimizer import ScaledDecayOptimizer


def follows_gradient(group: Group) -> bool:
    return DECAY_RULES[group["decay"]].uses_gradient and decays(group)


def attach(optimizer: ScaledDecayOptimizer) -> None:
    for group in optimizer.param_groups:
        if DECAY_RULES[group["decay"]].uses_gradient:
            group.setdefault("gradient_average", [0.0, 0.0])
    if any(map(follows_gradient, optimizer.param_groups)) and "gradient norm" not in optimizer._addons:
        optimizer._addons.add("gradient norm")
        hook = _GradientHook(optimizer)
        optimizer.register_step_pre_hook(lambda *_: hook.average())


class _GradientHook:
    def __init__(self, optimizer: ScaledDecayOptimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[int, tuple[int, list[float]]] = {}

    def average(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            if not follows_gradient(group) or not float(group["lr"]) > 0:  # a rate of zero leaves no trace
                continue
            step, before = self._before.get(number, (-1, []))
            if step == group["step_count"]:  # the last step raised, and must leave no trace
                group["gradient_average"] = before
            before = group["gradient_average"]
            self._before[number] = group["step_count"], before
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            total = sum(float(_sum_of_squares(param)) for param in params)
            if math.isfinite(total):
                mean, beta = total / sum(param.numel() for param in params), group["betas"][1]
                group["gradient_average"] = [beta * before[0] + (1 - beta) * mean, beta * before[1] + (1 - beta)]


def _sum_of_squares(param: Tensor) -> Tensor:
    assert param.grad is not None
    grad = local(param.grad)
    squares: Tensor = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)).square()
    if not is_dtensor(param.grad):
        return squares
    from torch.distributed.tensor import DTensor, Partial, Replicate

    like = as_dtensor(param.grad)
    # A shard that tensor parallelism has cut before FSDP is not a Shard to torch, so ask for the opposite.
    places = [Replicate() if place.is_replicate() else Partial() for place in like.placements]
    total: Tensor = DTensor.from_local(squares, like.device_mesh, places, run_check=False).full_tensor()
    return total
