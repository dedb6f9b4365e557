"""The one place where weights change: `W <- (1 - phi) W - eta * scale * direction`."""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.algorithms.base import Update, has_kernels, kernel_weights, rounding_key, subtract
from muonsw.matrices import Part, scatter, views
from muonsw.precision import LOW_PRECISION, mix, stochastic_round
from muonsw.work import Group, StepContext, copy_flattened_, flattened

ROUNDINGS = ("stochastic", "nearest")

# Elements of small weights that a CPU rounds in one buffer: it fits in the cache, and larger weights stay alone.
ROUNDED_TOGETHER = 2**18


def apply_update(group: Group, update: Update, ctx: StepContext) -> None:
    weights = views(update.parts, [part.item.param for part in update.parts])
    if has_kernels(group, weights[0].device):
        from muonsw.kernels.move import move as move_by_kernel

        given = kernel_weights(group, update.parts, weights)
        if move_by_kernel(given, update.directions, update.scale, group["cautious"], ctx, update.factors):
            return
    eta, phi = ctx.applied(weights[0].dtype)
    move = eta * update.scale
    directions = update.directions
    if update.factors is not None:
        directions = list(torch._foreach_mul(directions, scatter(update.factors, directions)))
    if weights[0].dtype in LOW_PRECISION and group["rounding"] != "nearest":
        # On accelerators each weight is rounded alone, as graphs take nothing from the host.
        most = ROUNDED_TOGETHER if weights[0].device.type == "cpu" else 0
        begin, room = 0, most
        for end in range(1, len(weights) + 1):
            room -= weights[end - 1].numel()
            if end == len(weights) or weights[end].numel() > room:
                some, begin, room = slice(begin, end), end, most
                _apply_rounded(group, update.parts[some], weights[some], directions[some], move, phi, ctx.ok)
    else:
        shrink_and_move(weights, directions, move, phi, group["cautious"])


def shrink_and_move(
    weights: list[Tensor],
    directions: list[Tensor],
    move: float | Tensor,
    phi: float | Tensor,
    cautious: bool,
) -> None:
    """`W <- (1 - phi) W - move * direction`, in place; cautious decay spares elements that move outward."""
    if isinstance(phi, Tensor) or phi != 0:
        if cautious:
            for weight, direction in zip(weights, directions, strict=True):
                weight.sub_(torch.where(weight * direction >= 0, weight, 0) * phi)
        else:
            subtract(weights, phi, weights)
    subtract(weights, move, directions)


def _apply_rounded(
    group: Group,
    parts: list[Part],
    weights: list[Tensor],
    directions: list[Tensor],
    move: float | Tensor,
    phi: float | Tensor,
    ok: Tensor | None,
) -> None:
    """Decay and move low-precision weights in one float32 pass, and round once.

    A thousand bfloat16 decays of 1e-3, each rounded to nearest, would leave the weight where it was.
    """
    wide = flattened(weights).float()
    shrink_and_move([wide], [flattened(directions).float()], move, phi, group["cautious"])
    steps = torch.stack([part.item.state["step"] for part in parts]).to(torch.int32)
    keys = [rounding_key(group, part) for part in parts]
    seeds = mix(steps ^ (keys[0] if len(keys) == 1 else torch.tensor(keys, dtype=torch.int32, device=steps.device)))
    rounded = stochastic_round(wide, weights[0].dtype, seeds, [weight.numel() for weight in weights])
    copy_flattened_(weights, rounded if ok is None else torch.where(ok, rounded, flattened(weights)))
