"""The dtypes that options name, the dtype of state, and how low-precision weights are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)

# dtypes by the names that param groups store, since groups hold plain data only
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

AUTO = "auto"

# State in 8 bits by block (`muonsw.codecs`), which is no dtype to compute in.
INT8 = "int8"

# Values of `state_dtype` whose stored form is not the one that a step computes with.
STORED = (INT8, "bfloat16")

# Suffix of the key of the scales of 8-bit state.
SCALE = "_scale"


def state_dtype(setting: str, param_dtype: torch.dtype) -> torch.dtype:
    """The dtype of optimizer state; by default float32 for weights in less, else the weight's own.

    Rounded to nearest, an average with a small weight on the new value never moves in bfloat16: its steps are under
    half an ulp. State in 8 bits is computed with as by default.
    """
    if setting not in (AUTO, INT8):
        return DTYPES[setting]
    return torch.float32 if param_dtype in LOW_PRECISION else param_dtype


def stochastic_round(x: Tensor, dtype: torch.dtype, seed: Tensor, origin: int = 0) -> Tensor:
    """Round float32 `x` to a neighbour in `dtype`, up or down with the odds that keep the mean.

    The noise is a hash of `seed` (an int32 scalar on x's device) and the position of each element, from `origin` on: it
    has no state of its own, and is the same on every device. A value that `dtype` holds exactly stays as it is.
    """
    info = torch.finfo(dtype)
    power = x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    ulp = power.clamp(min=info.smallest_normal).mul_(info.eps)  # the distance between neighbours, a power of two
    ulps = x.abs() / ulp
    below = ulps.floor()
    up = uniform_hash(x.shape, seed, origin) < ulps - below
    return torch.where(x.isfinite(), torch.copysign((below + up) * ulp, x), x).to(dtype)


def uniform_hash(shape: torch.Size, seed: Tensor, origin: int = 0) -> Tensor:
    """Numbers in [0, 1) from 24 bits of an integer hash of (seed, position)."""
    wrapped = (origin * _ODD[0] + 2**31) % 2**32 - 2**31  # as an int32 overflows
    h = torch.arange(shape.numel(), dtype=torch.int32, device=seed.device)
    h = mix(h.mul_(_ODD[0]).add_(mix(seed)).add_(wrapped))
    return h.bitwise_and(0xFFFFFF).to(torch.float32).mul_(2.0**-24).view(shape)


# Odd multipliers of a 32-bit finalizer (Wellons, "hash prospector": lowbias32), as signed integers, and one
# that spreads consecutive positions (2^32 divided by the golden ratio).
_ODD = (-1640531527, 2146121005, -2073254261)


def mix(h: Tensor) -> Tensor:
    """Scramble int32 values so that every input bit reaches every output bit; wraps around on overflow."""
    h = h ^ _shift_right(h, 16)
    h = h * _ODD[1]
    h = h ^ _shift_right(h, 15)
    h = h * _ODD[2]
    return h ^ _shift_right(h, 16)


def _shift_right(h: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (h >> bits) & ((1 << (32 - bits)) - 1)


class Noise(NamedTuple):
    """Numbers in [0, 1) for each element of a tensor of state at a step."""

    counter: Tensor  # the number of the step, on the device of the state
    key: int  # of this tensor of state, whatever the step
    origin: int = 0  # where this rank's shard begins in the whole parameter

    @property
    def seed(self) -> Tensor:
        return mix(self.counter.to(torch.int32) ^ self.key)


class Kept(NamedTuple):
    """Tensors of state under one key in the form in which they are kept."""

    values: Sequence[Tensor]  # floats, or codes
    scales: Sequence[Tensor] = ()  # of codes, one for each block
    noises: Sequence[Noise] = ()  # by which they are rounded; none is to nearest
