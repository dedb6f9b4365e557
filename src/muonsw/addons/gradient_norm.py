"""The average gradient norm that `decay="gradient_norm"` divides by.

Before each step a hook averages the group's mean squared gradient over steps, with AdamW's second beta.
`gradient_average` holds this average and its total weight. Their quotient equals the mean of AdamW's corrected average
squares, because averages over elements and over steps commute, so the rule needs no other state and works with every
algorithm. Gradients that are not finite are left out.

The mean is over all shards of a DTensor. Plain parameters are assumed equal on every rank, so an expert that only
one rank holds needs a separate group. Reading the mean waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from muonsw.addons.norm_rules import sum_over_ranks
from muonsw.decay import DECAY_RULES, decays
from muonsw.distributed.shards import local_gradient
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
        optimizer.register_step_pre_hook(lambda *_: _average(optimizer, before))


def _follows_gradient(group: Group) -> bool:
    return DECAY_RULES[group["decay"]].uses_gradient and decays(group)


def _average(optimizer: ScaledDecayOptimizer, before: dict[int, tuple[int, list[float]]]) -> None:
    """Add this step's gradients to each group's average; `before` holds the step count and average of the last call."""
    for number, group in enumerate(optimizer.param_groups):
        if not _follows_gradient(group) or not float(group["lr"]) > 0:  # a step at rate zero does not count
            continue
        step, average = before.get(number, (-1, []))
        if step != group["step_count"]:  # else the last step raised, so undo its average
            average = group["gradient_average"]
        before[number], group["gradient_average"] = (group["step_count"], average), average
        params, squares = [], []
        for param in group["params"]:
            if (grad := local_gradient(param)) is not None:
                params.append(param)
                dtype = torch.promote_types(grad.dtype, torch.float32)
                squares.append(torch.linalg.vector_norm(grad, dtype=dtype).square())
        total = sum(map(float, sum_over_ranks(optimizer, params, squares)))
        if params and math.isfinite(total):
            mean, beta = total / sum(param.numel() for param in params), group["betas"][1]
            group["gradient_average"] = [beta * average[0] + (1 - beta) * mean, beta * average[1] + (1 - beta)]
