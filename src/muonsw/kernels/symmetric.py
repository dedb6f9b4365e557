"""Products that are known to be symmetric: one triangle is computed, the other is its mirror image."""

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
    """How a product is cut: rows of a tile, its columns as a multiple of them, the depth of a step of the sum.

    `warps` work on a tile and `stages` steps are loaded ahead, by the copy engine of the chip if `engine`, which then
    also stores whole tiles.
    """

    rows: int
    ratio: int
    depth: int
    warps: int
    stages: int
    engine: bool = False


# The fastest of 14 ways to cut batches of 256 to 1024 rows on one H200, with the copy engine that chips have from
# compute capability 9 on, and without.
WITH_ENGINE = Tiles(128, 1, 64, 4, 3, engine=True)
WITHOUT_ENGINE = Tiles(128, 1, 64, 8, 3)


@functools.cache
def best_tiles(device: torch.device) -> Tiles:
    """How to cut products on this device."""
    return WITH_ENGINE if machine.gpu_capability(device) >= 90 else WITHOUT_ENGINE


@triton.jit
def _tile(number, RATIO: tl.constexpr):
    """Row and column of a tile of the lower triangle, counted from the top; tiles are RATIO times wider than high."""
    # strips of RATIO rows of tiles; the strips above strip p hold RATIO p (p + 1) / 2 tiles
    p = ((tl.sqrt(8.0 / RATIO * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    p = tl.where(RATIO * p * (p + 1) // 2 > number, p - 1, p)
    p = tl.where(RATIO * (p + 1) * (p + 2) // 2 <= number, p + 1, p)
    rest = number - RATIO * p * (p + 1) // 2
    return RATIO * p + rest // (p + 1), rest % (p + 1)


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
    WIDE: tl.constexpr,
    ENGINE: tl.constexpr,
    STORES: tl.constexpr,
    TYPE: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    DEPTH: tl.constexpr,
):
    COLUMNS: tl.constexpr = ROWS * RATIO
    batch = tl.program_id(0) // tiles
    i, j = _tile(tl.program_id(0) % tiles, RATIO)
    rows, columns = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if STORES and HAS_TERM:  # the addend waits in the sum: beside it, it would take half as many registers again
        terms = addend + batch.to(tl.int64) * size * size + rows[:, None] * size + columns[None, :]
        total = tl.load(terms).to(tl.float32) * (beta / alpha)
    if ENGINE:
        for begin in range(0, inner, DEPTH):
            if TURNED:
                x = left.load([batch, begin, i * ROWS]).reshape(DEPTH, ROWS).trans()
                y = right.load([batch, begin, j * COLUMNS]).reshape(DEPTH, COLUMNS)
            else:
                x = left.load([batch, i * ROWS, begin]).reshape(ROWS, DEPTH)
                y = right.load([batch, j * COLUMNS, begin]).reshape(COLUMNS, DEPTH).trans()
            total = tl.dot(x, y, total)
    else:
        steps = tl.arange(0, DEPTH)
        # what lies outside reads some other row, and is never stored
        a_rows, b_rows = rows, columns
        if not EVEN:
            a_rows, b_rows = rows % size, columns % size
        if WIDE:
            a_rows, b_rows, steps = a_rows.to(tl.int64), b_rows.to(tl.int64), steps.to(tl.int64)
        a = left + batch.to(tl.int64) * left_batch + a_rows[:, None] * left_row + steps[None, :] * left_column
        b = right + batch.to(tl.int64) * right_batch + b_rows[:, None] * right_row + steps[None, :] * right_column
        for begin in range(0, inner, DEPTH):
            if EVEN:
                x, y = tl.load(a), tl.load(b)
            else:
                within = (begin + tl.arange(0, DEPTH))[None, :] < inner
                x, y = tl.load(a, mask=within, other=0.0), tl.load(b, mask=within, other=0.0)
            # float32 in full: neither NVIDIA's nor AMD's short formats
            total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
            a += DEPTH * left_column
            b += DEPTH * right_column

    if WIDE:
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    r, c = rows[:, None], columns[None, :]
    result = alpha * total
    if STORES:
        result = tl.where(r == c, result + diagonal, result).to(TYPE)
        out.store([batch, i * ROWS, j * COLUMNS], result.reshape(1, ROWS, COLUMNS))
        if i != j:
            out.store([batch, j * COLUMNS, i * ROWS], tl.trans(result).reshape(1, COLUMNS, ROWS))
    else:
        straight = batch.to(tl.int64) * size * size + r * size + c
        mirrored = out + batch.to(tl.int64) * size * size + columns[:, None] * size + rows[None, :]
        if EVEN:
            if HAS_TERM:
                result += beta * tl.load(addend + straight).to(tl.float32)
            result = tl.where(r == c, result + diagonal, result).to(TYPE)
            tl.store(out + straight, result)
            if i // RATIO != j:  # strips on the diagonal are computed whole
                tl.store(mirrored, tl.trans(result))
        else:
            inside = (r < size) & (c < size)
            if HAS_TERM:
                result += beta * tl.load(addend + straight, mask=inside, other=0.0).to(tl.float32)
            result = tl.where(r == c, result + diagonal, result).to(TYPE)
            tl.store(out + straight, result, mask=inside)
            if i // RATIO != j:
                tl.store(mirrored, tl.trans(result), mask=(columns[:, None] < size) & (rows[None, :] < size))


def symmetric_product(
    left: Tensor,
    right: Tensor,
    *,
    alpha: float = 1.0,
    term: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    tiles: Tiles | None = None,
) -> Tensor:
    """`alpha left right^T + beta term + diagonal I`, for a result that is symmetric.

    Args:
        left: `(batch, m, k)`, of any strides.
        right: the same shape; either `left` itself, or symmetric and commuting with it.
        alpha: factor of the product.
        term: a contiguous symmetric `(batch, m, m)` that is added.
        beta: its factor.
        diagonal: added to each diagonal entry.
        tiles: how to cut the work; what was measured to be best unless given.
    """
    tiles = tiles or best_tiles(left.device)
    batch, size, inner = left.shape
    out = torch.empty(batch, size, size, dtype=left.dtype, device=left.device)
    number = _tiles_below_diagonal(size, tiles)
    largest = max(size * size, *(abs(t.stride(1)) * size + abs(t.stride(2)) * inner for t in (left, right)))
    turned = left.stride(1) == 1 and left.stride(2) != 1
    engine = tiles.engine and all(_suits_engine(t, turned) for t in (left, right))
    even = size % (tiles.rows * tiles.ratio) == 0 and inner % tiles.depth == 0
    stores = engine and even and tiles.ratio == 1 and largest < 2**31 and alpha != 0
    a, b = left, right
    if engine:
        a = _descriptor(left, tiles.rows, tiles.depth, turned)
        same = right is left and tiles.ratio == 1
        b = a if same else _descriptor(right, tiles.rows * tiles.ratio, tiles.depth, turned)
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
        WIDE=largest >= 2**31,
        ENGINE=engine,
        STORES=stores,
        TYPE=DTYPES[out.dtype],
        TURNED=turned,
        ROWS=tiles.rows,
        RATIO=tiles.ratio,
        DEPTH=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def _tiles_below_diagonal(size: int, tiles: Tiles) -> int:
    """How many tiles touch the lower triangle: strips of `ratio` rows of tiles hold 1, 2, 3, ... columns each."""
    rows = -(-size // tiles.rows)
    strips, rest = divmod(rows, tiles.ratio)
    return tiles.ratio * strips * (strips + 1) // 2 + rest * (strips + 1)


def _suits_engine(tensor: Tensor, turned: bool) -> bool:
    """Whether the chip's copy engine reads this layout: entries side by side along one axis, the rest on 16 bytes."""
    batch, row, column = tensor.stride()
    along, across = (row, column) if turned else (column, row)
    size = tensor.element_size()
    return along == 1 and across * size % 16 == 0 and batch * size % 16 == 0 and tensor.data_ptr() % 16 == 0


def _descriptor(tensor: Tensor, rows: int, depth: int, turned: bool) -> TensorDescriptor:
    view = tensor.mT if turned else tensor
    block = [1, depth, rows] if turned else [1, rows, depth]
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block)
