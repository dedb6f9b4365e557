"""AdamW: the average gradient over the root of the average squared gradient, both corrected for their start."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from muonsw.algorithms import momentum
from muonsw.algorithms.base import (
    Algorithm,
    Budget,
    Group,
    Item,
    Part,
    Update,
    clean,
    decay_average,
    elementwise_parts,
)

KEYS = ("exp_avg", "exp_avg_sq")


def state_keys(group: Group) -> tuple[str, ...]:  # noqa: ARG001
    """Torch's own names, so that its states load."""
    return (*KEYS, "step")


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update]:
    """Directions m_hat / (sqrt(v_hat) + eps)."""
    for parts in elementwise_parts(items, KEYS, budget.chunk_bytes):
        averages, squares = ([part.state(key) for part in parts] for key in KEYS)
        grads = clean([part.grad for part in parts], averages, group["maximize"], budget.ok)
        yield Update(parts, _directions(group, _steps(parts), averages, squares, grads, budget.ok))


def _steps(parts: list[Part]) -> Tensor:
    """How many steps each part has seen, as a float64 vector on the device: the host never asks.

    It is at least one: a skipped first step counts zero, and its direction must be finite to be multiplied away.
    """
    return torch.stack([part.item.state["step"] for part in parts]).double().clamp(min=1)


def _directions(
    group: Group,
    steps: Tensor,
    averages: list[Tensor],
    squares: list[Tensor],
    grads: list[Tensor],
    ok: Tensor | None,
) -> list[Tensor]:
    beta1, beta2 = group["betas"]
    momentum.advance("ema", averages, grads, beta1, ok)
    decay_average(squares, beta2, ok)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)

    # (m / c1) / (sqrt(v / c2) + eps), with both corrections in the denominator
    correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_mul_(denominators, (correction1 / correction2.sqrt()).unbind())
    torch._foreach_add_(denominators, (correction1 * group["eps"]).unbind())
    return list(torch._foreach_div(averages, denominators))


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
)
