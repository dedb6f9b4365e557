"""AdamW: the average gradient divided by the root of the average squared gradient, both bias-corrected."""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms.base import (
    Algorithm,
    Update,
    advance_momentum,
    clean,
    columns,
    decay_average,
    has_kernels,
    kernel_weights,
    suits_torch,
)
from muonsw.matrices import Part
from muonsw.precision import STORED, StoredState
from muonsw.slots import COUNTER, ELEMENTWISE, SQUARES
from muonsw.work import Group, StepContext, elements

KEYS = ("exp_avg", "exp_avg_sq")


def update(group: Group, parts: list[Part], ctx: StepContext) -> Update:
    """Directions (m / c1) / (sqrt(v / c2) + eps), with the bias corrections c1 and c2."""
    (beta1, beta2), ok = group["betas"], ctx.ok
    _, grads, averages, squares = columns(parts, KEYS)
    grads = clean(grads, averages, group["maximize"], ok)
    advance_momentum("ema", averages, grads, beta1, ok)
    decay_average(squares, beta2, ok)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    # Both corrections go into the denominator, on the device. If the first step is skipped its count is zero, but its
    # direction must be finite, because it is multiplied by zero.
    steps = torch.stack([part.item.state["step"] for part in parts]).double().clamp(min=1)
    c1, c2 = 1 - beta1**steps, 1 - beta2**steps
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_mul_(denominators, (c1 / c2.sqrt()).unbind())
    torch._foreach_add_(denominators, (c1 * group["eps"]).unbind())
    return Update(parts, list(torch._foreach_div(averages, denominators)))


def fused(group: Group, parts: list[Part], ctx: StepContext) -> bool:
    """Take the whole step with one kernel, ours or torch's, whichever supports it and is faster."""
    lists = columns(parts, KEYS)
    weights, _, averages, squares = lists
    if not has_kernels(group, weights[0].device):
        return _by_torch(group, parts, lists, ctx)
    # Groups with encoded state use our kernel, even for parameters whose state stays in float32.
    is_small = weights[0].is_cuda and elements(weights) < kernels.TORCH_BELOW and group["state_dtype"] not in STORED
    return (
        (is_small and _by_torch(group, parts, lists, ctx))
        or in_place(group, parts, {"exp_avg": StoredState(averages), "exp_avg_sq": StoredState(squares)}, ctx)
        or _by_torch(group, parts, lists, ctx)
    )


def in_place(group: Group, parts: list[Part], state: dict[str, StoredState], ctx: StepContext) -> bool:
    """Take the whole step with our kernel, on state that may be encoded."""
    from muonsw.kernels.adamw import adamw

    weights, grads = columns(parts, ())
    counters = [part.item.state["step"] for part in parts]
    averages, squares = (state[key] for key in KEYS)
    return adamw(group, kernel_weights(parts, weights), grads, averages, squares, counters, ctx)


def _by_torch(group: Group, parts: list[Part], lists: list[list[Tensor]], ctx: StepContext) -> bool:
    """Take the step with torch's kernel; with `weight_decay = phi / eta` it removes our phi."""
    if not suits_torch(group, ctx, *lists):
        return False
    weights, grads, averages, squares = lists
    eta, phi = float(ctx.eta), float(ctx.phi)
    torch._fused_adamw_(
        weights,
        grads,
        averages,
        squares,
        [],
        [part.item.state["step"] for part in parts],
        lr=eta,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=phi / eta,
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        found_inf=None if ctx.flag is None else ctx.flag.bad,
    )
    return True


ADAMW = Algorithm(
    defaults={"betas": (0.9, 0.95), "eps": 1e-8},
    state=lambda _: {"exp_avg": ELEMENTWISE, "exp_avg_sq": SQUARES, "step": COUNTER},  # torch's names
    update=update,
    fused=fused,
    in_place=in_place,
)
