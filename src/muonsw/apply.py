"""The one place where weights change: `W <- (1 - phi) W - eta * scale * direction`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms.base import Group, Part, Update, are_large
from muonsw.precision import LOW_PRECISION, mix, stochastic_round

if TYPE_CHECKING:
    from muonsw.kernels import elementwise

ROUNDINGS = ("stochastic", "kahan", "nearest")


class Coefficients(NamedTuple):
    """The learning rate and the decay of one group at one step, on the host or on the group's device.

    Where `ok` is not None and false, both are zero and nothing may change.
    """

    eta: float | Tensor
    phi: float | Tensor
    ok: Tensor | None = None


class Observer(Protocol):
    """Someone who applies updates in the place of `apply_update`, to measure them; the weights must not differ."""

    def apply(self, group: Group, update: Update, coefficients: Coefficients) -> None:
        """Apply an update with `apply_update`."""


def apply_update(group: Group, update: Update, coefficients: Coefficients) -> None:
    """Decay the weights of an update's parts and move them along its directions."""
    weights = [part.region.of(part.item.param) for part in update.parts]
    if kernels.available(weights[0].device) and _apply_in_one_pass(group, update, weights, coefficients):
        return
    move = coefficients.eta * update.scale
    if weights[0].dtype in LOW_PRECISION and group["rounding"] != "nearest":
        for part, weight, direction in zip(update.parts, weights, update.directions, strict=True):
            _apply_rounded(group, part, weight, direction, move, coefficients)
    else:
        shrink_and_move(weights, update.directions, move, coefficients.phi, group["cautious"])


def _apply_in_one_pass(group: Group, update: Update, weights: list[Tensor], coefficients: Coefficients) -> bool:
    """The same by a kernel; False, and nothing done, where there is none for this layout."""
    from muonsw.kernels import elementwise

    motion = elementwise.Motion(*coefficients, update.scale, group["cautious"])
    return elementwise.move(kernel_weights(group, update.parts, weights), update.directions, motion)


def kernel_weights(group: Group, parts: list[Part], weights: list[Tensor]) -> elementwise.Weights:
    """Weights of one dtype, with what their rounding needs."""
    from muonsw.kernels.elementwise import Weights

    rounding = group["rounding"] if weights[0].dtype in LOW_PRECISION else "nearest"
    if rounding == "kahan":
        return Weights(weights, rounding, compensations=[part.state("compensation") for part in parts])
    if rounding == "stochastic":
        counters = [part.item.state["step"] for part in parts]
        return Weights(weights, rounding, counters=counters, keys=[rounding_key(group, part) for part in parts])
    return Weights(weights)


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
            torch._foreach_mul_(weights, 1 - phi)
    if isinstance(move, Tensor) and not are_large(weights) and directions[0].dtype == weights[0].dtype:
        torch._foreach_add_(weights, torch._foreach_mul(directions, move), alpha=-1)
    elif isinstance(move, Tensor):
        torch._foreach_addcmul_(weights, directions, [move] * len(weights), value=-1)
    else:
        torch._foreach_add_(weights, directions, alpha=-move)


def _apply_rounded(
    group: Group,
    part: Part,
    weight: Tensor,
    direction: Tensor,
    move: float | Tensor,
    coefficients: Coefficients,
) -> None:
    """Decay and move a low-precision weight in one float32 pass.

    A thousand bfloat16 decays of 1e-3, each rounded to nearest, would leave the weight where it was.
    """
    kahan = group["rounding"] == "kahan"
    wide = weight.float()
    if kahan:
        wide = wide + part.state("compensation").float()
    shrink_and_move([wide], [direction.float()], move, coefficients.phi, group["cautious"])
    rounded = wide.to(weight.dtype) if kahan else stochastic_round(wide, weight.dtype, rounding_seed(group, part))
    if coefficients.ok is not None:
        rounded = torch.where(coefficients.ok, rounded, weight)
    if kahan:
        part.state("compensation").copy_(wide - rounded.float())
    weight.copy_(rounded)


def rounding_seed(group: Group, part: Part) -> Tensor:
    """A number for this part of this parameter at this step; the step is counted in the state."""
    return mix(part.item.state["step"].to(torch.int32) ^ rounding_key(group, part))


def rounding_key(group: Group, part: Part) -> int:
    """A number for this part of this parameter, whatever the step."""
    place = part.item.position * 0x10001 + sum((axis + 1) * start for axis, start, _ in part.region.narrows)
    return int((group["rounding_seed"] * 0x9E3779B1 + place) & 0x7FFFFFFF)
