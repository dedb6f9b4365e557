"""Lion: the sign of an average gradient, so that every element moves equally far.

Chen et al., "Symbolic discovery of optimization algorithms" (2023); equal to `lucidrains/lion-pytorch` at 6a74fdc. The
direction weighs the new gradient by `1 - beta1`, what is remembered by `1 - beta2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from muonsw.algorithms.base import (
    Algorithm,
    Budget,
    FusedUpdate,
    Update,
    advance_momentum,
    clean,
    columns,
    elementwise_updates,
)
from muonsw.matrices import Part
from muonsw.work import Group, Item

KEYS = ("exp_avg",)


def state_keys(group: Group) -> tuple[str, ...]:  # noqa: ARG001
    """One average for each parameter, under AdamW's name."""
    return KEYS


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update | FusedUpdate]:
    """Directions sign(beta1 M + (1 - beta1) G)."""
    return elementwise_updates(items, KEYS, budget, lambda _: None, partial(_plain_update, group, budget))


def _plain_update(group: Group, budget: Budget, parts: list[Part]) -> Update:
    (beta1, beta2), (_, grads, averages) = group["betas"], columns(parts, KEYS)
    grads = clean(grads, averages, group["maximize"], budget.ok)
    directions = list(torch._foreach_lerp(averages, grads, 1 - beta1))
    torch._foreach_sign_(directions)
    advance_momentum("ema", averages, grads, beta2, budget.ok)
    return Update(parts, directions)


def validate(group: Group, name: str, param: Tensor) -> None:
    """Any shape will do."""


LION = Algorithm(
    defaults={"betas": (0.9, 0.99)},
    state_keys=state_keys,
    updates=updates,
    validate=validate,
    scale_free=True,
)
