"""SGD with momentum: the direction is the gradient or its average."""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.algorithms.base import (
    Algorithm,
    Update,
    advance_momentum,
    clean,
    columns,
    look_ahead,
    subtract,
    suits_torch,
)
from muonsw.matrices import Part
from muonsw.slots import ELEMENTWISE, Specs
from muonsw.work import Group, StepContext, elements


def state(group: Group) -> Specs:
    return {"momentum_buffer": ELEMENTWISE} if group["momentum"] else {}


def update(group: Group, parts: list[Part], ctx: StepContext) -> Update:
    form, beta = group["momentum_form"], group["momentum"]
    if not beta:
        _, grads = columns(parts, ())
        return Update(parts, clean(grads, grads, group["maximize"], ctx.ok))
    _, grads, momenta = columns(parts, ("momentum_buffer",))
    grads = clean(grads, momenta, group["maximize"], ctx.ok)
    advance_momentum(form, momenta, grads, beta, ctx.ok)
    if not group["nesterov"]:
        return Update(parts, momenta)
    ahead = [torch.empty_like(m) for m in momenta]
    look_ahead(form, momenta, grads, beta, out=ahead)
    return Update(parts, ahead)


def fused(group: Group, parts: list[Part], ctx: StepContext) -> bool:
    """Take the whole step with torch's kernel.

    torch adds decay to the momentum, so with momentum we decay first.
    """
    weights, grads, *lists = columns(parts, tuple(state(group)))
    momenta = lists[0] if lists else []
    ema = bool(momenta) and group["momentum_form"] == "ema"
    if (ema and group["nesterov"]) or not suits_torch(group, ctx, weights, grads, momenta):
        return False
    eta, phi, flag = float(ctx.eta), float(ctx.phi), ctx.flag
    if momenta and phi:
        if weights[0].is_cpu and elements(weights) * weights[0].element_size() > ctx.chunk_bytes:
            return False  # in chunks, the second pass hits the cache
        subtract(weights, phi if flag is None else phi * flag.factor(weights[0].dtype), weights)
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
        found_inf=None if flag is None else flag.bad,
    )
    return True


def validate(group: Group, name: str, param: Tensor) -> None:  # noqa: ARG001
    if group["nesterov"] and not group["momentum"]:
        raise ValueError("nesterov=True needs a momentum above zero")


SGD = Algorithm(
    defaults={"momentum": 0.0, "momentum_form": "heavy_ball", "nesterov": False},
    state=state,
    update=update,
    validate=validate,
    fused=fused,
)
