"""Shared by several kernels: offsets, averages, and the rounding of low-precision weights.

Triton compiles separate kernels for integers that are 1 or multiples of 16. Counts of tensors, programs and blocks do
not gain from it, so kernels list them in `do_not_specialize`, which saves compilations in the first step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.nonfinite import Flag

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

FLOAT16_EPS = tl.constexpr(torch.finfo(torch.float16).eps)
FLOAT16_SMALLEST = tl.constexpr(torch.finfo(torch.float16).smallest_normal)
BY_FOUR = tl.constexpr(4)


def alignment(is_aligned: bool, *tensors: Tensor) -> int:
    """The constant `ALIGNED` for a kernel that reads these tensors: BY_FOUR if their elements differ in width."""
    mixed = len({tensor.element_size() for tensor in tensors}) > 1
    return BY_FOUR.value if is_aligned and mixed else int(is_aligned)


def flag_or(flag: Flag | None, unused: Tensor) -> Tensor:
    """A flag's tensor, or any tensor in its place."""
    return unused if flag is None else flag.bad


@triton.jit
def whole_number(table, entry, ALIGNED: tl.constexpr):
    """Read an integer from a table; ALIGNED promises a multiple of 16."""
    number = tl.load(table + entry)
    if ALIGNED:
        number = tl.multiple_of(number, 16)
    return number


@triton.jit
def block_of(blocks, BLOCK: tl.constexpr):
    """The tensor that this program works on, and the offsets of its block."""
    program = tl.program_id(0)
    owner = tl.load(blocks + program)
    return owner, tl.load(blocks + tl.num_programs(0) + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def across_gaps(offsets, widths, strides, owner):
    """The places of elements in a matrix whose rows are parts of longer rows."""
    width = tl.load(widths + owner)
    return offsets // width * tl.load(strides + owner) + offsets % width


@triton.jit
def limit(size, bad, HAS_FLAG: tl.constexpr):
    """How many of `size` elements this step may change: all or none."""
    if HAS_FLAG:
        size = size * (tl.load(bad) == 0.0).to(tl.int64)
    return size


@triton.jit
def start(table, entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Read a tensor's address from a table, a multiple of 16 if ALIGNED.

    BY_FOUR promises less for 16-bit tensors, so a thread reads four elements of every tensor at a time. Otherwise it
    would read eight of those and four of others, and exchange them with other threads.
    """
    pointer = tl.load(table + entry).to(tl.pointer_type(DTYPE))
    if ALIGNED == BY_FOUR:
        pointer = tl.multiple_of(pointer, DTYPE.primitive_bitwidth // 2)
    elif ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def by_four(tensor):
    """Make a thread read four elements of an aligned tensor at a time, as in `start`."""
    address = tensor.to(tl.int64)  # hides the alignment from the compiler
    return tl.multiple_of(address.to(tensor.dtype), tensor.dtype.element_ty.primitive_bitwidth // 2)


@triton.jit
def lerp(left, right, weight):
    """Interpolate from the nearer end, like torch."""
    if weight < 0.5:
        between = left + weight * (right - left)
    else:
        between = right - (right - left) * (1 - weight)
    return between


@triton.jit
def mix(h):
    """The hash of `precision.mix`, on unsigned integers."""
    h = h ^ (h >> 16)
    h = h * 2146121005
    h = h ^ (h >> 15)
    h = h * 2221713035
    return h ^ (h >> 16)


@triton.jit
def noise_24_bits(step, key, position):
    """A hash of step, key and position, below 2^24."""
    seed = mix(step.to(tl.int32).to(tl.uint32, bitcast=True) ^ key.to(tl.uint32))
    return mix(position.to(tl.uint32) * 2654435769 + mix(seed)) & 0xFFFFFF


@triton.jit
def stochastic_round(x, step, key, position, DTYPE: tl.constexpr):
    """`precision.stochastic_round` to bfloat16 or float16."""
    noise = noise_24_bits(step, key, position)
    bits = x.to(tl.int32, bitcast=True)
    if DTYPE.is_bf16():
        # the upper half of a float32, so the lower half is the fraction of a unit
        up = noise.to(tl.int32) < (bits & 0xFFFF) << 8
        rounded = ((bits & -65536) + (up.to(tl.int32) << 16)).to(tl.float32, bitcast=True)
    else:
        ulp = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), FLOAT16_SMALLEST) * FLOAT16_EPS
        inverse = (0x7F000000 - ulp.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # of a power of two
        ulps = tl.abs(x) * inverse
        below = tl.floor(ulps)
        up = noise.to(tl.float32) * 5.9604644775390625e-08 < ulps - below
        rounded = (below + up.to(tl.float32)) * ulp
        rounded = tl.where(x < 0, -rounded, rounded)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)
