"""Cross-entropy of a linear head without storing the logits of all tokens.

Loss and gradients of a chunk of tokens are computed together, so its logits are freed before the next chunk, and
nothing is computed twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from muonsw import kernels
from muonsw.lab.model.layers import at_least_float32, product_dtype, without_autocast

# On a CPU, the logits of a chunk should fit into the cache; a GPU needs large products.
CPU_CHUNK_TOKENS = 256
CHUNK_BYTES = 2**30


def cross_entropy(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, scale: float = 1.0) -> Tensor:
    """Mean cross-entropy of the logits `scale * x @ weight.T`.

    It computes 256 tokens at a time on CPUs, and elsewhere as many as fit into 1 GiB.
    """
    size = product_dtype(x_ND).itemsize
    chunk = CPU_CHUNK_TOKENS if x_ND.device.type == "cpu" else chunk_tokens(weight_VD.shape[0], size)
    differentiate = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    apply = cast("Any", _ChunkedCrossEntropy).apply
    return cast("Tensor", apply(x_ND, weight_VD, targets_N, scale, chunk, differentiate))


def chunk_tokens(vocab: int, size: int) -> int:
    """The number of tokens in a chunk on a GPU, for logits of `size` bytes each: a power of two, like most batches."""
    return 1 << (CHUNK_BYTES // (vocab * size)).bit_length() - 1


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale: float, chunk: int, differentiate: bool
    ) -> Tensor:
        dtype = product_dtype(x_ND)
        with without_autocast(x_ND):
            head_loss = _head_loss_on_gpu if x_ND.is_cuda else _head_loss
            inputs = x_ND.to(dtype), weight_VD.to(dtype), targets_N
            loss, grad_x, grad_head = head_loss(*inputs, scale, chunk, differentiate)
        if differentiate:
            ctx.save_for_backward(grad_x.to(x_ND.dtype), grad_head.to(weight_VD.dtype))
        return loss / x_ND.shape[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
        return *(grad * grads[0].to(grad.dtype) if need else None for grad, need in needed), None, None, None, None


def _head_loss(
    x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, scale: float, chunk: int, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses and the gradients of their mean, which are empty without `differentiate`."""
    dtype, tokens = x_ND.dtype, x_ND.shape[0]
    loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=x_ND.device)
    grad_x = torch.empty_like(x_ND if differentiate else x_ND[:0])
    grad_head = torch.zeros_like(head_VD if differentiate else head_VD[:0], dtype=loss.dtype)
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        logits, target = at_least_float32(x_ND[part] @ head_VD.T).mul_(scale), targets_N[part, None]
        peak, right = logits.amax(dim=1, keepdim=True), logits.gather(1, target)
        mass = logits.sub_(peak).exp_()  # in the memory of the logits
        total = mass.sum(dim=1, keepdim=True)
        loss += (total.log() + peak - right).sum()
        if differentiate:
            # Softmax minus one-hot, in the memory of `mass`.
            grad = mass.mul_(scale / tokens / total)
            grad = grad.scatter_(1, target, grad.gather(1, target) - scale / tokens).to(dtype)
            grad_x[part] = grad @ head_VD
            grad_head += grad.T @ x_ND[part]
    return loss, grad_x, grad_head


@library.custom_op("muonsw::head_loss", mutates_args=())
def _head_loss_on_gpu(
    x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, scale: float, chunk: int, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`_head_loss` with one kernel for the softmax, on logits in the precision of the product.

    A custom operator, because the compiler would unroll the chunks and store `mass` in float32.
    """
    if not kernels.available(x_ND.device):
        return _head_loss(x_ND, head_VD, targets_N, scale, chunk, differentiate)
    from muonsw.lab.model.kernels import softmax_losses_

    tokens, vocab = x_ND.shape[0], head_VD.shape[0]
    losses_N = torch.empty(tokens, dtype=torch.float32, device=x_ND.device)
    grad_x = torch.empty_like(x_ND if differentiate else x_ND[:0])
    grad_head = torch.empty_like(head_VD if differentiate else head_VD[:0], dtype=torch.float32)
    room = x_ND.new_empty(min(chunk, tokens), vocab)
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        rows = x_ND[part]
        logits = torch.mm(rows, head_VD.T, out=room[: rows.shape[0]])
        softmax_losses_(logits, targets_N[part], losses_N[part], scale, scale / tokens if differentiate else None)
        if differentiate:
            torch.mm(logits, head_VD, out=grad_x[part])
            wide: dict[str, Any] = {} if rows.dtype == torch.float32 else {"out_dtype": torch.float32}
            product = torch.mm(logits.T, rows, **wide)
            grad_head = grad_head.add_(product) if start else product
    return losses_N.sum(), grad_x, grad_head


@_head_loss_on_gpu.register_fake
def _(
    x_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    chunk: int,  # noqa: ARG001
    differentiate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_head = torch.empty_like(head_VD if differentiate else head_VD[:0], dtype=torch.float32)
    return grad_head.new_empty(()), torch.empty_like(x_ND if differentiate else x_ND[:0]), grad_head
