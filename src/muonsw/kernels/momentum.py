"""Momentum of many equal matrices in one pass, and their normalisation in a second over half the bytes.

The first pass reads gradient and momentum, writes the momentum and, in the dtype of the products, what is to be
orthogonalized. Its norm is known only afterwards, and float16 has little range: so each block of entries is stored
divided by the power of two of its largest entry, which changes no bit, beside that power and the sum of its squares.
The second pass multiplies the blocks, in place, by what is left: no scale over- or underflows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import DTYPES, advance, flag_or, limit, look_ahead, start
from muonsw.kernels.tables import addresses, table
from muonsw.nonfinite import Flag
from muonsw.work import all_contiguous, one_dtype

BLOCK = 2048
WARPS = 4
# Blocks that one program of the second pass rescales, and sums of squares that it reads at a time: of small matrices
# and of others, so that two kernels are compiled and not one for each shape.
BLOCKS_RESCALED = 4
SUMS_READ = (128, 1024)


@triton.jit(do_not_specialize=["blocks"])
def _advance(
    pointers,
    out,
    sums,
    exponents,
    bad,
    beta,
    gain,
    numel,
    blocks,
    HAS_FLAG: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    GAIN_SMALL: tl.constexpr,
    BETA_SMALL: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one axis of programs, because the others end at 65,535
    place = tl.program_id(0)
    matrix, block = place // blocks, place % blocks
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, live = offsets < numel, offsets < limit(numel, bad, HAS_FLAG)
    grads = start(pointers, matrix, GRAD, ALIGNED)
    momenta = start(pointers, tl.num_programs(0) // blocks + matrix, MOMENTUM, ALIGNED)
    g = tl.load(grads + offsets, mask=live, other=0.0).to(tl.float32)
    m = tl.load(momenta + offsets, mask=live, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    advanced = advance(m, g, beta, gain, EMA, GAIN_SMALL).to(MOMENTUM)
    tl.store(momenta + offsets, advanced, mask=live)
    ahead = advanced.to(tl.float32)
    if NESTEROV:
        ahead = look_ahead(ahead, g, beta, EMA, BETA_SMALL)

    # the exponent of the largest entry, kept where its power of two and the inverse are ordinary numbers
    largest = tl.max(tl.abs(ahead), axis=0)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    ahead = ahead * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(sums + place, tl.sum(ahead * ahead, axis=0))
    tl.store(exponents + place, exponent)
    tl.store(out + matrix.to(tl.int64) * numel + offsets, ahead.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def _normalize(
    out,
    sums,
    exponents,
    numel,
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
            offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < numel
            pointers = out + matrix.to(tl.int64) * numel + offsets
            x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            tl.store(pointers, (x * factor).to(out.dtype.element_ty), mask=inside)


def takes(grads: Sequence[Tensor], momenta: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether all matrices of these stacks are contiguous and in dtypes that the kernel reads."""
    return dtype in DTYPES and all(
        tensors[0].dtype in DTYPES
        and one_dtype(tensors)
        and (
            all_contiguous(tensors) or all(t.is_contiguous() or t.dim() == 3 and t[0].is_contiguous() for t in tensors)
        )
        for tensors in (grads, momenta)
    )


def matrix_addresses(stacks: Sequence[Tensor]) -> list[int]:
    """Where each matrix of these matrices and stacks begins."""
    if stacks[0].dim() == 2 and all(stack.dim() == 2 for stack in stacks):
        return addresses(stacks)
    found: list[int] = []
    for stack in stacks:
        begin = stack.data_ptr()
        if stack.dim() == 2:
            found.append(begin)
        else:
            stride = stack.stride(0) * stack.element_size()
            found.extend(range(begin, begin + stride * stack.shape[0], stride))
    return found


def normalized_momentum(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    form: str,
    beta: float,
    nesterov: bool,
    maximize: bool,
    flag: Flag | None,
    dtype: torch.dtype,
) -> Tensor:
    """Advance momenta in place; return the directions, divided by their norms, as one batch `(n, rows, columns)`.

    Args:
        grads: matrices `(rows, columns)` and stacks of them `(n, rows, columns)`.
        momenta: their momentum, in the same shapes.
        form: "ema" or "heavy_ball".
        beta: the momentum's decay.
        nesterov: whether to look ahead.
        maximize: whether gradients point uphill.
        flag: where it forbids the step, nothing changes and the directions are zero.
        dtype: of the result.
    """
    rows, columns = grads[0].shape[-2:]
    device, numel = grads[0].device, rows * columns
    sources, targets = matrix_addresses(grads), matrix_addresses(momenta)
    out = torch.empty(len(sources), rows, columns, dtype=dtype, device=device)
    blocks = triton.cdiv(numel, BLOCK)
    sums = torch.empty(len(sources), blocks, dtype=torch.float32, device=device)
    exponents = torch.empty(len(sources), blocks, dtype=torch.int32, device=device)
    pointers, is_aligned = table((sources, targets), device)
    gain = 1 - beta if form == "ema" else 1.0
    launch_on(
        device,
        _advance,
        (len(sources) * blocks,),
        pointers,
        out,
        sums,
        exponents,
        flag_or(flag, out),
        beta,
        gain,
        numel,
        blocks,
        HAS_FLAG=flag is not None,
        MAXIMIZE=maximize,
        EMA=form == "ema",
        NESTEROV=nesterov,
        GAIN_SMALL=gain < 0.5,
        BETA_SMALL=beta < 0.5,
        GRAD=DTYPES[grads[0].dtype],
        MOMENTUM=DTYPES[momenta[0].dtype],
        ALIGNED=is_aligned,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    launch_on(
        device,
        _normalize,
        (len(sources) * triton.cdiv(blocks, BLOCKS_RESCALED),),
        out,
        sums,
        exponents,
        numel,
        blocks,
        BLOCK=BLOCK,
        BLOCKS_RESCALED=BLOCKS_RESCALED,
        SUMS_READ=SUMS_READ[blocks > SUMS_READ[0]],
        num_warps=WARPS,
    )
    return out
