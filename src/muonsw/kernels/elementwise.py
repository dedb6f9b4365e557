"""How weights are decayed, moved and rounded by the kernels of `adamw` and `move`.

One launch works on a list of tensors. Their addresses are columns of a table with these rows: the weight; for
stochastic rounding the step counter, the key of the noise and the position of the first element; numbers that a kernel
asks for; then what it reads beside weights; last the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels.common import DTYPES, flag_or, start, stochastic_round
from muonsw.kernels.tables import Stretches
from muonsw.nonfinite import Flag
from muonsw.work import all_contiguous, one_dtype

BLOCK = 2048
WARPS = 4


class Motion(NamedTuple):
    """How weights move: `W <- (1 - phi) W - eta * scale * direction` unless `flag` forbids it, as in `apply`.

    Both rates are numbers, or both are scalars on the device.
    """

    eta: float | Tensor
    phi: float | Tensor
    flag: Flag | None
    scale: float
    cautious: bool


class Weights(NamedTuple):
    """Weights of one dtype, and what stochastic rounding needs: step counters and the keys of their noise."""

    tensors: Sequence[Tensor]
    rounding: str = "nearest"
    counters: Sequence[Tensor] = ()
    keys: Sequence[int] = ()

    def rounding_rows(self, stretches: Stretches) -> list[list[int]]:
        """The rows of the table that belong to the rounding, one column for each stretch of the weights."""
        if self.rounding == "nearest":
            return []
        counters = [counter.data_ptr() for counter in self.counters]
        return [
            [counters[owner] for owner in stretches.owners],
            [self.keys[owner] for owner in stretches.owners],
            list(stretches.positions),
        ]


@triton.jit
def rates(eta, phi, scale, ON_DEVICE: tl.constexpr):
    """The factor of the direction, and that of the decay."""
    if ON_DEVICE:
        eta, phi = tl.load(eta).to(tl.float32), tl.load(phi).to(tl.float32)
    return eta * scale, phi


@triton.jit
def write(
    pointers,
    tensors,
    owner,
    offsets,
    inside,
    direction,
    rate,
    decay,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Decay and move the weights of one block, in float32, and round once."""
    weights = start(pointers, owner, WEIGHT, ALIGNED)
    w = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    if CAUTIOUS:  # spares elements that move outward
        w = w - tl.where(w * direction >= 0, w, 0.0) * decay
    else:
        w = w - w * decay  # 1 - decay would be rounded, to the same side at every step
    w = w - rate * direction
    if STOCHASTIC:
        step = tl.load(start(pointers, tensors + owner, tl.float32, False))
        key = tl.load(pointers + 2 * tensors + owner)
        position = tl.load(pointers + 3 * tensors + owner) + offsets
        w = stochastic_round(w, step, key, position, WEIGHT)
    tl.store(weights + offsets, w.to(WEIGHT), mask=inside)


def takes(*lists: Sequence[Tensor]) -> bool:
    """Whether each list has one dtype that the kernels read, and only contiguous tensors."""
    return all(tensors[0].dtype in DTYPES and one_dtype(tensors) and all_contiguous(tensors) for tensors in lists)


def scalars(motion: Motion, unused: Tensor) -> tuple[float | Tensor, float | Tensor, float, Tensor]:
    """The arguments of a kernel that say how far weights move."""
    return motion.eta, motion.phi, motion.scale, flag_or(motion.flag, unused)


def choices(weights: Weights, motion: Motion) -> dict[str, object]:
    """What a kernel that moves weights is compiled for."""
    return {
        "HAS_FLAG": motion.flag is not None,
        "ON_DEVICE": isinstance(motion.eta, Tensor),
        "CAUTIOUS": motion.cautious,
        "STOCHASTIC": weights.rounding == "stochastic",
        "WEIGHT": DTYPES[weights.tensors[0].dtype],
    }
