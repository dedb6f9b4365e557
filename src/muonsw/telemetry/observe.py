"""Measure one step of any torch optimizer from a copy of the weights.

With W before the step, W' after it and phi the fraction that decay takes, the update is `u = (1 - phi) W - W'`. Weights
of low precision do not show it: rounding moves them by more, or not at all. There u is computed again from copies of
the state, if the optimizer is ours; of other optimizers it is the change that was stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw.addons.norm_rules import FREE, acts
from muonsw.algorithms import ALGORITHMS, Chunk
from muonsw.algorithms.base import whole_parts
from muonsw.codecs import decode, decode_items, is_code
from muonsw.distributed.shards import (
    as_dtensor,
    is_dtensor,
    local,
    local_gradient,
    offset,
    put_state,
    shard_like,
    whole,
)
from muonsw.matrices import STACK, WHOLE, MatrixCell, MatrixView, Region, box, matrix_chunks
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.precision import LOW_PRECISION, SCALE
from muonsw.slots import wide_dtype
from muonsw.state import layouts, zeros
from muonsw.step import chunk_bytes
from muonsw.summary import Summary
from muonsw.telemetry.parameters import ModelView, matrix_view, members
from muonsw.telemetry.record import Measured, MeasuringRanks, Sample, inner, norm
from muonsw.work import Group, Item, StepContext

MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")

# An update that is smaller than a weight by this many units of rounding cannot be told from none.
ROUNDING = 4

# torch optimizers that shrink weights by lr * weight_decay before they move them.
_DECOUPLED = (torch.optim.AdamW, torch.optim.Muon)

_ANNOUNCEMENT = (
    "telemetry that measures this step (attach it on every rank, with the same `every` and `start_step`, and give the "
    "sink to one of them)"
)


class Observer:
    """Copies the weights before a sampled step and measures them after it."""

    def __init__(self, optimizer: Optimizer, view: ModelView) -> None:
        self.optimizer = optimizer
        self.view = view
        self.ours = optimizer if isinstance(optimizer, ScaledDecayOptimizer) else None
        self._skipped = 0  # by kernels of torch's; ours count themselves
        self._skipped_unseen = self.ours.skipped_steps if self.ours is not None else 0
        self._weights: dict[Tensor, Tensor] = {}
        self._states: dict[Tensor, dict[str, Tensor]] = {}
        self._gradients: dict[Tensor, list[dict[str, Tensor]]] = {}

    def begin(self, closure: bool) -> None:
        """Copy the weights that the step may move; with a closure there are no gradients yet."""
        self.stop()
        ranks = self.ours._ranks if self.ours is not None else None
        for group, _, _, param in members(self.optimizer):
            # where ranks share parameters, another one may have the gradient
            shared = is_dtensor(param) or (ranks is not None and ranks.process_group is not None)
            if param.grad is None and not shared and not (closure and param.requires_grad):
                continue
            state = self.optimizer.state.get(param, {})
            self._weights[param] = param.detach().clone()
            if self.ours is not None and param.dtype in LOW_PRECISION:
                device = local(param).device
                self._states[param] = {
                    key: value.clone() if is_dtensor(value) else value.to(device, copy=True)
                    for key, value in state.items()
                }
            if self.ours is None and not closure and param.numel():  # some optimizers overwrite gradients
                self._gradients[param] = [self._gradient(param, rows) for rows in self._rows(group, param)]
        sharded = [param for param in self._weights if is_dtensor(param)]
        if ranks is not None and sharded:
            ranks.announced.append(_ANNOUNCEMENT)

    def stop(self) -> None:
        """Forget the copies."""
        self._weights, self._states, self._gradients = {}, {}, {}
        if self.ours is not None and _ANNOUNCEMENT in self.ours._ranks.announced:
            self.ours._ranks.announced.remove(_ANNOUNCEMENT)

    def finish(self, summary: Summary | None) -> Sample:
        """Measure what the step has done; `summary` is that of our own optimizers."""
        groups = self.optimizer.param_groups
        if self.ours is not None and summary is not None:
            was_skipped, skipped = summary.skipped, summary.skipped_steps - self._skipped_unseen
            moved = [param for _, params, _ in self.ours._last for param in params if param in self._weights]
            stepped = set(moved)
            etas = [own.lr for own in summary.groups]
            # a norm rule takes another share of every weight
            phis = [own.decay if own.norm == FREE else None for own in summary.groups]
        else:
            found = getattr(self.optimizer, "found_inf", None)  # a GradScaler makes fused kernels skip
            was_skipped = isinstance(found, Tensor) and bool(found)
            self._skipped += was_skipped
            skipped, stepped = self._skipped, {param for param in self._weights if param.grad is not None}
            etas, phis = [0.0] * len(groups), [known_decay(self.optimizer, group) for group in groups]
        measured: list[Measured] = []
        for group, eta, phi in zip(groups, etas, phis, strict=True):
            for param in [param for param in group["params"] if param in stepped]:
                intended = None
                if param in self._states and phi is not None and not was_skipped:
                    intended = self._intended_update(group, param, eta)  # also where this rank holds nothing of it
                if local(param).numel():
                    measured += self._measure(group, param, eta, phi, intended)
        self.stop()
        return Sample(measured, self._shared(), skipped, was_skipped)

    def _measure(
        self, group: Group, param: Tensor, eta: float, phi: float | None, intended: Tensor | None
    ) -> Iterator[Measured]:
        momentum = self._momentum(param)
        for number, rows in enumerate(self._rows(group, param)):
            w = rows.of(self._weights[param])
            change = rows.of(param.detach()) - w
            values = {"ww": norm(w), "dd": norm(change)}
            u = -change if intended is None else rows.of(intended)
            decayed = w
            if self.ours is not None and group["cautious"]:
                # an update that goes inward has the sign of the weight, with decay in it or without
                same = w.sign() * u.sign()
                decayed = torch.where(same > 0 if intended is None else same >= 0, w, 0)
            if intended is None and phi:
                u.sub_(decayed, alpha=phi)
            size, product = norm(u), inner(w, u)
            if intended is None:
                lost = size <= ROUNDING * torch.finfo(w.dtype).eps * values["ww"]
                size, product = torch.where(lost, 0.0, size), torch.where(lost, 0.0, product)
            values |= {"decayed": norm(decayed), "uu": size, "wu": product}
            values |= self._gradients[param][number] if param in self._gradients else self._gradient(param, rows)
            if momentum is not None:
                m = rows.of(momentum)
                values |= {"mm": norm(m), "wm": inner(w, m)}
            yield Measured(param, rows.numbers, rows.area, [eta * length for length in rows.lengths], phi, values)

    def _gradient(self, param: Tensor, rows: Rows) -> dict[str, Tensor]:
        grad = _local_gradient(param)
        if grad is None:
            return {}
        w, g = rows.of(self._weights[param]), rows.of(grad if grad.layout == torch.strided else grad.to_dense())
        return {"gg": norm(g), "wg": inner(w, g)}

    def _momentum(self, param: Tensor) -> Tensor | None:
        """The momentum after the step, as it is kept."""
        state = self.optimizer.state.get(param, {})
        for key in MOMENTUM_KEYS:
            value = state.get(key)
            if isinstance(value, Tensor) and value.shape == param.shape:
                held = local(value).to(local(param).device)
                return decode(held, local(state[f"{key}{SCALE}"]).to(held.device)) if is_code(held) else held
        return None

    def _intended_update(self, group: Group, param: Tensor, eta: float) -> Tensor:
        """The update before rounding, of this rank's shard: computed a second time, from the state before the step.

        A collective where the parameter is sharded: every rank computes all of it.
        """
        assert self.ours is not None
        weight, grad = self._weights[param], _local_gradient(param)
        grad = torch.zeros_like(local(weight)) if grad is None else grad
        item = Item(
            0,
            "a parameter",
            whole(weight),
            whole(shard_like(param, grad)) if is_dtensor(param) else grad,
            {key: whole(value) for key, value in self._states[param].items()},
        )
        for key, layout in layouts(group, item.param).items():
            item.state.setdefault(key, zeros(layout, item.param))
        if "step" in item.state:
            item.state["step"].add_(1)
        (item,) = decode_items(group, [item])
        ctx = StepContext(eta, 0.0, chunk_bytes(self.ours, item.param.device))
        rule = ALGORITHMS[group["algorithm"]]
        view = rule.view(group)
        if view is None:
            chunks = [Chunk(whole_parts([item]))]
        else:
            cut = matrix_chunks(view, [item], ctx.chunk_bytes)
            chunks = [Chunk(parts, view, bucket) for bucket, parts in cut]
        u = torch.zeros_like(item.param, dtype=wide_dtype(item.param.dtype))
        for chunk in chunks:
            update = rule.update(group, chunk, ctx)
            for part, direction in zip(update.parts, update.stretched, strict=True):
                part.region.of(u).copy_(direction).mul_(eta * update.scale)
        return local(put_state(param, u, as_dtensor(param).placements)) if is_dtensor(param) else u

    def _rows(self, group: Group, param: Tensor) -> list[Rows]:
        """What this rank holds of a parameter's matrices, those of one size together.

        These are the matrices that our optimizers see, the experts of a stack, or the whole parameter. On every rank
        they have the same numbers.
        """
        shape, held = param.shape, local(param).shape
        here = box(offset(param), held)
        axes, scale = len(shape) - 2 if matrix_view(group, param, self.view) == STACK else 0, None
        cells: Sequence[MatrixCell] = [MatrixCell(WHOLE, 0, 0)]
        rule = ALGORITHMS[group["algorithm"]] if self.ours is not None else None
        if rule is not None and rule.matrices is not None:
            view = rule.view(group)
            assert view is not None
            axes, cells = view.stack_axes(len(shape)), list(view.cells(shape))
            if group["algorithm"] == "muon" and not acts(group):
                scale = partial(rule.matrices.scale, group)
        by_area: dict[int, Rows] = {}
        for index, cell in enumerate(cells):
            region = cell.region.within(here)
            lengths = region.shape_in(held)
            count = math.prod(lengths[:axes])
            if not math.prod(lengths):
                continue
            area = math.prod(lengths) // count
            rows = by_area.setdefault(area, Rows(area, wide_dtype(param.dtype), [], [], []))
            rows.regions.append(WHOLE if lengths == held else region)
            first = index * math.prod(shape[:axes])
            rows.numbers.extend(first + number for number in _in_stack(here.starts, lengths[:axes], shape))
            side, out_in = min(cell.rows, cell.columns), MatrixView.of(group).out_in(cell.rows, cell.columns)
            rows.lengths.extend([scale(*out_in) * side**0.5 if scale else 0.0] * count)
        return list(by_area.values())

    def _shared(self) -> dict[Tensor, MeasuringRanks]:
        """The parameters of which other ranks measure other parts."""
        found: dict[Tensor, MeasuringRanks] = {}
        if self.ours is None:
            return found
        for group, _, _, param in members(self.optimizer):
            groups = self.ours._ranks.layouts.sharding_groups(param)
            if groups:
                matrices = ALGORITHMS[group["algorithm"]].count_matrices(group, param)
                stack = math.prod(param.shape[:-2])  # how other rules see a stack, at most
                found[param] = MeasuringRanks(groups, local(param).device, max(matrices, stack))
        return found


class Rows(NamedTuple):
    """Matrices of a parameter as rows of `area` elements: where they lie in its shard, and their numbers in all of it.

    `lengths` are the norms of an orthogonal direction after the shape scale, 0 where nothing is orthogonalized.
    """

    area: int
    dtype: torch.dtype
    regions: list[Region]
    numbers: list[int]
    lengths: list[float]

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor that has the shape of the parameter."""
        held = local(tensor)
        rows = [region.of(held).reshape(-1, self.area) for region in self.regions]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(self.dtype)


def _local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a gradient; None where only other ranks have one."""
    if param.grad is None or not is_dtensor(param):
        return param.grad
    return local_gradient("a parameter", param, param.grad)


def _in_stack(starts: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The numbers of matrices among those that the first axes of a parameter count, of which `lengths` are here."""
    numbers = [0]
    for start, length, size in zip(starts, lengths, shape, strict=False):
        numbers = [number * size + place for number in numbers for place in range(start, start + length)]
    return numbers


def known_decay(optimizer: Optimizer, group: Group) -> float | None:
    """The fraction of a weight that a step of another optimizer takes away, or None where the group does not say.

    Known are groups without decay, torch's decoupled optimizers, and groups under `scale_weight_decay`.
    """
    lam, lr = group.get("weight_decay"), group.get("lr")
    if isinstance(lam, int | float) and lam == 0:
        return 0.0
    decoupled = isinstance(optimizer, _DECOUPLED) or group.get("decoupled_weight_decay") is True
    return None if lam is None or lr is None or not (decoupled or "base_weight_decay" in group) else float(lr * lam)
