"""Measuring the optimizers of this package, at the moment they change the weights, with the rates they use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw import norms
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import FusedUpdate, Rates, Update
from muonsw.apply import apply_update
from muonsw.distributed.shards import local, offset
from muonsw.matrices import STACK, WHOLE, MatrixView, Part, Region
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.precision import LOW_PRECISION
from muonsw.slots import wide_dtype
from muonsw.telemetry.parameters import ModelView, matrix_view, members
from muonsw.telemetry.record import Measurements, MeasuringRanks, Piece, inner, norm
from muonsw.work import Group

MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")

# Blocks of at most so many entries are copied together, up to so many in all, and measured at once: for small ones
# calls cost more than copies, and on accelerators most are small in this sense.
CPU_BUNDLE = (2**15, 2**20)
ACCELERATOR_BUNDLE = (2**22, 2**24)


class MatrixRows(NamedTuple):
    """Matrices as rows of `area` elements: whole ones, or one piece of one.

    `region` is where they lie in a part of a parameter, `numbers` which of the parameter's matrices they are.
    """

    region: Region
    numbers: Sequence[int]
    area: int

    @property
    def rows(self) -> int:
        """How many they are."""
        return len(self.numbers)

    def of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """These rows of a tensor that has the part's shape."""
        return self.region.of(tensor).reshape(self.rows, self.area).to(dtype)


class Bundle(NamedTuple):
    """Blocks of one shape that are measured together, with the parts they lie in and the directions of those."""

    blocks: list[MatrixRows]
    parts: list[Part]
    directions: list[Tensor]

    def gather(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """The rows of all blocks, one tensor for each; a view of it where there is one."""
        rows = [block.of(tensor, dtype) for block, tensor in zip(self.blocks, tensors, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """The weights as they are now."""
        return self.gather((part.region.of(part.item.param) for part in self.parts), dtype)

    def weights_before(self, dtype: torch.dtype) -> Tensor:
        """A copy of the weights."""
        rows = self.weights(dtype)
        is_view = len(self.parts) == 1 and self.parts[0].item.param.dtype == dtype
        return rows.clone() if is_view else rows


class OurOptimizerObserver:
    """The observer of a `ScaledDecayOptimizer`; it applies updates as the optimizer would, and measures them."""

    def __init__(self, optimizer: ScaledDecayOptimizer, view: ModelView) -> None:
        self.optimizer = optimizer
        self.view = view
        self.measured = Measurements()
        self._matrices: Counter[Tensor] = Counter()
        self._ok: Tensor | None = None
        self._skipped_before = 0
        self._skipped_unseen = optimizer.skipped_steps

    def begin(self, closure: bool) -> None:  # noqa: ARG002
        """Measure the next update: from now on the optimizer hands its updates to `apply`."""
        self.measured, self._matrices, self._ok = Measurements(), Counter(), None
        self._skipped_before = self.optimizer._counters.skipped_on_host
        self.optimizer._observer = self

    def stop(self) -> None:
        """Stop measuring: the optimizer applies its updates itself again."""
        self.optimizer._observer = None

    def finish(self) -> bool:
        """Stop measuring, and say whether the update was skipped; of a skipped update only the weights are measured."""
        self.stop()
        self.measured.shared = self._shared()
        if self.optimizer._counters.skipped_on_host > self._skipped_before:
            self._measure_weights()
            return True
        return self._ok is not None and not bool(self._ok)

    @property
    def skipped(self) -> int:
        """Updates skipped since this observer came."""
        return self.optimizer.skipped_steps - self._skipped_unseen

    def apply(self, group: Group, update: Update | FusedUpdate, rates: Rates) -> None:
        """Apply an update exactly as without telemetry, and measure it.

        Weights whose change does not follow from decay and direction are measured before and after.
        """
        self._ok = rates.ok
        if isinstance(update, FusedUpdate):
            self._apply_fused(group, update, rates)
            return
        weight = update.parts[0].item.param
        dtype, follows = wide_dtype(weight.dtype), change_follows(group, weight)
        measured = []
        for bundle in self._bundles(group, update):
            before = bundle.weights(dtype) if follows else bundle.weights_before(dtype)
            measured.append((bundle, before, self._measure(group, bundle, before)))
        apply_update(group, update, rates)
        for bundle, before, rows in measured:
            if not follows:
                rows["change"] = norm(torch.sub(bundle.weights(dtype), before, out=before))
            self.measured.add(self._pieces(group, bundle, update.scale, rates), rows)

    def _apply_fused(self, group: Group, update: FusedUpdate, rates: Rates) -> None:
        """Let the kernel make the whole update, and measure it afterwards, beside a copy of the weights."""
        before = [part.region.of(part.item.param).clone() for part in update.parts]
        apply_update(group, update, rates)
        known = Update(update.parts, update.directions(), update.scale)
        old = {id(part): weight for part, weight in zip(update.parts, before, strict=True)}
        dtype = wide_dtype(update.parts[0].item.param.dtype)
        for bundle in self._bundles(group, known):
            weights = bundle.gather((old[id(part)] for part in bundle.parts), dtype)
            rows = self._measure(group, bundle, weights)
            if not change_follows(group, bundle.parts[0].item.param):
                rows["change"] = norm(bundle.weights(dtype) - weights)
            self.measured.add(self._pieces(group, bundle, update.scale, rates), rows)

    def _measure(self, group: Group, bundle: Bundle, w: Tensor) -> dict[str, Tensor]:
        """What is known before the weights change."""
        d = bundle.gather(bundle.directions, w.dtype)
        g = bundle.gather((part.grad for part in bundle.parts), w.dtype)
        rows = {"weight": norm(w), "direction": norm(d), "gradient": norm(g)}
        rows |= {"weight_direction": inner(w, d), "weight_gradient": inner(w, g)}
        key = _momentum_key(bundle.parts[0])
        if key is not None:
            m = bundle.gather((part.state(key) for part in bundle.parts), w.dtype)
            rows |= {"momentum": norm(m), "weight_momentum": inner(w, m)}
        rows["decayed"] = norm(torch.where(w * d >= 0, w, 0)) if group["cautious"] else rows["weight"]
        return rows

    def _pieces(self, group: Group, bundle: Bundle, scale: float, rates: Rates) -> list[Piece]:
        side, with_momentum = 0, _momentum_key(bundle.parts[0]) is not None
        rule = norms.acting(group)
        if group["algorithm"] == "muon" and (rule is None or rule.length is None):
            side = min(_matrices(MatrixView.of(group), bundle.parts[0])[1:])
        follows = change_follows(group, bundle.parts[0].item.param)
        eta, phi = rates.applied(bundle.parts[0].item.param.dtype)
        share = phi if rule is None else None  # a norm rule takes another share of every weight
        factors = (side, with_momentum, eta, scale, share, follows)
        return [
            Piece(part.item.parameter, block.numbers, block.area, *factors)
            for part, block in zip(bundle.parts, bundle.blocks, strict=True)
        ]

    def _bundles(self, group: Group, update: Update) -> Iterable[Bundle]:
        """The blocks of an update, small ones of the same shape together."""
        bundles: dict[tuple[object, ...], Bundle] = {}
        on_cpu = update.parts[0].item.param.device.type == "cpu"
        small, capacity = CPU_BUNDLE if on_cpu else ACCELERATOR_BUNDLE
        sizes: Counter[int] = Counter()
        for number, (part, direction) in enumerate(zip(update.parts, update.stretched, strict=True)):
            for block in self._blocks(group, part):
                size = block.rows * block.area
                together = (block.area, sizes[block.area] // capacity)
                key = together if size <= small else (block.area, number, block.region)
                sizes[block.area] += size if size <= small else 0
                bundle = bundles.setdefault(key, Bundle([], [], []))
                bundle.blocks.append(block)
                bundle.parts.append(part)
                bundle.directions.append(direction)
        return bundles.values()

    def _blocks(self, group: Group, part: Part) -> list[MatrixRows]:
        """How a part falls into matrices: Muon's are whole, those of other rules may have been cut anywhere.

        Matrices of a sharded parameter have the same numbers on every rank.
        """
        item, weight = part.item, part.region.of(part.item.param)
        size = weight.numel()
        view = ALGORITHMS[group["algorithm"]].view(group)
        if view is not None:
            rows, columns = view.rows_columns(weight.shape)
            count = size // (rows * columns)
            first = self._matrices[item.param]
            self._matrices[item.param] += count
            numbers = range(first, first + count) if item.whole is None else _matrices(view, part)[0]
            return [MatrixRows(WHOLE, numbers, rows * columns)]
        area, numbers = self._area(group, item.parameter)
        start = part.region.cuts[0][1] if part.region.flat else 0
        blocks = _cut_blocks(start, size, area)
        return [block._replace(numbers=[numbers[place] for place in block.numbers]) for block in blocks]

    def _area(self, group: Group, param: Tensor) -> tuple[int, list[int]]:
        """Entries of one expert of a stack, else of the whole parameter; and the numbers of those on this rank."""
        held = local(param)
        if matrix_view(group, param, self.view) != STACK:
            return held.numel(), [0]
        return held.shape[-1] * held.shape[-2], _in_stack(offset(param), held.shape[:-2], param.shape)

    def _measure_weights(self) -> None:
        """Measure the weights alone: the update was skipped on the host before anything was computed."""
        for group, params, _ in self.optimizer._last:
            for param in params:
                held = local(param.detach())
                if held.numel():
                    area, numbers = self._area(group, param)
                    w = held.reshape(-1, area).to(wide_dtype(held.dtype))
                    self.measured.add([Piece(param, numbers, area)], {"weight": norm(w)})

    def _shared(self) -> dict[Tensor, MeasuringRanks]:
        """The parameters of which other ranks measure other parts."""
        found = {}
        for group, _, _, param in members(self.optimizer):
            groups = self.optimizer._ranks.layouts.sharding_groups(param)
            if groups:
                matrices = ALGORITHMS[group["algorithm"]].count_matrices(group, param)
                stack = math.prod(param.shape[:-2])  # how other rules see a stack, at most
                found[param] = MeasuringRanks(groups, local(param).device, max(matrices, stack))
        return found


def _matrices(view: MatrixView, part: Part) -> tuple[list[int], int, int]:
    """The numbers of the matrices in a part, and rows and columns of each as a whole."""
    shape, lengths = part.item.parameter.shape, part.region.shape_in(part.item.param.shape)
    axes = view.stack_axes(len(shape))
    starts = list(offset(part.item.parameter))
    for axis, start, _ in part.region.cuts:
        starts[axis] += start
    for number, (region, rows, columns) in enumerate(view.cells(shape)):
        if all(begin <= starts[axis] < begin + length for axis, begin, length in region.cuts):
            before = number * math.prod(shape[:axes])
            return [before + place for place in _in_stack(starts, lengths[:axes], shape)], rows, columns
    raise AssertionError("a part lies in one of the matrices of its parameter")


def _in_stack(starts: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The numbers of matrices among those that the first axes of a parameter count, of which `lengths` are here."""
    numbers = [0]
    for start, length, whole in zip(starts, lengths, shape, strict=False):
        numbers = [number * whole + place for number in numbers for place in range(start, start + length)]
    return numbers


def change_follows(group: Group, weight: Tensor) -> bool:
    """Whether the stored change equals `-(phi W + lr scale direction)` up to rounding, and need not be measured."""
    return weight.dtype not in LOW_PRECISION and not group["cautious"] and norms.acting(group) is None


def _momentum_key(part: Part) -> str | None:
    return next((key for key in MOMENTUM_KEYS if key in part.item.state), None)


def _cut_blocks(start: int, size: int, area: int) -> Iterator[MatrixRows]:
    """The flat range [start, start + size) at the borders of matrices of `area` entries."""
    position, end = start, start + size
    while position < end:
        index, offset = divmod(position, area)
        if offset or end - position < area:
            length, count = min(area - offset, end - position), 1
        else:
            length, count = area, (end - position) // area
        whole = count * length == size
        region = WHOLE if whole else Region(((0, position - start, count * length),), flat=True)
        yield MatrixRows(region, range(index, index + count), length)
        position += count * length
