"""Rules that keep state of whole matrices: their state in batches, and algorithms made of pure functions.

A rule is a function from matrices (count, m, n) and their state to directions and the new state. Here the state of many
parameters is gathered into batches for it, and written back where the step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from muonsw.algorithms.base import Algorithm, Chunk, MatrixRule, Update, clean
from muonsw.matrices import WHOLE, MatrixView, Part, Region, empty_batch, scatter, views
from muonsw.slots.base import Slot, Specs, State, StateSpec, oriented, wide_dtype
from muonsw.work import Group, StepContext


class StateBatch:
    """The state of the matrices of a chunk: views of each parameter's tensors, and what they hold as batches."""

    def __init__(self, chunk: Chunk, specs: Specs) -> None:
        rows, columns, _ = chunk.bucket
        m, n = chunk.view.out_in(rows, columns)
        self._views = {key: _state_views(chunk, key, spec) for key, spec in specs.items()}
        self._shapes = {key: spec.shape(m, n) if spec.shape else (rows, columns) for key, spec in specs.items()}

    def matrices(self, key: str) -> list[Tensor]:
        """A tensor of the state where it lies, of each part: one matrix, or a stack of them where its layout allows."""
        shape = self._shapes[key]
        return [t.view(-1, *shape) if t.is_contiguous() else t for t in self._views[key]]

    def gathered(self) -> State:
        """Every tensor as one batch (count, r, c), in float32 or better."""
        batches = {key: _batched(tensors, self._shapes[key]) for key, tensors in self._views.items()}
        return {key: batch.to(wide_dtype(batch.dtype)) for key, batch in batches.items()}

    def write(self, before: State, after: State, ok: Tensor | None) -> None:
        """Store what a rule returned, unless `ok` is false."""
        for key, tensors in self._views.items():
            new = after[key] if ok is None else torch.where(ok, after[key], before[key])
            torch._foreach_copy_(tensors, scatter(new, tensors))


def _batched(tensors: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Tensors as one batch (count, r, c): a copy, or a view of the only one."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1, *shape)
    if False not in [tensor.shape == shape for tensor in tensors]:
        return torch.stack(list(tensors))
    return torch.cat([tensor.reshape(-1, *shape) for tensor in tensors])


def _state_views(chunk: Chunk, key: str, spec: StateSpec) -> list[Tensor]:
    """A tensor of the state of each part; of one with a shape of its own, that of the part's cell and stack."""
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


def gradients(group: Group, chunk: Chunk, ok: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gradients of a chunk as one batch, pointing downhill, zero where `ok` is false."""
    grads = views(chunk.parts, [part.item.grad for part in chunk.parts])
    batch = empty_batch(grads, chunk.bucket.rows, chunk.bucket.columns, dtype)
    torch._foreach_copy_(scatter(batch, grads), clean(grads, [batch] * len(grads), group["maximize"], ok))
    return batch


def apply_slot(slot: Slot, group: Group, chunk: Chunk, X: Tensor, ok: Tensor | None) -> Tensor:
    """Run the member of a slot on matrices that are whole here, and advance its state."""
    batch = StateBatch(chunk, slot.specs(group))
    before = batch.gathered()
    extra = {"grad": gradients(group, chunk, ok, X.dtype)} if slot.member(group).uses_gradient else {}
    X, after = slot.apply(group, X, {**before, **extra})
    batch.write(before, after, ok)
    return X


def validate_matrices(group: Group, name: str, param: Tensor) -> None:
    """Refuse a parameter that can be seen as matrices in no way, or in more than one."""
    shape, view = tuple(param.shape), MatrixView.of(group)
    if param.dim() < 2:
        raise ValueError(
            f"algorithm={group['algorithm']!r} needs matrices, but {name} has shape {shape}; give it a group with "
            f"algorithm='adamw', or let MuonSW.for_model route the whole model"
        )
    if param.dim() > 2 and view.matrix is None:
        raise ValueError(
            f"{name} has shape {shape}, which can be seen as matrices in two ways; say matrix='stack' where the last "
            f"two axes are (out, in) and the others count matrices (experts), or matrix='flatten' where the first "
            f"axis is out and the others are in (convolutions), or let MuonSW.for_model route the whole model"
        )
    heads, sizes, axis = view.heads, view.split_sizes, view.split_axis(shape)
    axis_text = f"{name} of shape {shape} has {shape[axis]} along axis {axis}"
    if heads is not None and sizes is not None:
        raise ValueError(f"heads={heads} and split_sizes={sizes} both say how to split {name}; give one of them")
    if heads is not None and shape[axis] % heads:
        raise ValueError(f"heads={heads} asks for equal blocks, but {axis_text}")
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
    """An algorithm from a pure function of gradients and state of whole matrices.

    Args:
        defaults: its own options.
        state: the tensors of state of a matrix, for a group's options.
        directions: group, gradients (count, m, n) of m outputs and n inputs that point downhill, and state (count, r,
            c) by key, to directions and the new state; all in float32, or float64 for such parameters.
        scale: how far a matrix of m outputs and n inputs moves along its direction.
        validate: refuses parameters that the rule cannot take.
        counts_steps: `group["update_count"]` is the number of the step, from 1. Such a rule is not captured.
        scale_free: whether the size of a gradient does not reach the update.
    """

    def oriented_directions(group: Group, X: Tensor, before: State, dtype: torch.dtype) -> tuple[Tensor, State]:
        before = {key: tensor.to(X.dtype) for key, tensor in before.items()}  # `state_dtype` may be lower
        transposed = group.get("transposed", False)
        X, after = oriented(lambda X, s: directions(group, X, s), state(group), X, before, transposed=transposed)
        return X.to(dtype), after

    def update(group: Group, chunk: Chunk, ctx: StepContext) -> Update:
        dtype, batch = wide_dtype(chunk.bucket.dtype), StateBatch(chunk, state(group))
        before = batch.gathered()
        X, after = oriented_directions(group, gradients(group, chunk, ctx.ok, dtype), before, dtype)
        batch.write(before, after, ctx.ok)
        like = views(chunk.parts, [part.item.param for part in chunk.parts])
        return Update(chunk.parts, scatter(X, like), scale(group, *chunk.view.out_in(*chunk.bucket[:2])))

    def advance(group: Group, parts: list[Part], targets: list[Tensor] | None) -> None:
        if targets is not None:
            grads = views(parts, [part.item.grad for part in parts])
            torch._foreach_copy_(targets, clean(grads, targets, group["maximize"], None))

    return Algorithm(
        defaults={"matrix": None, **defaults},
        state=state,
        update=update,
        validate=validate,
        matrices=MatrixRule(
            sent_dtype=lambda _, dtype: wide_dtype(dtype),
            result_dtype=lambda _, dtype, __: wide_dtype(dtype),
            advance=advance,
            directions=oriented_directions,
            scale=scale,
            state=state,
        ),
        scale_free=scale_free,
        counts_steps=(lambda _: True) if counts_steps else None,
    )
