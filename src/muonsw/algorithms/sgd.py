"""SGD with momentum: the direction is the gradient or its average."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw.algorithms.base import (
    Algorithm,
    Budget,
    FusedUpdate,
    Rates,
    Take,
    Update,
    advance_momentum,
    clean,
    columns,
    elementwise_updates,
    look_ahead,
    subtract,
    suits_torch,
)
from muonsw.matrices import Part
from muonsw.work import Group, Item


def state_keys(group: Group) -> tuple[str, ...]:
    """A buffer only where there is momentum."""
    return ("momentum_buffer",) if group["momentum"] else ()


# Entries that a CPU decays in one pass and moves in a second, before its cache has lost them.
CACHED = 2**18


class SGDTensors(NamedTuple):
    """What one chunk of SGD works on; `momenta` is empty where there is no momentum."""

    weights: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update | FusedUpdate]:
    """Directions of plain, heavy-ball or Nesterov SGD, or the whole step in torch's kernel where it can."""
    fused = partial(_fused_update, group) if budget.on_host else lambda _: None
    plain = partial(_plain_update, group, budget)
    return elementwise_updates(items, state_keys(group), budget, fused, plain)


def _tensors(group: Group, parts: list[Part]) -> SGDTensors:
    weights, grads, *momenta = columns(parts, state_keys(group))
    return SGDTensors(weights, grads, momenta[0] if momenta else [])


def _plain_update(group: Group, budget: Budget, parts: list[Part]) -> Update:
    tensors = _tensors(group, parts)
    grads = clean(tensors.grads, tensors.momenta or tensors.grads, group["maximize"], budget.ok)
    if tensors.momenta:
        advance_momentum(group["momentum_form"], tensors.momenta, grads, group["momentum"], budget.ok)
    return Update(parts, _look_ahead(group, grads, tensors.momenta))


def _fused_update(group: Group, parts: list[Part]) -> FusedUpdate | None:
    """The whole step by torch's kernel; None where it does not take these tensors."""
    take = _torch_kernel(group, _tensors(group, parts))
    return None if take is None else FusedUpdate(parts, take)


def _look_ahead(group: Group, grads: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    if not momenta:
        return grads
    if not group["nesterov"]:
        return momenta
    ahead = [torch.empty_like(m) for m in momenta]
    look_ahead(group["momentum_form"], momenta, grads, group["momentum"], out=ahead)
    return ahead


def _torch_kernel(group: Group, tensors: SGDTensors) -> Take | None:
    """The step as torch's own; it couples decay to momentum, so with momentum the decay goes first."""
    weights, grads, momenta = tensors
    ema = bool(momenta) and group["momentum_form"] == "ema"
    if (ema and group["nesterov"]) or not suits_torch(group, weights, grads, momenta or grads):
        return None

    def take(rates: Rates) -> None:
        eta, phi, flag = float(rates.eta), float(rates.phi), rates.flag
        decays_first = bool(momenta) and phi != 0
        applied = phi if flag is None or not decays_first else phi * flag.factor(weights[0].dtype)
        for piece in _pieces(tensors) if decays_first and weights[0].device.type == "cpu" else (tensors,):
            if decays_first:
                subtract(piece.weights, applied, piece.weights)
            torch._fused_sgd_(
                *piece,
                weight_decay=0.0 if momenta else phi / eta,
                momentum=group["momentum"],
                lr=eta,
                dampening=group["momentum"] if ema else 0.0,
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=False,
                found_inf=None if flag is None else flag.bad,
            )

    return take


def _pieces(tensors: SGDTensors) -> Iterator[SGDTensors]:
    """The same tensors in pieces of about `CACHED` entries: large ones cut, small ones together."""
    together, room = SGDTensors([], [], []), CACHED
    for three in zip(*tensors, strict=True):
        size = three[0].numel()
        if size > CACHED:
            for cut in zip(*(torch.split(tensor.view(-1), CACHED) for tensor in three), strict=True):
                yield SGDTensors(*([part] for part in cut))
            continue
        if size > room:
            yield together
            together, room = SGDTensors([], [], []), CACHED
        for column, tensor in zip(together, three, strict=True):
            column.append(tensor)
        room -= size
    if together.weights:
        yield together


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
