"""Lion: the sign of an average gradient, so that every element moves equally far.

Chen et al., "Symbolic discovery of optimization algorithms" (2023); equal to `lucidrains/lion-pytorch` at 6a74fdc. The
direction weighs the new gradient by `1 - beta1`, what is remembered by `1 - beta2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms.base import (
    Algorithm,
    Budget,
    FusedUpdate,
    Rates,
    Update,
    advance_momentum,
    clean,
    columns,
    elementwise_updates,
    kernel_weights,
)
from muonsw.matrices import Part
from muonsw.work import Group, Item

KEYS = ("exp_avg",)


def state_keys(group: Group) -> tuple[str, ...]:  # noqa: ARG001
    """One average for each parameter, under AdamW's name."""
    return KEYS


class LionTensors(NamedTuple):
    """What one chunk of Lion works on."""

    weights: list[Tensor]
    grads: list[Tensor]
    averages: list[Tensor]


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update | FusedUpdate]:
    """Directions sign(beta1 M + (1 - beta1) G), or the whole step in one kernel where there is one."""
    fused, plain = partial(_fused_update, group), partial(_plain_update, group, budget)
    return elementwise_updates(items, KEYS, budget, fused, plain)


def _plain_update(group: Group, budget: Budget, parts: list[Part]) -> Update:
    (beta1, beta2), (_, grads, averages) = group["betas"], columns(parts, KEYS)
    grads = clean(grads, averages, group["maximize"], budget.ok)
    directions = list(torch._foreach_lerp(averages, grads, 1 - beta1))
    torch._foreach_sign_(directions)
    advance_momentum("ema", averages, grads, beta2, budget.ok)
    return Update(parts, directions)


def _fused_update(group: Group, parts: list[Part]) -> FusedUpdate | None:
    """The whole step by our kernel; None where it does not take these tensors."""
    tensors = LionTensors(*columns(parts, KEYS))
    if not kernels.available(tensors.weights[0].device) or not group["betas"][1]:
        return None
    from muonsw.kernels.elementwise import Motion, takes
    from muonsw.kernels.lion import lion

    weights = kernel_weights(group, parts, tensors.weights)
    if not takes(weights.tensors, tensors.grads, tensors.averages):
        return None

    def take(rates: Rates) -> None:
        motion = Motion(rates.eta, rates.phi, rates.flag, 1.0, group["cautious"])
        lion(weights, tensors.grads, tensors.averages, group["betas"], group["maximize"], motion)

    return FusedUpdate(parts, take)


def validate(group: Group, name: str, param: Tensor) -> None:
    """Any shape will do."""


LION = Algorithm(
    defaults={"betas": (0.9, 0.99)},
    state_keys=state_keys,
    updates=updates,
    validate=validate,
    scale_free=True,
)
