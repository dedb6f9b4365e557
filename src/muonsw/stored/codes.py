"""Averages in 8 bits by block, and in bfloat16, with rounding that keeps the mean.

The first axis of a parameter counts rows, and each row is cut into blocks of about 256 elements. A block keeps its
largest magnitude s as float32, under `<key>_scale`; an element is `s (c / 127)^4` with a code c in int8, or
`s (c / 255)^4` in uint8 where it is an average of squares (keys with `_sq`). The fourth power resolves elements down to
1e-9 of s, which the roots of squares need, and puts noise of 1.5% on normal numbers; the square would put 1%, and
resolve nothing below 1e-5. A square above zero never becomes zero, since updates divide by its root. Blocks never cross
rows, so parameters that are sharded along their first axis have the same codes on any number of ranks.

Rounding is stochastic, by a hash of seed, step and position: averages that move by less than half of what is between
two codes would stay where they are. Rounded to the nearest code, the root of an average of squares with beta2=0.999
was still 4 times too large 2,500 steps after gradients had become 10 times smaller, as against 0.97 times.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.precision import Noise, stochastic_round

BLOCK, SHORTEST_BLOCK, LONGEST_BLOCK = 256, 16, 2**13

# Parameters with fewer elements keep float32: norms and biases need it, and have little state.
SMALLEST = 4096

# The largest code by dtype; zero is zero.
_LEVELS = {torch.int8: 127, torch.uint8: 255}

# Elements that are encoded at a time: several passes over them are then made in a CPU's cache.
_AT_A_TIME = {"cpu": 2**18, "cuda": 2**26}


@cache
def block_length(shape: tuple[int, ...]) -> int | None:
    """How many elements of a row share a scale: a divisor of its length near 256; None where state stays in float32.

    Examples:
        >>> block_length((768, 3072)), block_length((512, 512, 3, 3)), block_length((1000, 1009)), block_length((9000,))
        (256, 256, 1009, None)
    """
    row = math.prod(shape[1:])
    if len(shape) < 2 or math.prod(shape) < SMALLEST or row < SHORTEST_BLOCK:
        return None
    shorter = next(size for size in range(BLOCK, 0, -1) if row % size == 0)
    if shorter >= min(BLOCK // 4, row):
        return shorter
    return next((size for size in range(BLOCK, LONGEST_BLOCK + 1) if row % size == 0), None)


def scale_shape(param: Tensor) -> torch.Size:
    """The shape of the scales of a parameter's codes: (rows, blocks in a row)."""
    length = block_length(tuple(param.shape))
    assert length is not None
    return torch.Size((param.shape[0], math.prod(param.shape[1:]) // length))


def is_code(value: Tensor) -> bool:
    """Whether a tensor of state holds codes."""
    return value.dtype in _LEVELS


def encode(
    x: Tensor, codes: Tensor, scale: Tensor, noise: Noise | None = None, ok: Tensor | None = None, *, fused: bool = True
) -> None:
    """Write a float tensor as codes and scales, unless `ok` is false.

    To the nearest code, or with noise up or down with the odds that keep the mean.
    """
    x = x.float().contiguous()
    if fused and kernels.available(codes.device):
        from muonsw.kernels import stored

        stored.encode(x, codes, scale, _LEVELS[codes.dtype], noise, ok)
    elif ok is None:
        _encode_rows(x, codes, scale, noise)
    else:
        after = torch.empty_like(codes), torch.empty_like(scale)
        _encode_rows(x, *after, noise)
        codes.copy_(torch.where(ok, after[0], codes))
        scale.copy_(torch.where(ok, after[1], scale))


def _encode_rows(x: Tensor, codes: Tensor, scale: Tensor, noise: Noise | None) -> None:
    rows = _in_blocks(codes, scale)
    x, row = x.view(rows.shape), math.prod(rows.shape[1:])
    step = max(1, _AT_A_TIME.get(x.device.type, 2**26) // row)
    for start in range(0, rows.shape[0], step):
        some = slice(start, start + step)
        chances = None if noise is None else noise.of(x[some].shape, start * row)
        scale[some] = x[some].abs().amax(-1)
        rows[some] = _codes(x[some], scale[some, :, None], codes.dtype, chances)


def _in_blocks(x: Tensor, scale: Tensor) -> Tensor:
    """A tensor (rows, ...) as (rows, blocks, elements)."""
    return x.view(x.shape[0], scale.shape[1], math.prod(x.shape[1:]) // scale.shape[1])


def _codes(x: Tensor, scale: Tensor, dtype: torch.dtype, chances: Tensor | None) -> Tensor:
    """Codes of blocks; divided are only scales, since every division of an element would take as long as a pass."""
    levels = _LEVELS[dtype]
    t = (x.abs() * scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()).mul_(levels**4)
    below = t.sqrt().sqrt_().floor_().clamp_(max=levels - 1)
    power, gap = _fourth(below), _fourth(below + 1)
    above = t.sub_(power)
    code = below.add_(above > gap.sub_(power).mul_(0.5 if chances is None else chances))
    return torch.maximum(code, x > 0).to(dtype) if dtype == torch.uint8 else torch.copysign(code, x).to(dtype)


def _fourth(x: Tensor) -> Tensor:
    square = x * x
    return square.mul_(square)


def decode(codes: Tensor, scale: Tensor, *, fused: bool = True) -> Tensor:
    """The float32 values of codes, in their shape."""
    if fused and kernels.available(codes.device):
        from muonsw.kernels import stored

        return stored.decode(codes, scale, _LEVELS[codes.dtype])
    x = codes.to(torch.float32).mul_(1 / _LEVELS[codes.dtype])  # 127 and 255 times these are one in float32
    power = torch.copysign(_fourth(x), x)
    return _in_blocks(power, scale).mul_(scale[:, :, None]).view(codes.shape)


def round_bfloat16(x: Tensor, rounded: Tensor, noise: Noise, ok: Tensor | None, *, fused: bool = True) -> None:
    """Write a float tensor as bfloat16, up or down with the odds that keep the mean, unless `ok` is false."""
    x = x.float()
    if not x.numel():
        return
    if fused and kernels.available(x.device) and x.is_contiguous() and rounded.is_contiguous():
        from muonsw.kernels import stored

        stored.round_bfloat16(x, rounded, noise, ok)
        return
    after = stochastic_round(x, torch.bfloat16, noise.seed, origin=noise.origin)
    rounded.copy_(after if ok is None else torch.where(ok, after, rounded))
