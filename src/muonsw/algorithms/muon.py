"""Muon: momentum, orthogonalized matrix by matrix and stretched to the size of its shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw.algorithms import momentum
from muonsw.algorithms.base import (
    Algorithm,
    Budget,
    Group,
    Item,
    Narrows,
    Part,
    Region,
    Update,
    WholeMatrices,
    are_large,
    clean,
)
from muonsw.orthogonalize import ORTHOGONALIZERS
from muonsw.precision import compute_dtype, state_dtype
from muonsw.scale import SHAPE_SCALES

STACK, FLATTEN = "stack", "flatten"


class Bucket(NamedTuple):
    """What matrices must share to be one batch."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device


def state_keys(group: Group) -> tuple[str, ...]:  # noqa: ARG001
    """One buffer for each parameter, under torch's name."""
    return ("momentum_buffer",)


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update]:
    """Directions polar(M), one batch of equal matrices after another."""
    scale, orthogonalize = SHAPE_SCALES[group["scale"]], ORTHOGONALIZERS[group["orthogonalizer"]]
    for bucket, parts in _batches(group, items, budget.chunk_bytes):
        matrices = _momentum_matrices(group, bucket, parts, budget.ok)
        orthogonal = orthogonalize(
            matrices,
            steps=group["ns_steps"],
            dtype=compute_dtype(group["ns_dtype"], bucket.dtype, bucket.device),
        )
        like = [part.grad for part in parts]
        if budget.ok is not None and not are_large(like):
            orthogonal = orthogonal.to(bucket.dtype)  # one cast for all: kernels for many tensors want one dtype
        yield Update(parts, _scatter(orthogonal, like), scale(*_out_in(group, bucket.rows, bucket.columns)))


def _momentum_matrices(group: Group, bucket: Bucket, parts: list[Part], ok: Tensor | None) -> Tensor:
    """Advance the momentum of `parts` and return what is to be orthogonalized, (batch, rows, columns)."""
    form, beta, maximize = group["momentum_form"], group["momentum"], group["maximize"]
    momenta = [part.state("momentum_buffer") for part in parts]
    grads = [part.grad for part in parts]
    if ok is None or are_large(grads):
        grads = clean(grads, momenta, maximize, ok)
        ahead = _empty_batch(momenta, bucket)
        targets = _scatter(ahead, momenta)
    else:
        ahead = clean([_gather(grads, bucket)], momenta[:1], maximize, ok)[0]
        targets = grads = _scatter(ahead, momenta)
    momentum.advance(form, momenta, grads, beta, ok)
    if not group["nesterov"]:
        return _gather(momenta, bucket)
    momentum.look_ahead(form, momenta, grads, beta, out=targets)
    return ahead


def _out_in(group: Group, rows: int, columns: int) -> tuple[int, int]:
    """(out, in) of matrices, which may be stored as (in, out); polar(M^T) = polar(M)^T needs no more."""
    return (columns, rows) if group["transposed"] else (rows, columns)


def _empty_batch(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Room for all matrices of these tensors."""
    count = sum(t.numel() for t in tensors) // (bucket.rows * bucket.columns)
    return tensors[0].new_empty(count, bucket.rows, bucket.columns)


def _gather(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Copy matrices and stacks of matrices into one batch."""
    if all(t.dim() == 2 for t in tensors):
        return torch.stack(list(tensors))
    return torch.cat([t.reshape(-1, bucket.rows, bucket.columns) for t in tensors])


def _scatter(batch: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a batch in the shapes of the tensors it was gathered from."""
    if all(t.dim() == 2 for t in like):
        return list(batch.unbind())
    area = batch.shape[-2] * batch.shape[-1]
    pieces = batch.split_with_sizes([t.numel() // area for t in like])
    return [piece.reshape(t.shape) for piece, t in zip(pieces, like, strict=True)]


def _batches(group: Group, items: list[Item], chunk_bytes: int) -> Iterator[tuple[Bucket, list[Part]]]:
    """Matrices of equal shape, over all parameters of the group, in chunks bounded in bytes."""
    buckets: dict[Bucket, list[tuple[Part, int]]] = {}
    for item in items:
        for narrow in _splits(group, item.param):
            _collect(buckets, group, item, narrow, chunk_bytes)
    for bucket, counted in buckets.items():
        capacity = _capacity(bucket, chunk_bytes)
        chunk: list[Part] = []
        room = capacity
        for part, count in counted:
            if chunk and count > room:
                yield bucket, chunk
                chunk, room = [], capacity
            chunk.append(part)
            room -= count
        yield bucket, chunk


def _collect(
    buckets: dict[Bucket, list[tuple[Part, int]]],
    group: Group,
    item: Item,
    narrow: tuple[tuple[int, int, int], ...],
    chunk_bytes: int,
) -> None:
    """Put the matrices of one (possibly split) parameter into their bucket, long stacks cut into even runs."""
    shape = Region(narrow).of(item.param).shape
    rows, columns = matrix_shape(shape, group["matrix"])
    bucket = Bucket(rows, columns, item.param.dtype, item.param.device)
    if shape.numel() == 0:
        return
    parts = buckets.setdefault(bucket, [])
    count = shape.numel() // (rows * columns)
    if count == 1:
        parts.append((Part(item, Region(narrow)), 1))
        return
    slices, per_slice = shape[0], count // shape[0]
    runs = min(slices, math.ceil(count / _capacity(bucket, chunk_bytes)))
    bounds = [slices * i // runs for i in range(runs + 1)]
    for start, end in pairwise(bounds):
        cut = narrow if runs == 1 else (*narrow, (0, start, end - start))
        parts.append((Part(item, Region(cut)), (end - start) * per_slice))


def _capacity(bucket: Bucket, chunk_bytes: int) -> int:
    """How many matrices of a bucket fit into a chunk, as float32; at least one."""
    return max(1, chunk_bytes // (4 * bucket.rows * bucket.columns))


def matrix_shape(shape: Sequence[int], matrix: str | None) -> tuple[int, int]:
    """(rows, columns) of the matrices in a parameter as they are stored."""
    if matrix == FLATTEN:
        return shape[0], math.prod(shape[1:])
    return shape[-2], shape[-1]


def count_matrices(group: Group, param: Tensor) -> int:
    """How many matrices of a parameter are orthogonalized, each on its own."""
    if not param.numel():
        return 0
    stack = math.prod(param.shape[: _first_axis(group, param.dim())])
    return stack * sum(1 for _, rows, columns in _cells(group, param.shape) if rows * columns)


def _splits(group: Group, param: Tensor) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """The cuts that turn a fused projection into its parts."""
    sizes = split_sizes(group, param)
    if sizes is None:
        yield ()
        return
    start, axis = 0, split_axis(group, param)
    for size in sizes:
        yield ((axis, start, size),)
        start += size


def split_sizes(group: Group, param: Tensor) -> tuple[int, ...] | None:
    """Sizes of the parts along the split axis, or None for a parameter that is whole; `heads` means equal parts."""
    if group["heads"] is None:
        sizes: tuple[int, ...] | None = group["split_sizes"]
        return sizes
    heads: int = group["heads"]
    return (param.shape[split_axis(group, param)] // heads,) * heads


def split_axis(group: Group, param: Tensor) -> int:
    """The tensor axis of `split_dim`, which counts the axes of the matrix: 0 out, 1 in."""
    first, second = (0, 1) if group["matrix"] == FLATTEN else (param.dim() - 2, param.dim() - 1)
    is_second = bool(group["split_dim"]) != group["transposed"]
    return second if is_second else first


def validate(group: Group, name: str, param: Tensor) -> None:
    """A parameter must be seen as matrices in exactly one way."""
    shape = tuple(param.shape)
    if param.dim() < 2:
        raise ValueError(
            f"Muon needs matrices, but {name} has shape {shape}; give it a group with algorithm='adamw', "
            f"or let MuonSW.for_model route the whole model"
        )
    if param.dim() > 2 and group["matrix"] is None:
        raise ValueError(
            f"{name} has shape {shape}, which can be seen as matrices in two ways; say matrix='stack' where the last "
            f"two axes are (out, in) and the others count matrices (experts), or matrix='flatten' where the first "
            f"axis is out and the others are in (convolutions)"
        )
    _validate_splits(group, name, param)


def _validate_splits(group: Group, name: str, param: Tensor) -> None:
    heads, sizes, axis = group["heads"], group["split_sizes"], split_axis(group, param)
    found = f"{name} of shape {tuple(param.shape)} has {param.shape[axis]} along axis {axis}"
    if heads is not None and sizes is not None:
        raise ValueError(f"heads={heads} and split_sizes={tuple(sizes)} both say how to split {name}; give one of them")
    if heads is not None and param.shape[axis] % heads:
        raise ValueError(f"heads={heads} asks for equal blocks, but {found}")
    if sizes is not None and sum(sizes) != param.shape[axis]:
        raise ValueError(f"split_sizes={tuple(sizes)} add up to {sum(sizes)}, but {found}")


def _first_axis(group: Group, axes: int) -> int:
    return 0 if group["matrix"] == FLATTEN else axes - 2


def _cells(group: Group, shape: torch.Size) -> Iterator[tuple[Narrows, int, int]]:
    """The parts of a parameter of this shape, with the shape of their matrices."""
    like = torch.empty(shape, device="meta")
    for narrow in _splits(group, like):
        yield narrow, *matrix_shape(Region(narrow).of(like).shape, group["matrix"])


def _advance(group: Group, parts: list[Part], targets: list[Tensor] | None, ok: Tensor | None) -> None:
    """Advance the momentum of `parts`, and write what is to be orthogonalized to `targets`."""
    form, beta = group["momentum_form"], group["momentum"]
    momenta = [part.state("momentum_buffer") for part in parts]
    grads = clean([part.grad for part in parts], momenta, group["maximize"], ok)
    momentum.advance(form, momenta, grads, beta, ok)
    if targets is not None and group["nesterov"]:
        momentum.look_ahead(form, momenta, grads, beta, out=targets)
    elif targets is not None:
        torch._foreach_copy_(targets, momenta)


# The rule of `updates` in two halves, for matrices that are spread over ranks.
WHOLE_MATRICES = WholeMatrices(
    first_axis=_first_axis,
    cells=_cells,
    sent_dtype=lambda group, dtype: state_dtype(group["state_dtype"], dtype),
    result_dtype=lambda group, dtype, device: compute_dtype(group["ns_dtype"], dtype, device),
    advance=_advance,
    directions=lambda group, matrices, dtype: ORTHOGONALIZERS[group["orthogonalizer"]](
        matrices, steps=group["ns_steps"], dtype=dtype
    ),
    scale=lambda group, rows, columns: SHAPE_SCALES[group["scale"]](*_out_in(group, rows, columns)),
)


MUON = Algorithm(
    defaults={
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "orthogonalizer": "newton_schulz",
        "ns_steps": 5,
        "ns_dtype": "auto",
        "scale": "match_rms_adamw",
        "matrix": None,
        "transposed": False,
        "split_sizes": None,
        "split_dim": 0,
        "heads": None,
    },
    state_keys=state_keys,
    updates=updates,
    validate=validate,
    matrices=count_matrices,
    whole=WHOLE_MATRICES,
)
