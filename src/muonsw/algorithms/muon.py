"""Muon: momentum, orthogonalized matrix by matrix and scaled by the shape.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Unlike the author's code, the caller's
gradient is never changed, and equal matrices of all parameters are one batch. Two slots, before the orthogonalization
and after it, turn Muon into its relatives (`muonsw.slots`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonsw import slots
from muonsw.algorithms.base import (
    Algorithm,
    Chunk,
    MatrixRule,
    StateBatch,
    Update,
    advance_momentum,
    clean,
    gradients,
    has_kernels,
    look_ahead,
    validate_matrices,
)
from muonsw.machine import product_dtype
from muonsw.matrices import SHAPE_SCALES, Part, empty_batch, scatter, views
from muonsw.nonfinite import Flag
from muonsw.orthogonalize import ORTHOGONALIZERS, Iteration, aurora
from muonsw.precision import state_dtype
from muonsw.slots import ELEMENTWISE, NORMALIZE, PRECONDITION, Slot, SlotMember, wide_dtype
from muonsw.work import Group, State, StepContext

# The options of orthogonalizer="aurora", by default its authors' choice.
AURORA: Group = {"aurora_iterations": 2, "aurora_beta": 0.5, "aurora_polar": "simple_quintic"}


def update(group: Group, chunk: Chunk, ctx: StepContext) -> Update:
    """Directions polar(M) of equal matrices: momentum, precondition, orthogonalize, normalize."""
    parts, (rows, columns, dtype) = chunk.parts, chunk.bucket
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    fused, dtype = has_kernels(group, momenta[0].device), product_dtype(group["ns_dtype"], dtype, momenta[0].device)
    X = _polar_by_kernels(group, chunk, dtype, ctx.flag) if fused else None
    if X is None:
        member = PRECONDITION.member(group)
        X = empty_batch(momenta, rows, columns, wide_dtype(momenta[0].dtype) if member.elementwise else None)
        advance(group, parts, scatter(X, momenta), ctx.flag)
        if group["precondition"] is not None and not member.elementwise:
            X = apply_slot(PRECONDITION, group, chunk, X.to(wide_dtype(X.dtype)), ctx.ok)
        X = orthogonalize(group, X, dtype)
    factors = None
    if group["normalize"] is not None:
        factors = _factors_by_kernels(group, chunk, X, ctx.flag) if fused else None
        if factors is None:
            X = apply_slot(NORMALIZE, group, chunk, X, ctx.ok)
    scale = SHAPE_SCALES[group["scale"]](*chunk.view.out_in(rows, columns))
    return Update(parts, scatter(X, momenta), scale, factors)


def advance(group: Group, parts: list[Part], targets: list[Tensor] | None, flag: Flag | None) -> None:
    """Advance momenta in place, and write what is to be orthogonalized to `targets`, if there are any.

    A preconditioner that treats every element on its own acts here, because parts may be shards.
    """
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    member = PRECONDITION.member(group)
    if has_kernels(group, grads[0].device) and (in_kernels(member) or not member.elementwise):
        from muonsw.kernels.momentum import advance_momenta

        options = group if member.elementwise else {**group, "precondition": None}
        if advance_momenta(options, grads, momenta, _squares(group, parts), targets, flag):
            return
    form, beta, ok = group["momentum_form"], group["momentum"], None if flag is None else flag.ok
    grads = clean(grads, momenta, group["maximize"], ok)
    advance_momentum(form, momenta, grads, beta, ok)
    if targets is not None and group["nesterov"]:
        look_ahead(form, momenta, grads, beta, out=targets)
    elif targets is not None:
        torch._foreach_copy_(targets, momenta)
    if not member.elementwise:
        return
    for part, X in zip(parts, momenta if targets is None else targets, strict=True):
        tensors = {key: part.state(key) for key in PRECONDITION.specs(group)}
        before = {key: tensor.to(wide_dtype(tensor.dtype)) for key, tensor in tensors.items()}
        ahead = X.to(wide_dtype(X.dtype))
        (before["grad"],) = clean([part.grad], [ahead], group["maximize"], ok)
        ahead, after = PRECONDITION.apply({**group, "transposed": False}, ahead, before)
        for key, tensor in tensors.items():
            tensor.copy_(after[key] if ok is None else torch.where(ok, after[key], before[key]))
        if targets is not None:
            X.copy_(ahead)


def apply_slot(slot: Slot, group: Group, chunk: Chunk, X: Tensor, ok: Tensor | None) -> Tensor:
    batch = StateBatch(chunk, slot.specs(group))
    before = batch.gathered()
    extra = {"grad": gradients(group, chunk, ok, X.dtype)} if slot.member(group).uses_gradient else {}
    X, after = slot.apply(group, X, {**before, **extra})
    batch.write(before, after, ok)
    return X


def orthogonalize(group: Group, matrices: Tensor, dtype: torch.dtype) -> Tensor:
    is_aurora = group["orthogonalizer"] == "aurora"
    polar = ORTHOGONALIZERS[polar_name(group) if is_aurora else group["orthogonalizer"]]
    steps = group["ns_steps"] or (polar.coefficients.steps if isinstance(polar, Iteration) else 5)
    if not is_aurora:
        return polar(matrices, steps=steps, dtype=dtype)
    iterations, beta = (_aurora_option(group, key) for key in ("aurora_iterations", "aurora_beta"))
    return aurora(matrices, steps=steps, dtype=dtype, iterations=iterations, beta=beta, polar=polar)


def polar_name(group: Group) -> str:
    name = group.get("orthogonalizer", "auto")
    return str(_aurora_option(group, "aurora_polar") if name == "aurora" else name)


def _aurora_option(group: Group, key: str) -> Any:
    return AURORA[key] if group.get(key) is None else group[key]


def sharded_directions(group: Group, X: Tensor, before: State, dtype: torch.dtype) -> tuple[Tensor, State]:
    """What follows `advance` where matrices were put together from shards, with the state that travels with them."""
    after: State = {}
    if group["precondition"] is not None and not PRECONDITION.member(group).elementwise:
        X, after = PRECONDITION.apply(group, X.to(wide_dtype(X.dtype)), before)
    X = orthogonalize(group, X, dtype)
    if group["normalize"] is not None:
        X, more = NORMALIZE.apply(group, X, before)
        X, after = X.to(dtype), {**after, **more}
    return X, after


# The same by kernels; None where they cannot read the tensors.


def in_kernels(member: SlotMember) -> bool:
    known = (slots.NO_MEMBER, slots.SIGN, slots.MUON2, slots.EQUALIZE, slots.NORMUON, slots.ADAMUON, slots.MUON_PLUS)
    return any(member is each for each in known)


def _polar_by_kernels(group: Group, chunk: Chunk, dtype: torch.dtype, flag: Flag | None) -> Tensor | None:
    """Momentum, preconditioner and norm in two launches, and then the iteration."""
    iteration, parts, (rows, columns, _) = ORTHOGONALIZERS[group["orthogonalizer"]], chunk.parts, chunk.bucket
    if not isinstance(iteration, Iteration) or not in_kernels(PRECONDITION.member(group)):
        return None
    from muonsw.kernels.momentum import normalized_momentum

    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    dtype = iteration.inner(dtype, grads[0].device)
    X = normalized_momentum(group, grads, momenta, _squares(group, parts), (rows, columns), dtype, flag)
    if X is None:
        return None
    steps = group["ns_steps"] or iteration.coefficients.steps
    return iteration.run(X.mT, steps).mT if rows > columns else iteration.run(X, steps)


def _squares(group: Group, parts: list[Part]) -> list[Tensor]:
    if PRECONDITION.member(group) is not slots.MUON2:
        return []
    return views(parts, [part.item.state["exp_avg_sq"] for part in parts])


def _factors_by_kernels(group: Group, chunk: Chunk, directions: Tensor, flag: Flag | None) -> Tensor | None:
    if not in_kernels(NORMALIZE.member(group)):
        return None
    from muonsw.kernels.normalize import slice_factors

    batch = StateBatch(chunk, NORMALIZE.specs(group))
    averages = [tensor for tensors in batch.views.values() for tensor in tensors]
    return slice_factors(group, directions, averages, next(iter(batch.shapes.values()), (0, 0)), flag)


def validate(group: Group, name: str, param: Tensor) -> None:
    for key in AURORA:
        if group.get(key) is not None and group["orthogonalizer"] != "aurora":
            raise ValueError(
                f"{key}={group[key]!r} is an option of orthogonalizer='aurora', but this group has "
                f"orthogonalizer={group['orthogonalizer']!r}"
            )
    for slot in (PRECONDITION, NORMALIZE):
        slot.refuse_options_of_others(group)
    validate_matrices(group, name, param)
    if group.get("block_period") is None:
        return
    period = f"block_period={group['block_period']}"
    if group.get("heads") is None and group.get("split_sizes") is None:
        raise ValueError(f"{period} needs blocks: give heads= or split_sizes=")
    for slot in (PRECONDITION, NORMALIZE):
        if any(spec.shape for spec in slot.specs(group).values()):
            raise ValueError(
                f"{period} and {slot.name}={group[slot.name]!r} do not go together: what is kept of a block means "
                f"nothing to the whole matrix"
            )


MUON = Algorithm(
    defaults={
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "orthogonalizer": "auto",
        "ns_steps": None,
        "ns_dtype": "auto",
        "scale": "match_rms_adamw",
        "precondition": None,
        "normalize": None,
        "matrix": None,
    },
    state=lambda group: {"momentum_buffer": ELEMENTWISE, **PRECONDITION.specs(group), **NORMALIZE.specs(group)},
    update=update,
    validate=validate,
    matrices=MatrixRule(
        sent_dtype=lambda group, dtype: state_dtype(group["state_dtype"], dtype),
        result_dtype=lambda group, dtype, device: product_dtype(group["ns_dtype"], dtype, device),
        advance=advance,
        directions=sharded_directions,
        scale=lambda group, m, n: SHAPE_SCALES[group["scale"]](m, n),
        state=lambda group: {
            **({} if PRECONDITION.member(group).elementwise else PRECONDITION.specs(group)),
            **NORMALIZE.specs(group),
        },
        sends_gradient=lambda group: (first := PRECONDITION.member(group)).uses_gradient and not first.elementwise,
    ),
    scale_free=True,
    counts_steps=lambda group: bool(group.get("block_period")) or PRECONDITION.member(group).counts_steps,
)
