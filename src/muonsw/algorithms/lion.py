"""Lion: the sign of an average gradient, so every element moves equally far.

Chen et al., "Symbolic discovery of optimization algorithms" (2023); equal to `lucidrains/lion-pytorch` at 6a74fdc. The
direction weights the new gradient by `1 - beta1`, the stored average by `1 - beta2`.
"""

from __future__ import annotations

import torch

from muonsw.algorithms.base import Algorithm, Update, advance_momentum, clean, columns
from muonsw.matrices import Part
from muonsw.slots import ELEMENTWISE
from muonsw.work import Group, StepContext


def update(group: Group, parts: list[Part], ctx: StepContext) -> Update:
    """Directions sign(beta1 M + (1 - beta1) G)."""
    beta1, beta2 = group["betas"]
    _, grads, averages = columns(parts, ("exp_avg",))
    grads = clean(grads, averages, group["maximize"], ctx.ok)
    directions = list(torch._foreach_lerp(averages, grads, 1 - beta1))
    torch._foreach_sign_(directions)
    advance_momentum("ema", averages, grads, beta2, ctx.ok)
    return Update(parts, directions)


LION = Algorithm(
    defaults={"betas": (0.9, 0.99)},
    state=lambda _: {"exp_avg": ELEMENTWISE},
    update=update,
    scale_free=True,
)
