"""Muon: momentum, orthogonalized matrix by matrix and scaled by the shape.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Unlike the author's code, the caller's
gradient is never changed, and equal matrices of all parameters are one batch. Two slots, before the orthogonalization
and after it, turn Muon into its relatives (`muonsw.precondition`, `muonsw.normalize`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms import muon_kernels as by_kernel
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
from muonsw.algorithms.whole import VIEW_OPTIONS, apply_slot, validate_matrices
from muonsw.algorithms.whole import state_keys as keys_of
from muonsw.machine import product_dtype
from muonsw.matrices import (
    SHAPE_SCALES,
    Bucket,
    MatrixView,
    Part,
    empty_batch,
    matrix_chunks,
    scatter,
    views,
)
from muonsw.nonfinite import Flag
from muonsw.normalize import NORMALIZE
from muonsw.orthogonalize import ITERATIONS, ORTHOGONALIZERS, aurora
from muonsw.precision import LOW_PRECISION, state_dtype
from muonsw.precondition import PRECONDITION
from muonsw.slots import Specs, State, wide_dtype
from muonsw.work import Group, Item

# The options of orthogonalizer="aurora", by default its authors' choice; a group holds None for these.
AURORA: Group = {"aurora_iterations": 2, "aurora_beta": 0.5, "aurora_polar": "simple_quintic"}


def state_keys(group: Group) -> tuple[str, ...]:
    """One buffer for each parameter, under torch's name, and what the slots keep."""
    if group["precondition"] is None and group["normalize"] is None:
        return ("momentum_buffer",)
    specs = {**PRECONDITION.specs(group), **NORMALIZE.specs(group)}
    return ("momentum_buffer", *keys_of(MatrixView.of(group), specs))


def updates(group: Group, items: list[Item], budget: Budget) -> Iterator[Update]:
    """Directions polar(M), one batch of equal matrices after another."""
    for bucket, parts in matrix_chunks(group, items, budget.chunk_bytes):
        directions, row_factors = _directions(group, bucket, parts, budget)
        scale = _scale(group, bucket.rows, bucket.columns)
        yield Update(parts, directions, scale, row_factors=row_factors)


def _directions(group: Group, bucket: Bucket, parts: list[Part], budget: Budget) -> tuple[list[Tensor], Tensor | None]:
    """Orthogonalized momentum of parts with equal matrices, each in the shape of its part; the factors of rows."""
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    matrices, fused = None, _has_kernels(group, grads)
    if fused:
        matrices = by_kernel.orthogonalized_momentum(group, bucket, parts, grads, momenta, budget.flag)
    if matrices is None:
        ahead = empty_batch(momenta, bucket.rows, bucket.columns)
        _advance(group, parts, grads, momenta, scatter(ahead, momenta), budget.flag)
        if group["precondition"] is not None:
            ahead = apply_slot(PRECONDITION, group, bucket, parts, ahead.to(wide_dtype(ahead.dtype)), budget.ok)
        matrices = orthogonalize(group, ahead, product_dtype(group["ns_dtype"], bucket.dtype, ahead.device))
        if budget.flag is not None and not are_large(grads) and bucket.dtype not in LOW_PRECISION:
            matrices = matrices.to(bucket.dtype)  # one cast for all: kernels for many tensors want one dtype
    if group["normalize"] is None:
        return scatter(matrices, grads), None
    normalize = by_kernel.normalizer(group, bucket, parts, matrices, budget) if fused else None
    if normalize is not None:
        return scatter(matrices, grads), normalize()
    return scatter(apply_slot(NORMALIZE, group, bucket, parts, matrices, budget.ok), grads), None


def _advance(
    group: Group,
    parts: list[Part],
    grads: list[Tensor],
    momenta: list[Tensor],
    targets: list[Tensor] | None,
    flag: Flag | None,
) -> None:
    """Advance momenta in place, and write what is to be orthogonalized to `targets`, if there are any."""
    if _has_kernels(group, grads) and by_kernel.advance(group, parts, grads, momenta, targets, flag):
        return
    form, beta, nesterov, maximize = (group[key] for key in ("momentum_form", "momentum", "nesterov", "maximize"))
    ok = None if flag is None else flag.ok
    grads = clean(grads, momenta, maximize, ok)
    advance_momentum(form, momenta, grads, beta, ok)
    if targets is not None and nesterov:
        look_ahead(form, momenta, grads, beta, out=targets)
    elif targets is not None:
        torch._foreach_copy_(targets, momenta)


def _has_kernels(group: Group, tensors: list[Tensor]) -> bool:
    return group["fused"] is not False and bool(tensors) and kernels.available(tensors[0].device)


def polar_name(group: Group) -> str:
    """The name of a group's orthogonalizer; of Aurora, that of the one inside."""
    name = group.get("orthogonalizer", "auto")
    return str((group["aurora_polar"] or AURORA["aurora_polar"]) if name == "aurora" else name)


def orthogonalize(group: Group, matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices (count, rows, columns) through the group's orthogonalizer, in a dtype."""
    name = group["orthogonalizer"]
    if name != "aurora":
        return ORTHOGONALIZERS[name](matrices, steps=_steps(group, name), dtype=dtype)
    chosen = {key: AURORA[key] if group.get(key) is None else group[key] for key in AURORA}
    return aurora(
        matrices,
        steps=_steps(group, chosen["aurora_polar"]),
        dtype=dtype,
        iterations=chosen["aurora_iterations"],
        beta=chosen["aurora_beta"],
        polar=ORTHOGONALIZERS[chosen["aurora_polar"]],
    )


def _steps(group: Group, orthogonalizer: str) -> int:
    """`ns_steps`, or as many as the authors of the orthogonalizer take."""
    iteration = ITERATIONS.get(ORTHOGONALIZERS[orthogonalizer])
    return group["ns_steps"] or (5 if iteration is None else iteration.steps)


def _scale(group: Group, rows: int, columns: int) -> float:
    return SHAPE_SCALES[group["scale"]](*MatrixView.of(group).out_in(rows, columns))


def _advance_parts(group: Group, parts: list[Part], targets: list[Tensor] | None) -> None:
    momenta, grads = [part.state("momentum_buffer") for part in parts], [part.grad for part in parts]
    preconditions = _runs_on_shards(group)
    fused = preconditions and _has_kernels(group, grads)
    if fused and by_kernel.advance(group, parts, grads, momenta, targets, None, precondition=True):
        return
    _advance(group, parts, grads, momenta, targets, None)
    if preconditions:
        _precondition_shards(group, parts, targets)


def _runs_on_shards(group: Group) -> bool:
    member = PRECONDITION.member(group)
    return member is not None and member.elementwise


def _precondition_shards(group: Group, parts: list[Part], targets: list[Tensor] | None) -> None:
    """Run an elementwise preconditioner where the shards are: its state advances on every rank that keeps it."""
    for number, part in enumerate(parts):
        kept = {key: part.state(key) for key in PRECONDITION.specs(group)}
        X = part.state("momentum_buffer") if targets is None else targets[number]
        state = {key: tensor.to(wide_dtype(tensor.dtype)) for key, tensor in kept.items()}
        ahead = X.to(wide_dtype(X.dtype))
        state["grad"] = clean([part.grad], [ahead], group["maximize"], None)[0]
        result, after = PRECONDITION.apply({**group, "transposed": False}, ahead, state)
        for key, tensor in kept.items():
            tensor.copy_(after[key])
        if targets is not None:
            X.copy_(result)


def _whole(group: Group, X: Tensor, state: State, dtype: torch.dtype) -> tuple[Tensor, State]:
    """What follows momentum, for whole matrices with the state that the slots keep of them."""
    new: State = {}
    if group["precondition"] is not None and not _runs_on_shards(group):
        X, new = PRECONDITION.apply(group, X.to(wide_dtype(X.dtype)), state)
    X = orthogonalize(group, X, dtype)
    if group["normalize"] is not None:
        X, more = NORMALIZE.apply(group, X, state)
        X, new = X.to(dtype), {**new, **more}
    return X, new


def _travelling_state(group: Group) -> Specs:
    first = {} if _runs_on_shards(group) else PRECONDITION.specs(group)
    return {**first, **NORMALIZE.specs(group)}


def _sends_gradient(group: Group) -> bool:
    member = PRECONDITION.member(group)
    return member is not None and member.uses_gradient and not member.elementwise


def _counts_steps(group: Group) -> bool:
    if group["block_period"] is not None:
        return True
    return group["precondition"] is not None and PRECONDITION.members[group["precondition"]].counts_steps


def validate(group: Group, name: str, param: Tensor) -> None:
    """A parameter must be seen as matrices in exactly one way, and options must belong to what was chosen."""
    for key in AURORA:
        if group[key] is not None and group["orthogonalizer"] != "aurora":
            found = f"this group has orthogonalizer={group['orthogonalizer']!r}"
            raise ValueError(f"{key}={group[key]!r} is an option of orthogonalizer='aurora', but {found}")
    for slot in (PRECONDITION, NORMALIZE):
        slot.refuse_options_of_others(group)
    validate_matrices(group, name, param)
    if group["block_period"] is not None:
        _validate_blocks(group)


def _validate_blocks(group: Group) -> None:
    """Blocks of a matrix at some steps and the whole of it at others: nothing may be kept of either."""
    period = f"block_period={group['block_period']}"
    if group["heads"] is None and group["split_sizes"] is None:
        raise ValueError(f"{period} needs blocks: give heads= or split_sizes=")
    keeps = [slot.name for slot in (PRECONDITION, NORMALIZE) if any(one.shape for one in slot.specs(group).values())]
    for option in [*keeps, *(["norm"] if group["norm"] != "free" else [])]:
        raise ValueError(
            f"{period} and {option}={group[option]!r} do not go together: what is kept of a block means nothing to the "
            f"whole matrix"
        )


# The rule of `updates` in two halves, for sharded matrices.
MATRIX_RULE = MatrixRule(
    sent_dtype=lambda group, dtype: state_dtype(group["state_dtype"], dtype),
    result_dtype=lambda group, dtype, device: product_dtype(group["ns_dtype"], dtype, device),
    advance=_advance_parts,
    directions=_whole,
    scale=_scale,
    state=_travelling_state,
    sends_gradient=_sends_gradient,
)


MUON = Algorithm(
    defaults={
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "orthogonalizer": "auto",
        "ns_steps": None,
        "ns_dtype": "auto",
        **dict.fromkeys(AURORA),
        "scale": "match_rms_adamw",
        "precondition": None,
        "normalize": None,
        **dict.fromkeys((*PRECONDITION.option_names(), *NORMALIZE.option_names())),
        **VIEW_OPTIONS,
        "block_period": None,
    },
    state_keys=state_keys,
    updates=updates,
    validate=validate,
    matrices=MATRIX_RULE,
    scale_free=True,
    counts_steps=_counts_steps,
)
