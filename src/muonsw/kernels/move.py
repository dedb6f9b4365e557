"""Decay, move and round weights: the end of AdamW's kernel, and a kernel of its own for directions computed before.

One launch works on a list of tensors, each a column of an address table. Its rows: the weight; for stochastic rounding
the step counter, the noise key and the position of the first element; other integers; the kernel's other inputs; the
widths and strides of rows if any have gaps; and last the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import (
    DTYPES,
    across_gaps,
    alignment,
    block_of,
    flag_or,
    limit,
    start,
    stochastic_round,
    whole_number,
)
from muonsw.kernels.tables import Stretches, addresses, block_map, runs, table
from muonsw.work import StepContext, all_contiguous, one_dtype

BLOCK = 2048
WARPS = 4


class Weights(NamedTuple):
    """Weights of one dtype; for stochastic rounding also step counters and noise keys."""

    tensors: Sequence[Tensor]
    counters: Sequence[Tensor] = ()
    keys: Sequence[int] = ()

    def rounding_rows(self, stretches: Stretches) -> list[list[int]]:
        if not self.counters:
            return []
        counters = addresses(self.counters)
        return [
            [counters[owner] for owner in stretches.owners],
            [self.keys[owner] for owner in stretches.owners],
            list(stretches.positions),
        ]


@triton.jit
def rates(eta, phi, scale, ON_DEVICE: tl.constexpr):
    """The factors of the direction and of the decay."""
    if ON_DEVICE:
        eta, phi = tl.load(eta).to(tl.float32), tl.load(phi).to(tl.float32)
    return eta * scale, phi


@triton.jit
def write(
    pointers,
    tensors,
    owner,
    offsets,
    places,
    inside,
    direction,
    rate,
    decay,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Decay and move the weights at `places` in float32, and round once."""
    weights = start(pointers, owner, WEIGHT, ALIGNED)
    w = tl.load(weights + places, mask=inside, other=0.0).to(tl.float32)
    if CAUTIOUS:  # no decay of elements that move outward
        w = w - tl.where(w * direction >= 0, w, 0.0) * decay
    else:
        w = w - w * decay  # 1 - decay would be rounded in the same direction at every step
    w = w - rate * direction
    if STOCHASTIC:
        step = tl.load(start(pointers, tensors + owner, tl.float32, False))
        key = tl.load(pointers + 2 * tensors + owner)
        position = tl.load(pointers + 3 * tensors + owner) + offsets
        w = stochastic_round(w, step, key, position, WEIGHT)
    tl.store(weights + places, w.to(WEIGHT), mask=inside)


def choices(weights: Weights, cautious: bool, ctx: StepContext) -> dict[str, object]:
    return {
        "HAS_FLAG": ctx.flag is not None,
        "ON_DEVICE": isinstance(ctx.eta, Tensor),  # both rates, or neither
        "CAUTIOUS": cautious,
        "STOCHASTIC": bool(weights.counters),
        "WEIGHT": DTYPES[weights.tensors[0].dtype],
    }


@triton.jit(do_not_specialize=["tensors", "rows", "columns"])
def _move(
    pointers,
    sizes,
    widths,
    strides,
    blocks,
    tensors,
    factors,
    rows,
    columns,
    eta,
    phi,
    scale,
    bad,
    STRIDED: tl.constexpr,
    FACTORS: tl.constexpr,
    STATE_ROW: tl.constexpr,
    DIRECTION: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner, offsets = block_of(blocks, BLOCK)
    inside = offsets < limit(whole_number(sizes, owner, ALIGNED), bad, HAS_FLAG)
    directions = start(pointers, STATE_ROW * tensors + owner, DIRECTION, ALIGNED)
    direction = tl.load(directions + offsets, mask=inside, other=0.0).to(tl.float32)
    if FACTORS is not None:
        first = tl.load(pointers + (STATE_ROW - 1) * tensors + owner)
        begin = first + tl.load(blocks + tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK
        place = (begin % columns).to(tl.int32) + tl.arange(0, BLOCK)
        # division as one rounded product: adding a half keeps the result away from whole numbers
        below = ((place.to(tl.float32) + 0.5) * (1.0 / columns)).to(tl.int32)
        slices = (begin // columns).to(tl.int32) + below  # rows, counted over all matrices
        if FACTORS == "columns":
            slices = slices // rows * columns + place - below * columns
        direction *= tl.load(factors + slices, mask=inside, other=0.0)
    places = offsets
    if STRIDED:
        places = across_gaps(offsets, widths, strides, owner)
    rate, decay = rates(eta, phi, scale, ON_DEVICE)
    write(
        pointers, tensors, owner, offsets, places, inside, direction, rate, decay, CAUTIOUS, STOCHASTIC, WEIGHT, ALIGNED
    )


# Up to this length plus a block, the quotients in `_move` are exact in float32.
LONGEST_ROW = 2**20


def move(
    weights: Weights,
    directions: Sequence[Tensor],
    scale: float,
    cautious: bool,
    ctx: StepContext,
    factors: Tensor | None = None,
) -> bool:
    """Move weights like `apply`.

    `factors` multiply the directions, as in `Update`. Returns False, without changes, if the kernel cannot run.
    """
    dtypes = (weights.tensors[0].dtype, directions[0].dtype)
    if not all(dtype in DTYPES for dtype in dtypes) or not (one_dtype(directions) and all_contiguous(directions)):
        return False
    if factors is not None and factors.shape[-1] > LONGEST_ROW:
        return False
    stretches = runs(weights.tensors)
    if stretches is None:
        return False
    sizes, companions = stretches.sizes, weights.rounding_rows(stretches)
    if factors is not None:
        companions.append([0, *accumulate(sizes[:-1])])
    device, row = directions[0].device, 1 + len(companions)
    rows = (stretches.addresses, *companions, stretches.in_others(directions), *stretches.rows, sizes)
    pointers, is_aligned = table(rows, device, range(1, row))
    blocks = block_map(sizes, BLOCK, device)
    # Strides distinguish rows from columns even if a matrix has only one.
    kind = None if factors is None else "rows" if factors.stride(1) == 1 else "columns"
    launch_on(
        device,
        _move,
        (blocks.shape[1],),
        pointers,
        pointers[-1],
        pointers[-3],
        pointers[-2],
        blocks,
        len(sizes),
        *((pointers, 1, 1) if factors is None else (factors, *factors.shape[1:])),
        *(ctx.eta, ctx.phi, scale, flag_or(ctx.flag, pointers)),
        STRIDED=bool(stretches.rows),
        FACTORS=kind,
        STATE_ROW=row,
        DIRECTION=DTYPES[directions[0].dtype],
        **choices(weights, cautious, ctx),
        ALIGNED=alignment(is_aligned, weights.tensors[0], directions[0]),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return True
