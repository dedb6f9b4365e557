"""The interface of update rules, which turn gradients and state into directions and never touch weights.

`muonsw.apply` subtracts `eta * scale * direction`, with decay, masks and rounding. An algorithm gets one chunk at a
time, which bounds temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.matrices import WHOLE, Chunk, MatrixView, Part, Region, filled, scatter, views
from muonsw.precision import LOW_PRECISION, StoredState
from muonsw.slots import Specs, StateSpec, oriented, wide_dtype
from muonsw.work import Group, Item, State, StepContext, all_contiguous, elements

if TYPE_CHECKING:
    from muonsw.kernels.move import Weights


class Update(NamedTuple):
    """Directions for some parts: each part moves by `-eta * scale * direction`.

    The directions must still be multiplied by `factors`, if any: one per row or column, expanded to the batch
    (count, rows, columns). The kernel that moves weights multiplies as it reads.
    """

    parts: list[Part]
    directions: list[Tensor]
    scale: float = 1.0
    factors: Tensor | None = None


class MatrixRule(NamedTuple):
    """A rule for whole matrices: `advance`, then `directions`; in between, ranks exchange sharded matrices.

    Attributes:
        advance: advances the state of parts unless the flag forbids it, and writes the inputs of `directions` to
            targets, if any.
        directions: maps matrices (count, rows, columns), their state and a dtype to directions and the new state.
        scale: the scale of directions for a matrix of shape (out, in).
        state: the state that `directions` reads and returns; it is sent with the matrix.
        sends_gradient: whether `directions` also needs the gradient, as `state["grad"]`.
        sent_dtype: the dtype of the inputs of `directions` for sharded matrices; whole ones need not travel.
        result_dtype: the dtype of directions.
        by_kernels: a faster update of whole matrices; returns None, without side effects, if it cannot.
    """

    advance: Callable[[Group, list[Part], list[Tensor] | None, StepContext], None]
    directions: Callable[[Group, Tensor, State, torch.dtype], tuple[Tensor, State]]
    scale: Callable[[Group, int, int], float]
    state: Callable[[Group], Specs]
    sends_gradient: Callable[[Group], bool] = lambda _: False
    sent_dtype: Callable[[Group, torch.dtype], torch.dtype] = lambda _, dtype: wide_dtype(dtype)
    result_dtype: Callable[[Group, torch.dtype, torch.device], torch.dtype] = lambda _, dtype, __: wide_dtype(dtype)
    by_kernels: Callable[[Group, Chunk, StepContext], Update | None] | None = None


class Algorithm(NamedTuple):
    """An update rule: its options with their defaults, its state, and its directions.

    A rule either computes each element separately, by `update`, so it runs on shards, or needs whole `matrices`.

    Attributes:
        defaults: its options.
        state: the tensors of a parameter's state, by key.
        update: returns the directions of some parts and advances their state in place.
        validate: refuses an unsupported parameter or option.
        matrices: a rule for whole matrices.
        fused: takes the whole step of some parts in one kernel; returns False, without side effects, if it cannot.
        in_place: `fused` on encoded state; bit-equal to `update` on decoded state.
        scale_free: the update does not depend on the size of the gradient, so clipping has no effect.
        counts_steps: whether a group's rule acts differently every few steps. `update_count` is then the number of the
            step, from 1. Skipped steps count, except before the first one taken.
    """

    defaults: dict[str, Any]
    state: Callable[[Group], Specs]
    update: Callable[[Group, list[Part], StepContext], Update] | None = None
    validate: Callable[[Group, str, Tensor], None] = lambda *_: None
    matrices: MatrixRule | None = None
    fused: Callable[[Group, list[Part], StepContext], bool] | None = None
    in_place: Callable[[Group, list[Part], dict[str, StoredState], StepContext], bool] | None = None
    scale_free: bool = False
    counts_steps: Callable[[Group], bool] = lambda _: False

    def view(self, group: Group) -> MatrixView | None:
        return None if self.matrices is None else MatrixView.of(group)


def has_kernels(group: Group, device: torch.device) -> bool:
    return group["fused"] is not False and kernels.available(device)


def rounding_key(part: Part) -> int:
    """A number for this part of this parameter, the same at every step."""
    place = part.item.position * 0x10001 + sum((axis + 1) * start for axis, start, _ in part.region.cuts)
    return place & 0x7FFFFFFF


def kernel_weights(parts: list[Part], weights: list[Tensor]) -> Weights:
    from muonsw.kernels.move import Weights

    if weights[0].dtype not in LOW_PRECISION:
        return Weights(weights)
    counters = [part.item.state["step"] for part in parts]
    return Weights(weights, counters, [rounding_key(part) for part in parts])


def suits_torch(group: Group, ctx: StepContext, *lists: Sequence[Tensor]) -> bool:
    """Whether torch's fused kernels support this: contiguous tensors of one dtype, float32 or float64.

    We pass them phi divided by the learning rate, which must be a nonzero number; they have no cautious decay. In
    lower precision torch 2.12 and 2.13 silently skip steps on CPUs.
    """
    first = lists[0][0]
    if group["cautious"] or first.device.type not in ("cpu", "cuda") or isinstance(ctx.eta, Tensor) or ctx.eta == 0:
        return False
    tensors = list(chain.from_iterable(lists))
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes in ({torch.float32}, {torch.float64}) and all_contiguous(tensors)


def clean(grads: Sequence[Tensor], like: Sequence[Tensor], maximize: bool, ok: Tensor | None) -> list[Tensor]:
    """Descent gradients in the dtype of `like`, all zero if `ok` is false.

    Never changes the caller's gradients, but may return them as they are.
    """
    ready = [g if g.dtype == s.dtype else g.to(s.dtype) for g, s in zip(grads, like, strict=True)]
    if maximize:
        ready = list(torch._foreach_neg(ready))
    return ready if ok is None else [torch.where(ok, g, 0) for g in ready]


def decay_average(averages: list[Tensor], beta: float, ok: Tensor | None) -> None:
    if ok is None:
        torch._foreach_mul_(averages, beta)
    else:
        factor = torch.where(ok, torch.full_like(ok, beta, dtype=wide_dtype(averages[0].dtype)), 1.0)
        torch._foreach_mul_(averages, factor)


def subtract(weights: list[Tensor], factor: float | Tensor, directions: list[Tensor]) -> None:
    """`W <- W - factor * direction`, in place.

    Decay passes the weights as directions: a factor `1 - phi` would be rounded the same way at every step.
    """
    if isinstance(factor, Tensor):
        torch._foreach_addcmul_(weights, directions, [factor] * len(weights), value=-1)
    else:
        torch._foreach_add_(weights, directions, alpha=-factor)


# The two common forms of momentum. They differ by the factor `1 - beta`, which orthogonalization cancels:
# `ema` (the paper's listing, `torch.optim.Muon`): `M <- beta M + (1 - beta) G`, Nesterov `(1 - beta) G + beta M`;
# `heavy_ball` (the paper's Algorithm 1, `torch.optim.SGD`): `M <- beta M + G`, Nesterov `G + beta M`.
def advance_momentum(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float, ok: Tensor | None) -> None:
    if form == "ema" and ok is None:
        torch._foreach_lerp_(momenta, grads, 1 - beta)
    else:
        decay_average(momenta, beta, ok)
        torch._foreach_add_(momenta, grads, alpha=1 - beta if form == "ema" else 1.0)


def look_ahead(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float, out: list[Tensor]) -> None:
    for average, grad, target in zip(momenta, grads, out, strict=True):
        if form == "ema":
            torch.lerp(grad, average, beta, out=target)
        else:
            torch.add(grad, average, alpha=beta, out=target)


def whole_parts(items: Sequence[Item]) -> list[Part]:
    return list(map(Part._make, zip(items, repeat(WHOLE))))


def columns(parts: Sequence[Part], keys: Sequence[str]) -> list[list[Tensor]]:
    items = [part.item for part in parts]
    lists = [[item.param for item in items], [item.grad for item in items]]
    lists += [[item.state[key] for item in items] for key in keys]
    return lists if False not in [part.region is WHOLE for part in parts] else [views(parts, of) for of in lists]


def elementwise_chunks(items: list[Item], chunk_bytes: int) -> list[list[Part]]:
    """Chunks for elementwise rules: small tensors together, large ones cut.

    In a CPU's cache several passes over a chunk cost little more than one.
    """
    if elements([item.param for item in items]) * items[0].param.element_size() <= chunk_bytes:
        return [whole_parts(items)]
    pieces: list[tuple[Part, int]] = []
    for item in items:
        numel, size = item.param.numel(), item.param.element_size()
        length = max(1, chunk_bytes // size)
        state = [tensor for tensor in item.state.values() if tensor.shape == item.param.shape]
        if numel <= length or not all_contiguous([item.param, item.grad, *state]):
            pieces.append((Part(item, WHOLE), numel * size))
            continue
        for start in range(0, numel, length):
            count = min(length, numel - start)
            pieces.append((Part(item, Region(((0, start, count),), flat=True)), count * size))
    return filled(pieces, chunk_bytes)


# Rules with per-matrix state: a pure function from matrices (count, m, n) and their state to directions and new state.
# The state of many parameters is gathered into batches for it, and written back if the step is taken.


class StateBatch:
    """The state of the matrices in a chunk: views of each parameter's tensors, gathered into batches."""

    def __init__(self, chunk: Chunk, specs: Specs) -> None:
        rows, columns = chunk.rows, chunk.columns
        m, n = chunk.view.out_in(rows, columns)
        self.views = {key: _state_views(chunk, key, spec) for key, spec in specs.items()}
        self.shapes = {key: spec.shape(m, n) if spec.shape else (rows, columns) for key, spec in specs.items()}

    def gathered(self) -> State:
        """Every tensor as one batch (count, r, c), in float32 or better: a copy, or a view if there is just one."""
        batches: State = {}
        for key, tensors in self.views.items():
            stacks = [tensor.reshape(-1, *self.shapes[key]) for tensor in tensors]
            batch = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
            batches[key] = batch.to(wide_dtype(batch.dtype))
        return batches

    def write(self, before: State, after: State, ok: Tensor | None) -> None:
        for key, tensors in self.views.items():
            new = after[key] if ok is None else torch.where(ok, after[key], before[key])
            torch._foreach_copy_(tensors, scatter(new, tensors))


def _state_views(chunk: Chunk, key: str, spec: StateSpec) -> list[Tensor]:
    """One state tensor of each part: its region of elementwise state, or the per-matrix state of its matrices."""
    if spec.shape is None:
        return [part.state(key) for part in chunk.parts]
    view, keys = chunk.view, chunk.view.cell_keys(key)
    if len(keys) == 1 and False not in [part.region is WHOLE for part in chunk.parts]:
        return [part.item.state[key] for part in chunk.parts]
    tensors = []
    for part in chunk.parts:
        shape, cuts = part.item.param.shape, part.region.cuts
        number = 0 if len(keys) == 1 else view.cell_number(shape, cuts)
        stack = tuple(cut for cut in cuts if cut[0] < view.stack_axes(len(shape)))
        tensors.append(Region(stack).of(part.item.state[keys[number]]))
    return tensors


def copy_gradients(group: Group, parts: list[Part], targets: list[Tensor] | None, ctx: StepContext) -> None:
    """Write descent gradients to targets, if any."""
    if targets is not None:
        grads = views(parts, [part.item.grad for part in parts])
        torch._foreach_copy_(targets, clean(grads, targets, group["maximize"], ctx.ok))


def update_matrices(rule: MatrixRule, group: Group, chunk: Chunk, ctx: StepContext) -> Update:
    """Advance the state of a chunk of matrices that are whole on this rank, and return their directions."""
    view, rows, columns, home, parts = chunk
    like = views(parts, [part.item.param for part in parts])
    if rule.by_kernels is not None and has_kernels(group, like[0].device):
        updated = rule.by_kernels(group, chunk, ctx)
        if updated is not None:
            return updated
    dtype, count = torch.promote_types(home, torch.float32), elements(like) // (rows * columns)
    X = torch.empty(count, rows, columns, dtype=dtype, device=like[0].device)
    rule.advance(group, parts, scatter(X, like), ctx)
    specs = rule.state(group)
    batch = StateBatch(chunk, specs) if specs else None
    before = batch.gathered() if batch else {}
    if rule.sends_gradient(group):
        before["grad"] = torch.empty_like(X)
        copy_gradients(group, parts, scatter(before["grad"], like), ctx)
    X, after = rule.directions(group, X, before, rule.result_dtype(group, home, X.device))
    if batch:
        batch.write(before, after, ctx.ok)
    return Update(parts, scatter(X, like), rule.scale(group, *view.out_in(rows, columns)))


def validate_matrices(group: Group, name: str, param: Tensor) -> None:
    """Refuse a parameter that has no matrix view, or an ambiguous one."""
    shape, view = tuple(param.shape), MatrixView.of(group)
    if param.dim() < 2:
        raise ValueError(
            f"algorithm={group['algorithm']!r} needs matrices, but {name} has shape {shape}; give it a group with "
            f"algorithm='adamw', or let MuonSW.for_model route the whole model"
        )
    if param.dim() > 2 and view.matrix is None:
        raise ValueError(
            f"{name} has shape {shape}, so its matrices are ambiguous; set matrix='stack' if the last two axes are "
            f"(out, in) and the others count matrices (experts), or matrix='flatten' if the first axis is out and the "
            f"others are in (convolutions), or let MuonSW.for_model route the whole model"
        )
    heads, sizes, axis = view.heads, view.split_sizes, view.split_axis(shape)
    axis_text = f"{name} of shape {shape} has {shape[axis]} along axis {axis}"
    if heads is not None and sizes is not None:
        raise ValueError(f"heads={heads} and split_sizes={sizes} both split {name}; pass one of them")
    if heads is not None and shape[axis] % heads:
        raise ValueError(f"heads={heads} needs equal blocks, but {axis_text}")
    if sizes is not None and sum(sizes) != shape[axis]:
        raise ValueError(f"split_sizes={sizes} add up to {sum(sizes)}, but {axis_text}")


def matrix_algorithm(
    *,
    defaults: dict[str, Any],
    state: Callable[[Group], Specs],
    directions: Callable[[Group, Tensor, State], tuple[Tensor, State]],
    scale: Callable[[Group, int, int], float] = lambda *_: 1.0,
    validate: Callable[[Group, str, Tensor], None] = validate_matrices,
    counts_steps: bool = False,
    scale_free: bool = True,
) -> Algorithm:
    """Make an algorithm from a pure function of whole matrices.

    `directions` maps group, descent gradients (count, m, n) of m outputs and n inputs, and state (count, r, c) by key
    to directions and the new state; in float32, or float64 for float64 parameters. For the rest see `Algorithm` and
    `MatrixRule`; rules that count steps are not captured in graphs.
    """

    def oriented_directions(group: Group, X: Tensor, before: State, dtype: torch.dtype) -> tuple[Tensor, State]:
        before = {key: tensor.to(X.dtype) for key, tensor in before.items()}  # `state_dtype` may be lower
        transposed = group.get("transposed", False)
        X, after = oriented(lambda X, s: directions(group, X, s), state(group), X, before, transposed=transposed)
        return X.to(dtype), after

    rule = MatrixRule(copy_gradients, oriented_directions, scale, state)
    return Algorithm(
        defaults={"matrix": None, **defaults},
        state=state,
        validate=validate,
        matrices=rule,
        scale_free=scale_free,
        counts_steps=lambda _: counts_steps,
    )
