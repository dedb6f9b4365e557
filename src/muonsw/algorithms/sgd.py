"""SGD with momentum: the direction is the gradient or its average."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from muonsw.algorithms import momentum
from muonsw.algorithms.base import Algorithm, Budget, Group, Item, Update, clean, elementwise_parts


def state_keys(group: Group) -> tuple[str, ...]:
    """A buffer only where there is momentum."""
    return ("momentum_buffer",) if group["momentum"] else ()


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update]:
    """Directions of plain, heavy-ball or Nesterov SGD."""
    beta, form, keys = group["momentum"], group["momentum_form"], state_keys(group)
    for parts in elementwise_parts(items, keys, budget.chunk_bytes):
        grads = [part.grad for part in parts]
        momenta = [part.state("momentum_buffer") for part in parts] if keys else grads
        directions = clean(grads, momenta, group["maximize"], budget.ok)
        if keys:
            momentum.advance(form, momenta, directions, beta, budget.ok)
            if group["nesterov"]:
                ahead = [torch.empty_like(m) for m in momenta]
                momentum.look_ahead(form, momenta, directions, beta, out=ahead)
                directions = ahead
            else:
                directions = momenta
        yield Update(parts, directions)


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
