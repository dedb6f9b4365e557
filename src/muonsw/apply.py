"""The one place where weights change: `W <- (1 - phi) W - eta * scale * direction`."""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.algorithms.base import Update, has_kernels, kernel_weights, rounding_key, subtract
from muonsw.matrices import scatter, views
from muonsw.precision import LOW_PRECISION, mix, stochastic_round
from muonsw.work import Group, StepContext


def apply_update(group: Group, update: Update, ctx: StepContext) -> None:
    weights = views(update.parts, [part.item.param for part in update.parts])
    if has_kernels(group, weights[0].device):
        from muonsw.kernels.move import move as move_by_kernel

        prepared = kernel_weights(update.parts, weights)
        if move_by_kernel(prepared, update.directions, update.scale, group["cautious"], ctx, update.factors):
            return
    eta, phi = ctx.applied(weights[0].dtype)
    move = eta * update.scale
    directions = update.directions
    if update.factors is not None:
        directions = list(torch._foreach_mul(directions, scatter(update.factors, directions)))
    if weights[0].dtype in LOW_PRECISION:
        # Decay and move in one float32 pass, and round once: a thousand bfloat16 decays of 1e-3, each rounded to
        # nearest, would not change the weight.
        for part, weight, direction in zip(update.parts, weights, directions, strict=True):
            wide = weight.float()
            shrink_and_move([wide], [direction.float()], move, phi, group["cautious"])
            seed = mix(part.item.state["step"].to(torch.int32) ^ rounding_key(part))
            rounded = stochastic_round(wide, weight.dtype, seed)
            weight.copy_(rounded if ctx.ok is None else torch.where(ctx.ok, rounded, weight))
    else:
        shrink_and_move(weights, directions, move, phi, group["cautious"])


def shrink_and_move(
    weights: list[Tensor],
    directions: list[Tensor],
    move: float | Tensor,
    phi: float | Tensor,
    cautious: bool,
) -> None:
    """`W <- (1 - phi) W - move * direction`, in place; cautious decay skips elements that move away from zero."""
    if isinstance(phi, Tensor) or phi != 0:
        if cautious:
            for weight, direction in zip(weights, directions, strict=True):
                weight.sub_(torch.where(weight * direction >= 0, weight, 0) * phi)
        else:
            subtract(weights, phi, weights)
    subtract(weights, move, directions)
