"""Muon: momentum, orthogonalized matrix by matrix and scaled by the shape.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Unlike the author's code, the caller's
gradient is never changed, and equal matrices of all parameters are one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms.base import (
    Algorithm,
    Budget,
    MatrixRule,
    Update,
    advance_momentum,
    are_large,
    clean,
    look_ahead,
)
from muonsw.machine import product_dtype
from muonsw.matrices import SHAPE_SCALES, Bucket, MatrixView, Part, chunks, remembered_chunks, views
from muonsw.nonfinite import Flag
from muonsw.orthogonalize import ITERATIONS, ORTHOGONALIZERS
from muonsw.precision import LOW_PRECISION, state_dtype
from muonsw.work import Group, Item


def state_keys(group: Group) -> tuple[str, ...]:  # noqa: ARG001
    """One buffer for each parameter, under torch's name."""
    return ("momentum_buffer",)


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update]:
    """Directions polar(M), one batch of equal matrices after another."""
    shapes, dtypes = tuple([item.param.shape for item in items]), tuple([item.param.dtype for item in items])
    plan = chunks if torch.compiler.is_compiling() else remembered_chunks
    for bucket, regions in plan(shapes, dtypes, MatrixView.of(group), budget.chunk_bytes):
        parts = [Part(items[index], region) for index, region in regions]
        directions = _directions(group, bucket, parts, budget)
        yield Update(parts, directions, _scale(group, bucket.rows, bucket.columns))


def _directions(group: Group, bucket: Bucket, parts: list[Part], budget: Budget) -> list[Tensor]:
    """Orthogonalized momentum of parts with equal matrices, each in the shape of its part."""
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    flag = budget.flag
    matrices = None if group["fused"] is False else _by_kernel(group, bucket, grads, momenta, flag)
    if matrices is None:
        ahead = _empty_batch(momenta, bucket)
        _advance(group, grads, momenta, _scatter(ahead, momenta), None if flag is None else flag.ok)
        matrices = _orthogonalize(group, ahead, product_dtype(group["ns_dtype"], bucket.dtype, ahead.device))
        if flag is not None and not are_large(grads) and bucket.dtype not in LOW_PRECISION:
            matrices = matrices.to(bucket.dtype)  # one cast for all: kernels for many tensors want one dtype
    return _scatter(matrices, grads)


def _by_kernel(
    group: Group, bucket: Bucket, grads: list[Tensor], momenta: list[Tensor], flag: Flag | None
) -> Tensor | None:
    """The same from a kernel that reads gradients and momenta where they lie; None where there is none for them."""
    device = grads[0].device
    iteration = ITERATIONS.get(ORTHOGONALIZERS[group["orthogonalizer"]])
    if iteration is None or not kernels.available(device):
        return None
    from muonsw.kernels.momentum import normalized_momentum, takes

    grads, momenta = _as_matrices(grads, bucket), _as_matrices(momenta, bucket)
    dtype = iteration.inner(product_dtype(group["ns_dtype"], bucket.dtype, device), device)
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


def _advance(
    group: Group, grads: list[Tensor], momenta: list[Tensor], targets: list[Tensor] | None, ok: Tensor | None
) -> None:
    """Advance momenta in place, and write what is to be orthogonalized to `targets`, if there are any."""
    form, beta = group["momentum_form"], group["momentum"]
    grads = clean(grads, momenta, group["maximize"], ok)
    advance_momentum(form, momenta, grads, beta, ok)
    if targets is not None and group["nesterov"]:
        look_ahead(form, momenta, grads, beta, out=targets)
    elif targets is not None:
        torch._foreach_copy_(targets, momenta)


def _orthogonalize(group: Group, matrices: Tensor, dtype: torch.dtype) -> Tensor:
    return ORTHOGONALIZERS[group["orthogonalizer"]](matrices, steps=group["ns_steps"], dtype=dtype)


def _scale(group: Group, rows: int, columns: int) -> float:
    return SHAPE_SCALES[group["scale"]](*MatrixView.of(group).out_in(rows, columns))


def _as_matrices(tensors: list[Tensor], bucket: Bucket) -> list[Tensor]:
    """Each tensor as one matrix or a stack of them, as a view where its layout allows."""
    shape = torch.Size((bucket.rows, bucket.columns))
    if all(tensor.shape == shape for tensor in tensors):
        return tensors
    return [
        t.view(-1, *shape) if t.is_contiguous() and not (t.dim() <= 3 and t.shape[-2:] == shape) else t for t in tensors
    ]


def _empty_batch(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Room for all matrices of these tensors."""
    count = sum(t.numel() for t in tensors) // (bucket.rows * bucket.columns)
    return tensors[0].new_empty(count, bucket.rows, bucket.columns)


def _scatter(batch: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a batch (count, rows, columns) in the shapes of tensors that hold as many matrices together."""
    if all(t.dim() == 2 for t in like):
        return list(batch.unbind())
    area = batch.shape[-2] * batch.shape[-1]
    pieces = batch.split_with_sizes([t.numel() // area for t in like])
    return [piece.reshape(t.shape) for piece, t in zip(pieces, like, strict=True)]


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
    heads, sizes, axis = group["heads"], group["split_sizes"], MatrixView.of(group).split_axis(param.shape)
    found = f"{name} of shape {tuple(param.shape)} has {param.shape[axis]} along axis {axis}"
    if heads is not None and sizes is not None:
        raise ValueError(f"heads={heads} and split_sizes={tuple(sizes)} both say how to split {name}; give one of them")
    if heads is not None and param.shape[axis] % heads:
        raise ValueError(f"heads={heads} asks for equal blocks, but {found}")
    if sizes is not None and sum(sizes) != param.shape[axis]:
        raise ValueError(f"split_sizes={tuple(sizes)} add up to {sum(sizes)}, but {found}")


def _advance_parts(group: Group, parts: list[Part], targets: list[Tensor] | None, ok: Tensor | None) -> None:
    momenta = [part.state("momentum_buffer") for part in parts]
    _advance(group, [part.grad for part in parts], momenta, targets, ok)


# The rule of `updates` in two halves, for sharded matrices.
MATRIX_RULE = MatrixRule(
    sent_dtype=lambda group, dtype: state_dtype(group["state_dtype"], dtype),
    result_dtype=lambda group, dtype, device: product_dtype(group["ns_dtype"], dtype, device),
    advance=_advance_parts,
    directions=_orthogonalize,
    scale=_scale,
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
    matrices=MATRIX_RULE,
    scale_free=True,
)
