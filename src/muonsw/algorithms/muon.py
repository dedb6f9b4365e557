"""Muon: momentum, orthogonalized matrix by matrix and stretched to the size of its shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms import momentum
from muonsw.algorithms.base import Algorithm, Budget, Group, Item, Part, Region, Update, are_large, clean
from muonsw.orthogonalize import ITERATIONS, ORTHOGONALIZERS
from muonsw.precision import compute_dtype
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
    scale = SHAPE_SCALES[group["scale"]]
    for bucket, parts in _batches(group, items, budget.chunk_bytes):
        orthogonal = _fused_directions(group, bucket, parts, budget.ok)
        if orthogonal is None:
            orthogonal = _directions(group, bucket, parts, budget.ok)
        yield Update(parts, _scatter(orthogonal, [part.grad for part in parts]), scale(bucket.rows, bucket.columns))


def _directions(group: Group, bucket: Bucket, parts: list[Part], ok: Tensor | None) -> Tensor:
    """Orthogonalized momentum of `parts`, (batch, rows, columns)."""
    orthogonal = ORTHOGONALIZERS[group["orthogonalizer"]](
        _momentum_matrices(group, bucket, parts, ok),
        steps=group["ns_steps"],
        dtype=compute_dtype(group["ns_dtype"], bucket.dtype, bucket.device),
    )
    if ok is not None and not are_large([part.grad for part in parts]):
        return orthogonal.to(bucket.dtype)  # one cast for all: kernels for many tensors want one dtype
    return orthogonal


def _fused_directions(group: Group, bucket: Bucket, parts: list[Part], ok: Tensor | None) -> Tensor | None:
    """The same from a kernel that reads gradients and momenta where they lie; None where there is none for them."""
    iteration = ITERATIONS.get(ORTHOGONALIZERS[group["orthogonalizer"]])
    if iteration is None or not kernels.available(bucket.device):
        return None
    from muonsw.kernels.momentum import normalized_momentum, takes

    grads = [_as_matrices(part.grad, bucket) for part in parts]
    momenta = [_as_matrices(part.state("momentum_buffer"), bucket) for part in parts]
    dtype = iteration.inner(compute_dtype(group["ns_dtype"], bucket.dtype, bucket.device), bucket.device)
    if not takes(grads, momenta, dtype):
        return None
    X = normalized_momentum(
        grads,
        momenta,
        form=group["momentum_form"],
        beta=group["momentum"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        ok=ok,
        dtype=dtype,
    )
    if bucket.rows > bucket.columns:
        return iteration.run(X.mT, group["ns_steps"]).mT
    return iteration.run(X, group["ns_steps"])


def _as_matrices(tensor: Tensor, bucket: Bucket) -> Tensor:
    """A part as one matrix or a stack of them, as a view where its layout allows."""
    shape = (bucket.rows, bucket.columns)
    if tensor.dim() <= 3 and tensor.shape[-2:] == shape:
        return tensor
    return tensor.view(-1, *shape) if tensor.is_contiguous() else tensor


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
    """(rows, columns) = (out, in) of the matrices in a parameter."""
    if matrix == FLATTEN:
        return shape[0], math.prod(shape[1:])
    return shape[-2], shape[-1]


def _splits(group: Group, param: Tensor) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """The cuts that turn a fused projection into its parts."""
    if group["split_sizes"] is None:
        yield ()
        return
    start = 0
    for size in group["split_sizes"]:
        yield ((_split_axis(group, param), start, size),)
        start += size


def _split_axis(group: Group, param: Tensor) -> int:
    """The tensor axis of `split_dim`, which counts the axes of the matrix: 0 out, 1 in."""
    first = 0 if group["matrix"] == FLATTEN else param.dim() - 2
    return int(first + group["split_dim"])


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
    sizes = group["split_sizes"]
    if sizes is not None and sum(sizes) != shape[_split_axis(group, param)]:
        raise ValueError(
            f"split_sizes={tuple(sizes)} add up to {sum(sizes)}, but {name} of shape {shape} has "
            f"{shape[_split_axis(group, param)]} along axis {_split_axis(group, param)}"
        )


MUON = Algorithm(
    defaults={
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "orthogonalizer": "auto",
        "ns_steps": 5,
        "ns_dtype": "auto",
        "scale": "match_rms_adamw",
        "matrix": None,
        "split_sizes": None,
        "split_dim": 0,
    },
    state_keys=state_keys,
    updates=updates,
    validate=validate,
)
