"""Which rank orthogonalizes which matrix, and in which rounds the matrices travel.

A plan follows from global shapes, placements and settings, which are the same on every rank; no rank asks another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import MatrixRule
from muonsw.distributed.layout import Grid, Hop, Layout, Layouts, route
from muonsw.matrices import MatrixView, Region, runs
from muonsw.slots import wide_dtype
from muonsw.work import Batch

# Matrices between the same ranks travel in at least this many rounds if they are large enough, so that one round is
# multiplied while the next is on its way.
ROUNDS = 4
SMALLEST_ROUND = 2**22

# The keys of the matrix itself and of its gradient among the tensors that travel.
MATRIX, GRADIENT = "matrix", "grad"


class Traveller(NamedTuple):
    """A tensor that travels: a matrix, its gradient or a tensor of its state.

    `shape` is that of one; `pieces` is what each rank holds of a stack of them.
    """

    key: str
    shape: tuple[int, ...]
    pieces: tuple[Region, ...]


class Shape(NamedTuple):
    """What matrices must share to travel as one block: the batch, the sizes, and what travels, the matrix first."""

    batch: int
    rows: int
    columns: int
    tensors: tuple[Traveller, ...]


class Unit(NamedTuple):
    """Matrices of one parameter that have one owner: a matrix, or a run of a stack.

    `place` is that of the parameter in its batch. `regions` say where this rank's pieces lie: for each tensor that
    travels, its key in the parameter's state and the region of it.
    """

    shape: Shape
    place: int
    matrices: int
    regions: tuple[tuple[str, Region], ...]
    owner: int = 0

    @property
    def cost(self) -> int:
        """What the products of an iteration cost, up to a factor."""
        rows, columns = self.shape.rows, self.shape.columns
        return self.matrices * max(rows, columns) * min(rows, columns) ** 2

    @property
    def numel(self) -> int:
        """Elements of its whole matrices, and of what travels with them."""
        return self.matrices * sum(math.prod(tensor.shape) for tensor in self.shape.tensors)

    def held(self, number: int, rank: int) -> int:
        """Elements that a rank holds of a tensor that travels."""
        return self.matrices * math.prod(self.shape.tensors[number].pieces[rank].lengths)

    def holder(self) -> int | None:
        """The rank that holds these matrices alone, such as the heads of its shard: they need not travel."""
        numel = self.matrices * self.shape.rows * self.shape.columns
        holders = [rank for rank in range(len(self.shape.tensors[0].pieces)) if self.held(0, rank) == numel]
        return holders[0] if len(holders) == 1 else None


class Wire(NamedTuple):
    """What units must share to travel together: ranks, kind of exchange, and dtypes at home, there and back."""

    grid: Grid
    copies: bool
    device: torch.device
    home: torch.dtype
    there: torch.dtype
    back: torch.dtype


class Trip(NamedTuple):
    """One collective of a round."""

    dtype: torch.dtype  # of its buffers
    # Units, each with the number of a tensor: the pieces that this rank sends to owners or gets from them, by owner,
    # then by shape; and the elements of each.
    held: list[tuple[Unit, int]]
    lengths: list[int]
    owned: list[tuple[Shape, int, int]]  # shapes that this rank owns, the number of a tensor, the count of matrices
    hops: Sequence[Hop] = ()  # how pieces travel; none where nothing does
    shares: Sequence[int] = ()  # elements of each owner's matrices, where all ranks get them whole


class Round(NamedTuple):
    """Units that travel together: to their owners and back, the matrices first, then what travels with them.

    `others` are copies that other ranks own: only their momenta advance here.
    """

    wire: Wire
    there: list[Trip]
    back: list[Trip]
    others: list[Unit]


def rule_of(batch: Batch) -> tuple[MatrixRule, MatrixView]:
    """The rule of a batch that is exchanged, and how it sees parameters."""
    rule = ALGORITHMS[batch.group["algorithm"]].matrices
    assert rule is not None
    assert batch.view is not None
    return rule, batch.view


def make_rounds(
    batches: Sequence[Batch], layouts: Sequence[Sequence[Layout]], chunk_bytes: int, known: Layouts
) -> list[Round]:
    """Plan the exchange of batches, given the layouts of their items; in a round no rank owns more than a chunk."""
    wires: dict[Wire, list[Unit]] = {}
    for number, batch in enumerate(batches):
        rule, _ = rule_of(batch)
        there = rule.sent_dtype(batch.group, batch.dtype)
        back = rule.result_dtype(batch.group, batch.dtype, batch.device)
        for place, layout in enumerate(layouts[number]):
            assert layout.grid is not None
            wire = Wire(layout.grid, layout.copies, batch.device, batch.dtype, there, back)
            wires.setdefault(wire, []).extend(_units(number, place, batch, layout, chunk_bytes, known))
    rounds: list[Round] = []
    for wire, units in wires.items():
        # The one rank that holds all of a unit owns it; the others are shared by cost.
        loads, holders = [0] * len(wire.grid.ranks), [unit.holder() for unit in units]
        for unit, holder in zip(units, holders, strict=True):
            if holder is not None:
                loads[holder] += unit.cost
        free = [unit.cost for unit, holder in zip(units, holders, strict=True) if holder is None]
        shared = iter(share_by_cost(free, len(loads), loads))
        owners = [next(shared) if holder is None else holder for holder in holders]
        owned = [unit._replace(owner=owner) for unit, owner in zip(units, owners, strict=True)]
        rounds += _rounds(wire, owned, chunk_bytes)
    return rounds


def _units(number: int, place: int, batch: Batch, layout: Layout, chunk_bytes: int, known: Layouts) -> Iterator[Unit]:
    """The matrices of a parameter, stacks cut into runs: at least one for each rank, none above `chunk_bytes`."""
    assert layout.grid is not None
    rule, view = rule_of(batch)
    param, first = batch.items[place].parameter, view.stack_axes(len(layout.shape))
    for run in runs(layout.shape, view, chunk_bytes, fewest=len(layout.boxes)):
        cell, rows, columns = run.cell
        shape = tuple(cell.shape_in(layout.shape)[first:])
        pieces = tuple(_in_stack(shard.within(cell), first) for shard in layout.boxes)
        cut_axes = {axis for axis, _, _ in cell.cuts}
        mine = (cut for cut in cell.within(layout.boxes[layout.grid.me]).cuts if cut[0] in cut_axes)
        region = Region((*mine, *run.stack))
        tensors, regions = [Traveller(MATRIX, shape, pieces)], [(MATRIX, region)]
        for key, spec in rule.state(batch.group).items():
            if spec.shape is None:
                tensors.append(Traveller(key, shape, pieces))
                regions.append((key, region))
                continue
            state_shape = spec.shape(*view.out_in(rows, columns))
            boxes = known.of_state(param, torch.Size((*param.shape[:first], *state_shape)), first).boxes
            tensors.append(Traveller(key, state_shape, tuple(_in_stack(box, first) for box in boxes)))
            regions.append((view.cell_keys(key)[view.cell_number(layout.shape, cell.cuts)], Region(run.stack)))
        if rule.sends_gradient(batch.group):
            tensors.append(Traveller(GRADIENT, shape, pieces))
            regions.append((GRADIENT, region))
        yield Unit(Shape(number, rows, columns, tuple(tensors)), place, run.matrices, tuple(regions))


def _in_stack(piece: Region, first: int) -> Region:
    """A piece of a tensor whose axes from `first` on are a matrix, as a piece of a stack (count, *matrix)."""
    return Region(tuple((axis - first + 1, start, length) for axis, start, length in piece.cuts if axis >= first))


def share_by_cost(costs: Sequence[int], ranks: int, loads: Iterable[int] = ()) -> list[int]:
    """An owner for each cost: the most expensive first, always to the rank with the least so far.

    Examples:
        >>> share_by_cost([1, 8, 2, 4, 1], ranks=2)
        [1, 0, 1, 1, 1]
    """
    load = list(loads) or [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = min(range(ranks), key=load.__getitem__)
        load[owners[index]] += costs[index]
    return owners


def _rounds(wire: Wire, units: list[Unit], chunk_bytes: int) -> Iterator[Round]:
    """Units of equal shape one after another, a new round where an owner would have too much."""
    size, ranks = wire.there.itemsize, len(wire.grid.ranks)
    share = sum(unit.numel for unit in units) * size / ranks
    room = min(chunk_bytes, max(SMALLEST_ROUND, math.ceil(share / ROUNDS)))
    together: list[Unit] = []
    owned = [0] * ranks
    order = {shape: place for place, shape in enumerate(dict.fromkeys(unit.shape for unit in units))}
    for unit in sorted(units, key=lambda unit: order[unit.shape]):
        taken = unit.numel * size
        if owned[unit.owner] and owned[unit.owner] + taken > room:
            yield _round(wire, together)
            together, owned = [], [0] * ranks
        together.append(unit)
        owned[unit.owner] += taken
    if together:
        yield _round(wire, together)


def _round(wire: Wire, units: list[Unit]) -> Round:
    """The trips of a round: one there and one back for matrices, and the same for what travels with them."""
    owned = [[unit for unit in units if unit.owner == rank] for rank in range(len(wire.grid.ranks))]
    others = [unit for unit in units if unit.owner != wire.grid.me] if wire.copies else []
    there, back = _trip(wire, owned, wire.there, {MATRIX}), _trip(wire, owned, wire.back, {MATRIX}, back=True)
    keys = {tensor.key for unit in units for tensor in unit.shape.tensors} - {MATRIX}
    if keys:
        dtype = wide_dtype(wire.home)
        state = _trip(wire, owned, dtype, keys), _trip(wire, owned, dtype, keys - {GRADIENT}, back=True)
        return Round(wire, [there, state[0]], [back, state[1]], others)
    if all(unit.holder() == unit.owner for unit in units):
        there, back = there._replace(hops=()), back._replace(hops=())
    return Round(wire, [there], [back], others)


def _trip(wire: Wire, owned: list[list[Unit]], dtype: torch.dtype, keys: set[str], *, back: bool = False) -> Trip:
    """One way of the tensors with these keys, of the units of each owner."""

    def numbers(shape: Shape) -> list[int]:
        return [number for number, tensor in enumerate(shape.tensors) if tensor.key in keys]

    def size(holder: int, owner: int) -> int:
        return sum(unit.held(number, holder) for unit in owned[owner] for number in numbers(unit.shape))

    me, every = wire.grid.me, range(len(owned))
    held: list[tuple[Unit, int]] = []
    for owner in [me] if wire.copies and not back else every:
        for shape, alike in groupby(owned[owner], key=attrgetter("shape")):
            units = list(alike)
            held += [(unit, number) for number in numbers(shape) for unit in units]
    counts: dict[Shape, int] = {}
    for unit in owned[me]:
        counts[unit.shape] = counts.get(unit.shape, 0) + unit.matrices
    mine = [(shape, number, count) for shape, count in counts.items() for number in numbers(shape)]
    trip = Trip(dtype, held, [unit.held(number, me) for unit, number in held], mine)
    if wire.copies:
        return trip._replace(shares=[size(me, owner) for owner in every] if back else ())
    return trip._replace(hops=route(wire.grid, (lambda owner, holder: size(holder, owner)) if back else size))
