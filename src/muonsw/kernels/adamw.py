"""AdamW in one pass, from gradient to weight, with state in floats or as it is stored.

Compiled without fused multiply-adds, so that stored state makes the same bits on its way as decoded and encoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import DTYPES, alignment, block_of, lerp, limit, start, stochastic_round, whole_number
from muonsw.kernels.elementwise import BLOCK, WARPS, Motion, Weights, choices, rates, scalars, write
from muonsw.kernels.stored import decoded, encoded, tile
from muonsw.kernels.tables import addresses, block_map, runs, table
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
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner, offsets = block_of(blocks, BLOCK)
    inside = offsets < limit(whole_number(sizes, owner, ALIGNED), bad, HAS_FLAG)
    g = tl.load(start(pointers, STATE_ROW * tensors + owner, GRAD, ALIGNED) + offsets, mask=inside, other=0.0)
    g = g.to(STATE).to(tl.float32)
    if MAXIMIZE:
        g = -g
    averages = start(pointers, (STATE_ROW + 1) * tensors + owner, STATE, ALIGNED)
    squares = start(pointers, (STATE_ROW + 2) * tensors + owner, STATE, ALIGNED)
    m = tl.load(averages + offsets, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(squares + offsets, mask=inside, other=0.0).to(tl.float32)
    m = lerp(m, g, gain1).to(STATE)
    v = (beta2 * v + gain2 * g * g).to(STATE)
    tl.store(averages + offsets, m, mask=inside)
    tl.store(squares + offsets, v, mask=inside)
    step = tl.load(start(pointers, (STATE_ROW + 3) * tensors + owner, tl.float32, False))
    direction = _direction(m.to(tl.float32), v.to(tl.float32), step, log_beta1, log_beta2, eps)
    rate, decay = rates(eta, phi, scale, ON_DEVICE)
    write(pointers, tensors, owner, offsets, inside, direction, rate, decay, CAUTIOUS, STOCHASTIC, WEIGHT, ALIGNED)


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
    GRAD: tl.constexpr,
    CODED: tl.constexpr,
    NOISY: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    owner, rows = block_of(blocks, ROWS)  # blocks of state
    columns = tl.arange(0, COLUMNS)[None, :]
    offsets = rows[:, None] * LENGTH + columns
    inside = (offsets < limit(whole_number(sizes, owner, ALIGNED), bad, HAS_FLAG)) & (columns < LENGTH)
    g = tl.load(start(pointers, STATE_ROW * tensors + owner, GRAD, ALIGNED) + offsets, mask=inside, other=0.0)
    g = g.to(tl.float32)
    if MAXIMIZE:
        g = -g
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
    m = lerp(m, g, gain1)
    v = beta2 * v + gain2 * g * g
    direction = _direction(m, v, step, log_beta1, log_beta2, eps)
    rate, decay = rates(eta, phi, scale, ON_DEVICE)
    write(pointers, tensors, owner, offsets, inside, direction, rate, decay, CAUTIOUS, STOCHASTIC, WEIGHT, ALIGNED)
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
    lists = (grads, averages, squares, counters)
    options = {"MAXIMIZE": maximize, "STATE": DTYPES[averages[0].dtype], "BLOCK": BLOCK}
    _launch(_adamw, weights, lists, [], BLOCK, betas, eps, motion, options)


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
    values, scales, noises = (
        [[getattr(each, field) for each in state] for state in (averages, squares)]
        for field in ("values", "scale", "noise")
    )
    coded, noisy = first.scale is not None, first.noise is not None
    lists = (grads, *values, counters, *(scales if coded else ()))
    numbers = []
    if noisy:
        numbers = [*([noise.key for noise in each] for each in noises), [noise.origin for noise in noises[0]]]
    cut = tile(first.values.numel() // first.scale.numel() if first.scale is not None else BLOCK)
    options = {"MAXIMIZE": maximize, "CODED": coded, "NOISY": noisy, **cut}
    _launch(_adamw_stored, weights, lists, numbers, cut["ROWS"] * cut["LENGTH"], betas, eps, motion, options)


def _launch(
    kernel: triton.JITFunction,
    weights: Weights,
    lists: Sequence[Sequence[Tensor]],
    numbers: Sequence[Sequence[int]],
    block: int,
    betas: tuple[float, float],
    eps: float,
    motion: Motion,
    options: Mapping[str, object],
) -> None:
    """Launch a kernel on weights, lists of gradients and state, and rows of whole numbers that it asks for."""
    device, stretches = weights.tensors[0].device, runs(weights.tensors)
    assert stretches is not None
    companions = [*weights.rounding_rows(stretches), *numbers]
    rows = (stretches.addresses, *companions, *map(addresses, lists), stretches.sizes)
    row = 1 + len(companions)
    pointers, is_aligned = table(rows, device, range(1, row))
    blocks = block_map(stretches.sizes, block, device)
    beta1, beta2 = betas
    large = [weights.tensors[0], *(tensors[0] for tensors in lists if tensors[0].dim())]  # without counters
    launch_on(
        device,
        kernel,
        (blocks.shape[1],),
        pointers,
        pointers[-1],
        blocks,
        len(weights.tensors),
        _log(beta1),
        _log(beta2),
        eps,
        1 - beta1,
        beta2,
        1 - beta2,
        *scalars(motion, pointers),
        STATE_ROW=row,
        GRAD=DTYPES[lists[0][0].dtype],
        **options,
        **choices(weights, motion),
        ALIGNED=alignment(is_aligned, *large),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _log(beta: float) -> float:
    """The logarithm, of zero a number whose multiples are far enough from zero."""
    return math.log(beta) if beta else -1e4
