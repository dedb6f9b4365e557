"""AdamW in one pass, from gradient to weight; state is in floats, in 8 bits, or in stochastically rounded bfloat16.

Compiled without fused multiply-adds, so encoded state gets the same bits as separate decoding, stepping and encoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import (
    DTYPES,
    alignment,
    block_of,
    flag_or,
    lerp,
    limit,
    start,
    stochastic_round,
    whole_number,
)
from muonsw.kernels.move import BLOCK, WARPS, Weights, choices, rates, write
from muonsw.kernels.stored import decoded, encoded, tile
from muonsw.kernels.tables import addresses, block_map, runs, table
from muonsw.precision import StoredState
from muonsw.work import Group, StepContext, all_contiguous, one_dtype

STATE_DTYPES = {**DTYPES, torch.int8: tl.int8, torch.uint8: tl.uint8}


@triton.jit
def _one_minus_power(log_beta, step):
    """`1 - beta^step`, by its series where subtracting would cancel."""
    x = step * log_beta
    series = 1 + x * (1 / 5) * (1 + x * (1 / 6) * (1 + x * (1 / 7) * (1 + x * (1 / 8) * (1 + x * (1 / 9)))))
    series = 1 + x * (1 / 2) * (1 + x * (1 / 3) * (1 + x * (1 / 4) * series))
    return tl.where(x > -0.5, -x * series, 1 - tl.exp(x))


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
    AVERAGES: tl.constexpr,
    SQUARES: tl.constexpr,
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
    owner, rows = block_of(blocks, ROWS)
    offsets, inside = rows, None
    if CODED:  # rows are blocks of codes that share a scale
        columns = tl.arange(0, COLUMNS)[None, :]
        offsets = rows[:, None] * LENGTH + columns
        inside = (offsets < limit(whole_number(sizes, owner, ALIGNED), bad, HAS_FLAG)) & (columns < LENGTH)
    else:
        inside = offsets < limit(whole_number(sizes, owner, ALIGNED), bad, HAS_FLAG)
    g = tl.load(start(pointers, STATE_ROW * tensors + owner, GRAD, ALIGNED) + offsets, mask=inside, other=0.0)
    g = g.to(STATE).to(tl.float32)
    if MAXIMIZE:
        g = -g
    averages = start(pointers, (STATE_ROW + 1) * tensors + owner, AVERAGES, ALIGNED)
    squares = start(pointers, (STATE_ROW + 2) * tensors + owner, SQUARES, ALIGNED)
    if CODED:
        average_scales = start(pointers, (STATE_ROW + 4) * tensors + owner, tl.float32, False)
        square_scales = start(pointers, (STATE_ROW + 5) * tensors + owner, tl.float32, False)
        m = decoded(averages, average_scales, rows, offsets, inside, 1 / 127)
        v = decoded(squares, square_scales, rows, offsets, inside, 1 / 255)
    else:
        m = tl.load(averages + offsets, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(squares + offsets, mask=inside, other=0.0).to(tl.float32)
    m = lerp(m, g, gain1).to(STATE)
    v = (beta2 * v + gain2 * g * g).to(STATE)
    if not CODED and not NOISY:
        tl.store(averages + offsets, m, mask=inside)
        tl.store(squares + offsets, v, mask=inside)

    # (m / c1) / (sqrt(v / c2) + eps), with both corrections in the denominator
    step = tl.load(start(pointers, (STATE_ROW + 3) * tensors + owner, tl.float32, False))
    count = tl.maximum(step, 1.0)
    correction1, correction2 = _one_minus_power(log_beta1, count), _one_minus_power(log_beta2, count)
    denominator = tl.sqrt(v.to(tl.float32)) * (correction1 / tl.sqrt(correction2)) + correction1 * eps
    direction = m.to(tl.float32) / denominator
    rate, decay = rates(eta, phi, scale, ON_DEVICE)
    places = offsets  # without gaps
    write(
        pointers, tensors, owner, offsets, places, inside, direction, rate, decay, CAUTIOUS, STOCHASTIC, WEIGHT, ALIGNED
    )

    key1, key2, origin = owner.to(tl.int64), owner.to(tl.int64), owner.to(tl.int64)  # unused without noise
    if NOISY:
        key1 = tl.load(pointers + (STATE_ROW - 3) * tensors + owner)
        key2 = tl.load(pointers + (STATE_ROW - 2) * tensors + owner)
        origin = tl.load(pointers + (STATE_ROW - 1) * tensors + owner)
    if CODED:
        encoded(m, averages, average_scales, rows, offsets, inside, step, key1, origin, 127.0, 127.0**4, True, NOISY)
        encoded(v, squares, square_scales, rows, offsets, inside, step, key2, origin, 255.0, 255.0**4, False, NOISY)
    elif NOISY:
        m = stochastic_round(m, step, key1, offsets + origin, tl.bfloat16)
        v = stochastic_round(v, step, key2, offsets + origin, tl.bfloat16)
        tl.store(averages + offsets, m.to(tl.bfloat16), mask=inside)
        tl.store(squares + offsets, v.to(tl.bfloat16), mask=inside)


def adamw(
    group: Group,
    weights: Weights,
    grads: Sequence[Tensor],
    averages: StoredState,
    squares: StoredState,
    counters: Sequence[Tensor],
    ctx: StepContext,
) -> bool:
    """Take one step of AdamW; `counters` hold each tensor's step number, from 1.

    Returns False, without a step, if the kernel cannot read the tensors.
    """
    device, (beta1, beta2) = weights.tensors[0].device, group["betas"]
    coded, noisy = bool(averages.scales), bool(averages.noises)
    stretches = runs(weights.tensors)
    for tensors in (weights.tensors, grads, averages.values, squares.values):
        if tensors[0].dtype not in STATE_DTYPES or not one_dtype(tensors) or not all_contiguous(tensors):
            return False
    if stretches is None or (not coded and averages.values[0].dtype != squares.values[0].dtype):
        return False
    lists = (grads, averages.values, squares.values, counters, *((averages.scales, squares.scales) if coded else ()))
    companions = weights.rounding_rows(stretches)
    if noisy:
        companions += [[noise.key for noise in state.noises] for state in (averages, squares)]
        companions += [[noise.origin for noise in averages.noises]]
    row = 1 + len(companions)
    rows = (stretches.addresses, *companions, *map(addresses, lists), stretches.sizes)
    pointers, is_aligned = table(rows, device, range(1, row))
    tiles = {"LENGTH": 1, "ROWS": BLOCK, "COLUMNS": 1}
    if coded:
        tiles = tile(averages.values[0].numel() // averages.scales[0].numel())
    blocks = block_map(stretches.sizes, tiles["ROWS"] * tiles["LENGTH"], device)
    kinds = [STATE_DTYPES[state.values[0].dtype] for state in (averages, squares)]
    large = [weights.tensors[0], *(tensors[0] for tensors in lists if tensors[0].dim())]  # all but scalar counters
    launch_on(
        device,
        _adamw,
        (blocks.shape[1],),
        pointers,
        pointers[-1],
        blocks,
        len(weights.tensors),
        _log(beta1),
        _log(beta2),
        group["eps"],
        1 - beta1,
        beta2,
        1 - beta2,
        *(ctx.eta, ctx.phi, 1.0, flag_or(ctx.flag, pointers)),
        STATE_ROW=row,
        MAXIMIZE=group["maximize"],
        GRAD=DTYPES[grads[0].dtype],
        STATE=tl.float32 if coded or noisy else kinds[0],
        AVERAGES=kinds[0],
        SQUARES=kinds[1],
        CODED=coded,
        NOISY=noisy,
        **tiles,
        **choices(weights, group["cautious"], ctx),
        ALIGNED=alignment(is_aligned, *large),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return True


def _log(beta: float) -> float:
    return math.log(beta) if beta else -1e4  # exp(-1e4) is zero
