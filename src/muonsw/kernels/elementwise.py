"""Steps in which every entry is on its own: AdamW and SGD from gradient to weight, and Muon's move. One pass each.

One launch works on a list of tensors. Their addresses are columns of a table with these rows: the weight; for
stochastic rounding the step counter, the key of the noise and the position of the first entry, for Kahan rounding the
compensation; then gradient and state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels.common import (
    DTYPES,
    KAHAN,
    ROUNDINGS,
    STOCHASTIC,
    advance,
    flag,
    limit,
    look_ahead,
    lerp,
    scalar,
    shrink_and_move,
    start,
    stochastic_round,
    whole_number,
)
from muonsw.kernels.tables import Run, aligned, block_map, runs, table

BLOCK = 4096
WARPS = 8


class Motion(NamedTuple):
    """How weights move: `W <- (1 - phi) W - eta * scale * direction` unless `ok` is false; see `apply.Coefficients`."""

    eta: float | Tensor
    phi: float | Tensor
    ok: Tensor | None
    scale: float
    cautious: bool


class Weights(NamedTuple):
    """Weights of one dtype, and what their rounding needs: compensations, or counters, keys and positions."""

    tensors: Sequence[Tensor]
    rounding: str = "nearest"
    compensations: Sequence[Tensor] = ()
    counters: Sequence[Tensor] = ()
    keys: Sequence[int] = ()


@triton.jit
def _place(sizes, blocks, ok, HAS_OK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The tensor that this program works on, and the entries."""
    program = tl.program_id(0)
    owner = tl.load(blocks + program)
    offsets = tl.load(blocks + tl.num_programs(0) + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return owner, offsets, offsets < limit(whole_number(sizes, owner, ALIGNED), ok, HAS_OK)


@triton.jit
def _write(
    pointers, tensors, owner, offsets, inside, direction, eta, phi, scale,
    ETA_ON_DEVICE: tl.constexpr, PHI_ON_DEVICE: tl.constexpr, CAUTIOUS: tl.constexpr, ROUNDING: tl.constexpr,
    WEIGHT: tl.constexpr, EPS: tl.constexpr, SMALLEST: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Decay and move the weights of one block, in float32, and round once."""
    weights = start(pointers, owner, WEIGHT, ALIGNED)
    w = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    if ROUNDING == KAHAN:
        compensations = start(pointers, tensors + owner, WEIGHT, ALIGNED)
        w += tl.load(compensations + offsets, mask=inside, other=0.0).to(tl.float32)
    w = shrink_and_move(w, direction, scalar(eta, ETA_ON_DEVICE) * scale, scalar(phi, PHI_ON_DEVICE), CAUTIOUS)
    rounded = w
    if ROUNDING == STOCHASTIC:
        step = tl.load(start(pointers, tensors + owner, tl.float32, False))
        key = tl.load(pointers + 2 * tensors + owner)
        position = tl.load(pointers + 3 * tensors + owner) + offsets
        rounded = stochastic_round(w, step, key, position, EPS, SMALLEST)
    rounded = rounded.to(WEIGHT)
    tl.store(weights + offsets, rounded, mask=inside)
    if ROUNDING == KAHAN:
        tl.store(compensations + offsets, (w - rounded.to(tl.float32)).to(WEIGHT), mask=inside)


@triton.jit
def _move(
    pointers, sizes, blocks, tensors, directions, eta, phi, scale, ok,
    STATE_ROW: tl.constexpr, DIRECTIONS_ALIGNED: tl.constexpr,
    HAS_OK: tl.constexpr, ETA_ON_DEVICE: tl.constexpr, PHI_ON_DEVICE: tl.constexpr, CAUTIOUS: tl.constexpr,
    ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, EPS: tl.constexpr, SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    owner, offsets, inside = _place(sizes, blocks, ok, HAS_OK, ALIGNED, BLOCK)
    first = whole_number(pointers, STATE_ROW * tensors + owner, DIRECTIONS_ALIGNED)
    direction = tl.load(directions + first + offsets, mask=inside, other=0.0).to(tl.float32)
    _write(
        pointers, tensors, owner, offsets, inside, direction, eta, phi, scale,
        ETA_ON_DEVICE, PHI_ON_DEVICE, CAUTIOUS, ROUNDING, WEIGHT, EPS, SMALLEST, ALIGNED,
    )


@triton.jit
def _adamw(
    pointers, sizes, blocks, tensors, corrections, beta1, gain1, beta2, gain2, eta, phi, scale, ok,
    STATE_ROW: tl.constexpr, MAXIMIZE: tl.constexpr, GAIN_SMALL: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr,
    HAS_OK: tl.constexpr, ETA_ON_DEVICE: tl.constexpr, PHI_ON_DEVICE: tl.constexpr, CAUTIOUS: tl.constexpr,
    ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, EPS: tl.constexpr, SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    owner, offsets, inside = _place(sizes, blocks, ok, HAS_OK, ALIGNED, BLOCK)
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
    root = tl.sqrt(v.to(tl.float32)) * tl.load(corrections + owner) + tl.load(corrections + tensors + owner)
    _write(
        pointers, tensors, owner, offsets, inside, m.to(tl.float32) / root, eta, phi, scale,
        ETA_ON_DEVICE, PHI_ON_DEVICE, CAUTIOUS, ROUNDING, WEIGHT, EPS, SMALLEST, ALIGNED,
    )


@triton.jit
def _sgd(
    pointers, sizes, blocks, tensors, beta, gain, eta, phi, scale, ok,
    STATE_ROW: tl.constexpr, MAXIMIZE: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    EMA: tl.constexpr, GAIN_SMALL: tl.constexpr, BETA_SMALL: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr,
    HAS_OK: tl.constexpr, ETA_ON_DEVICE: tl.constexpr, PHI_ON_DEVICE: tl.constexpr, CAUTIOUS: tl.constexpr,
    ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, EPS: tl.constexpr, SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    owner, offsets, inside = _place(sizes, blocks, ok, HAS_OK, ALIGNED, BLOCK)
    g = tl.load(start(pointers, STATE_ROW * tensors + owner, GRAD, ALIGNED) + offsets, mask=inside, other=0.0)
    g = g.to(STATE).to(tl.float32)
    if MAXIMIZE:
        g = -g
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
    _write(
        pointers, tensors, owner, offsets, inside, g, eta, phi, scale,
        ETA_ON_DEVICE, PHI_ON_DEVICE, CAUTIOUS, ROUNDING, WEIGHT, EPS, SMALLEST, ALIGNED,
    )


def takes(*lists: Sequence[Tensor]) -> bool:
    """Whether each list has one dtype that the kernels read, and only contiguous tensors."""
    return all(
        tensors[0].dtype in DTYPES and all(t.dtype == tensors[0].dtype and t.is_contiguous() for t in tensors)
        for tensors in lists
    )


def adamw(
    weights: Weights,
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    corrections: Tensor,
    betas: tuple[float, float],
    maximize: bool,
    motion: Motion,
) -> None:
    """One step of AdamW; `corrections` `(2, n)` multiply and raise the root of the average square."""
    beta1, beta2 = betas
    _launch(
        _adamw, weights, (grads, averages, squares), motion,
        (corrections, beta1, 1 - beta1, beta2, 1 - beta2),
        {"MAXIMIZE": maximize, "GAIN_SMALL": 1 - beta1 < 0.5, "STATE": DTYPES[averages[0].dtype]},
    )


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
    _launch(
        _sgd, weights, (grads, momenta) if momenta else (grads,), motion, (beta, gain),
        {
            "MAXIMIZE": maximize, "HAS_MOMENTUM": bool(momenta), "NESTEROV": nesterov, "EMA": form == "ema",
            "GAIN_SMALL": gain < 0.5, "BETA_SMALL": beta < 0.5, "STATE": DTYPES[(momenta or grads)[0].dtype],
        },
    )


def move(weights: Weights, directions: Sequence[Tensor], motion: Motion) -> bool:
    """Move weights along directions that lie one after another in memory; False, and nothing done, if they do not."""
    stretches = runs(weights.tensors)
    dtypes = (weights.tensors[0].dtype, directions[0].dtype)
    if stretches is None or not _are_one_batch(directions) or not all(dtype in DTYPES for dtype in dtypes):
        return False
    addresses, sizes = [run.address for run in stretches], tuple([run.size for run in stretches])
    companions = _rounding_rows(weights, stretches)
    first = [0, *accumulate(sizes[:-1])]
    device = directions[0].device
    pointers = table((addresses, *companions, first, sizes), device)
    blocks = block_map(sizes, BLOCK, device)
    _move[(blocks.shape[1],)](
        pointers, pointers[-1], blocks, len(sizes), directions[0], *_scalars(motion, pointers),
        STATE_ROW=1 + len(companions), DIRECTIONS_ALIGNED=not any(place % 16 for place in first),
        **_options(weights, motion, aligned(addresses, sizes)), BLOCK=BLOCK, num_warps=WARPS,
    )
    return True


def _are_one_batch(directions: Sequence[Tensor]) -> bool:
    expected = directions[0].data_ptr()
    for direction in directions:
        if not direction.is_contiguous() or direction.data_ptr() != expected:
            return False
        expected += direction.numel() * direction.element_size()
    return True


def _launch(kernel, weights: Weights, state, motion: Motion, arguments, options) -> None:
    sizes = tuple([t.numel() for t in weights.tensors])
    columns = [[t.data_ptr() for t in tensors] for tensors in (weights.tensors, *state)]
    companions = _rounding_rows(weights, [Run(0, 0, owner, 0) for owner in range(len(sizes))])
    device = weights.tensors[0].device
    pointers = table((columns[0], *companions, *columns[1:], sizes), device)
    blocks = block_map(sizes, BLOCK, device)
    kernel[(blocks.shape[1],)](
        pointers, pointers[-1], blocks, len(sizes), *arguments, *_scalars(motion, pointers),
        STATE_ROW=1 + len(companions), GRAD=DTYPES[state[0][0].dtype], **options,
        **_options(weights, motion, aligned(*columns, sizes)), BLOCK=BLOCK, num_warps=WARPS,
    )


def _rounding_rows(weights: Weights, stretches: Sequence[Run]) -> list[list[int]]:
    """The rows of the table that belong to the rounding, one column for each stretch of the weights."""
    if weights.rounding == "nearest":
        return []
    if weights.rounding == "kahan":
        return [[run.address for run in runs(weights.compensations) or ()]]
    counters = [counter.data_ptr() for counter in weights.counters]
    owners = [run.owner for run in stretches]
    return [[counters[o] for o in owners], [weights.keys[o] for o in owners], [run.position for run in stretches]]


def _scalars(motion: Motion, unused: Tensor):
    return motion.eta, motion.phi, motion.scale, flag(motion.ok, unused)


def _options(weights: Weights, motion: Motion, is_aligned: bool) -> dict[str, object]:
    dtype = weights.tensors[0].dtype
    info = torch.finfo(dtype)
    return {
        "HAS_OK": motion.ok is not None,
        "ETA_ON_DEVICE": isinstance(motion.eta, Tensor),
        "PHI_ON_DEVICE": isinstance(motion.phi, Tensor),
        "CAUTIOUS": motion.cautious,
        "ROUNDING": ROUNDINGS[weights.rounding],
        "WEIGHT": DTYPES[dtype],
        "EPS": info.eps,
        "SMALLEST": info.smallest_normal,
        "ALIGNED": is_aligned,
    }
