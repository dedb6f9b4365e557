"""Finding infinities and NaNs in gradients before a step changes anything, without asking the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms.base import Item

POLICIES = ("skip", "raise", "propagate")


class NonFiniteGradientError(FloatingPointError):
    """A gradient holds an infinity or a NaN, and the optimizer was told to raise."""


class NonFiniteGradientWarning(RuntimeWarning):
    """Steps were skipped because a gradient held an infinity or a NaN."""


def all_finite(grads: Sequence[Tensor], order: float = math.inf) -> Tensor:
    """A boolean scalar on the gradients' device: whether every norm of this order is finite.

    With the default, the largest absolute entry, that is whether every entry is finite. The Euclidean norm is
    several times faster on CPUs but overflows for gradients that are large and finite.
    """
    if grads and kernels.available(grads[0].device):
        from muonsw.kernels import finite

        if finite.takes(grads):
            return finite.all_finite(grads)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_dtype.setdefault(grad.dtype, []).append(grad)
    flags = [torch.stack(torch._foreach_norm(same, order)).isfinite().all() for same in by_dtype.values()]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)


def finite_flag(items: Sequence[Item]) -> Tensor | bool:
    """Whether this step may be taken: a bool where the host can know at no cost, else a device scalar."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for item in items:
        by_device.setdefault(item.param.device, []).append(item.grad)
    if all(device.type == "cpu" for device in by_device) and not torch.compiler.is_compiling():
        grads = [item.grad for item in items]
        return bool(all_finite(grads, order=2)) or bool(all_finite(grads))
    home = next(iter(by_device))
    flags = [all_finite(grads).to(home, non_blocking=True) for grads in by_device.values()]
    return flags[0] if len(flags) == 1 else torch.stack(flags).all()


def describe_non_finite(items: Sequence[Item]) -> str:
    """Name the parameters whose gradients are not finite; waits for the device."""
    bad = [item.name for item in items if not bool(all_finite([item.grad]))]
    if not bad:
        return "a gradient on another rank holds infinities or NaNs"
    shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return f"the gradient of {shown} holds infinities or NaNs"
