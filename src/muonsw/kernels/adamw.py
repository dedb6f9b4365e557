"""AdamW in one pass, from gradient to weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels.common import DTYPES, lerp, start
from muonsw.kernels.elementwise import Motion, Weights, launch, place, write


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
    GAIN_SMALL: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    ETA_ON_DEVICE: tl.constexpr,
    PHI_ON_DEVICE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ROUNDING: tl.constexpr,
    WEIGHT: tl.constexpr,
    EPS: tl.constexpr,
    SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner, offsets, inside = place(sizes, blocks, bad, HAS_FLAG, ALIGNED, BLOCK)
    g = tl.load(start(pointers, STATE_ROW * tensors + owner, GRAD, ALIGNED) + offsets, mask=inside, other=0.0)
    g = g.to(STATE).to(tl.float32)
    averages = start(pointers, (STATE_ROW + 1) * tensors + owner, STATE, ALIGNED)
    squares = start(pointers, (STATE_ROW + 2) * tensors + owner, STATE, ALIGNED)
    m = tl.load(averages + offsets, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(squares + offsets, mask=inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    m = lerp(m, g, gain1, GAIN_SMALL).to(STATE)
    v = (beta2 * v + gain2 * g * g).to(STATE)
    tl.store(averages + offsets, m, mask=inside)
    tl.store(squares + offsets, v, mask=inside)
    # (m / c1) / (sqrt(v / c2) + eps), with both corrections in the denominator
    step = tl.maximum(tl.load(start(pointers, (STATE_ROW + 3) * tensors + owner, tl.float32, False)), 1.0)
    correction1, correction2 = _one_minus_power(log_beta1, step), _one_minus_power(log_beta2, step)
    root = tl.sqrt(v.to(tl.float32)) * (correction1 / tl.sqrt(correction2)) + correction1 * eps
    write(
        pointers,
        tensors,
        owner,
        offsets,
        inside,
        m.to(tl.float32) / root,
        eta,
        phi,
        scale,
        ETA_ON_DEVICE,
        PHI_ON_DEVICE,
        CAUTIOUS,
        ROUNDING,
        WEIGHT,
        EPS,
        SMALLEST,
        ALIGNED,
    )


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
    beta1, beta2 = betas
    launch(
        _adamw,
        weights,
        (grads, averages, squares, counters),
        motion,
        (_log(beta1), _log(beta2), eps, 1 - beta1, beta2, 1 - beta2),
        {"MAXIMIZE": maximize, "GAIN_SMALL": 1 - beta1 < 0.5, "STATE": DTYPES[averages[0].dtype]},
    )


def _log(beta: float) -> float:
    """The logarithm, of zero a number whose multiples are far enough from zero."""
    return math.log(beta) if beta else -1e4
