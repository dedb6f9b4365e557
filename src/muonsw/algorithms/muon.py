"""Muon: momentum, orthogonalized matrix by matrix and stretched to the size of its shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms import momentum
from muonsw.algorithms.base import (
    WHOLE,
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
    views,
)
from muonsw.flag import Flag
from muonsw.orthogonalize import ITERATIONS, ORTHOGONALIZERS
from muonsw.precision import LOW_PRECISION, compute_dtype, state_dtype
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
        grads = views(parts, [part.item.grad for part in parts])
        momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
        yield Update(
            parts,
            _scatter(_directions(group, bucket, grads, momenta, budget.flag), grads),
            scale(*_out_in(group, bucket.rows, bucket.columns)),
        )


def _directions(group: Group, bucket: Bucket, grads: list[Tensor], momenta: list[Tensor], flag: Flag | None) -> Tensor:
    """Orthogonalized momentum, (batch, rows, columns)."""
    fused = _fused_directions(group, bucket, grads, momenta, flag)
    if fused is not None:
        return fused
    orthogonal = ORTHOGONALIZERS[group["orthogonalizer"]](
        _momentum_matrices(group, bucket, grads, momenta, None if flag is None else flag.ok),
        steps=group["ns_steps"],
        dtype=compute_dtype(group["ns_dtype"], bucket.dtype, bucket.device),
    )
    if flag is None or are_large(grads) or bucket.dtype in LOW_PRECISION:
        return orthogonal
    return orthogonal.to(bucket.dtype)  # one cast for all: kernels for many tensors want one dtype


def _fused_directions(
    group: Group, bucket: Bucket, grads: list[Tensor], momenta: list[Tensor], flag: Flag | None
) -> Tensor | None:
    """The same from a kernel that reads gradients and momenta where they lie; None where there is none for them."""
    iteration = ITERATIONS.get(ORTHOGONALIZERS[group["orthogonalizer"]])
    if iteration is None or not kernels.available(bucket.device):
        return None
    from muonsw.kernels.momentum import normalized_momentum, takes

    grads, momenta = _as_matrices(grads, bucket), _as_matrices(momenta, bucket)
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
        flag=flag,
        dtype=dtype,
    )
    if bucket.rows > bucket.columns:
        return iteration.run(X.mT, group["ns_steps"]).mT
    return iteration.run(X, group["ns_steps"])


def _as_matrices(tensors: list[Tensor], bucket: Bucket) -> list[Tensor]:
    """Each tensor as one matrix or a stack of them, as a view where its layout allows."""
    shape = torch.Size((bucket.rows, bucket.columns))
    if all(tensor.shape == shape for tensor in tensors):
        return tensors
    return [
        t.view(-1, *shape) if t.is_contiguous() and not (t.dim() <= 3 and t.shape[-2:] == shape) else t for t in tensors
    ]


def _momentum_matrices(
    group: Group, bucket: Bucket, grads: list[Tensor], momenta: list[Tensor], ok: Tensor | None
) -> Tensor:
    """Advance momenta and return what is to be orthogonalized, (batch, rows, columns)."""
    form, beta, maximize = group["momentum_form"], group["momentum"], group["maximize"]
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
    shapes = tuple([item.param.shape for item in items])
    dtypes = tuple([item.param.dtype for item in items])
    plan = _plan if torch.compiler.is_compiling() else _remembered_plan
    for (rows, columns, dtype), places in plan(shapes, dtypes, _cuts(group), chunk_bytes):
        bucket = Bucket(rows, columns, dtype, items[0].param.device)
        yield bucket, [Part(items[index], region) for index, region in places]


Chunk = tuple[tuple[int, int, torch.dtype], list[tuple[int, Region]]]


def _plan(
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    cuts: Cuts,
    chunk_bytes: int,
) -> list[Chunk]:
    """Which parts of which parameters are batched together: it follows from shapes and settings alone."""
    buckets: dict[tuple[int, int, torch.dtype], list[tuple[int, Region, int]]] = {}
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        for narrow in _splits(shape, cuts):
            part = _narrowed(shape, narrow)
            if part.numel():
                rows, columns = matrix_shape(part, cuts.matrix)
                capacity = _capacity(rows, columns, chunk_bytes)
                runs = [(index, region, count) for region, count in _runs(part, narrow, rows * columns, capacity)]
                buckets.setdefault((rows, columns, dtype), []).extend(runs)
    return [
        (bucket, chunk)
        for bucket, counted in buckets.items()
        for chunk in _chunks(counted, _capacity(*bucket[:2], chunk_bytes))
    ]


_remembered_plan = lru_cache(maxsize=128)(_plan)


def _runs(shape: torch.Size, narrow: Narrows, area: int, capacity: int) -> Iterator[tuple[Region, int]]:
    """A parameter, or one split of it, with the number of its matrices; long stacks cut into even runs."""
    whole = Region(narrow) if narrow else WHOLE
    count = shape.numel() // area
    if count == 1:
        yield whole, 1
        return
    slices, per_slice = shape[0], count // shape[0]
    runs = min(slices, math.ceil(count / capacity))
    for start, end in pairwise(slices * i // runs for i in range(runs + 1)):
        region = whole if runs == 1 else Region((*narrow, (0, start, end - start)))
        yield region, (end - start) * per_slice


def _chunks(counted: list[tuple[int, Region, int]], capacity: int) -> Iterator[list[tuple[int, Region]]]:
    """Parts with their numbers of matrices, as many together as fit."""
    chunk: list[tuple[int, Region]] = []
    room = capacity
    for index, region, count in counted:
        if chunk and count > room:
            yield chunk
            chunk, room = [], capacity
        chunk.append((index, region))
        room -= count
    yield chunk


def _capacity(rows: int, columns: int, chunk_bytes: int) -> int:
    """How many matrices fit into a chunk, as float32; at least one."""
    return max(1, chunk_bytes // (4 * rows * columns))


def matrix_shape(shape: Sequence[int], matrix: str | None) -> tuple[int, int]:
    """(rows, columns) of the matrices in a parameter as they are stored."""
    if len(shape) < 2:
        raise ValueError(
            f"a matrix that Muon was built with has become a vector of {math.prod(shape)} entries: something has "
            f"flattened the parameters since, as DeepSpeed's ZeRO does. Keep them whole (ZeRO stage 0, DDP, FSDP2)"
        )
    if matrix == FLATTEN:
        return shape[0], math.prod(shape[1:])
    return shape[-2], shape[-1]


def count_matrices(group: Group, param: Tensor) -> int:
    """How many matrices of a parameter are orthogonalized, each on its own."""
    cuts = _cuts(group)
    shapes = [_narrowed(param.shape, narrow) for narrow in _splits(param.shape, cuts)]
    return sum(shape.numel() // math.prod(matrix_shape(shape, cuts.matrix)) for shape in shapes if shape.numel())


class Cuts(NamedTuple):
    """The options of a group that say which matrices its parameters hold."""

    matrix: str | None
    transposed: bool
    split_sizes: tuple[int, ...] | None
    split_dim: int
    heads: int | None


def _cuts(group: Group) -> Cuts:
    sizes = group["split_sizes"]
    return Cuts(
        group["matrix"],
        group["transposed"],
        None if sizes is None else tuple(sizes),
        group["split_dim"],
        group["heads"],
    )


def _splits(shape: Sequence[int], cuts: Cuts) -> Iterator[Narrows]:
    """The cuts that turn a fused projection into its parts."""
    sizes = _split_sizes(shape, cuts)
    if sizes is None:
        yield ()
        return
    start, axis = 0, _split_axis(shape, cuts)
    for size in sizes:
        yield ((axis, start, size),)
        start += size


def split_sizes(group: Group, param: Tensor) -> tuple[int, ...] | None:
    """Sizes of the matrices along the split axis of a parameter, or None where it is not split."""
    return _split_sizes(param.shape, _cuts(group))


def split_axis(group: Group, param: Tensor) -> int:
    """The axis of a parameter along which it is split."""
    return _split_axis(param.shape, _cuts(group))


def _split_sizes(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...] | None:
    """Sizes of the parts along the split axis, or None for a parameter that is whole; `heads` means equal parts."""
    if cuts.heads is None:
        return cuts.split_sizes
    return (shape[_split_axis(shape, cuts)] // cuts.heads,) * cuts.heads


def _split_axis(shape: Sequence[int], cuts: Cuts) -> int:
    """The tensor axis of `split_dim`, which counts the axes of the matrix: 0 out, 1 in."""
    first, second = (0, 1) if cuts.matrix == FLATTEN else (len(shape) - 2, len(shape) - 1)
    return second if bool(cuts.split_dim) != cuts.transposed else first


def _narrowed(shape: torch.Size, narrow: Narrows) -> torch.Size:
    """The shape of a part."""
    lengths = list(shape)
    for axis, _, length in narrow:
        lengths[axis] = length
    return torch.Size(lengths)


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
    for narrow in _splits(shape, _cuts(group)):
        yield narrow, *matrix_shape(_narrowed(shape, narrow), group["matrix"])


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
        "orthogonalizer": "auto",
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
