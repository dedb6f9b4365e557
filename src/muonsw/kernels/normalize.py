"""The `normalize` slot for one batch of directions, with its state in place.

A slice is a row or a column of a matrix. The first launch sums the squares of each slice, after AdaMuon's division. In
the second, one program per matrix turns the sums into factors and advances NorMuon's averages. The kernel that moves
weights multiplies by the factors, which saves a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import DTYPES, by_four, flag_or, lerp, limit, start
from muonsw.kernels.tables import runs, table
from muonsw.nonfinite import Flag
from muonsw.slots import NORMALIZE
from muonsw.work import Group, one_dtype

# Elements of a tile across and along memory, and how many sums are read at a time.
SHORT, LONG = 16, 256
WARPS = 4
SUMS_READ = 1024


@triton.jit
def _tile(group, begin, slices, along, slice_stride, step, SLICES: tl.constexpr, ALONG: tl.constexpr):
    """The offsets of a (SLICES, ALONG) tile, and which of them are inside the matrix."""
    s, k = group * SLICES + tl.arange(0, SLICES), begin + tl.arange(0, ALONG)
    return s[:, None] * slice_stride + k[None, :] * step, (s[:, None] < slices) & (k[None, :] < along)


@triton.jit(do_not_specialize=["groups"])
def _sum_squares(
    directions,
    sums,
    pointers,
    bad,
    gain2,
    eps,
    area,
    slices,
    along,
    slice_stride,
    step,
    groups,
    HAS_FLAG: tl.constexpr,
    DIVIDE: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SLICES: tl.constexpr,
    ALONG: tl.constexpr,
):
    matrix, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    first = directions
    if DIVIDE:  # also reads state, usually in float32
        first = by_four(directions)
    first += matrix.to(tl.int64) * area
    total = tl.zeros((SLICES, ALONG), dtype=tl.float32)
    for begin in range(0, along, ALONG):
        offsets, inside = _tile(group, begin, slices, along, slice_stride, step, SLICES, ALONG)
        x = tl.load(first + offsets, mask=inside, other=0.0).to(tl.float32)
        if DIVIDE:
            averages = start(pointers, matrix, STATE, ALIGNED)
            live = inside
            if HAS_FLAG:
                live = inside & (offsets < tl.where(tl.load(bad) == 0.0, area, 0))
            v = lerp(tl.load(averages + offsets, mask=live, other=0.0).to(tl.float32), x * x, gain2)
            tl.store(averages + offsets, v.to(STATE), mask=live)
            x = tl.where(live, x / (tl.sqrt(v) + eps), 0.0)
            tl.store(first + offsets, x.to(directions.dtype.element_ty), mask=inside)
        total += x * x
    s = group * SLICES + tl.arange(0, SLICES)
    tl.store(sums + matrix.to(tl.int64) * slices + s, tl.sum(total, axis=1), mask=s < slices)


@triton.jit
def _turn_into_factors(
    sums,
    pointers,
    bad,
    gain2,
    eps,
    orthogonal,
    slices,
    along,
    HAS_FLAG: tl.constexpr,
    SNAP: tl.constexpr,
    AVERAGE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SUMS_READ: tl.constexpr,
):
    """Replace sums of squares by NorMuon's factors; without averages, by the one factor that sets the norm."""
    matrix = tl.program_id(0)
    first = sums + matrix.to(tl.int64) * slices
    total = 0.0
    for begin in range(0, slices, SUMS_READ):
        place = begin + tl.arange(0, SUMS_READ)
        total += tl.sum(tl.load(first + place, mask=place < slices, other=0.0), axis=0)
    norm = tl.sqrt(total)
    target = norm
    if SNAP:
        target = orthogonal
    gain = target / tl.where(norm > 0.0, norm, 1.0)
    if AVERAGE:
        averages = start(pointers, matrix, tl.float32, ALIGNED)
        after = 0.0
        for begin in range(0, slices, SUMS_READ):
            place = begin + tl.arange(0, SUMS_READ)
            inside = place < slices
            square = tl.load(first + place, mask=inside, other=0.0) * gain * gain
            v = lerp(tl.load(averages + place, mask=inside, other=0.0), square / along, gain2)
            divisor = tl.sqrt(v) + eps
            after += tl.sum(tl.where(inside, square / divisor / divisor, 0.0), axis=0)
        common = gain * target / (tl.sqrt(after) + eps)
        for begin in range(0, slices, SUMS_READ):
            place = begin + tl.arange(0, SUMS_READ)
            inside = place < slices
            square = tl.load(first + place, mask=inside, other=0.0) * gain * gain
            v = lerp(tl.load(averages + place, mask=inside, other=0.0), square / along, gain2)
            tl.store(averages + place, v, mask=place < limit(slices, bad, HAS_FLAG))
            tl.store(first + place, common / (tl.sqrt(v) + eps), mask=inside)
    else:
        factor = target / (tl.where(norm > 0.0, norm, 1.0) + eps)
        for begin in range(0, slices, SUMS_READ):
            place = begin + tl.arange(0, SUMS_READ)
            tl.store(first + place, tl.zeros((SUMS_READ,), dtype=tl.float32) + factor, mask=place < slices)


def slice_factors(
    group: Group,
    directions: Tensor,
    averages: Sequence[Tensor],
    shape: tuple[int, int],
    flag: Flag | None,
) -> Tensor | None:
    """Return the normalizer's factors for contiguous directions (count, rows, columns), in the same shape.

    `averages`, the normalizer's state if it has any, has `shape` for each matrix ((m, 1) or (1, n) for NorMuon); it
    advances unless `flag` forbids the step. AdaMuon first divides the directions in place. Returns None, without
    changes, if the kernel cannot run.
    """
    (count, rows, columns), device = directions.shape, directions.device
    divides, options = group["normalize"] == "adamuon", NORMALIZE.options(group)
    layout = runs(averages, shape[0] * shape[1]) if averages else None
    if directions.dtype not in DTYPES or not directions.is_contiguous() or directions.data_ptr() % 16:
        return None
    if rows * columns >= 2**31 or (averages and (layout is None or layout.rows or not one_dtype(averages))):
        return None
    if averages and averages[0].dtype not in (DTYPES if divides else (torch.float32,)):
        return None
    # NorMuon's averages determine the slices; for the others rows are faster, because they are contiguous.
    by_row = group["normalize"] != "normuon" or (shape[1] == 1) != group.get("transposed", False)
    slices, along, strides = (rows, columns, (columns, 1)) if by_row else (columns, rows, (1, columns))
    short = SHORT // 2 if divides else SHORT  # division needs more registers per element
    tile = {"SLICES": short, "ALONG": LONG} if by_row else {"SLICES": LONG, "ALONG": short}
    groups = triton.cdiv(slices, tile["SLICES"])
    sums = torch.empty(count, slices, dtype=torch.float32, device=device)
    pointers, is_aligned = table([layout.addresses], device) if layout else (sums, False)
    gain2, eps = 1 - options.get("beta2", 0.0), options.get("eps", 0.0)
    shared = {"HAS_FLAG": flag is not None, "ALIGNED": is_aligned}
    launch_on(
        device,
        _sum_squares,
        (count * groups,),
        directions,
        sums,
        pointers,
        flag_or(flag, sums),
        gain2,
        eps,
        *(rows * columns, slices, along, *strides, groups),
        DIVIDE=divides,
        STATE=DTYPES[averages[0].dtype] if averages else None,
        **shared,
        **tile,
        num_warps=WARPS,
    )
    launch_on(
        device,
        _turn_into_factors,
        (count,),
        sums,
        pointers,
        flag_or(flag, sums),
        gain2,
        eps,
        min(rows, columns) ** 0.5,
        slices,
        along,
        SNAP=options.get("snap", True),
        AVERAGE=bool(averages) and not divides,
        **shared,
        SUMS_READ=SUMS_READ,
        num_warps=WARPS,
    )
    return sums[:, :, None].expand_as(directions) if by_row else sums[:, None].expand_as(directions)
