"""Momentum, shared by Muon and SGD, in the two forms people write.

- `ema` (the paper's listing, `torch.optim.Muon`): `M <- beta M + (1 - beta) G`, Nesterov `(1 - beta) G + beta M`;
- `heavy_ball` (the paper's Algorithm 1, `torch.optim.SGD`): `M <- beta M + G`, Nesterov `G + beta M`.

They differ by the factor `1 - beta`, which orthogonalization does not see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.algorithms.base import decay_average

FORMS = ("ema", "heavy_ball")


def advance(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float, ok: Tensor | None) -> None:
    """Move the buffers one step on, in place."""
    if form == "ema" and ok is None:
        torch._foreach_lerp_(momenta, grads, 1 - beta)
        return
    decay_average(momenta, beta, ok)
    torch._foreach_add_(momenta, grads, alpha=1 - beta if form == "ema" else 1.0)


def look_ahead(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float) -> None:
    """Nesterov's direction from the gradients and the advanced buffers, written over `grads`."""
    if form == "ema":
        torch._foreach_lerp_(grads, momenta, beta)
    else:
        torch._foreach_add_(grads, momenta, alpha=beta)
