"""Rows sorted by expert times their expert's matrix: the one place that decides how.

Nothing here makes a GPU wait: group sizes stay on the device as offsets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from muonsw.lab.model.precision import product_dtype

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

# Grouped GEMM kernels want rows that start at multiples of 16 bytes.
ALIGNMENT_BYTES = 16


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each group of rows with its own matrix: `out[r] = weight[e] @ x[r]` for the rows r of group e.

    Args:
        x_RD: rows, sorted by group.
        weight_EFD: one (out, in) matrix for each group.
        ends_E: where each group ends, int32; the last is R. Groups may be empty.
    """
    dtype = product_dtype(x_RD)
    x, weight = x_RD.to(dtype), weight_EFD.to(dtype)
    return choose_product(x, weight)(x, weight, ends_E)


def choose_product(x_RD: Tensor, weight_EFD: Tensor) -> Product:
    """The fastest product for where and what the tensors are."""
    if x_RD.is_cuda and x_RD.dtype == torch.bfloat16 and _aligned(weight_EFD) and hasattr(functional, "grouped_mm"):
        return grouped_gemm
    if x_RD.device.type == "cpu" and not torch.compiler.is_compiling():
        return slice_by_slice
    return masked


def grouped_gemm(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """All groups in one kernel."""
    return functional.grouped_mm(x_RD, weight_EFD.transpose(-2, -1), offs=ends_E)


def slice_by_slice(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """One product for each group, on contiguous slices; reads the sizes, which would make a GPU wait."""
    ends = ends_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # unbind, not indexing: the backward of indexing writes a zero tensor as large as all experts for each of them
    pairs = zip(torch.split_with_sizes(x_RD, sizes), weight_EFD.unbind(0), strict=True)
    return torch.cat([functional.linear(rows, matrix) for rows, matrix in pairs])


def masked(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Every expert on all rows with the others' rows zeroed: E times the work, but shapes that depend on no data."""
    row = torch.arange(x_RD.shape[0], device=x_RD.device)
    group = (row[:, None] >= ends_E).sum(dim=1, keepdim=True)
    products = [functional.linear(x_RD * (group == e), matrix) for e, matrix in enumerate(weight_EFD.unbind(0))]
    return torch.stack(products).sum(dim=0)


def _aligned(weight_EFD: Tensor) -> bool:
    return all(size * weight_EFD.element_size() % ALIGNMENT_BYTES == 0 for size in weight_EFD.shape[1:])
