"""AdamW in one pass, from gradient to weight, with state in floats or as it is stored.

Compiled without fused multiply-adds, so that stored state makes the same bits on its way as decoded and encoded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels.common import DTYPES, lerp, scalar, start, stochastic_round
from muonsw.kernels.elementwise import BLOCK, Motion, Weights, gradient, launch, place, place_blocks, write
from muonsw.kernels.stored import decoded, encoded, tile
from muonsw.precision import Kept


@triton.jit
def _one_minus_power(log_beta, step):
    """`1 - beta^step`, by its series where subtracting would cancel."""
    x = step * log_beta
    series = 1 + x * (1 / 5) * (1 + x * (1 / 6) * (1 + x * (1 / 7) * (1 + x * (1 / 8) * (1 + x * (1 / 9)))))
    series = 1 + x * (1 / 2) * (1 + x * (1 / 3) * (1 + x * (1 / 4) * series))
    return tl.where(x > -0.5, -x * series, 1 - tl.exp(x))


@triton.jit
def _direction(m, v, step, log_beta1, log_beta2, eps):
    """`(m / c1) / (sqrt(v / c2) + eps)`, with both corrections in the denominator."""
    step = tl.maximum(step, 1.0)
    correction1, correction2 = _one_minus_power(log_beta1, step), _one_minus_power(log_beta2, step)
    return m / (tl.sqrt(v) * (correction1 / tl.sqrt(correction2)) + correction1 * eps)


@triton.jit(do_not_specialize=["tensors"])
def _adamw(
    pointers,
    sizes,
    blocks,
    tensors,
    log_beta1,
    log_beta2,
    eps,
    gain1,
    beta2,
    gain2,
    eta,
    phi,
    scale,
    bad,
    STATE_ROW: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    GAIN_SMALL: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ETA_ON_DEVICE: tl.constexpr,
    PHI_ON_DEVICE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ROUNDING: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner, offsets, inside = place(sizes, blocks, bad, HAS_FLAG, ALIGNED, BLOCK)
    g = gradient(pointers, STATE_ROW * tensors + owner, offsets, inside, GRAD, STATE, MAXIMIZE, ALIGNED)
    averages = start(pointers, (STATE_ROW + 1) * tensors + owner, STATE, ALIGNED)
    squares = start(pointers, (STATE_ROW + 2) * tensors + owner, STATE, ALIGNED)
    m = tl.load(averages + offsets, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(squares + offsets, mask=inside, other=0.0).to(tl.float32)
    m = lerp(m, g, gain1, GAIN_SMALL).to(STATE)
    v = (beta2 * v + gain2 * g * g).to(STATE)
    tl.store(averages + offsets, m, mask=inside)
    tl.store(squares + offsets, v, mask=inside)
    step = tl.load(start(pointers, (STATE_ROW + 3) * tensors + owner, tl.float32, False))
    direction = _direction(m.to(tl.float32), v.to(tl.float32), step, log_beta1, log_beta2, eps)
    rate, decay = scalar(eta, ETA_ON_DEVICE) * scale, scalar(phi, PHI_ON_DEVICE)
    write(pointers, tensors, owner, offsets, inside, direction, rate, decay, CAUTIOUS, ROUNDING, WEIGHT, ALIGNED)


@triton.jit(do_not_specialize=["tensors"])
def _adamw_stored(
    pointers,
    sizes,
    blocks,
    tensors,
    log_beta1,
    log_beta2,
    eps,
    gain1,
    beta2,
    gain2,
    eta,
    phi,
    scale,
    bad,
    STATE_ROW: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    GAIN_SMALL: tl.constexpr,
    GRAD: tl.constexpr,
    CODED: tl.constexpr,
    NOISY: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ETA_ON_DEVICE: tl.constexpr,
    PHI_ON_DEVICE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ROUNDING: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    owner, rows, offsets, inside = place_blocks(sizes, blocks, bad, HAS_FLAG, ALIGNED, LENGTH, ROWS, COLUMNS)
    g = gradient(pointers, STATE_ROW * tensors + owner, offsets, inside, GRAD, tl.float32, MAXIMIZE, ALIGNED)
    step = tl.load(start(pointers, (STATE_ROW + 3) * tensors + owner, tl.float32, False))
    averages = start(pointers, (STATE_ROW + 1) * tensors + owner, tl.int8 if CODED else tl.bfloat16, ALIGNED)
    squares = start(pointers, (STATE_ROW + 2) * tensors + owner, tl.uint8 if CODED else tl.bfloat16, ALIGNED)
    if CODED:
        average_scales = start(pointers, (STATE_ROW + 4) * tensors + owner, tl.float32, False)
        square_scales = start(pointers, (STATE_ROW + 5) * tensors + owner, tl.float32, False)
        m = decoded(averages, average_scales, rows, offsets, inside, 1 / 127)
        v = decoded(squares, square_scales, rows, offsets, inside, 1 / 255)
    else:
        m = tl.load(averages + offsets, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(squares + offsets, mask=inside, other=0.0).to(tl.float32)
    m = lerp(m, g, gain1, GAIN_SMALL)
    v = beta2 * v + gain2 * g * g
    direction = _direction(m, v, step, log_beta1, log_beta2, eps)
    rate, decay = scalar(eta, ETA_ON_DEVICE) * scale, scalar(phi, PHI_ON_DEVICE)
    write(pointers, tensors, owner, offsets, inside, direction, rate, decay, CAUTIOUS, ROUNDING, WEIGHT, ALIGNED)
    key1, key2, origin = owner.to(tl.int64), owner.to(tl.int64), owner.to(tl.int64)  # without noise unused
    if NOISY:
        key1 = tl.load(pointers + (STATE_ROW - 3) * tensors + owner)
        key2 = tl.load(pointers + (STATE_ROW - 2) * tensors + owner)
        origin = tl.load(pointers + (STATE_ROW - 1) * tensors + owner)
    if CODED:
        encoded(m, averages, average_scales, rows, offsets, inside, step, key1, origin, 127.0, 127.0**4, True, NOISY)
        encoded(v, squares, square_scales, rows, offsets, inside, step, key2, origin, 255.0, 255.0**4, False, NOISY)
    else:
        m = stochastic_round(m, step, key1, offsets + origin, tl.bfloat16)
        v = stochastic_round(v, step, key2, offsets + origin, tl.bfloat16)
        tl.store(averages + offsets, m.to(tl.bfloat16), mask=inside)
        tl.store(squares + offsets, v.to(tl.bfloat16), mask=inside)


def adamw(
    weights: Weights,
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    counters: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
    motion: Motion,
) -> None:
    """One step of AdamW; `counters` hold the number of this step, from one, for each tensor."""
    options = _options(betas, maximize) | {"STATE": DTYPES[averages[0].dtype]}
    launch(_adamw, weights, (grads, averages, squares, counters), motion, _arguments(betas, eps), options)


def adamw_stored(
    weights: Weights,
    grads: Sequence[Tensor],
    averages: Sequence[Kept],
    squares: Sequence[Kept],
    counters: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
    motion: Motion,
) -> None:
    """The same of state in 8 bits, in blocks of one length, or in bfloat16."""
    first = averages[0]
    scales = [[one.scale for one in kept if one.scale is not None] for kept in (averages, squares)]
    noises = [[one.noise for one in kept if one.noise is not None] for kept in (averages, squares)]
    keys = [[noise.key for noise in some] for some in noises]
    launch(
        _adamw_stored,
        weights,
        (grads, *([one.values for one in kept] for kept in (averages, squares)), counters, *filter(None, scales)),
        motion,
        _arguments(betas, eps),
        _options(betas, maximize) | {"CODED": first.scale is not None, "NOISY": first.noise is not None},
        [*keys, [noise.origin for noise in noises[0]]] if noises[0] else [],
        tile(BLOCK if first.scale is None else first.values.numel() // first.scale.numel()),
    )


def _arguments(betas: tuple[float, float], eps: float) -> tuple[float, ...]:
    beta1, beta2 = betas
    return _log(beta1), _log(beta2), eps, 1 - beta1, beta2, 1 - beta2


def _options(betas: tuple[float, float], maximize: bool) -> dict[str, object]:
    return {"MAXIMIZE": maximize, "GAIN_SMALL": 1 - betas[0] < 0.5, "enable_fp_fusion": False}


def _log(beta: float) -> float:
    """The logarithm, of zero a number whose multiples are far enough from zero."""
    return math.log(beta) if beta else -1e4
