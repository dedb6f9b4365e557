"""Finding infinities and NaNs in gradients before a step changes anything, without asking the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from muonsw.algorithms.base import Item

POLICIES = ("skip", "raise", "propagate")


class NonFiniteGradientError(FloatingPointError):
    """A gradient holds an infinity or a NaN, and the optimizer was told to raise."""


def all_finite(grads: Sequence[Tensor]) -> Tensor:
    """A boolean scalar on the gradients' device: whether every entry of every gradient is finite.

    The largest absolute entry is used, not the norm, which overflows for gradients that are large but finite.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_dtype.setdefault(grad.dtype, []).append(grad)
    flags = [torch.stack(torch._foreach_norm(same, math.inf)).isfinite().all() for same in by_dtype.values()]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)


def finite_flag(items: Sequence[Item]) -> Tensor | bool:
    """Whether this step may be taken: a bool where the host can know at no cost, else a device scalar."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for item in items:
        by_device.setdefault(item.param.device, []).append(item.grad)
    flags = [all_finite(grads) for grads in by_device.values()]
    on_host = all(device.type == "cpu" for device in by_device)
    if on_host and not torch.compiler.is_compiling():
        return all(bool(flag) for flag in flags)
    home = next(iter(by_device))
    return torch.stack([flag.to(home, non_blocking=True) for flag in flags]).all()


def raise_if_not_finite(items: Sequence[Item]) -> None:
    """Name the parameters whose gradients are not finite; waits for the device."""
    bad = [item.name for item in items if not bool(all_finite([item.grad]))]
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise NonFiniteGradientError(f"the gradient of {shown} holds infinities or NaNs; nothing was changed")
