"""The one place where weights change: `W <- (1 - phi) W - eta * scale * direction`, or as a norm rule says."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muonsw import kernels, norms
from muonsw.algorithms.base import FusedUpdate, Rates, Update, are_large, kernel_weights, rounding_key, shrink
from muonsw.matrices import Part, views
from muonsw.precision import LOW_PRECISION, mix, stochastic_round
from muonsw.work import Group

ROUNDINGS = ("stochastic", "kahan", "nearest")


class Observer(Protocol):
    """Applies updates in the place of `apply_update`, to measure them; the weights must not differ."""

    def apply(self, group: Group, update: Update | FusedUpdate, rates: Rates) -> None:
        """Apply an update with `apply_update`."""


def apply_update(group: Group, update: Update | FusedUpdate, rates: Rates) -> None:
    """Decay the weights of an update's parts and move them along its directions."""
    if isinstance(update, FusedUpdate):
        update.take(rates)
        return
    weights = views(update.parts, [part.item.param for part in update.parts])
    if rates.norm is not None:
        _apply_norm_rule(group, update, weights, rates, rates.norm)
        return
    if (
        group["fused"] is not False
        and kernels.available(weights[0].device)
        and _apply_in_one_pass(group, update, weights, rates)
    ):
        return
    eta, phi = rates.applied(weights[0].dtype)
    move = eta * update.scale
    if weights[0].dtype in LOW_PRECISION and group["rounding"] != "nearest":
        for part, weight, direction in zip(update.parts, weights, update.directions, strict=True):
            _apply_rounded(group, part, weight, direction, move, phi, rates.ok)
    else:
        shrink_and_move(weights, update.directions, move, phi, group["cautious"])


def _apply_in_one_pass(group: Group, update: Update, weights: list[Tensor], rates: Rates) -> bool:
    """The same by a kernel; False, and nothing done, where there is none for this layout."""
    from muonsw.kernels.elementwise import Motion
    from muonsw.kernels.move import move

    motion = Motion(rates.eta, rates.phi, rates.flag, update.scale, group["cautious"])
    return move(kernel_weights(group, update.parts, weights), update.directions, motion)


def shrink_and_move(
    weights: list[Tensor],
    directions: list[Tensor],
    move: float | Tensor,
    phi: float | Tensor,
    cautious: bool,
) -> None:
    """`W <- (1 - phi) W - move * direction`, in place; cautious decay spares entries that move outward."""
    if isinstance(phi, Tensor) or phi != 0:
        if cautious:
            for weight, direction in zip(weights, directions, strict=True):
                weight.sub_(torch.where(weight * direction >= 0, weight, 0) * phi)
        else:
            shrink(weights, phi)
    if isinstance(move, Tensor) and not are_large(weights) and directions[0].dtype == weights[0].dtype:
        torch._foreach_add_(weights, torch._foreach_mul(directions, move), alpha=-1)
    elif isinstance(move, Tensor):
        torch._foreach_addcmul_(weights, directions, [move] * len(weights), value=-1)
    else:
        torch._foreach_add_(weights, directions, alpha=-move)


@_disable_dynamo  # Inductor fuses the casts away that rounding is made of, and would write other weights
def _apply_rounded(
    group: Group,
    part: Part,
    weight: Tensor,
    direction: Tensor,
    move: float | Tensor,
    phi: float | Tensor,
    ok: Tensor | None,
) -> None:
    """Decay and move a low-precision weight in one float32 pass.

    A thousand bfloat16 decays of 1e-3, each rounded to nearest, would leave the weight where it was.
    """
    wide = _wide(group, part, weight)
    shrink_and_move([wide], [direction.float()], move, phi, group["cautious"])
    _store(group, part, weight, wide, ok)


@_disable_dynamo  # for the same reason
def _apply_norm_rule(group: Group, update: Update, weights: list[Tensor], rates: Rates, rule: norms.NormRule) -> None:
    """Move weights whose norm is not free; each part holds whole ones."""
    if isinstance(rates.eta, float) and rates.eta == 0:
        return  # whatever the rule, up to rounding
    eta, phi = rates.applied(weights[0].dtype)
    move = eta * update.scale
    for part, weight, direction in zip(update.parts, weights, update.directions, strict=True):
        wide = _wide(group, part, weight)
        moved = rule.moved(wide, move * direction.to(wide.dtype), phi, norms.ball_of(group, part))
        _store(group, part, weight, moved, rates.ok)


def _wide(group: Group, part: Part, weight: Tensor) -> Tensor:
    """A weight in the precision in which it is changed, with what rounding has kept from it so far."""
    if weight.dtype not in LOW_PRECISION:
        return weight
    wide = weight.float()
    return wide + part.state("compensation").float() if group["rounding"] == "kahan" else wide


def _store(group: Group, part: Part, weight: Tensor, wide: Tensor, ok: Tensor | None) -> None:
    """Round a weight into its place, unless `ok` is false."""
    rounding = group["rounding"] if weight.dtype in LOW_PRECISION else "nearest"
    if rounding == "stochastic":
        rounded = stochastic_round(wide, weight.dtype, rounding_seed(group, part))
    else:
        rounded = wide.to(weight.dtype)
    if ok is not None:
        rounded = torch.where(ok, rounded, weight)
    if rounding == "kahan":
        part.state("compensation").copy_(wide - rounded.float())
    weight.copy_(rounded)


def rounding_seed(group: Group, part: Part) -> Tensor:
    """A number for this part of this parameter at this step; the step is counted in the state."""
    return mix(part.item.state["step"].to(torch.int32) ^ rounding_key(group, part))
