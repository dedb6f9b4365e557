"""AdamW: the average gradient over the root of the average squared gradient, both corrected for their start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    Take,
    Update,
    advance_momentum,
    clean,
    columns,
    decay_average,
    elementwise_updates,
    kernel_weights,
    suits_torch,
    torch_is_quicker,
)
from muonsw.matrices import Part
from muonsw.precision import STORED, Kept
from muonsw.work import Group, Item

KEYS = ("exp_avg", "exp_avg_sq")


def state_keys(group: Group) -> tuple[str, ...]:  # noqa: ARG001
    """Torch's own names, so that its states load."""
    return (*KEYS, "step")


class AdamWTensors(NamedTuple):
    """What one chunk of AdamW works on."""

    weights: list[Tensor]
    grads: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]


Maker = Callable[[Group, list[Part], AdamWTensors], Take | None]


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update | FusedUpdate]:
    """Directions m_hat / (sqrt(v_hat) + eps), or the whole step in one kernel where there is one."""
    makers: list[Maker] = [_kernel, _torch_kernel] if budget.on_host else [_kernel]
    if group["state_dtype"] not in STORED and torch_is_quicker(items):  # `in_place` is ours
        makers.reverse()
    fused, plain = partial(_fused_update, group, makers), partial(_plain_update, group, budget)
    return elementwise_updates(items, KEYS, budget, fused, plain)


def _plain_update(group: Group, budget: Budget, parts: list[Part]) -> Update:
    tensors = AdamWTensors(*columns(parts, KEYS))
    _advance(group, tensors, budget.ok)
    return Update(parts, _directions(group, parts, tensors))


def _fused_update(group: Group, makers: list[Maker], parts: list[Part]) -> FusedUpdate | None:
    """The whole step by the first kernel that takes these tensors; None where there is none."""
    tensors = AdamWTensors(*columns(parts, KEYS))
    for make in makers:
        take = make(group, parts, tensors)
        if take is not None:
            return FusedUpdate(parts, take)
    return None


def _kernel(group: Group, parts: list[Part], tensors: AdamWTensors) -> Take | None:
    """The step as one pass of our kernel, if it takes these tensors."""
    if not kernels.available(tensors.weights[0].device):
        return None
    from muonsw.kernels.adamw import adamw
    from muonsw.kernels.elementwise import Motion, takes

    weights = kernel_weights(group, parts, tensors.weights)
    if not takes(weights.tensors, *tensors[1:]) or tensors.averages[0].dtype != tensors.squares[0].dtype:
        return None

    def take(rates: Rates) -> None:
        motion = Motion(rates.eta, rates.phi, rates.flag, 1.0, group["cautious"])
        counters = [part.item.state["step"] for part in parts]
        adamw(weights, *tensors[1:], counters, group["betas"], group["eps"], group["maximize"], motion)

    return take


def in_place(group: Group, parts: list[Part], kept: dict[str, list[Kept]]) -> FusedUpdate | None:
    """The step as one pass of our kernel over state as it is kept, if it takes these tensors."""
    from muonsw.kernels.adamw import adamw_stored
    from muonsw.kernels.elementwise import Motion, takes

    plain, grads = columns(parts, ())
    weights = kernel_weights(group, parts, plain)
    if not takes(weights.tensors, grads):
        return None

    def take(rates: Rates) -> None:
        motion = Motion(rates.eta, rates.phi, rates.flag, 1.0, group["cautious"])
        averages, squares = (kept[key] for key in KEYS)
        counters = [part.item.state["step"] for part in parts]
        options = group["betas"], group["eps"], group["maximize"]
        adamw_stored(weights, grads, averages, squares, counters, *options, motion)

    return FusedUpdate(parts, take)


def _torch_kernel(group: Group, parts: list[Part], tensors: AdamWTensors) -> Take | None:
    """The step as torch's own, which takes the decay as a number: `weight_decay = phi / eta` makes it ours."""
    if not suits_torch(group, *tensors):
        return None

    def take(rates: Rates) -> None:
        eta, phi = float(rates.eta), float(rates.phi)
        torch._fused_adamw_(
            tensors.weights,
            tensors.grads,
            tensors.averages,
            tensors.squares,
            [],
            [part.item.state["step"] for part in parts],
            lr=eta,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=phi / eta,
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
            found_inf=None if rates.flag is None else rates.flag.bad,
        )

    return take


def _corrections(group: Group, parts: list[Part]) -> tuple[Tensor, Tensor]:
    """What multiplies and what is added to the root of the average square, for each part; the host never asks.

    (m / c1) / (sqrt(v / c2) + eps), with both corrections in the denominator. Steps are at least one: a skipped first
    one counts zero, and its direction must be finite to be multiplied away.
    """
    steps = torch.stack([part.item.state["step"] for part in parts]).double().clamp(min=1)
    (beta1, beta2), eps = group["betas"], group["eps"]
    correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
    return correction1 / correction2.sqrt(), correction1 * eps


def _advance(group: Group, tensors: AdamWTensors, ok: Tensor | None) -> None:
    beta1, beta2 = group["betas"]
    grads = clean(tensors.grads, tensors.averages, group["maximize"], ok)
    advance_momentum("ema", tensors.averages, grads, beta1, ok)
    decay_average(tensors.squares, beta2, ok)
    torch._foreach_addcmul_(tensors.squares, grads, grads, value=1 - beta2)


def _directions(group: Group, parts: list[Part], tensors: AdamWTensors) -> list[Tensor]:
    factors, addends = _corrections(group, parts)
    denominators = torch._foreach_sqrt(tensors.squares)
    torch._foreach_mul_(denominators, factors.unbind())
    torch._foreach_add_(denominators, addends.unbind())
    return list(torch._foreach_div(tensors.averages, denominators))


def validate(group: Group, name: str, param: Tensor) -> None:  # noqa: ARG001
    """Any shape will do, but squared gradients need the range of float32."""
    if group["state_dtype"] == "float16":
        raise ValueError(
            f"state_dtype='float16' cannot hold the average squared gradient of {name}: whatever is below 6e-8 becomes "
            f"zero, and the update divides by its root; use 'float32' or 'bfloat16'"
        )


ADAMW = Algorithm(
    defaults={"betas": (0.9, 0.95), "eps": 1e-8},
    state_keys=state_keys,
    updates=updates,
    validate=validate,
    in_place=in_place,
)
