"""Cross-entropy of a linear head that never holds the logits of all tokens.

The gradient of a softmax is known as soon as its logits are, so each chunk of tokens computes loss and gradients in one
visit and throws its logits away: memory is one chunk's, and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from muonsw.lab.model.layers import at_least_float32, product_dtype, without_autocast

# A CPU wants a chunk's logits in its cache; a GPU wants products large enough to fill it.
CPU_CHUNK_TOKENS = 256
CHUNK_TOKENS = 4096


def cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, scale: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Mean cross-entropy of the logits `scale * x @ weight.T`, at most `chunk` tokens' logits at a time.

    Args:
        x_ND: what the head is applied to.
        weight_VD: the head.
        targets_N: the right token for each row.
        scale: what the logits are multiplied by.
        chunk: tokens whose float32 logits are held at once; None is 256 on CPUs and 4096 elsewhere.

    Examples:
        >>> x, weight, targets = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)
        >>> plain = torch.nn.functional.cross_entropy(x @ weight.T, targets)
        >>> bool(torch.isclose(cross_entropy(x, weight, targets, chunk=4), plain))
        True
    """
    if chunk is None:
        chunk = CPU_CHUNK_TOKENS if x_ND.device.type == "cpu" else CHUNK_TOKENS
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least one token")
    if x_ND.shape[0] != targets_N.shape[0] or not targets_N.shape[0]:
        raise ValueError(f"{x_ND.shape[0]} rows and {targets_N.shape[0]} targets: both must be equal and not zero")
    differentiate = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    apply = cast("Any", _ChunkedCrossEntropy).apply
    return cast("Tensor", apply(x_ND, weight_VD, targets_N, scale, chunk, differentiate))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of tokens."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale: float, chunk: int, differentiate: bool
    ) -> Tensor:
        dtype = product_dtype(x_ND)
        with without_autocast(x_ND):
            rows, head = x_ND.to(dtype), weight_VD.to(dtype)
            loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=x_ND.device)
            grad_x = torch.empty_like(rows) if differentiate else None
            grad_head = torch.zeros_like(head, dtype=loss.dtype) if differentiate else None
            for start in range(0, rows.shape[0], chunk):
                part = slice(start, start + chunk)
                logits, target = at_least_float32(rows[part] @ head.T).mul_(scale), targets_N[part, None]
                losses, mass, total = _losses(logits, target)
                loss += losses.sum()
                if grad_x is not None and grad_head is not None:
                    grad = _grad_logits(mass, total, target, scale / rows.shape[0]).to(dtype)
                    grad_x[part] = grad @ head
                    grad_head += grad.T @ rows[part]
        if grad_x is not None and grad_head is not None:
            ctx.save_for_backward(grad_x.to(x_ND.dtype), grad_head.to(weight_VD.dtype))
        return loss / x_ND.shape[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.saved_tensors
        outer = grads[0]
        return (
            grad_x * outer.to(grad_x.dtype) if ctx.needs_input_grad[0] else None,
            grad_head * outer.to(grad_head.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
            None,
        )


def _losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each token, and the softmax as masses and their total; the masses take the memory of the logits."""
    peak, right = logits.amax(dim=1, keepdim=True), logits.gather(1, target)
    mass = logits.sub_(peak).exp_()
    total = mass.sum(dim=1, keepdim=True)
    return total.log() + peak - right, mass, total


def _grad_logits(mass: Tensor, total: Tensor, target: Tensor, scale: float) -> Tensor:
    """Softmax minus one-hot, times scale, in the memory of the masses."""
    grad = mass.mul_(scale / total)
    return grad.scatter_(1, target, grad.gather(1, target) - scale)
