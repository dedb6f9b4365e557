"""What the one-pass steps share: which elements, and how a weight is decayed, moved and rounded.

One launch works on a list of tensors. Their addresses are columns of a table with these rows: the weight; for
stochastic rounding the step counter, the key of the noise and the position of the first element; numbers that a kernel
asks for; then gradient and state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import (
    DTYPES,
    ROUNDINGS,
    STOCHASTIC,
    alignment,
    block_of,
    flag_or,
    limit,
    shrink_and_move,
    start,
    stochastic_round,
    whole_number,
)
from muonsw.kernels.tables import Stretch, addresses, block_map, lengths, table
from muonsw.nonfinite import Flag
from muonsw.work import all_contiguous, one_dtype

BLOCK = 2048
WARPS = 4


class Motion(NamedTuple):
    """How weights move: `W <- (1 - phi) W - eta * scale * direction` unless `flag` forbids it, as in `apply`."""

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


@triton.jit
def place(sizes, blocks, bad, HAS_FLAG: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The tensor that this program works on, the entries, and which of them it may change."""
    owner, offsets = block_of(blocks, BLOCK)
    return owner, offsets, offsets < limit(whole_number(sizes, owner, ALIGNED), bad, HAS_FLAG)


@triton.jit
def place_blocks(
    sizes,
    blocks,
    bad,
    HAS_FLAG: tl.constexpr,
    ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The same in blocks of state: the tensor, its blocks (rows), and the entries (rows, columns)."""
    owner, rows = block_of(blocks, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    offsets = rows[:, None] * LENGTH + columns
    size = limit(whole_number(sizes, owner, ALIGNED), bad, HAS_FLAG)
    return owner, rows, offsets, (offsets < size) & (columns < LENGTH)


@triton.jit
def gradient(
    pointers,
    entry,
    offsets,
    inside,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The gradient of one block as state of this dtype takes it in, pointing downhill."""
    g = tl.load(start(pointers, entry, GRAD, ALIGNED) + offsets, mask=inside, other=0.0)
    g = g.to(STATE).to(tl.float32)
    if MAXIMIZE:
        g = -g
    return g


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
    ROUNDING: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Decay and move the weights of one block, in float32, and round once."""
    weights = start(pointers, owner, WEIGHT, ALIGNED)
    w = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    w = shrink_and_move(w, direction, rate, decay, CAUTIOUS)
    rounded = w
    if ROUNDING == STOCHASTIC:
        step = tl.load(start(pointers, tensors + owner, tl.float32, False))
        key = tl.load(pointers + 2 * tensors + owner)
        position = tl.load(pointers + 3 * tensors + owner) + offsets
        rounded = stochastic_round(w, step, key, position, WEIGHT)
    tl.store(weights + offsets, rounded.to(WEIGHT), mask=inside)


def takes(*lists: Sequence[Tensor]) -> bool:
    """Whether each list has one dtype that the kernels read, and only contiguous tensors."""
    return all(tensors[0].dtype in DTYPES and one_dtype(tensors) and all_contiguous(tensors) for tensors in lists)


def launch(kernel, weights: Weights, state, motion: Motion, arguments, options, numbers=(), tile=None) -> None:
    """Launch the kernel of an algorithm on weights, gradients and state of any sizes.

    Args:
        kernel: a Triton kernel, with the parameters that those here have in common.
        weights: what moves.
        state: lists of tensors; the first are gradients.
        motion: how far they move.
        arguments: the kernel's own, after the table.
        options: what it is compiled for.
        numbers: rows of whole numbers that it wants before the gradients.
        tile: ROWS blocks of LENGTH elements for a program, in COLUMNS; None is BLOCK elements.
    """
    sizes = lengths(weights.tensors)
    companions = rounding_rows(weights, [Stretch(0, size, owner, 0) for owner, size in enumerate(sizes)])
    device = weights.tensors[0].device
    rows = (addresses(weights.tensors), *companions, *numbers, *map(addresses, state), sizes)
    pointers, is_aligned = table(rows, device, loose_rows(weights, len(numbers)))
    blocks = block_map(sizes, BLOCK if tile is None else tile["ROWS"] * tile["LENGTH"], device)
    first = [weights.tensors[0], *(tensors[0] for tensors in state if tensors[0].dim())]  # without counters
    launch_on(
        device,
        kernel,
        (blocks.shape[1],),
        pointers,
        pointers[-1],
        blocks,
        len(sizes),
        *arguments,
        *scalars(motion, pointers),
        STATE_ROW=1 + len(companions) + len(numbers),
        GRAD=DTYPES[state[0][0].dtype],
        **options,
        **choices(weights, motion, alignment(is_aligned, *first)),
        **({"BLOCK": BLOCK} if tile is None else tile),
        num_warps=WARPS,
    )


def rounding_rows(weights: Weights, stretches: Sequence[Stretch]) -> list[list[int]]:
    """The rows of the table that belong to the rounding, one column for each stretch of the weights."""
    if weights.rounding == "nearest":
        return []
    counters = [counter.data_ptr() for counter in weights.counters]
    owners = [run.owner for run in stretches]
    return [[counters[o] for o in owners], [weights.keys[o] for o in owners], [run.position for run in stretches]]


def loose_rows(weights: Weights, numbers: int = 0) -> range:
    """Which rows of the table hold no addresses of many entries: those of noise, and the `numbers` of a kernel."""
    return range(1, 1 + (3 if weights.rounding == "stochastic" else 0) + numbers)


def scalars(motion: Motion, unused: Tensor) -> tuple[float | Tensor, float | Tensor, float, Tensor]:
    """The arguments of a kernel that say how far weights move."""
    return motion.eta, motion.phi, motion.scale, flag_or(motion.flag, unused)


def choices(weights: Weights, motion: Motion, aligned: int) -> dict[str, object]:
    """What a kernel is compiled for."""
    return {
        "HAS_FLAG": motion.flag is not None,
        "ETA_ON_DEVICE": isinstance(motion.eta, Tensor),
        "PHI_ON_DEVICE": isinstance(motion.phi, Tensor),
        "CAUTIOUS": motion.cautious,
        "ROUNDING": ROUNDINGS[weights.rounding],
        "WEIGHT": DTYPES[weights.tensors[0].dtype],
        "ALIGNED": aligned,
    }
