"""Triton kernels of the model.

`softmax_losses_` replaces a chunk of logits with their gradient (`loss._head_loss` in torch) and saves 14% of a
training step. `add_rows` adds up the rows of each token's choices (`layers._add_choices` in torch), because torch's
compiler sometimes gets that sum wrong.

Import this module only if `muonsw.kernels.available`, since it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on

SOFTMAX_BLOCK, SOFTMAX_WARPS = 4096, 8
# For each program of `add_rows`.
ENTRY_ROWS, ENTRY_COLUMNS, ENTRY_WARPS = 8, 256, 4


@triton.jit
def _softmax(
    logits, targets, losses, scale, grad_scale, columns, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Loss of one row, then softmax minus one-hot in place; the second pass reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    right = tl.load(logits + target).to(tl.float32) * scale
    peak = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(peak, tl.max(z, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher), axis=0)
        peak = higher
    tl.store(losses + row, tl.log(total) + peak - right)
    if GRADIENT:
        factor = grad_scale / total
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = tl.load(logits + column, mask=column < columns, other=-float("inf")).to(tl.float32) * scale
            grad = tl.exp(z - peak) * factor
            grad = tl.where(column == target, grad - grad_scale, grad)
            tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < columns)


def softmax_losses_(
    logits_NV: Tensor, targets_N: Tensor, losses_N: Tensor, scale: float, grad_scale: float | None
) -> None:
    """Write the float32 cross-entropy of each row of `scale * logits` into `losses_N`.

    The gradient with respect to the scaled logits, times `grad_scale`, replaces the contiguous logits.
    """
    rows, columns = logits_NV.shape
    block = min(SOFTMAX_BLOCK, triton.next_power_of_2(columns))
    sizes = {"GRADIENT": grad_scale is not None, "BLOCK": block, "num_warps": SOFTMAX_WARPS}
    arguments = (logits_NV, targets_N, losses_N, scale, grad_scale or 0.0, columns)
    launch_on(logits_NV.device, _softmax, (rows,), *arguments, **sizes)


@triton.jit
def _add_rows(
    rows, places, weights, out, tokens, width, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (token < tokens) & (column < width)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + choice, mask=token < tokens, other=0)
        row = tl.load(rows + place * width + column, mask=inside).to(tl.float32)
        if weights is not None:
            row *= tl.load(weights + token * TOP_K + choice, mask=token < tokens, other=0.0)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def add_rows(rows_RD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """Sum the rows at each token's places, weighted if there are weights; inputs must be contiguous."""
    (tokens, top_k), width = places_NK.shape, rows_RD.shape[1]
    out = rows_RD.new_empty(tokens, width)
    grid = (triton.cdiv(tokens, ENTRY_ROWS), triton.cdiv(width, ENTRY_COLUMNS))
    sizes = {"TOP_K": top_k, "ROWS": ENTRY_ROWS, "COLUMNS": ENTRY_COLUMNS, "num_warps": ENTRY_WARPS}
    launch_on(rows_RD.device, _add_rows, grid, rows_RD, places_NK, weights_NK, out, tokens, width, **sizes)
    return out
