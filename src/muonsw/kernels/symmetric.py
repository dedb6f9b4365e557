"""Symmetric products: compute one triangle and mirror it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from muonsw import machine
from muonsw.kernels import launch_on
from muonsw.kernels.common import DTYPES


class Tiles(NamedTuple):
    """The tiles of a product: `rows` by `rows`, summed in steps of `depth`.

    `warps` work on a tile and `stages` steps are loaded ahead; with `engine`, by the chip's copy engine, which also
    stores full tiles.
    """

    rows: int
    depth: int
    warps: int
    stages: int
    engine: bool = False


@functools.cache
def best_tiles(device: torch.device) -> Tiles:
    """The fastest of 14 settings for batches of 256 to 1024 rows on one H200, with the copy engine and without."""
    has_engine = machine.gpu_capability(device) >= 90
    return Tiles(128, 64, 4, 3, engine=True) if has_engine else Tiles(128, 64, 8, 3)


@triton.jit
def _tile(number):
    """Row and column of a tile of the lower triangle, counted row by row from the top."""
    # the rows above row i hold i (i + 1) / 2 tiles
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    return i, number - i * (i + 1) // 2


@triton.jit(do_not_specialize=["tiles"])
def _symmetric(
    left,
    right,
    addend,
    out,
    size,
    inner,
    tiles,
    alpha,
    beta,
    diagonal,
    left_batch,
    left_row,
    left_column,
    right_batch,
    right_row,
    right_column,
    HAS_TERM: tl.constexpr,
    EVEN: tl.constexpr,
    ENGINE: tl.constexpr,
    STORES: tl.constexpr,
    TYPE: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    batch = tl.program_id(0) // tiles
    i, j = _tile(tl.program_id(0) % tiles)
    rows, columns = i * ROWS + tl.arange(0, ROWS), j * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    if STORES and HAS_TERM:  # start the sum from the addend, because holding it separately takes 50% more registers
        terms = addend + batch.to(tl.int64) * size * size + rows[:, None] * size + columns[None, :]
        total = tl.load(terms).to(tl.float32) * (beta / alpha)
    if ENGINE:
        for begin in range(0, inner, DEPTH):
            if TURNED:
                x = left.load([batch, begin, i * ROWS]).reshape(DEPTH, ROWS).trans()
                y = right.load([batch, begin, j * ROWS]).reshape(DEPTH, ROWS)
            else:
                x = left.load([batch, i * ROWS, begin]).reshape(ROWS, DEPTH)
                y = right.load([batch, j * ROWS, begin]).reshape(ROWS, DEPTH).trans()
            total = tl.dot(x, y, total)
    else:
        steps = tl.arange(0, DEPTH)
        # elements outside read other rows and are never stored
        a_rows, b_rows = rows, columns
        if not EVEN:
            a_rows, b_rows = rows % size, columns % size
        a = left + batch.to(tl.int64) * left_batch + a_rows[:, None] * left_row + steps[None, :] * left_column
        b = right + batch.to(tl.int64) * right_batch + b_rows[:, None] * right_row + steps[None, :] * right_column
        for begin in range(0, inner, DEPTH):
            if EVEN:
                x, y = tl.load(a), tl.load(b)
            else:
                within = (begin + tl.arange(0, DEPTH))[None, :] < inner
                x, y = tl.load(a, mask=within, other=0.0), tl.load(b, mask=within, other=0.0)
            total = tl.dot(x, tl.trans(y), total)
            a += DEPTH * left_column
            b += DEPTH * right_column

    r, c = rows[:, None], columns[None, :]
    result = alpha * total
    if STORES:
        result = tl.where(r == c, result + diagonal, result).to(TYPE)
        out.store([batch, i * ROWS, j * ROWS], result.reshape(1, ROWS, ROWS))
        if i != j:
            out.store([batch, j * ROWS, i * ROWS], tl.trans(result).reshape(1, ROWS, ROWS))
    else:
        straight = batch.to(tl.int64) * size * size + r * size + c
        mirrored = out + batch.to(tl.int64) * size * size + columns[:, None] * size + rows[None, :]
        inside, mirrored_inside = None, None
        if not EVEN:
            inside = (r < size) & (c < size)
            mirrored_inside = (columns[:, None] < size) & (rows[None, :] < size)
        if HAS_TERM:
            result += beta * tl.load(addend + straight, mask=inside).to(tl.float32)
        result = tl.where(r == c, result + diagonal, result).to(TYPE)
        tl.store(out + straight, result, mask=inside)
        if i != j:
            tl.store(mirrored, tl.trans(result), mask=mirrored_inside)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    *,
    alpha: float = 1.0,
    term: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Compute `alpha left right^T + beta term + diagonal I`, which must be symmetric.

    `left` is `(batch, m, k)` in half precision, with any strides within 2^31 elements; `right` is `left` itself, or
    symmetric and commuting with it; `term` is contiguous, symmetric `(batch, m, m)`.
    """
    tiles = best_tiles(left.device)
    batch, size, inner = left.shape
    out = torch.empty(batch, size, size, dtype=left.dtype, device=left.device)
    across = triton.cdiv(size, tiles.rows)
    number = across * (across + 1) // 2  # on and below the diagonal
    turned = left.stride(1) == 1 and left.stride(2) != 1
    engine = tiles.engine and all(_suits_engine(t, turned) for t in (left, right))
    even = size % tiles.rows == 0 and inner % tiles.depth == 0
    stores = engine and even and alpha != 0
    a, b = left, right
    if engine:
        a = _descriptor(left, tiles.rows, tiles.depth, turned)
        b = a if right is left else _descriptor(right, tiles.rows, tiles.depth, turned)
    launch_on(
        left.device,
        _symmetric,
        (batch * number,),
        a,
        b,
        out if term is None else term,
        _descriptor(out, tiles.rows, tiles.rows, False) if stores else out,
        size,
        inner,
        number,
        alpha,
        beta,
        diagonal,
        *left.stride(),
        *right.stride(),
        HAS_TERM=term is not None,
        EVEN=even,
        ENGINE=engine,
        STORES=stores,
        TYPE=DTYPES[out.dtype],
        TURNED=turned,
        ROWS=tiles.rows,
        DEPTH=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def _suits_engine(tensor: Tensor, turned: bool) -> bool:
    """Whether the copy engine can read a tensor: contiguous along one axis, other strides multiples of 16 bytes."""
    batch, row, column = tensor.stride()
    along, across = (row, column) if turned else (column, row)
    size = tensor.element_size()
    return along == 1 and across * size % 16 == 0 and batch * size % 16 == 0 and tensor.data_ptr() % 16 == 0


def _descriptor(tensor: Tensor, rows: int, depth: int, turned: bool) -> TensorDescriptor:
    view = tensor.mT if turned else tensor
    block = [1, depth, rows] if turned else [1, rows, depth]
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block)
