"""Decay and move of Muon's matrices along one batch of directions, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import BY_FOUR, DTYPES, alignment, block_of, by_four, limit, whole_number
from muonsw.kernels.elementwise import BLOCK, WARPS, Motion, Weights, choices, rates, scalars, write
from muonsw.kernels.tables import addresses, block_map, lengths, runs, table
from muonsw.work import all_contiguous


@triton.jit(do_not_specialize=["tensors"])
def _move(
    pointers,
    sizes,
    blocks,
    tensors,
    directions,
    factors,
    columns,
    eta,
    phi,
    scale,
    bad,
    HAS_FACTORS: tl.constexpr,
    STATE_ROW: tl.constexpr,
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
    first = whole_number(pointers, STATE_ROW * tensors + owner, ALIGNED)
    if ALIGNED == BY_FOUR:
        directions = by_four(directions)
    direction = tl.load(directions + first + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        begin = first + tl.load(blocks + tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK
        # a quotient of numbers below 2^21 by one rounded product: a half keeps it away from whole numbers
        rows = (((begin % columns) + tl.arange(0, BLOCK)).to(tl.float32) + 0.5) * (1.0 / columns)
        direction *= tl.load(factors + begin // columns + rows.to(tl.int32), mask=inside, other=0.0)
    rate, decay = rates(eta, phi, scale, ON_DEVICE)
    write(pointers, tensors, owner, offsets, inside, direction, rate, decay, CAUTIOUS, STOCHASTIC, WEIGHT, ALIGNED)


LONGEST_ROW = 2**20


def move(
    weights: Weights, directions: Sequence[Tensor], motion: Motion, row_factors: Tensor | None = None, columns: int = 1
) -> bool:
    """Move weights along directions that lie one after another in one tensor; False, and nothing done, if they do not.

    Each row of so many `columns` is multiplied by its factor, if there are any, in float32.
    """
    dtypes = (weights.tensors[0].dtype, directions[0].dtype)
    if not all(dtype in DTYPES for dtype in dtypes) or not _are_one_batch(directions) or columns > LONGEST_ROW:
        return False
    stretches = runs(weights.tensors)
    if stretches is None:
        return False
    sizes, companions = stretches.sizes, weights.rounding_rows(stretches)
    first, row = [0, *accumulate(sizes[:-1])], 1 + len(companions)
    device = directions[0].device
    pointers, is_aligned = table((stretches.addresses, *companions, first, sizes), device, range(1, row))
    is_aligned &= directions[0].data_ptr() % 16 == 0
    blocks = block_map(sizes, BLOCK, device)
    launch_on(
        device,
        _move,
        (blocks.shape[1],),
        pointers,
        pointers[-1],
        blocks,
        len(sizes),
        directions[0],
        directions[0] if row_factors is None else row_factors,
        columns,
        *scalars(motion, pointers),
        HAS_FACTORS=row_factors is not None,
        STATE_ROW=row,
        **choices(weights, motion),
        ALIGNED=alignment(is_aligned, weights.tensors[0], directions[0]),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return True


def _are_one_batch(directions: Sequence[Tensor]) -> bool:
    first, last = (direction.untyped_storage().data_ptr() for direction in (directions[0], directions[-1]))
    if first != last or not all_contiguous(directions):  # neighbours by chance would round otherwise at each run
        return False
    begins, width = addresses(directions), directions[0].element_size()
    ends = accumulate([begins[0], *(size * width for size in lengths(directions))])
    return begins == list(ends)[:-1]
