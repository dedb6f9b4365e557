"""Muon's step by kernels, where tensors are laid out as they read them: momentum, and the two slots.

Called where there are kernels, each function does what `algorithms/muon.py` does with torch's operations, or says that
it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonsw.algorithms.base import Budget
from muonsw.algorithms.whole import StateBatch
from muonsw.machine import product_dtype
from muonsw.matrices import Bucket, MatrixView, Part
from muonsw.nonfinite import Flag
from muonsw.normalize import ADAMUON, MUON_PLUS, NORMALIZE, NORMUON
from muonsw.orthogonalize import ITERATIONS, ORTHOGONALIZERS
from muonsw.precondition import EQUALIZE, MUON2, PRECONDITION, SIGN
from muonsw.slots import SlotMember
from muonsw.work import Group

if TYPE_CHECKING:
    from muonsw.kernels.momentum import Precondition


def in_kernels(member: SlotMember | None) -> bool:
    """Whether our kernels do what a member of a slot does, where tensors are laid out as they read them."""
    return member is None or any(member is known for known in (SIGN, MUON2, EQUALIZE, NORMUON, ADAMUON, MUON_PLUS))


def orthogonalized_momentum(
    group: Group, bucket: Bucket, parts: list[Part], grads: list[Tensor], momenta: list[Tensor], flag: Flag | None
) -> Tensor | None:
    """Advance momenta, precondition and orthogonalize; None, and nothing done, where there is no kernel for it."""
    device = grads[0].device
    iteration = ITERATIONS.get(ORTHOGONALIZERS[group["orthogonalizer"]])
    if iteration is None:
        return None
    from muonsw.kernels.momentum import normalized_momentum, takes

    grads, momenta = _as_matrices(grads, bucket), _as_matrices(momenta, bucket)
    dtype = iteration.inner(product_dtype(group["ns_dtype"], bucket.dtype, device), device)
    first = None if group["precondition"] is None else _precondition(group, parts, bucket)
    if not takes(grads, momenta, dtype) or not _are_of(bucket, [*grads, *momenta]):
        return None
    if first is None and group["precondition"] is not None:
        return None
    X = normalized_momentum(
        grads,
        momenta,
        **_momentum(group),
        flag=flag,
        dtype=dtype,
        precondition=first,
    )
    steps = group["ns_steps"] or iteration.steps
    return iteration.run(X.mT, steps).mT if bucket.rows > bucket.columns else iteration.run(X, steps)


def normalizer(
    group: Group, bucket: Bucket, parts: list[Part], directions: Tensor, budget: Budget
) -> Callable[[], Tensor | None] | None:
    """What runs the group's normalizer on directions in place, or gives the factors of their rows; None if none can."""
    member = NORMALIZE.member(group)
    if not in_kernels(member):
        return None
    from muonsw.kernels.normalize import adamuon_, muon_plus_, normuon_, takes

    specs, options = NORMALIZE.specs(group), NORMALIZE.options(group)
    batch = StateBatch(MatrixView.of(group), bucket, parts, specs)
    state = [tensor for key in specs for tensor in batch.matrices(key)]
    if not takes(directions, state) or (member is NORMUON and state[0].dtype != torch.float32):
        return None
    if member is ADAMUON and not _are_of(bucket, state):
        return None
    hand_on = not budget.plain
    if member is MUON_PLUS:
        return partial(muon_plus_, directions, hand_on=hand_on)
    shared = {"beta2": options["beta2"], "eps": options["eps"], "flag": budget.flag, "hand_on": hand_on}
    if member is ADAMUON:
        return partial(adamuon_, directions, state, **shared)
    by_row = (state[0].shape[-1] == 1) != group["transposed"]
    return partial(normuon_, directions, state, by_row=by_row, snap=options["snap"], **shared)


def advance(
    group: Group,
    parts: list[Part],
    grads: list[Tensor],
    momenta: list[Tensor],
    targets: list[Tensor] | None,
    flag: Flag | None,
    *,
    precondition: bool = False,
) -> bool:
    """Advance momenta of any shapes, with the preconditioner if asked for; False, and nothing done, if it cannot."""
    from muonsw.kernels.momentum import advance_momenta

    first = _precondition(group, parts, None) if precondition else None
    if precondition and first is None:
        return False
    return advance_momenta(
        grads,
        momenta,
        targets,
        **_momentum(group),
        flag=flag,
        precondition=first,
    )


def _momentum(group: Group) -> dict[str, Any]:
    keys = {"form": "momentum_form", "beta": "momentum", "nesterov": "nesterov", "maximize": "maximize"}
    return {name: group[key] for name, key in keys.items()}


def _precondition(group: Group, parts: list[Part], bucket: Bucket | None) -> Precondition | None:
    """What a momentum kernel is to do to matrices, or without a bucket to shards; None where it cannot."""
    from muonsw.kernels.momentum import LONGEST_ROW, Precondition, are_matrices

    member, options = PRECONDITION.member(group), PRECONDITION.options(group)
    if member is SIGN:
        return Precondition("sign")
    if member is EQUALIZE and bucket is not None and not group["transposed"] and bucket.columns <= LONGEST_ROW:
        return Precondition("equalize")
    if member is MUON2:
        squares = [part.state("exp_avg_sq") for part in parts]
        squares = squares if bucket is None else _as_matrices(squares, bucket)
        if are_matrices(squares) and (bucket is None or _are_of(bucket, squares)):
            return Precondition("muon2", squares, options["beta2"], options["eps"])
    return None


def _as_matrices(tensors: list[Tensor], bucket: Bucket) -> list[Tensor]:
    """Each tensor as one matrix or a stack of them, as a view where its layout allows."""
    shape = torch.Size((bucket.rows, bucket.columns))
    if all(tensor.shape == shape for tensor in tensors):
        return tensors
    return [
        t.view(-1, *shape) if t.is_contiguous() and not (t.dim() <= 3 and t.shape[-2:] == shape) else t for t in tensors
    ]


def _are_of(bucket: Bucket, tensors: list[Tensor]) -> bool:
    """Whether all are such matrices or stacks of them: a flattened one with gaps has its own axes, like a stack."""
    return all(tensor.shape[-2:] == (bucket.rows, bucket.columns) for tensor in tensors)
