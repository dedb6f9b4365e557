"""Muon: momentum, orthogonalized matrix by matrix and scaled by the shape.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Unlike the author's code, the caller's
gradient is never changed, and equal matrices of all parameters are one batch. Two slots, before the orthogonalization
and after it, turn Muon into its relatives (`muonsw.precondition`, `muonsw.normalize`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

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
from muonsw.algorithms.whole import VIEW_OPTIONS, StateBatch, apply_slot, validate_matrices
from muonsw.algorithms.whole import state_keys as keys_of
from muonsw.machine import product_dtype
from muonsw.matrices import (
    SHAPE_SCALES,
    Bucket,
    MatrixView,
    Part,
    chunks,
    empty_batch,
    remembered_chunks,
    scatter,
    views,
)
from muonsw.nonfinite import Flag
from muonsw.normalize import ADAMUON, MUON_PLUS, NORMALIZE, NORMUON
from muonsw.orthogonalize import ITERATIONS, ORTHOGONALIZERS, aurora
from muonsw.precision import LOW_PRECISION, state_dtype
from muonsw.precondition import EQUALIZE, MUON2, PRECONDITION, SIGN
from muonsw.slots import SlotMember, Specs, State, wide_dtype
from muonsw.work import Group, Item

if TYPE_CHECKING:
    from muonsw.kernels.momentum import Precondition

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
    shapes, dtypes = tuple([item.param.shape for item in items]), tuple([item.param.dtype for item in items])
    plan = chunks if torch.compiler.is_compiling() else remembered_chunks
    for bucket, regions in plan(shapes, dtypes, MatrixView.of(group), budget.chunk_bytes):
        parts = [Part(items[index], region) for index, region in regions]
        directions, row_factors = _directions(group, bucket, parts, budget)
        scale = _scale(group, bucket.rows, bucket.columns)
        yield Update(parts, directions, scale, row_factors=row_factors)


def _directions(group: Group, bucket: Bucket, parts: list[Part], budget: Budget) -> tuple[list[Tensor], Tensor | None]:
    """Orthogonalized momentum of parts with equal matrices, each in the shape of its part; the factors of rows."""
    grads = views(parts, [part.item.grad for part in parts])
    momenta = views(parts, [part.item.state["momentum_buffer"] for part in parts])
    matrices = _by_kernel(group, bucket, parts, grads, momenta, budget.flag)
    if matrices is None:
        ahead = empty_batch(momenta, bucket.rows, bucket.columns)
        _advance(group, grads, momenta, scatter(ahead, momenta), budget.flag)
        if group["precondition"] is not None:
            ahead = apply_slot(PRECONDITION, group, bucket, parts, ahead.to(wide_dtype(ahead.dtype)), budget.ok)
        matrices = orthogonalize(group, ahead, product_dtype(group["ns_dtype"], bucket.dtype, ahead.device))
        if budget.flag is not None and not are_large(grads) and bucket.dtype not in LOW_PRECISION:
            matrices = matrices.to(bucket.dtype)  # one cast for all: kernels for many tensors want one dtype
    if group["normalize"] is None:
        return scatter(matrices, grads), None
    kernel = _normalizing_kernel(group, bucket, parts, matrices, budget)
    if kernel is not None:
        return scatter(matrices, grads), kernel()
    return scatter(apply_slot(NORMALIZE, group, bucket, parts, matrices, budget.ok), grads), None


def _by_kernel(
    group: Group, bucket: Bucket, parts: list[Part], grads: list[Tensor], momenta: list[Tensor], flag: Flag | None
) -> Tensor | None:
    """The same from a kernel that reads gradients and momenta where they lie; None where there is none for them."""
    device = grads[0].device
    iteration = ITERATIONS.get(ORTHOGONALIZERS[group["orthogonalizer"]])
    if iteration is None or not _may_use_kernels(group, grads):
        return None
    from muonsw.kernels.momentum import normalized_momentum, takes

    grads, momenta = _as_matrices(grads, bucket), _as_matrices(momenta, bucket)
    dtype = iteration.inner(product_dtype(group["ns_dtype"], bucket.dtype, device), device)
    first = None if group["precondition"] is None else _precondition_of_kernel(group, parts, bucket)
    if not takes(grads, momenta, dtype) or (first is None and group["precondition"] is not None):
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
        precondition=first,
    )
    steps = group["ns_steps"] or iteration.steps
    return iteration.run(X.mT, steps).mT if bucket.rows > bucket.columns else iteration.run(X, steps)


def in_kernels(member: SlotMember | None) -> bool:
    """Whether our kernels do what a member of a slot does, where tensors are laid out as they read them."""
    return member is None or any(member is known for known in (SIGN, MUON2, EQUALIZE, NORMUON, ADAMUON, MUON_PLUS))


def _precondition_of_kernel(group: Group, parts: list[Part], bucket: Bucket | None) -> Precondition | None:
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
        if are_matrices(squares):
            return Precondition("muon2", squares, options["beta2"], options["eps"])
    return None


def _normalizing_kernel(
    group: Group, bucket: Bucket, parts: list[Part], directions: Tensor, budget: Budget
) -> Callable[[], Tensor | None] | None:
    """What runs the group's normalizer on directions in place, or gives the factors of their rows; None if none can."""
    member = NORMALIZE.member(group)
    if not in_kernels(member) or not _may_use_kernels(group, [directions]):
        return None
    from muonsw.kernels.normalize import adamuon_, muon_plus_, normuon_, takes

    specs, options = NORMALIZE.specs(group), NORMALIZE.options(group)
    batch = StateBatch(MatrixView.of(group), bucket, parts, specs)
    state = [tensor for key in specs for tensor in batch.matrices(key)]
    if not takes(directions, state) or (member is NORMUON and state[0].dtype != torch.float32):
        return None
    hand_on = not budget.plain
    if member is MUON_PLUS:
        return partial(muon_plus_, directions, hand_on=hand_on)
    shared = {"beta2": options["beta2"], "eps": options["eps"], "flag": budget.flag, "hand_on": hand_on}
    if member is ADAMUON:
        return partial(adamuon_, directions, state, **shared)
    by_row = (state[0].shape[-1] == 1) != group["transposed"]
    return partial(normuon_, directions, state, by_row=by_row, snap=options["snap"], **shared)


def _advance(
    group: Group, grads: list[Tensor], momenta: list[Tensor], targets: list[Tensor] | None, flag: Flag | None
) -> None:
    """Advance momenta in place, and write what is to be orthogonalized to `targets`, if there are any."""
    if _advance_by_kernel(group, grads, momenta, targets, flag):
        return
    form, beta, nesterov, maximize = (group[key] for key in ("momentum_form", "momentum", "nesterov", "maximize"))
    ok = None if flag is None else flag.ok
    grads = clean(grads, momenta, maximize, ok)
    advance_momentum(form, momenta, grads, beta, ok)
    if targets is not None and nesterov:
        look_ahead(form, momenta, grads, beta, out=targets)
    elif targets is not None:
        torch._foreach_copy_(targets, momenta)


def _advance_by_kernel(
    group: Group,
    grads: list[Tensor],
    momenta: list[Tensor],
    targets: list[Tensor] | None,
    flag: Flag | None,
    precondition: Precondition | None = None,
) -> bool:
    """The same by a kernel, and what it can do of the preconditioner; False, and nothing done, where it cannot."""
    if not _may_use_kernels(group, grads):
        return False
    from muonsw.kernels.momentum import advance_momenta

    return advance_momenta(
        grads,
        momenta,
        targets,
        form=group["momentum_form"],
        beta=group["momentum"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        flag=flag,
        precondition=precondition,
    )


def _may_use_kernels(group: Group, tensors: list[Tensor]) -> bool:
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


def _as_matrices(tensors: list[Tensor], bucket: Bucket) -> list[Tensor]:
    """Each tensor as one matrix or a stack of them, as a view where its layout allows."""
    shape = torch.Size((bucket.rows, bucket.columns))
    if all(tensor.shape == shape for tensor in tensors):
        return tensors
    return [
        t.view(-1, *shape) if t.is_contiguous() and not (t.dim() <= 3 and t.shape[-2:] == shape) else t for t in tensors
    ]


def _advance_parts(group: Group, parts: list[Part], targets: list[Tensor] | None, ok: Tensor | None) -> None:
    momenta = [part.state("momentum_buffer") for part in parts]
    grads, flag = [part.grad for part in parts], None if ok is None else Flag.from_ok(ok)
    first = None
    if _runs_on_shards(group) and _may_use_kernels(group, grads):
        first = _precondition_of_kernel(group, parts, None)
    if first is not None and _advance_by_kernel(group, grads, momenta, targets, flag, first):
        return
    _advance(group, grads, momenta, targets, flag)
    if _runs_on_shards(group):
        _precondition_shards(group, parts, targets, ok)


def _runs_on_shards(group: Group) -> bool:
    member = PRECONDITION.member(group)
    return member is not None and member.elementwise


def _precondition_shards(group: Group, parts: list[Part], targets: list[Tensor] | None, ok: Tensor | None) -> None:
    """Run an elementwise preconditioner where the shards are: its state advances on every rank that keeps it."""
    for number, part in enumerate(parts):
        kept = {key: part.state(key) for key in PRECONDITION.specs(group)}
        X = part.state("momentum_buffer") if targets is None else targets[number]
        state = {key: tensor.to(wide_dtype(tensor.dtype)) for key, tensor in kept.items()}
        ahead = X.to(wide_dtype(X.dtype))
        state["grad"] = clean([part.grad], [ahead], group["maximize"], ok)[0]
        result, after = PRECONDITION.apply({**group, "transposed": False}, ahead, state)
        for key, tensor in kept.items():
            tensor.copy_(after[key] if ok is None else torch.where(ok, after[key], tensor))
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
