"""Which rank orthogonalizes which matrix, and in which rounds the matrices travel.

A plan follows from global shapes, placements and settings, which are the same on every rank; no rank asks another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw.algorithms.base import MatrixRule
from muonsw.distributed.grid import Grid, Route, plan_route
from muonsw.distributed.layout import SHARDS, Layout
from muonsw.matrices import MatrixCell, MatrixView, Region, StackRun, runs
from muonsw.slots import wide_dtype
from muonsw.work import Group, Item

# Matrices that take one way travel in at least so many rounds if they are large enough, so that one round is multiplied
# while the next is on its way.
ROUNDS = 4
SMALLEST_ROUND = 2**22

# The key of the gradient among what travels with a matrix.
GRADIENT = "grad"


class ExchangeBatch(NamedTuple):
    """Parameters of one batch whose matrices are sharded or divided over ranks."""

    group: Group
    rule: MatrixRule
    view: MatrixView
    items: list[Item]
    layouts: list[Layout]


class Companion(NamedTuple):
    """A tensor that travels with each matrix: its shape, and each rank's piece of it; state also travels back."""

    key: str
    shape: tuple[int, ...]
    pieces: tuple[Region, ...]
    returns: bool = True

    def held(self, rank: int) -> int:
        """Elements that a rank holds."""
        return math.prod(self.pieces[rank].lengths)


class Shape(NamedTuple):
    """What matrices must share to travel as one block: the batch, the cell they fill, and each rank's piece of it."""

    batch: int
    cell: tuple[int, ...]
    rows: int
    columns: int
    pieces: tuple[Region, ...]
    companions: tuple[Companion, ...] = ()


class Unit(NamedTuple):
    """Matrices of one parameter that have one owner: a matrix, or a run of a stack.

    `region` is this rank's piece within its shard; `companions` are the keys of the tensors that travel with it, each
    with the region that does.
    """

    shape: Shape
    place: int
    region: Region
    matrices: int
    owner: int
    companions: tuple[tuple[str, Region], ...] = ()

    @property
    def cost(self) -> int:
        """What the products of an iteration cost, up to a factor."""
        rows, columns = self.shape.rows, self.shape.columns
        return self.matrices * max(rows, columns) * min(rows, columns) ** 2

    @property
    def numel(self) -> int:
        """Entries of its whole matrices, and of what travels with them."""
        beside = sum(math.prod(one.shape) for one in self.shape.companions)
        return self.matrices * (self.shape.rows * self.shape.columns + beside)

    def held(self, rank: int) -> int:
        """Entries that a rank holds."""
        return self.matrices * math.prod(self.shape.pieces[rank].lengths)

    def held_beside(self, rank: int, *, returning: bool) -> int:
        """Elements that a rank holds of what travels with it, there or back."""
        return self.matrices * sum(one.held(rank) for one in self.shape.companions if one.returns or not returning)


class Wire(NamedTuple):
    """What units must share to travel together: ranks, kind of exchange, and dtypes at home, there and back."""

    grid: Grid
    kind: str
    device: torch.device
    home: torch.dtype
    there: torch.dtype
    back: torch.dtype

    @property
    def beside(self) -> torch.dtype:
        """The dtype of what travels with matrices."""
        return wide_dtype(self.home)

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.grid.ranks)

    @property
    def me(self) -> int:
        """The number of this rank among them."""
        return self.grid.me


class Sizes(NamedTuple):
    """Elements of each owner's units that this rank holds, and of this rank's own units that each rank holds.

    Where they travel in pieces, `there` and `back` are their routes to the owners and from them.
    """

    held: list[int]
    pieces: list[int]
    there: Route | None = None
    back: Route | None = None


class Round(NamedTuple):
    """Units that travel together, by owner and then by shape: the order in which they lie in buffers.

    Attributes:
        wire: how they travel.
        owned: the units of each owner.
        counts: how many matrices of each shape this rank owns.
        sizes: elements of the matrices.
        beside: elements of what travels with them, there, then back; None where nothing does.
        stays: every owner holds its units whole and alone, and nothing travels.
    """

    wire: Wire
    owned: tuple[tuple[Unit, ...], ...]
    counts: dict[Shape, int]
    sizes: Sizes
    beside: tuple[Sizes, Sizes] | None = None
    stays: bool = False

    @property
    def units(self) -> Iterator[Unit]:
        """All of them, in order."""
        return (unit for units in self.owned for unit in units)


# The layout of a tensor of state of a parameter, by its shape and its first axis that the parameter has not.
StateLayout = Callable[[Tensor, torch.Size, int], Layout]


def make_rounds(batches: Sequence[ExchangeBatch], chunk_bytes: int, state_layout: StateLayout) -> list[Round]:
    """All units in rounds.

    Args:
        batches: what has to be exchanged.
        chunk_bytes: how much of whole matrices one rank may own in a round.
        state_layout: how state with a shape of its own lies over the ranks.
    """
    wires: dict[Wire, list[Unit]] = {}
    for number, batch in enumerate(batches):
        for place, (item, layout) in enumerate(zip(batch.items, batch.layouts, strict=True)):
            units = _units(number, place, batch, layout, chunk_bytes, state_layout)
            wires.setdefault(_wire(batch, item, layout), []).extend(units)
    return [one for wire, units in wires.items() for one in _rounds(wire, _with_owners(wire, units), chunk_bytes)]


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


def _wire(batch: ExchangeBatch, item: Item, layout: Layout) -> Wire:
    assert layout.grid is not None
    there = batch.rule.sent_dtype(batch.group, item.param.dtype)
    back = batch.rule.result_dtype(batch.group, item.param.dtype, item.param.device)
    return Wire(layout.grid, layout.kind, item.param.device, item.param.dtype, there, back)


def _units(
    number: int, place: int, batch: ExchangeBatch, layout: Layout, chunk_bytes: int, state_layout: StateLayout
) -> Iterator[Unit]:
    """The matrices of a parameter, stacks cut into runs: at least one for each rank, none above `chunk_bytes`."""
    assert layout.grid is not None
    first = batch.view.stack_axes(len(layout.shape))
    here = layout.boxes[layout.grid.me]
    for run in runs(layout.shape, batch.view, chunk_bytes, fewest=len(layout.boxes)):
        cell = run.cell.region
        pieces = tuple(_matrix_axes(shard.within(cell), first) for shard in layout.boxes)
        shape = Shape(number, tuple(cell.shape_in(layout.shape)[first:]), run.cell.rows, run.cell.columns, pieces)
        unit = Unit(shape, place, Region((*_mine(run.cell, here), *run.stack)), run.matrices, 0)
        yield _with_companions(unit, batch, layout, run, state_layout)


def _with_companions(
    unit: Unit, batch: ExchangeBatch, layout: Layout, run: StackRun, state_layout: StateLayout
) -> Unit:
    """A unit with the state that its rule keeps of whole matrices, and the gradient if the rule asks for it."""
    companions, regions = [], []
    for key, spec in batch.rule.state(batch.group).items():
        if spec.shape is None:
            companions.append(Companion(key, unit.shape.cell, unit.shape.pieces))
            regions.append((key, unit.region))
        else:
            first = batch.view.stack_axes(len(layout.shape))
            number = batch.view.cell_number(layout.shape, run.cell.region.cuts)
            own = spec.shape(*batch.view.out_in(run.cell.rows, run.cell.columns))
            param = batch.items[unit.place].parameter
            boxes = state_layout(param, torch.Size((*param.shape[:first], *own)), first).boxes
            companions.append(Companion(key, own, tuple(_matrix_axes(box, first) for box in boxes)))
            regions.append((batch.view.cell_keys(key)[number], Region(run.stack)))
    if batch.rule.sends_gradient(batch.group):
        companions.append(Companion(GRADIENT, unit.shape.cell, unit.shape.pieces, returns=False))
        regions.append((GRADIENT, unit.region))
    return unit._replace(shape=unit.shape._replace(companions=tuple(companions)), companions=tuple(regions))


def _matrix_axes(piece: Region, first: int) -> Region:
    """A piece of a shard in the coordinates of the matrix, whose axes begin at `first`."""
    return Region(tuple((axis - first, start, length) for axis, start, length in piece.cuts if axis >= first))


def _mine(cell: MatrixCell, here: Region) -> Iterator[tuple[int, int, int]]:
    """The cuts that this rank's shard needs to be the part of it that lies in a cell."""
    cut_axes = {axis for axis, _, _ in cell.region.cuts}
    return (cut for cut in cell.region.within(here).cuts if cut[0] in cut_axes)


def _with_owners(wire: Wire, units: list[Unit]) -> list[Unit]:
    """Units with their owners: the one rank that holds all of it if there is one, else shared by cost."""
    fixed = [_holder(unit) for unit in units]
    loads = [sum(u.cost for u, owner in zip(units, fixed, strict=True) if owner == rank) for rank in range(wire.ranks)]
    free = [unit.cost for unit, owner in zip(units, fixed, strict=True) if owner is None]
    shared = iter(share_by_cost(free, wire.ranks, loads))
    return [
        unit._replace(owner=next(shared) if owner is None else owner) for unit, owner in zip(units, fixed, strict=True)
    ]


def _holder(unit: Unit) -> int | None:
    """The rank that holds these matrices alone, such as the heads of its shard: they need not travel."""
    whole = unit.matrices * unit.shape.rows * unit.shape.columns
    holders = [rank for rank in range(len(unit.shape.pieces)) if unit.held(rank) == whole]
    return holders[0] if len(holders) == 1 else None


def _rounds(wire: Wire, units: list[Unit], chunk_bytes: int) -> Iterator[Round]:
    """Units of equal shape one after another, a new round where an owner would have too much."""
    size = wire.there.itemsize
    share = sum(unit.numel for unit in units) * size / wire.ranks
    room = min(chunk_bytes, max(SMALLEST_ROUND, math.ceil(share / ROUNDS)))
    together: list[Unit] = []
    owned = [0] * wire.ranks
    order = {shape: place for place, shape in enumerate(dict.fromkeys(unit.shape for unit in units))}
    for unit in sorted(units, key=lambda unit: order[unit.shape]):
        taken = unit.numel * size
        if owned[unit.owner] and owned[unit.owner] + taken > room:
            yield _round(wire, together)
            together, owned = [], [0] * wire.ranks
        together.append(unit)
        owned[unit.owner] += taken
    if together:
        yield _round(wire, together)


def _round(wire: Wire, units: list[Unit]) -> Round:
    owned = tuple(tuple(unit for unit in units if unit.owner == rank) for rank in range(wire.ranks))
    mine = owned[wire.me]
    counts: dict[Shape, int] = {}
    for unit in mine:
        counts[unit.shape] = counts.get(unit.shape, 0) + unit.matrices

    def sizes(held: Callable[[Unit, int], int]) -> Sizes:
        def size(holder: int, owner: int) -> int:
            return sum(held(unit, holder) for unit in owned[owner])

        every = range(wire.ranks)
        found = Sizes([size(wire.me, owner) for owner in every], [size(holder, wire.me) for holder in every])
        if wire.kind != SHARDS:
            return found
        there, back = plan_route(wire.grid, size), plan_route(wire.grid, lambda owner, holder: size(holder, owner))
        return found._replace(there=there, back=back)

    if any(unit.companions for unit in units):
        there, back = (sizes(partial(Unit.held_beside, returning=returning)) for returning in (False, True))
        return Round(wire, owned, counts, sizes(Unit.held), (there, back))
    stays = all(_holder(unit) == unit.owner for unit in units)
    return Round(wire, owned, counts, sizes(Unit.held), stays=stays)
