"""Encode and decode state in 8 bits by block, and in bfloat16, in one pass.

Kernels that decode and encode in registers share `decoded` and `encoded`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import noise_24_bits, stochastic_round
from muonsw.precision import Noise

# Elements per program, in several blocks of equal length.
TILE = 2048
WARPS = 4

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _place(blocks, LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The blocks of this program, the positions of their elements, and a mask of those that exist."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows < blocks)[:, None] & (columns < LENGTH)[None, :]
    return rows, rows[:, None] * LENGTH + columns[None, :], inside


@triton.jit
def _permitted(count, ok, HAS_FLAG: tl.constexpr):
    """All elements or none. Triton 3.9's interpreter does not accept the flag itself as a mask."""
    if HAS_FLAG:
        count = count * (tl.load(ok) != 0).to(tl.int64)
    return count


@triton.jit
def _fourth(x):
    square = x * x
    return square * square


@triton.jit
def decoded(codes, scales, rows, positions, inside, INVERSE: tl.constexpr):
    """The float32 values of blocks of codes (rows, columns)."""
    code = tl.load(codes + positions, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + rows, mask=tl.max(inside.to(tl.int32), axis=1) > 0, other=0.0)
    power = _fourth(code * INVERSE)
    return tl.where(code < 0, -power, power) * scale[:, None]


@triton.jit
def encoded(
    value,
    codes,
    scales,
    rows,
    positions,
    inside,
    counter,
    key,
    origin,
    LEVELS: tl.constexpr,
    POWER: tl.constexpr,
    SIGNED: tl.constexpr,
    NOISY: tl.constexpr,
):
    """Write blocks of float32 values (rows, columns) as codes and scales; elements not `inside` must be zero."""
    size = tl.abs(value)
    largest = tl.max(size, axis=1)
    t = size * tl.div_rn(tl.zeros_like(largest) + 1.0, tl.maximum(largest, TINY))[:, None] * POWER
    known = t >= 0  # false for infinity and for NaN, which the maximum ignores
    below = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(t))), LEVELS - 1)
    power = _fourth(below)
    above, gap = t - power, _fourth(below + 1) - power
    if NOISY:
        noise = noise_24_bits(counter, key, positions + origin)
        up = above > gap * (noise.to(tl.float32) * 5.9604644775390625e-08)
    else:
        up = above > gap * 0.5
    code = below + up.to(tl.float32)
    if SIGNED:
        code = tl.where(value < 0, -code, code)
    else:
        code = tl.maximum(code, (value > 0).to(tl.float32))
    code = tl.where(known, code, 1.0)
    tl.store(codes + positions, code.to(tl.int32).to(codes.dtype.element_ty), mask=inside)
    scale = tl.where(tl.min(known.to(tl.int32), axis=1) > 0, largest, float("nan"))
    tl.store(scales + rows, scale, mask=tl.max(inside.to(tl.int32), axis=1) > 0)


@triton.jit(do_not_specialize=["blocks", "key", "origin"])
def _encode(
    x,
    codes,
    scales,
    counter,
    ok,
    blocks,
    key,
    origin,
    LEVELS: tl.constexpr,
    POWER: tl.constexpr,
    SIGNED: tl.constexpr,
    NOISY: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, positions, inside = _place(_permitted(blocks, ok, HAS_FLAG), LENGTH, ROWS, COLUMNS)
    value = tl.load(x + positions, mask=inside, other=0.0)
    step = tl.load(counter)
    encoded(value, codes, scales, rows, positions, inside, step, key, origin, LEVELS, POWER, SIGNED, NOISY)


@triton.jit(do_not_specialize=["blocks"])
def _decode(
    codes,
    scales,
    x,
    blocks,
    INVERSE: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, positions, inside = _place(blocks, LENGTH, ROWS, COLUMNS)
    tl.store(x + positions, decoded(codes, scales, rows, positions, inside, INVERSE), mask=inside)


@triton.jit(do_not_specialize=["key", "origin"])  # `elements` is specialized: multiples of 16 get vector loads
def _round(x, rounded, counter, ok, elements, key, origin, HAS_FLAG: tl.constexpr, BLOCK: tl.constexpr):
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < _permitted(elements, ok, HAS_FLAG)
    value = tl.load(x + positions, mask=inside, other=0.0)
    value = stochastic_round(value, tl.load(counter), key, positions + origin, tl.bfloat16)
    tl.store(rounded + positions, value.to(tl.bfloat16), mask=inside)


def tile(length: int) -> dict[str, int]:
    columns = triton.next_power_of_2(length)
    return {"LENGTH": length, "ROWS": max(1, TILE // columns), "COLUMNS": columns}


def encode(x: Tensor, codes: Tensor, scale: Tensor, levels: int, noise: Noise | None, ok: Tensor | None) -> None:
    """`codecs.encode` of contiguous float32 in one pass, unless `ok` is false."""
    if not codes.numel():
        return
    tiles = tile(codes.numel() // scale.numel())
    launch_on(
        codes.device,
        _encode,
        (math.ceil(scale.numel() / tiles["ROWS"]),),
        x,
        codes,
        scale,
        scale if noise is None else noise.counter,
        scale if ok is None else ok,
        scale.numel(),
        0 if noise is None else noise.key,
        0 if noise is None else noise.origin,
        LEVELS=float(levels),
        POWER=float(levels**4),
        SIGNED=codes.dtype == torch.int8,
        NOISY=noise is not None,
        HAS_FLAG=ok is not None,
        **tiles,
        num_warps=WARPS,
        enable_fp_fusion=False,  # as torch rounds
    )


def decode(codes: Tensor, scale: Tensor, levels: int) -> Tensor:
    x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.numel():
        tiles = tile(codes.numel() // scale.numel())
        launch_on(
            codes.device,
            _decode,
            (math.ceil(scale.numel() / tiles["ROWS"]),),
            codes,
            scale,
            x,
            scale.numel(),
            INVERSE=1 / levels,
            **tiles,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return x


def round_bfloat16(x: Tensor, rounded: Tensor, noise: Noise, ok: Tensor | None) -> None:
    """`precision.stochastic_round` of contiguous float32 into bfloat16 in one pass, unless `ok` is false."""
    launch_on(
        x.device,
        _round,
        (math.ceil(x.numel() / TILE),),
        x,
        rounded,
        noise.counter,
        noise.counter if ok is None else ok,
        x.numel(),
        noise.key,
        noise.origin,
        HAS_FLAG=ok is not None,
        BLOCK=TILE,
        num_warps=WARPS,
    )
