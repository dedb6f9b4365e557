"""The products that the iterations are made of, each by whatever was measured to be fastest for it."""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw import kernels

# Rows from which computing one triangle in Triton beats the vendor's dense product, in half precision: on one H200
# 1.15 (X X^T) and 1.5 times (the square) at 512, 1.4 and 1.7 times at 1024; at 256 it loses the first.
KERNEL_ROWS = 512


def symmetric(left: Tensor, right: Tensor) -> Tensor:
    """`left right^T`, where that is symmetric: `X X^T`, or the product of two symmetric matrices that commute.

    Examples:
        >>> symmetric(torch.eye(2, 3), torch.eye(2, 3)).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if kernel_pays(left):
        from muonsw.kernels.symmetric import symmetric_product

        return symmetric_product(left, right)
    return _matmul(left, right.mT)


def polynomial(R: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """`a I + b R + c R^2` of symmetric matrices.

    Examples:
        >>> polynomial(2 * torch.eye(2), (1.0, 10.0, 100.0)).diagonal().tolist()
        [421.0, 421.0]
    """
    a, b, c = coefficients
    if kernel_pays(R):
        from muonsw.kernels.symmetric import symmetric_product

        return symmetric_product(R, R, alpha=c, term=R, beta=b, diagonal=a)
    Z = multiply_add(R, R, R, beta=b, alpha=c)
    Z.diagonal(dim1=-2, dim2=-1).add_(a)
    return Z


def multiply(Q: Tensor, X: Tensor) -> Tensor:
    """`Q X`, in the memory order of `X` on accelerators, so that a transposed view stays one.

    Examples:
        >>> multiply(2 * torch.eye(2), torch.ones(2, 3)).sum().item()
        12.0
    """
    if _order_is_kept(X):
        return torch.bmm(Q, X, out=torch.empty_like(X))
    return _matmul(Q, X)


def multiply_add(addend: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """`beta * addend + alpha * left @ right` in one call, in the memory order of `addend` on accelerators.

    Examples:
        >>> multiply_add(torch.eye(2), torch.eye(2), torch.eye(2), beta=2.0).diagonal().tolist()
        [3.0, 3.0]
    """
    if _order_is_kept(addend):
        return torch.baddbmm(addend, left, right, beta=beta, alpha=alpha, out=torch.empty_like(addend))
    fused = torch.addmm if left.ndim == 2 else torch.baddbmm
    return fused(addend, left, right, beta=beta, alpha=alpha)


def kernel_pays(left: Tensor) -> bool:
    """Whether symmetric products of this tensor go to our kernel."""
    return (
        left.ndim == 3
        and left.dtype in (torch.float16, torch.bfloat16)
        and left.shape[-2] >= KERNEL_ROWS
        and not left.requires_grad
        and kernels.available(left.device)
    )


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """On accelerators the call that does least on the host; `@` thinks about broadcasting first."""
    return torch.bmm(left, right) if left.ndim == 3 and left.device.type != "cpu" else left @ right


def _order_is_kept(X: Tensor) -> bool:
    if X.ndim != 3 or X.device.type == "cpu" or X.requires_grad or torch.compiler.is_compiling():
        return False
    return not X.is_contiguous()
