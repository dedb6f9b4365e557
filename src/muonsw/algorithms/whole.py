"""Rules that keep state of whole matrices: their state in batches, and algorithms made of pure functions.

A rule is a function from matrices (count, m, n) and their state to directions and the new state. Here the state of many
parameters is gathered into batches for it, and written back where the step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from muonsw.algorithms.base import Algorithm, Budget, MatrixRule, Update, clean
from muonsw.matrices import (
    WHOLE,
    Bucket,
    MatrixView,
    Part,
    Region,
    empty_batch,
    matrix_chunks,
    scatter,
    views,
)
from muonsw.slots import ELEMENTWISE, MatrixState, Slot, Specs, State, oriented, wide_dtype
from muonsw.work import Group, Item

# The options that say which matrices a parameter holds.
VIEW_OPTIONS: dict[str, Any] = {
    "matrix": None,
    "transposed": False,
    "split_sizes": None,
    "split_dim": 0,
    "heads": None,
}


class StateBatch:
    """The state of the matrices of some parts: views of each parameter's tensors, and what they hold as batches."""

    def __init__(self, view: MatrixView, bucket: Bucket, parts: Sequence[Part], specs: Specs) -> None:
        m, n = view.out_in(bucket.rows, bucket.columns)
        self._views = {key: _state_of(view, key, spec, parts) for key, spec in specs.items()}
        self._shapes = {
            key: (bucket.rows, bucket.columns) if spec.shape is None else spec.shape(m, n)
            for key, spec in specs.items()
        }

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


def _state_of(view: MatrixView, key: str, spec: MatrixState, parts: Sequence[Part]) -> list[Tensor]:
    """A tensor of the state of parts; of one with a shape of its own, that of a part's cell and run of the stack."""
    keys = (key,) if spec.shape is None else view.cell_keys(key)
    if len(keys) == 1 and False not in [part.region is WHOLE for part in parts]:
        return [part.item.state[keys[0]] for part in parts]
    if spec.shape is None:
        return [part.state(key) for part in parts]
    found = []
    for part in parts:
        shape, cuts = part.item.param.shape, part.region.cuts
        number = 0 if len(keys) == 1 else view.cell_number(shape, cuts)
        stack = tuple(cut for cut in cuts if cut[0] < view.stack_axes(len(shape)))
        found.append(Region(stack).of(part.item.state[keys[number]]))
    return found


def gradients(group: Group, parts: Sequence[Part], ok: Tensor | None, dtype: torch.dtype, bucket: Bucket) -> Tensor:
    """The gradients of parts as one batch, pointing downhill, zero where `ok` is false."""
    grads = views(parts, [part.item.grad for part in parts])
    batch = empty_batch(grads, bucket.rows, bucket.columns, dtype)
    torch._foreach_copy_(scatter(batch, grads), clean(grads, [batch] * len(grads), group["maximize"], ok))
    return batch


def apply_slot(slot: Slot, group: Group, bucket: Bucket, parts: list[Part], X: Tensor, ok: Tensor | None) -> Tensor:
    """Run the member of a slot on matrices that are whole here, and advance its state."""
    member = slot.members[group[slot.name]]
    batch = StateBatch(MatrixView.of(group), bucket, parts, slot.specs(group))
    before = batch.gathered()
    extra = {"grad": gradients(group, parts, ok, X.dtype, bucket)} if member.uses_gradient else {}
    X, after = slot.apply(group, X, {**before, **extra})
    batch.write(before, after, ok)
    return X


def state_keys(view: MatrixView, specs: Specs) -> tuple[str, ...]:
    """The keys of a parameter's state for what a rule keeps of its matrices."""
    found = ((key,) if spec.shape is None else view.cell_keys(key) for key, spec in specs.items())
    return tuple(key for keys in found for key in keys)


def validate_matrices(group: Group, name: str, param: Tensor) -> None:
    """A parameter must be seen as matrices in exactly one way."""
    shape = tuple(param.shape)
    if param.dim() < 2:
        raise ValueError(
            f"algorithm={group['algorithm']!r} needs matrices, but {name} has shape {shape}; give it a group with "
            f"algorithm='adamw', or let MuonSW.for_model route the whole model"
        )
    if param.dim() > 2 and group["matrix"] is None:
        raise ValueError(
            f"{name} has shape {shape}, which can be seen as matrices in two ways; say matrix='stack' where the last "
            f"two axes are (out, in) and the others count matrices (experts), or matrix='flatten' where the first "
            f"axis is out and the others are in (convolutions), or let MuonSW.for_model route the whole model"
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
        defaults: its own options; those that say which matrices a parameter holds are added.
        state: the tensors of state of a matrix, for a group's options.
        directions: group, gradients (count, m, n) of m outputs and n inputs that point downhill, and state (count, r,
            c) by key, to directions and the new state; all in float32, or float64 for such parameters.
        scale: how far a matrix of m outputs and n inputs moves along its direction.
        validate: refuses parameters that the rule cannot take.
        counts_steps: `group["update_count"]` is the number of the step, from 1. Such a rule is not captured.
        scale_free: whether the size of a gradient does not reach the update.
    """

    def found(group: Group, X: Tensor, kept: State, dtype: torch.dtype) -> tuple[Tensor, State]:
        def apply(X: Tensor, kept: State) -> tuple[Tensor, State]:
            return directions(group, X, kept)

        kept = {key: tensor.to(X.dtype) for key, tensor in kept.items()}  # `state_dtype` may be lower
        X, new = oriented(apply, state(group), X, kept, transposed=group["transposed"])
        return X.to(dtype), new

    def advance(group: Group, parts: list[Part], targets: list[Tensor] | None) -> None:
        if targets is not None:
            grads = views(parts, [part.item.grad for part in parts])
            torch._foreach_copy_(targets, clean(grads, targets, group["maximize"], None))

    rule = MatrixRule(
        sent_dtype=lambda _, dtype: wide_dtype(dtype),
        result_dtype=lambda _, dtype, __: wide_dtype(dtype),
        advance=advance,
        directions=found,
        scale=lambda group, rows, columns: scale(group, *MatrixView.of(group).out_in(rows, columns)),
        state=state,
    )
    return Algorithm(
        defaults={**VIEW_OPTIONS, **defaults},
        state_keys=lambda group: state_keys(MatrixView.of(group), state(group)),
        updates=lambda group, items, budget: _updates(rule, group, items, budget),
        validate=validate,
        matrices=rule,
        scale_free=scale_free,
        counts_steps=(lambda _: True) if counts_steps else None,
    )


def _updates(rule: MatrixRule, group: Group, items: list[Item], budget: Budget) -> Iterator[Update]:
    """Directions of matrices that are whole here, one batch of equal ones after another."""
    view, specs = MatrixView.of(group), rule.state(group)
    for bucket, parts in matrix_chunks(group, items, budget.chunk_bytes):
        dtype = wide_dtype(bucket.dtype)
        batch = StateBatch(view, bucket, parts, specs)
        before = batch.gathered()
        X, after = rule.directions(group, gradients(group, parts, budget.ok, dtype, bucket), before, dtype)
        batch.write(before, after, budget.ok)
        like = views(parts, [part.item.param for part in parts])
        yield Update(parts, scatter(X, like), rule.scale(group, bucket.rows, bucket.columns))


__all__ = ["ELEMENTWISE", "MatrixState", "matrix_algorithm"]
