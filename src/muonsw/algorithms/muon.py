"""Muon: momentum -> precondition -> orthogonalize -> normalize -> scale, matrix by matrix.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Unlike the author's code, this never
changes gradients, and batches equal matrices of all parameters. The two slots around the orthogonalizer make Muon's
relatives (`muonsw.slots`).
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from muonsw.orthogonalize import ORTHOGONALIZERS, Iteration
from muonsw.precision import state_dtype
from muonsw.slots import ELEMENTWISE, MUON2, NORMALIZE, PRECONDITION, Slot, wide_dtype
from muonsw.work import Group, State, StepContext


def update(group: Group, chunk: Chunk, ctx: StepContext) -> Update:
    """Directions for a chunk of equal matrices that are whole on this rank."""
    parts, (rows, columns, dtype) = chunk.parts, chunk.bucket
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    scale = SHAPE_SCALES[group["scale"]](*chunk.view.out_in(rows, columns))
    dtype = product_dtype(group["ns_dtype"], dtype, momenta[0].device)
    if has_kernels(group, momenta[0].device):
        fused = directions_by_kernels(group, chunk, momenta, dtype, ctx)
        if fused is not None:
            return Update(parts, scatter(fused[0], momenta), scale, fused[1])
    # momentum and elementwise preconditioner
    elementwise, wide = PRECONDITION.member(group).elementwise, wide_dtype(momenta[0].dtype)
    X = empty_batch(momenta, rows, columns, wide if elementwise else momenta[0].dtype)
    advance(group, parts, scatter(X, momenta), ctx.flag)
    # whole matrices
    if group["precondition"] is not None and not elementwise:
        X = apply_slot(PRECONDITION, group, chunk, X.to(wide), ctx.ok)
    X = ORTHOGONALIZERS[group["orthogonalizer"]](X, steps=group["ns_steps"], dtype=dtype)
    if group["normalize"] is not None:
        X = apply_slot(NORMALIZE, group, chunk, X, ctx.ok)
    return Update(parts, scatter(X, momenta), scale)


def advance(group: Group, parts: list[Part], targets: list[Tensor] | None, flag: Flag | None) -> None:
    """Advance momenta in place, and write the matrices to orthogonalize to `targets`, if any.

    Elementwise preconditioners act here, because they work on shards.
    """
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    member, options = PRECONDITION.member(group), PRECONDITION.options(group)
    if has_kernels(group, grads[0].device) and (member.has_kernel or not member.elementwise):
        from muonsw.kernels.momentum import advance_momenta

        kernel_group = group if member.elementwise else {**group, "precondition": None}
        if advance_momenta(kernel_group, grads, momenta, _squares(group, parts), targets, flag):
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
    for part, target in zip(parts, momenta if targets is None else targets, strict=True):
        state = {key: part.state(key) for key in member.state(options)}
        before = {key: tensor.to(wide_dtype(tensor.dtype)) for key, tensor in state.items()}
        X = target.to(wide_dtype(target.dtype))
        (grad,) = clean([part.grad], [X], group["maximize"], ok)
        X, after = member.apply(options, X, {**before, "grad": grad})
        for key, tensor in state.items():
            tensor.copy_(after[key] if ok is None else torch.where(ok, after[key], before[key]))
        if targets is not None:
            target.copy_(X)


def apply_slot(slot: Slot, group: Group, chunk: Chunk, X: Tensor, ok: Tensor | None) -> Tensor:
    batch = StateBatch(chunk, slot.specs(group))
    before = batch.gathered()
    extra = {"grad": gradients(group, chunk, ok, X.dtype)} if slot.member(group).uses_gradient else {}
    X, after = slot.apply(group, X, {**before, **extra})
    batch.write(before, after, ok)
    return X


def sharded_directions(group: Group, X: Tensor, before: State, dtype: torch.dtype) -> tuple[Tensor, State]:
    """Directions for matrices gathered from shards after `advance`, with the state sent along."""
    after: State = {}
    if group["precondition"] is not None and not PRECONDITION.member(group).elementwise:
        X, after = PRECONDITION.apply(group, X.to(wide_dtype(X.dtype)), before)
    X = ORTHOGONALIZERS[group["orthogonalizer"]](X, steps=group["ns_steps"], dtype=dtype)
    if group["normalize"] is not None:
        X, more = NORMALIZE.apply(group, X, before)
        after = {**after, **more}
    return X, after


def directions_by_kernels(
    group: Group, chunk: Chunk, momenta: list[Tensor], dtype: torch.dtype, ctx: StepContext
) -> tuple[Tensor, Tensor | None] | None:
    """Directions, and factors for the move to multiply them by; None, without side effects, if kernels cannot."""
    iteration, parts, (rows, columns, _) = ORTHOGONALIZERS[group["orthogonalizer"]], chunk.parts, chunk.bucket
    if not isinstance(iteration, Iteration) or not slots_have_kernels(group):
        return None
    from muonsw.kernels.momentum import normalized_momentum
    from muonsw.kernels.normalize import slice_factors

    # momentum, preconditioner and division by the norm in two launches
    grads, dtype = views(parts, [part.item.grad for part in parts]), iteration.inner(dtype, momenta[0].device)
    X = normalized_momentum(group, grads, momenta, _squares(group, parts), (rows, columns), dtype, ctx.flag)
    if X is None:
        return None
    steps = group["ns_steps"] or iteration.coefficients.steps
    X = iteration.run(X.mT, steps).mT if rows > columns else iteration.run(X, steps)
    if group["normalize"] is None:
        return X, None
    batch = StateBatch(chunk, NORMALIZE.specs(group))
    averages = [tensor for tensors in batch.views.values() for tensor in tensors]
    factors = slice_factors(group, X, averages, next(iter(batch.shapes.values()), (0, 0)), ctx.flag)
    return (X if factors is not None else apply_slot(NORMALIZE, group, chunk, X, ctx.ok)), factors


def slots_have_kernels(group: Group) -> bool:
    return PRECONDITION.member(group).has_kernel and NORMALIZE.member(group).has_kernel


def _squares(group: Group, parts: list[Part]) -> list[Tensor]:
    """Muon^2's average squares, which its kernel advances together with the momentum."""
    if PRECONDITION.member(group) is not MUON2:
        return []
    return views(parts, [part.item.state["exp_avg_sq"] for part in parts])


def validate(group: Group, name: str, param: Tensor) -> None:
    for slot in (PRECONDITION, NORMALIZE):
        slot.refuse_options_of_others(group)
    validate_matrices(group, name, param)
    if group.get("block_period") is None:
        return
    period = f"block_period={group['block_period']}"
    if group.get("heads") is None and group.get("split_sizes") is None:
        raise ValueError(f"{period} needs blocks: pass heads= or split_sizes=")
    for slot in (PRECONDITION, NORMALIZE):
        if any(spec.shape for spec in slot.specs(group).values()):
            raise ValueError(
                f"{period} and {slot.name}={group[slot.name]!r} cannot be combined: the state of blocks does not "
                f"apply to the whole matrix"
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
        advance=advance,
        directions=sharded_directions,
        scale=lambda group, m, n: SHAPE_SCALES[group["scale"]](m, n),
        state=lambda group: {
            **({} if PRECONDITION.member(group).elementwise else PRECONDITION.specs(group)),
            **NORMALIZE.specs(group),
        },
        sends_gradient=lambda group: (first := PRECONDITION.member(group)).uses_gradient and not first.elementwise,
        sent_dtype=lambda group, dtype: state_dtype(group["state_dtype"], dtype),
        result_dtype=lambda group, dtype, device: product_dtype(group["ns_dtype"], dtype, device),
    ),
    scale_free=True,
    counts_steps=lambda group: bool(group.get("block_period")) or PRECONDITION.member(group).counts_steps,
)
