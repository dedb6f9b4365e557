"""SGD with momentum: the direction is the gradient or its average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms import momentum
from muonsw.algorithms.base import (
    Algorithm,
    Budget,
    FusedUpdate,
    Group,
    Item,
    Part,
    Update,
    clean,
    elementwise_parts,
    kernel_weights,
    suits_torch,
    views,
)

if TYPE_CHECKING:
    from muonsw.apply import Coefficients


def state_keys(group: Group) -> tuple[str, ...]:
    """A buffer only where there is momentum."""
    return ("momentum_buffer",) if group["momentum"] else ()


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update | FusedUpdate]:
    """Directions of plain, heavy-ball or Nesterov SGD, or the whole step in one kernel where there is one."""
    keys = state_keys(group)
    for parts in elementwise_parts(items, keys, budget.chunk_bytes):
        weights = views(parts, [part.item.param for part in parts])
        grads = views(parts, [part.item.grad for part in parts])
        momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts]) if keys else []
        take = None if budget.plain else _kernel(group, parts, weights, grads, momenta)
        if take is None and budget.on_host and not budget.plain:
            take = _torch_kernel(group, weights, grads, momenta)
        if take is not None:
            yield FusedUpdate(parts, take, partial(_directions, group, grads, momenta, budget.ok))
        else:
            clean_grads = clean(grads, momenta or grads, group["maximize"], budget.ok)
            if momenta:
                momentum.advance(group["momentum_form"], momenta, clean_grads, group["momentum"], budget.ok)
            yield Update(parts, _look_ahead(group, clean_grads, momenta))


def _directions(group: Group, grads: list[Tensor], momenta: list[Tensor], ok: Tensor | None) -> list[Tensor]:
    """Where the last step went, from the advanced momentum."""
    return _look_ahead(group, clean(grads, momenta or grads, group["maximize"], ok), momenta)


def _look_ahead(group: Group, grads: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    if not momenta:
        return grads
    if not group["nesterov"]:
        return momenta
    ahead = [torch.empty_like(m) for m in momenta]
    momentum.look_ahead(group["momentum_form"], momenta, grads, group["momentum"], out=ahead)
    return ahead


def _kernel(
    group: Group, parts: list[Part], weights: list[Tensor], grads: list[Tensor], momenta: list[Tensor]
) -> Callable[[Coefficients], None] | None:
    """The step as one pass of our kernel, if it takes these tensors."""
    if not kernels.available(weights[0].device):
        return None
    from muonsw.kernels.elementwise import Motion, takes
    from muonsw.kernels.sgd import sgd

    if not takes(weights, grads, momenta or grads):
        return None
    settings = (group["momentum"], group["momentum_form"], group["nesterov"], group["maximize"])

    def take(coefficients: Coefficients) -> None:
        motion = Motion(*coefficients, 1.0, group["cautious"])
        sgd(kernel_weights(group, parts, weights), grads, momenta, *settings, motion)

    return take


def _torch_kernel(
    group: Group, weights: list[Tensor], grads: list[Tensor], momenta: list[Tensor]
) -> Callable[[Coefficients], None] | None:
    """The step as torch's own; it couples decay to momentum, so with momentum the decay goes first, by itself."""
    ema = bool(momenta) and group["momentum_form"] == "ema"
    if (ema and group["nesterov"]) or not suits_torch(group, weights, grads, momenta or grads):
        return None

    def take(coefficients: Coefficients) -> None:
        eta, phi = float(coefficients.eta), float(coefficients.phi)
        if momenta and phi:
            torch._foreach_mul_(weights, 1 - phi)
        torch._fused_sgd_(
            weights,
            grads,
            momenta,
            weight_decay=0.0 if momenta else phi / eta,
            momentum=group["momentum"],
            lr=eta,
            dampening=group["momentum"] if ema else 0.0,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
        )

    return take


def validate(group: Group, name: str, param: Tensor) -> None:  # noqa: ARG001
    """Any shape will do, but Nesterov needs a momentum to look ahead with."""
    if group["nesterov"] and not group["momentum"]:
        raise ValueError("nesterov=True needs a momentum above zero")


SGD = Algorithm(
    defaults={"momentum": 0.0, "momentum_form": "heavy_ball", "nesterov": False},
    state_keys=state_keys,
    updates=updates,
    validate=validate,
)
