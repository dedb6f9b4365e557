"""Muon: momentum, orthogonalized matrix by matrix and scaled by the shape.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Unlike the author's code, the caller's
gradient is never changed, and equal matrices of all parameters are one batch. Two slots, before the orthogonalization
and after it, turn Muon into its relatives (`muonsw.slots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    apply_slot,
    clean,
    has_kernels,
    look_ahead,
    validate_matrices,
)
from muonsw.machine import product_dtype
from muonsw.matrices import SHAPE_SCALES, Bucket, Part, empty_batch, scatter, views
from muonsw.nonfinite import Flag
from muonsw.orthogonalize import ORTHOGONALIZERS, Iteration, aurora
from muonsw.precision import state_dtype
from muonsw.slots import ELEMENTWISE, NORMALIZE, PRECONDITION, SlotMember, wide_dtype
from muonsw.work import Group, State, StepContext

if TYPE_CHECKING:
    from muonsw.kernels.momentum import Precondition

# The options of orthogonalizer="aurora", by default its authors' choice.
AURORA: Group = {"aurora_iterations": 2, "aurora_beta": 0.5, "aurora_polar": "simple_quintic"}


def update(group: Group, chunk: Chunk, ctx: StepContext) -> Update:
    """Directions polar(M) of equal matrices: momentum, precondition, orthogonalize, normalize."""
    parts, bucket = chunk.parts, chunk.bucket
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    fused = has_kernels(group, grads[0].device)
    matrices = _orthogonalized_by_kernel(group, chunk, grads, momenta, ctx.flag) if fused else None
    if matrices is None:
        ahead = empty_batch(momenta, bucket.rows, bucket.columns)
        _advance(group, parts, grads, momenta, scatter(ahead, momenta), ctx.flag)
        if group["precondition"] is not None:
            ahead = apply_slot(PRECONDITION, group, chunk, ahead.to(wide_dtype(ahead.dtype)), ctx.ok)
        matrices = orthogonalize(group, ahead, product_dtype(group["ns_dtype"], bucket.dtype, ahead.device))
    factors = _factors_by_kernel(group, chunk, matrices, ctx.flag) if fused and group["normalize"] is not None else None
    if group["normalize"] is not None and factors is None:
        matrices = apply_slot(NORMALIZE, group, chunk, matrices, ctx.ok)
    scale = SHAPE_SCALES[group["scale"]](*chunk.view.out_in(bucket.rows, bucket.columns))
    return Update(parts, scatter(matrices, grads), scale, factors)


def _advance(
    group: Group,
    parts: list[Part],
    grads: list[Tensor],
    momenta: list[Tensor],
    targets: list[Tensor] | None,
    flag: Flag | None,
    *,
    precondition: bool = False,
) -> bool:
    """Advance momenta in place, and write what is to be orthogonalized to `targets`, if there are any.

    Returns whether directions are preconditioned already, which a kernel does on its way where it can.
    """
    if has_kernels(group, grads[0].device):
        from muonsw.kernels.momentum import advance_momenta

        first = _kernel_precondition(group, parts, None) if precondition else None
        if advance_momenta(grads, momenta, targets, **_momentum_options(group), flag=flag, precondition=first):
            return first is not None
    form, beta, ok = group["momentum_form"], group["momentum"], None if flag is None else flag.ok
    grads = clean(grads, momenta, group["maximize"], ok)
    advance_momentum(form, momenta, grads, beta, ok)
    if targets is not None and group["nesterov"]:
        look_ahead(form, momenta, grads, beta, out=targets)
    elif targets is not None:
        torch._foreach_copy_(targets, momenta)
    return False


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


# The same rule in two halves, for sharded matrices.


def _advance_shards(group: Group, parts: list[Part], targets: list[Tensor] | None) -> None:
    """Advance momenta where the shards are, and an elementwise preconditioner with them."""
    momenta, grads = [part.state("momentum_buffer") for part in parts], [part.grad for part in parts]
    preconditions = PRECONDITION.member(group).elementwise
    if _advance(group, parts, grads, momenta, targets, None, precondition=preconditions) or not preconditions:
        return
    for number, part in enumerate(parts):  # its state advances on every rank that holds some of it
        tensors = {key: part.state(key) for key in PRECONDITION.specs(group)}
        X = part.state("momentum_buffer") if targets is None else targets[number]
        before = {key: tensor.to(wide_dtype(tensor.dtype)) for key, tensor in tensors.items()}
        ahead = X.to(wide_dtype(X.dtype))
        before["grad"] = clean([part.grad], [ahead], group["maximize"], None)[0]
        result, after = PRECONDITION.apply({**group, "transposed": False}, ahead, before)
        for key, tensor in tensors.items():
            tensor.copy_(after[key])
        if targets is not None:
            X.copy_(result)


def _directions(group: Group, X: Tensor, before: State, dtype: torch.dtype) -> tuple[Tensor, State]:
    """What follows momentum, for whole matrices with the state that the slots keep of them."""
    after: State = {}
    if group["precondition"] is not None and not PRECONDITION.member(group).elementwise:
        X, after = PRECONDITION.apply(group, X.to(wide_dtype(X.dtype)), before)
    X = orthogonalize(group, X, dtype)
    if group["normalize"] is not None:
        X, more = NORMALIZE.apply(group, X, before)
        X, after = X.to(dtype), {**after, **more}
    return X, after


# The same by kernels, where tensors are laid out as they read them; each says None or False where it cannot.


def in_kernels(member: SlotMember) -> bool:
    known = (slots.NO_MEMBER, slots.SIGN, slots.MUON2, slots.EQUALIZE, slots.NORMUON, slots.ADAMUON, slots.MUON_PLUS)
    return any(member is one for one in known)


def _orthogonalized_by_kernel(
    group: Group, chunk: Chunk, grads: list[Tensor], momenta: list[Tensor], flag: Flag | None
) -> Tensor | None:
    iteration = ORTHOGONALIZERS[group["orthogonalizer"]]
    if not isinstance(iteration, Iteration):
        return None
    from muonsw.kernels.momentum import normalized_momentum, takes

    bucket, device = chunk.bucket, grads[0].device
    grads, momenta = _as_matrices(grads, bucket), _as_matrices(momenta, bucket)
    dtype = iteration.inner(product_dtype(group["ns_dtype"], bucket.dtype, device), device)
    if not takes(grads, momenta, dtype) or not _are_of(bucket, [*grads, *momenta]):
        return None
    first = None
    if group["precondition"] is not None:
        first = _kernel_precondition(group, chunk.parts, bucket)
        if first is None:
            return None
    X = normalized_momentum(grads, momenta, **_momentum_options(group), flag=flag, dtype=dtype, precondition=first)
    steps = group["ns_steps"] or iteration.steps
    return iteration.run(X.mT, steps).mT if bucket.rows > bucket.columns else iteration.run(X, steps)


def _factors_by_kernel(group: Group, chunk: Chunk, directions: Tensor, flag: Flag | None) -> Tensor | None:
    member = NORMALIZE.member(group)
    if not in_kernels(member):
        return None
    from muonsw.kernels.normalize import slice_factors, takes

    specs, options = NORMALIZE.specs(group), NORMALIZE.options(group)
    batch = StateBatch(chunk, specs)
    kept = [tensor for key in specs for tensor in batch.matrices(key)]
    if not takes(directions, kept):
        return None
    given: dict[str, Any] = {key: options[key] for key in ("beta2", "eps", "snap") if key in options}
    if member is slots.ADAMUON:
        if not _are_of(chunk.bucket, kept):
            return None
        given["averages"] = kept
    elif member is slots.NORMUON:
        if kept[0].dtype != torch.float32:
            return None
        given |= {"slice_averages": kept, "by_row": (kept[0].shape[-1] == 1) != chunk.view.transposed}
    return slice_factors(directions, **given, flag=flag)


def _momentum_options(group: Group) -> dict[str, Any]:
    keys = {"form": "momentum_form", "beta": "momentum", "nesterov": "nesterov", "maximize": "maximize"}
    return {name: group[key] for name, key in keys.items()}


def _kernel_precondition(group: Group, parts: list[Part], bucket: Bucket | None) -> Precondition | None:
    """What a momentum kernel is to do to matrices, or without a bucket to shards."""
    from muonsw.kernels.momentum import LONGEST_ROW, Precondition, are_matrices

    member, options = PRECONDITION.member(group), PRECONDITION.options(group)
    if member is slots.SIGN:
        return Precondition("sign")
    by_row = bucket is not None and not group.get("transposed") and bucket.columns <= LONGEST_ROW
    if member is slots.EQUALIZE and by_row:
        return Precondition("equalize")
    if member is slots.MUON2:
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
        advance=_advance_shards,
        directions=_directions,
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
