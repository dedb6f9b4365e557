"""Momentum of many matrices in one pass; matrices of equal shape are also normalized, in a second pass.

The first pass reads gradients and momenta, and writes the momenta and the directions to orthogonalize. The norm is
known only after it, and float16 has little range. So each block is stored divided by the power of two of its largest
element, which is exact, together with that exponent and its sum of squares. The second pass multiplies each block in
place by the remaining factor, so nothing over- or underflows.

Preconditioners that act on single elements or rows are part of the first pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import (
    BY_FOUR,
    DTYPES,
    across_gaps,
    alignment,
    block_of,
    by_four,
    flag_or,
    lerp,
    limit,
    start,
    whole_number,
)
from muonsw.kernels.tables import Stretches, block_map, runs, table
from muonsw.nonfinite import Flag
from muonsw.slots import PRECONDITION
from muonsw.work import Group, all_contiguous, one_dtype

BLOCK = 2048
WARPS = 4
# How many blocks a program of the second pass rescales, and how many sums of squares it reads at a time: two sizes, for
# small matrices and others, so only two kernels are compiled.
BLOCKS_RESCALED = 4
SUMS_READ = (128, 1024)

# Preconditioners of the first pass, by their names in `precondition=`; and the longest row that fits one block.
SIGN, MUON2, EQUALIZE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
PRECONDITIONS = {None: 0, "sign": 1, "muon2": 2, "equalize": 3}
LONGEST_ROW = 8192


@triton.jit(do_not_specialize=["tensors", "blocks"])
def _advance(
    pointers,
    sizes,
    widths,
    strides,
    block_map,
    tensors,
    out,
    sums,
    exponents,
    bad,
    beta,
    gain,
    gain2,
    eps,
    numel,
    length,
    blocks,
    EQUAL: tl.constexpr,
    STRIDED: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    PRECONDITION: tl.constexpr,
    SQUARES: tl.constexpr,
    TARGET: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advance a block of momentum, and Muon^2's average squares; write the direction.

    The table has rows of gradients, momenta, squares (if any) and targets (if any). EQUAL matrices have equally many
    blocks, and their directions form one batch. The rows of STRIDED matrices are parts of longer rows; targets have no
    gaps.
    """
    place = tl.program_id(0)
    if EQUAL:  # one grid axis, because the others are limited to 65,535 programs
        tensor, block, within = place // blocks, place % blocks, tl.arange(0, BLOCK)
        offsets = block.to(tl.int64) * length + within
        inside, live = offsets < numel, offsets < limit(numel, bad, HAS_FLAG)
        if PRECONDITION == EQUALIZE:  # a block is a row
            inside, live = inside & (within < length), live & (within < length)
    else:
        tensor, offsets = block_of(block_map, BLOCK)
        size = whole_number(sizes, tensor, ALIGNED)
        inside, live = offsets < size, offsets < limit(size, bad, HAS_FLAG)
    places = offsets
    if STRIDED:
        places = across_gaps(offsets, widths, strides, tensor)
    momenta = start(pointers, tensors + tensor, MOMENTUM, ALIGNED)
    g = tl.load(start(pointers, tensor, GRAD, ALIGNED) + places, mask=live, other=0.0).to(tl.float32)
    m = tl.load(momenta + places, mask=live, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if EMA:
        m = lerp(m, g, gain)
    else:
        m = beta * m + g
    m = m.to(MOMENTUM)
    tl.store(momenta + places, m, mask=live)
    ahead = m.to(tl.float32)
    if NESTEROV:
        if EMA:
            ahead = lerp(g, ahead, beta)
        else:
            ahead = g + beta * ahead
    if PRECONDITION == SIGN:
        ahead = (ahead > 0).to(tl.float32) - (ahead < 0).to(tl.float32)
    if PRECONDITION == MUON2:
        squares = start(pointers, 2 * tensors + tensor, SQUARES, ALIGNED)
        v = lerp(tl.load(squares + places, mask=live, other=0.0).to(tl.float32), g * g, gain2)
        tl.store(squares + places, v.to(SQUARES), mask=live)
        ahead = tl.where(live, ahead / (tl.sqrt(v) + eps), 0.0)

    if EQUAL:
        # the exponent of the largest element, clamped so its power of two and the inverse are normal numbers
        largest = tl.max(tl.abs(ahead), axis=0)
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        ahead = ahead * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        square = tl.sum(ahead * ahead, axis=0)
        if PRECONDITION == EQUALIZE:  # every nonzero row has norm one
            ahead = ahead / tl.where(square > 0.0, tl.sqrt(square), 1.0)
            square = (square > 0.0).to(tl.float32)
            tl.store(exponents + place, 127)
        else:
            tl.store(exponents + place, exponent)
        tl.store(sums + place, square)
        if ALIGNED == BY_FOUR:
            out = by_four(out)
        tl.store(out + tensor.to(tl.int64) * numel + offsets, ahead.to(out.dtype.element_ty), mask=inside)
    elif TARGET is not None:
        row = 3 if PRECONDITION == MUON2 else 2
        targets = start(pointers, row * tensors + tensor, TARGET, ALIGNED)
        tl.store(targets + offsets, ahead.to(TARGET), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def _normalize(
    out,
    sums,
    exponents,
    numel,
    length,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS_RESCALED: tl.constexpr,
    SUMS_READ: tl.constexpr,
):
    groups = tl.cdiv(blocks, BLOCKS_RESCALED)
    matrix, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    first = matrix * blocks
    top = 0
    for begin in range(0, blocks, SUMS_READ):
        place = begin + tl.arange(0, SUMS_READ)
        top = tl.maximum(top, tl.max(tl.load(exponents + first + place, mask=place < blocks, other=0), axis=0))
    square = 0.0
    for begin in range(0, blocks, SUMS_READ):
        place = begin + tl.arange(0, SUMS_READ)
        below = tl.load(exponents + first + place, mask=place < blocks, other=0) - top
        part = tl.load(sums + first + place, mask=place < blocks, other=0.0)
        square += tl.sum(part * tl.exp2(2.0 * below.to(tl.float32)), axis=0)
    norm = tl.where(square == 0.0, 1.0, tl.sqrt(square))
    for step in range(BLOCKS_RESCALED):
        block = group * BLOCKS_RESCALED + step
        if block < blocks:
            below = tl.load(exponents + first + block) - top
            factor = tl.exp2(below.to(tl.float32)) / norm
            within = tl.arange(0, BLOCK)
            offsets = block.to(tl.int64) * length + within
            inside = (offsets < numel) & (within < length)
            pointers = out + matrix.to(tl.int64) * numel + offsets
            x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            tl.store(pointers, (x * factor).to(out.dtype.element_ty), mask=inside)


def normalized_momentum(
    group: Group,
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    squares: Sequence[Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    flag: Flag | None,
) -> Tensor | None:
    """Advance momenta and Muon^2's average squares in place; return normalized directions `(n, rows, columns)`.

    Each tensor holds one or more matrices of shape `(rows, columns)`. If `flag` forbids the step, state does not change
    and directions are zero. Returns None, without changes, if the kernel cannot read the tensors.
    """
    (rows, columns), device = shape, grads[0].device
    block, length, numel = BLOCK, BLOCK, rows * columns
    if group["precondition"] == "equalize":
        if group.get("transposed") or columns > LONGEST_ROW:
            return None
        block, length = max(128, triton.next_power_of_2(columns)), columns
    lists = [tensors for tensors in (grads, momenta, squares) if tensors]
    layouts = _layouts(lists, numel)
    if layouts is None or dtype not in DTYPES:
        return None
    gaps, count, blocks = layouts[0].rows, len(layouts[0].sizes), triton.cdiv(numel, length)
    out = torch.empty(count, rows, columns, dtype=dtype, device=device)
    sums = torch.empty(count, blocks, dtype=torch.float32, device=device)
    exponents = torch.empty(count, blocks, dtype=torch.int32, device=device)
    pointers, is_aligned = table((*(layout.addresses for layout in layouts), *gaps), device)
    launch_on(
        device,
        _advance,
        (count * blocks,),
        pointers,
        pointers,
        pointers[-2],
        pointers[-1],
        pointers,
        count,
        out,
        sums,
        exponents,
        flag_or(flag, out),
        *_coefficients(group),
        *(numel, length, blocks),
        EQUAL=True,
        STRIDED=bool(gaps),
        HAS_FLAG=flag is not None,
        **_choices(group, grads, momenta, squares),
        TARGET=None,
        ALIGNED=alignment(is_aligned, out, *(tensors[0] for tensors in lists)),
        BLOCK=block,
        num_warps=WARPS if block <= BLOCK else 2 * WARPS,
    )
    rescaled = BLOCKS_RESCALED * max(1, BLOCK // block)
    launch_on(
        device,
        _normalize,
        (count * triton.cdiv(blocks, rescaled),),
        out,
        sums,
        exponents,
        numel,
        length,
        blocks,
        BLOCK=block,
        BLOCKS_RESCALED=rescaled,
        SUMS_READ=SUMS_READ[blocks > SUMS_READ[0]],
        num_warps=WARPS,
    )
    return out


def advance_momenta(
    group: Group,
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    squares: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    flag: Flag | None,
) -> bool:
    """Advance momenta of any shapes in place, and write directions to targets, if any.

    Targets have the shapes of the momenta, one dtype and no gaps. Preconditioners of rows are not supported. Returns
    False, without changes, if the kernel cannot read the tensors.
    """
    lists = [tensors for tensors in (grads, momenta, squares) if tensors]
    layouts = _layouts(lists)
    if layouts is None:
        return False
    if targets and not (targets[0].dtype in DTYPES and one_dtype(targets) and all_contiguous(targets)):
        return False
    device, sizes, gaps = grads[0].device, layouts[0].sizes, layouts[0].rows
    rows = [layout.addresses for layout in layouts]
    if targets:
        rows.append(layouts[0].in_others(targets))
    pointers, is_aligned = table((*rows, *gaps, sizes), device)
    blocks = block_map(sizes, BLOCK, device)
    launch_on(
        device,
        _advance,
        (blocks.shape[1],),
        pointers,
        pointers[-1],
        pointers[-3],
        pointers[-2],
        blocks,
        len(sizes),
        pointers,
        pointers,
        pointers,
        flag_or(flag, pointers),
        *_coefficients(group),
        *(0, 0, 0),
        EQUAL=False,
        STRIDED=bool(gaps),
        HAS_FLAG=flag is not None,
        **_choices(group, grads, momenta, squares),
        TARGET=None if targets is None else DTYPES[targets[0].dtype],
        ALIGNED=alignment(is_aligned, *(tensors[0] for tensors in (*lists, targets or grads))),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return True


def _layouts(lists: Sequence[Sequence[Tensor]], area: int = 0) -> list[Stretches] | None:
    """The stretches of each list (see `runs`); None unless all lists have one layout and a kernel can read it."""
    layouts: list[Stretches] = []
    for tensors in lists:
        layout = runs(tensors, area) if tensors[0].dtype in DTYPES and one_dtype(tensors) else None
        if layout is None or (layouts and layout[1:] != layouts[0][1:]):
            return None
        layouts.append(layout)
    return layouts


def _coefficients(group: Group) -> tuple[float, float, float, float]:
    beta, options = group["momentum"], PRECONDITION.options(group)
    return beta, 1 - beta, 1 - options.get("beta2", 0.0), options.get("eps", 0.0)


def _choices(
    group: Group, grads: Sequence[Tensor], momenta: Sequence[Tensor], squares: Sequence[Tensor]
) -> dict[str, object]:
    return {
        "MAXIMIZE": group["maximize"],
        "EMA": group["momentum_form"] == "ema",
        "NESTEROV": group["nesterov"],
        "GRAD": DTYPES[grads[0].dtype],
        "MOMENTUM": DTYPES[momenta[0].dtype],
        "PRECONDITION": PRECONDITIONS[group["precondition"]],
        "SQUARES": DTYPES[squares[0].dtype] if squares else None,
    }
