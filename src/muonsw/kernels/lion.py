"""Lion in one pass, from gradient to weight."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels.common import DTYPES, lerp, scalar, start
from muonsw.kernels.elementwise import Motion, Weights, gradient, launch, place, write


@triton.jit(do_not_specialize=["tensors"])
def _lion(
    pointers,
    sizes,
    blocks,
    tensors,
    gain1,
    gain2,
    eta,
    phi,
    scale,
    bad,
    STATE_ROW: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    GAIN1_SMALL: tl.constexpr,
    GAIN2_SMALL: tl.constexpr,
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
    m = tl.load(averages + offsets, mask=inside, other=0.0).to(tl.float32)
    ahead = lerp(m, g, gain1, GAIN1_SMALL)
    tl.store(averages + offsets, lerp(m, g, gain2, GAIN2_SMALL).to(STATE), mask=inside)
    direction = tl.where(ahead > 0, 1.0, tl.where(ahead < 0, -1.0, ahead))  # NaN stays NaN
    rate, decay = scalar(eta, ETA_ON_DEVICE) * scale, scalar(phi, PHI_ON_DEVICE)
    write(pointers, tensors, owner, offsets, inside, direction, rate, decay, CAUTIOUS, ROUNDING, WEIGHT, ALIGNED)


def lion(
    weights: Weights,
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    betas: tuple[float, float],
    maximize: bool,
    motion: Motion,
) -> None:
    """One step of Lion."""
    gain1, gain2 = 1 - betas[0], 1 - betas[1]
    options = {"MAXIMIZE": maximize, "GAIN1_SMALL": gain1 < 0.5, "GAIN2_SMALL": gain2 < 0.5}
    state = (grads, averages)
    launch(_lion, weights, state, motion, (gain1, gain2), {**options, "STATE": DTYPES[averages[0].dtype]})
