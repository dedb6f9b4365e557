"""What several kernels share: dtypes, decay and move, and the rounding of low-precision weights.

Triton compiles a kernel again for whole numbers that are one, or multiples of 16. Counts of tensors, programs and
blocks gain nothing by it, so kernels name them in `do_not_specialize`: the first step waits for each compilation.
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
STOCHASTIC = tl.constexpr(1)
BY_FOUR = tl.constexpr(4)
ROUNDINGS = {"nearest": 0, "stochastic": 1}


@triton.jit
def scalar(value, ON_DEVICE: tl.constexpr):
    """A number that is an argument, or lies on the device."""
    if ON_DEVICE:
        number = tl.load(value).to(tl.float32)
    else:
        number = value
    return number


# Whether kernels that read tensors of several widths read as many elements of each at a time.
MIXED_BY_FOUR = True


def alignment(is_aligned: bool, *tensors: Tensor) -> int:
    """What `ALIGNED` is for a kernel that reads such tensors."""
    mixed = MIXED_BY_FOUR and len({tensor.element_size() for tensor in tensors}) > 1
    return BY_FOUR.value if is_aligned and mixed else int(is_aligned)


def flag_or(flag: Flag | None, unused: Tensor) -> Tensor:
    """A flag as a kernel takes it, or any tensor where there is none."""
    return unused if flag is None else flag.bad


@triton.jit
def whole_number(table, entry, ALIGNED: tl.constexpr):
    """An entry of a table that is not an address; ALIGNED promises that it is a multiple of 16."""
    number = tl.load(table + entry)
    if ALIGNED:
        number = tl.multiple_of(number, 16)
    return number


@triton.jit
def block_of(blocks, BLOCK: tl.constexpr):
    """The tensor that this program works on, and the entries of its block."""
    program = tl.program_id(0)
    owner = tl.load(blocks + program)
    return owner, tl.load(blocks + tl.num_programs(0) + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def limit(size, bad, HAS_FLAG: tl.constexpr):
    """How many of `size` entries this step may change: all or none."""
    if HAS_FLAG:
        size = size * (tl.load(bad) == 0.0).to(tl.int64)
    return size


@triton.jit
def start(table, entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor whose address is an entry of a table, a multiple of 16 if ALIGNED.

    BY_FOUR lets the compiler know less of 16-bit tensors, so that a thread reads four elements of each tensor at a
    time. It would read eight of those and four of others, and exchange them with other threads.
    """
    pointer = tl.load(table + entry).to(tl.pointer_type(DTYPE))
    if ALIGNED == BY_FOUR:
        pointer = tl.multiple_of(pointer, DTYPE.primitive_bitwidth // 2)
    elif ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def by_four(tensor):
    """An aligned tensor of which a thread reads four elements at a time, as `start` says."""
    address = tensor.to(tl.int64)  # of which the compiler knows nothing
    return tl.multiple_of(address.to(tensor.dtype), tensor.dtype.element_ty.primitive_bitwidth // 2)


@triton.jit
def lerp(left, right, weight, NEAR_LEFT: tl.constexpr):
    """From left to right by `weight`, from the nearer end as torch does it; NEAR_LEFT is `weight < 0.5`."""
    if NEAR_LEFT:
        between = left + weight * (right - left)
    else:
        between = right - (right - left) * (1 - weight)
    return between


@triton.jit
def shrink_and_move(weight, direction, move, phi, CAUTIOUS: tl.constexpr):
    """`(1 - phi) W - move * direction`; cautious decay spares entries that move outward."""
    if CAUTIOUS:
        weight = weight - tl.where(weight * direction >= 0, weight, 0.0) * phi
    else:
        weight = weight - weight * phi  # 1 - phi would be rounded, to the same side at every step
    return weight - move * direction


@triton.jit
def mix(h):
    """The hash of `precision.mix`, on unsigned integers."""
    h = h ^ (h >> 16)
    h = h * 2146121005
    h = h ^ (h >> 15)
    h = h * 2221713035
    return h ^ (h >> 16)


@triton.jit
def stochastic_round(x, step, key, position, DTYPE: tl.constexpr):
    """`precision.stochastic_round` to bfloat16 or float16; the noise is a hash of step, key and position."""
    seed = mix(step.to(tl.int32).to(tl.uint32, bitcast=True) ^ key.to(tl.uint32))
    noise = mix(position.to(tl.uint32) * 2654435769 + mix(seed)) & 0xFFFFFF
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


@triton.jit
def advance(m, g, beta, gain, EMA: tl.constexpr, GAIN_SMALL: tl.constexpr):
    """Momentum one step on; GAIN_SMALL is `gain < 0.5`."""
    if EMA:
        m = lerp(m, g, gain, GAIN_SMALL)
    else:
        m = beta * m + g
    return m


@triton.jit
def look_ahead(m, g, beta, EMA: tl.constexpr, BETA_SMALL: tl.constexpr):
    """Nesterov's direction, from the advanced momentum; BETA_SMALL is `beta < 0.5`."""
    if EMA:
        ahead = lerp(g, m, beta, BETA_SMALL)
    else:
        ahead = g + beta * m
    return ahead
