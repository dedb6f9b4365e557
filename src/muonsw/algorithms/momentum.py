"""Momentum, shared by Muon and SGD, in the two forms people write.

- `ema` (the paper's listing, `torch.optim.Muon`): `M <- beta M + (1 - beta) G`, Nesterov `(1 - beta) G + beta M`;
- `heavy_ball` (the paper's Algorithm 1, `torch.optim.SGD`): `M <- beta M + G`, Nesterov `G + beta M`.

They differ by the factor `1 - beta`, which orthogonalization does not see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.algorithms.base import are_large, decay_average, where_ok

FORMS = ("ema", "heavy_ball")


def advance(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float, ok: Tensor | None) -> None:
    """Move the buffers one step on, in place."""
    gain = _gain(form, beta)
    if form == "ema" and ok is None:
        torch._foreach_lerp_(momenta, grads, gain)
        return
    if form == "ema" and ok is not None and are_large(momenta):
        weight = where_ok(ok, gain, 0.0, momenta[0].dtype).to(momenta[0].dtype)
        for average, grad in zip(momenta, grads, strict=True):
            average.lerp_(grad, weight)
        return
    decay_average(momenta, beta, ok)
    torch._foreach_add_(momenta, grads, alpha=gain)


def look_ahead(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float, out: list[Tensor]) -> None:
    """Write Nesterov's direction, from the gradients and the advanced buffers, to `out`, which may be `grads`."""
    if out is grads:
        if form == "ema":
            torch._foreach_lerp_(grads, momenta, beta)
        else:
            torch._foreach_add_(grads, momenta, alpha=beta)
        return
    for average, grad, target in zip(momenta, grads, out, strict=True):
        if form == "ema":
            torch.lerp(grad, average, beta, out=target)
        else:
            torch.add(grad, average, alpha=beta, out=target)


def _gain(form: str, beta: float) -> float:
    """The weight of a new gradient in the buffer."""
    if form not in FORMS:
        raise ValueError(f"momentum_form={form!r}: must be one of {', '.join(map(repr, FORMS))}")
    return 1 - beta if form == "ema" else 1.0
