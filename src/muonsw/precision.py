"""The dtypes that options name, the dtype of state, and how low-precision weights are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)

# dtypes by name, because param groups store plain data only
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

AUTO = "auto"

# State in blocks of 8 bits (`muonsw.codecs`); a storage format, not a dtype to compute in.
INT8 = "int8"

# Values of `state_dtype` that a step decodes before it computes.
STORED = (INT8, "bfloat16")

# Suffix of the key of the scales of 8-bit state.
SCALE = "_scale"


def state_dtype(setting: str, param_dtype: torch.dtype) -> torch.dtype:
    """The dtype of optimizer state; by default float32 for low-precision weights, else the weight's dtype.

    Rounded to nearest in bfloat16, a slow average never moves: its steps are under half an ulp. 8-bit state decodes to
    the default dtype.
    """
    if setting not in (AUTO, INT8):
        return DTYPES[setting]
    return torch.float32 if param_dtype in LOW_PRECISION else param_dtype


def stochastic_round(x: Tensor, dtype: torch.dtype, seed: Tensor, origin: int = 0) -> Tensor:
    """Round float32 `x` to a neighbour in `dtype`, up or down at random, unbiased.

    The noise is a hash of `seed` (an int32 scalar on x's device) and the position of each element, counted from
    `origin`: it needs no state and is the same on every device. Values that `dtype` represents exactly do not change.
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
    """Logical shift; torch's `>>` keeps the sign."""
    return (h >> bits) & ((1 << (32 - bits)) - 1)


class Noise(NamedTuple):
    """The seed of the rounding noise of one tensor of state at one step."""

    counter: Tensor  # the number of the step, on the device of the state
    key: int  # of this tensor of state, the same at every step
    origin: int = 0  # where this rank's shard begins in the whole parameter

    @property
    def seed(self) -> Tensor:
        return mix(self.counter.to(torch.int32) ^ self.key)


class StoredState(NamedTuple):
    """Tensors of state under one key, as stored."""

    values: Sequence[Tensor]  # floats, or codes
    scales: Sequence[Tensor] = ()  # of codes, one for each block
    noises: Sequence[Noise] = ()  # of codes and bfloat16, for rounding
