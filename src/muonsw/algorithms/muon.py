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
    MatrixRule,
    StateBatch,
    Update,
    advance_momentum,
    clean,
    has_kernels,
    look_ahead,
    validate_matrices,
)
from muonsw.machine import product_dtype
from muonsw.matrices import SHAPE_SCALES, Chunk, Part, scatter, views
from muonsw.orthogonalize import ORTHOGONALIZERS, Iteration
from muonsw.precision import state_dtype
from muonsw.slots import ELEMENTWISE, MUON2, NORMALIZE, PRECONDITION, wide_dtype
from muonsw.work import Group, State, StepContext


def advance(group: Group, parts: list[Part], targets: list[Tensor] | None, ctx: StepContext) -> None:
    """Advance momenta in place, and write the matrices to orthogonalize to `targets`, if any.

    Elementwise preconditioners act here, because they work on shards.
    """
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    member = PRECONDITION.member(group)
    if has_kernels(group, grads[0].device) and (member.has_kernel or not member.elementwise):
        from muonsw.kernels.momentum import advance_momenta

        kernel_group = group if member.elementwise else {**group, "precondition": None}
        if advance_momenta(kernel_group, grads, momenta, _squares(group, parts), targets, ctx.flag):
            return
    form, beta, ok = group["momentum_form"], group["momentum"], ctx.ok
    grads = clean(grads, momenta, group["maximize"], ok)
    advance_momentum(form, momenta, grads, beta, ok)
    if targets is not None and group["nesterov"]:
        look_ahead(form, momenta, grads, beta, out=targets)
    elif targets is not None:
        torch._foreach_copy_(targets, momenta)
    if not member.elementwise:
        return
    options = PRECONDITION.options(group)
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


def directions(group: Group, X: Tensor, before: State, dtype: torch.dtype) -> tuple[Tensor, State]:
    """Precondition, orthogonalize and normalize; elementwise preconditioners acted in `advance`."""
    after: State = {}
    if group["precondition"] is not None and not PRECONDITION.member(group).elementwise:
        X, after = PRECONDITION.apply(group, X.to(wide_dtype(X.dtype)), before)
    X = ORTHOGONALIZERS[group["orthogonalizer"]](X, steps=group["ns_steps"], dtype=dtype)
    if group["normalize"] is not None:
        X, more = NORMALIZE.apply(group, X, before)
        after = {**after, **more}
    return X, after


def by_kernels(group: Group, chunk: Chunk, ctx: StepContext) -> Update | None:
    """Update whole matrices with kernels; return None, without side effects, if they cannot."""
    iteration, (view, rows, columns, home, parts) = ORTHOGONALIZERS[group["orthogonalizer"]], chunk
    if not isinstance(iteration, Iteration) or not slots_have_kernels(group):
        return None
    from muonsw.kernels.momentum import normalized_momentum
    from muonsw.kernels.normalize import slice_factors

    # momentum, preconditioner and division by the norm in two launches
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    dtype = result_dtype(group, home, momenta[0].device)
    X = normalized_momentum(group, grads, momenta, _squares(group, parts), (rows, columns), dtype, ctx.flag)
    if X is None:
        return None
    steps = group["ns_steps"] or iteration.coefficients.steps
    X = iteration.run(X.mT, steps).mT if rows > columns else iteration.run(X, steps)
    factors = None
    if group["normalize"] is not None:
        batch = StateBatch(chunk, NORMALIZE.specs(group))
        averages = [tensor for tensors in batch.views.values() for tensor in tensors]
        factors = slice_factors(group, X, averages, next(iter(batch.shapes.values()), (0, 0)), ctx.flag)
        if factors is None:
            before = batch.gathered()
            X, after = NORMALIZE.apply(group, X, before)
            batch.write(before, after, ctx.ok)
    return Update(parts, scatter(X, momenta), RULE.scale(group, *view.out_in(rows, columns)), factors)


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


def result_dtype(group: Group, home: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the products, and so of the directions."""
    orthogonalizer, dtype = ORTHOGONALIZERS[group["orthogonalizer"]], product_dtype(group["ns_dtype"], home, device)
    return orthogonalizer.inner(dtype, device) if isinstance(orthogonalizer, Iteration) else dtype


RULE = MatrixRule(
    advance=advance,
    directions=directions,
    scale=lambda group, m, n: SHAPE_SCALES[group["scale"]](m, n),
    state=lambda group: {
        **({} if PRECONDITION.member(group).elementwise else PRECONDITION.specs(group)),
        **NORMALIZE.specs(group),
    },
    sends_gradient=lambda group: (
        PRECONDITION.member(group).uses_gradient and not PRECONDITION.member(group).elementwise
    ),
    sent_dtype=lambda group, dtype: state_dtype(group["state_dtype"], dtype),
    result_dtype=result_dtype,
    by_kernels=by_kernels,
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
    validate=validate,
    matrices=RULE,
    scale_free=True,
    counts_steps=lambda group: bool(group.get("block_period")) or PRECONDITION.member(group).counts_steps,
)
