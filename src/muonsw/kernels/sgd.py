"""SGD in one pass, from gradient to weight."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels.common import DTYPES, advance, look_ahead, scalar, start
from muonsw.kernels.elementwise import Motion, Weights, gradient, launch, place, write


@triton.jit(do_not_specialize=["tensors"])
def _sgd(
    pointers,
    sizes,
    blocks,
    tensors,
    beta,
    gain,
    eta,
    phi,
    scale,
    bad,
    STATE_ROW: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    EMA: tl.constexpr,
    GAIN_SMALL: tl.constexpr,
    BETA_SMALL: tl.constexpr,
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
    if HAS_MOMENTUM:
        momenta = start(pointers, (STATE_ROW + 1) * tensors + owner, STATE, ALIGNED)
        m = tl.load(momenta + offsets, mask=inside, other=0.0).to(tl.float32)
        m = advance(m, g, beta, gain, EMA, GAIN_SMALL).to(STATE)
        tl.store(momenta + offsets, m, mask=inside)
        m = m.to(tl.float32)
        if NESTEROV:
            g = look_ahead(m, g, beta, EMA, BETA_SMALL)
        else:
            g = m
    rate, decay = scalar(eta, ETA_ON_DEVICE) * scale, scalar(phi, PHI_ON_DEVICE)
    write(pointers, tensors, owner, offsets, inside, g, rate, decay, CAUTIOUS, ROUNDING, WEIGHT, ALIGNED)


def sgd(
    weights: Weights,
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    beta: float,
    form: str,
    nesterov: bool,
    maximize: bool,
    motion: Motion,
) -> None:
    """One step of SGD, without momentum where `momenta` is empty."""
    gain = 1 - beta if form == "ema" else 1.0
    launch(
        _sgd,
        weights,
        (grads, momenta) if momenta else (grads,),
        motion,
        (beta, gain),
        {
            "MAXIMIZE": maximize,
            "HAS_MOMENTUM": bool(momenta),
            "NESTEROV": nesterov,
            "EMA": form == "ema",
            "GAIN_SMALL": gain < 0.5,
            "BETA_SMALL": beta < 0.5,
            "STATE": DTYPES[(momenta or grads)[0].dtype],
        },
    )
