"""The exchange of sharded matrices: which rank orthogonalizes which matrix, in which rounds, and how matrices travel.

Pieces of a matrix travel to its owner, and directions travel back. State of whole matrices travels with them, by a
second collective each way, in the dtype of the state. The plan follows from global shapes, placements and settings,
which are equal on all ranks, so planning needs no communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby, product, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import MatrixRule, Update, clean
from muonsw.apply import apply_update
from muonsw.distributed.shards import Grid, Layout, Layouts
from muonsw.kernels.graphs import eagerly
from muonsw.matrices import MatrixView, Part, Region, runs
from muonsw.slots import wide_dtype
from muonsw.work import Batch, State, StepContext

# Large exchanges take at least this many rounds, so that one round is computed while the next travels. Small rounds do
# not fill a GPU: on one H200 a share of 40 MiB takes 1.07 ms in rounds of 10 MiB, 0.81 ms in rounds of 32 MiB and 0.66
# ms at once, without overlap.
ROUNDS = 4
SMALLEST_ROUND = 2**25

# Keys of the matrix and of its gradient among the tensors that travel.
MATRIX, GRADIENT = "matrix", "grad"

Arrival = Callable[[], Tensor]


class Hop(NamedTuple):
    """An exchange along one axis: reorder pieces of these lengths, then send them.

    `sent` and `received` count elements for each rank of the axis. The last hop has no group and only reorders.
    """

    lengths: list[int]
    order: list[int]
    group: dist.ProcessGroup | None = None
    sent: Sequence[int] = ()
    received: Sequence[int] = ()

    def arrange(self, buffer: Tensor) -> Tensor:
        if self.order == sorted(self.order):
            return buffer
        pieces = buffer.split_with_sizes(self.lengths)
        return torch.cat([pieces[number] for number in self.order])


def route(grid: Grid, size: Callable[[int, int], int]) -> list[Hop]:
    """The hops that bring `size(sender, receiver)` elements between any two ranks, in the order of senders.

    Before its hop along an axis, a piece has its receiver's coordinates along earlier axes, and its sender's along this
    axis and later ones.
    """
    size, ranks = cache(size), len(grid.ranks)
    held = [(grid.me, receiver) for receiver in range(ranks)]
    hops = []
    for axis, (group, line) in enumerate(zip(grid.groups, grid.lines, strict=True)):
        outgoing = [_pieces_passed(grid.shape, axis, grid.me, peer) for peer in line]
        incoming = [_pieces_passed(grid.shape, axis, peer, grid.me) for peer in line]
        numbers = {piece: number for number, piece in enumerate(held)}
        order = [numbers[piece] for pieces in outgoing for piece in pieces]
        sent, received = ([sum(starmap(size, pieces)) for pieces in way] for way in (outgoing, incoming))
        hops.append(Hop(list(starmap(size, held)), order, group, sent, received))
        held = [piece for pieces in incoming for piece in pieces]
    return [*hops, Hop(list(starmap(size, held)), sorted(range(ranks), key=held.__getitem__))]


def _pieces_passed(shape: Sequence[int], axis: int, giver: int, taker: int) -> list[tuple[int, int]]:
    """The pieces (sender, receiver) that one rank passes to another in the hop along an axis."""
    block, behind = math.prod(shape[axis:]), math.prod(shape[axis + 1 :])
    senders = range(giver % block, math.prod(shape), block)
    first = taker - taker % behind
    return list(product(senders, range(first, first + behind)))


class Traveller(NamedTuple):
    """A tensor that travels: a matrix, its gradient or its state.

    `shape` is that of one such tensor; `pieces` says what each rank holds of a stack of them.
    """

    key: str
    shape: tuple[int, ...]
    pieces: tuple[Region, ...]


class Shape(NamedTuple):
    """What matrices must share to travel as one block: batch, sizes, and the tensors that travel (the matrix first)."""

    batch: int
    rows: int
    columns: int
    tensors: tuple[Traveller, ...]


class Unit(NamedTuple):
    """Matrices of one parameter that have one owner: a matrix, or a run of a stack.

    `place` is the parameter's index in its batch. `regions` say where this rank's pieces are: for each tensor that
    travels, its key in the parameter's state and the region.
    """

    shape: Shape
    place: int
    matrices: int
    regions: tuple[tuple[str, Region], ...]
    owner: int = 0

    @property
    def cost(self) -> int:
        """The cost of an iteration's products, up to a factor."""
        rows, columns = self.shape.rows, self.shape.columns
        return self.matrices * max(rows, columns) * min(rows, columns) ** 2

    @property
    def numel(self) -> int:
        """Elements of the whole matrices and of what travels with them."""
        return self.matrices * sum(math.prod(tensor.shape) for tensor in self.shape.tensors)

    def held(self, number: int, rank: int) -> int:
        """Number of elements that a rank holds of a travelling tensor."""
        return self.matrices * math.prod(self.shape.tensors[number].pieces[rank].lengths)

    def holder(self) -> int | None:
        """The one rank that holds these matrices (such as the heads in its shard), if any; they need not travel."""
        numel = self.matrices * self.shape.rows * self.shape.columns
        holders = [rank for rank in range(len(self.shape.tensors[0].pieces)) if self.held(0, rank) == numel]
        return holders[0] if len(holders) == 1 else None


class Wire(NamedTuple):
    """What units must share to travel together: ranks, kind of exchange, and the dtypes at home, there and back."""

    grid: Grid
    copies: bool
    device: torch.device
    home: torch.dtype
    there: torch.dtype
    back: torch.dtype


class Trip(NamedTuple):
    """One collective of a round."""

    dtype: torch.dtype  # of its buffers
    # (unit, tensor index) of the pieces that this rank sends to owners or gets from them, by owner and shape
    held: list[tuple[Unit, int]]
    lengths: list[int]  # their elements
    owned: list[tuple[Shape, int, int]]  # what this rank owns: shape, tensor index, count of matrices
    hops: Sequence[Hop] = ()  # how pieces travel; none if nothing does
    shares: Sequence[int] = ()  # elements of each owner's matrices, if all ranks get the whole results


class Round(NamedTuple):
    """Units that travel together, to their owners and back: first the matrices, then their state.

    `not_owned` are copies that other ranks own; here only their momenta advance.
    """

    wire: Wire
    there: list[Trip]
    back: list[Trip]
    not_owned: list[Unit]


def rule_of(batch: Batch) -> tuple[MatrixRule, MatrixView]:
    """The rule of an exchanged batch, and how it sees parameters."""
    rule = ALGORITHMS[batch.group["algorithm"]].matrices
    assert rule is not None
    assert batch.view is not None
    return rule, batch.view


def make_rounds(
    batches: Sequence[Batch], layouts: Sequence[Sequence[Layout]], chunk_bytes: int, known: Layouts
) -> list[Round]:
    """Plan the exchange of batches from the layouts of their items; no rank owns more than a chunk in a round."""
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
        owners = share_by_cost([unit.cost for unit in units], [unit.holder() for unit in units], len(wire.grid.ranks))
        owned = [unit._replace(owner=owner) for unit, owner in zip(units, owners, strict=True)]
        rounds += _rounds(wire, owned, chunk_bytes)
    return rounds


def _units(number: int, place: int, batch: Batch, layout: Layout, chunk_bytes: int, known: Layouts) -> Iterator[Unit]:
    """The matrices of a parameter, stacks cut into runs: at least one for each rank, each within `chunk_bytes`."""
    assert layout.grid is not None
    rule, view = rule_of(batch)
    param, first = batch.items[place].parameter, view.stack_axes(len(layout.shape))
    for (cell, rows, columns), stack, matrices in runs(layout.shape, view, chunk_bytes, fewest=len(layout.boxes)):
        shape = tuple(cell.shape_in(layout.shape)[first:])
        pieces = tuple(_in_stack(shard.within(cell), first) for shard in layout.boxes)
        cut_axes = {axis for axis, _, _ in cell.cuts}
        mine = (cut for cut in cell.within(layout.boxes[layout.grid.me]).cuts if cut[0] in cut_axes)
        region = Region((*mine, *stack))
        specs = rule.state(batch.group)
        alike = [MATRIX, *(key for key, spec in specs.items() if spec.shape is None)]
        alike += [GRADIENT] if rule.sends_gradient(batch.group) else []
        tensors, regions = [Traveller(key, shape, pieces) for key in alike], [(key, region) for key in alike]
        for key, spec in specs.items():
            if spec.shape is not None:
                state_shape = spec.shape(*view.out_in(rows, columns))
                boxes = known.of(param, first, torch.Size((*param.shape[:first], *state_shape))).boxes
                tensors.append(Traveller(key, state_shape, tuple(_in_stack(box, first) for box in boxes)))
                regions.append((view.cell_keys(key)[view.cell_number(layout.shape, cell.cuts)], Region(stack)))
        yield Unit(Shape(number, rows, columns, tuple(tensors)), place, matrices, tuple(regions))


def _in_stack(piece: Region, first: int) -> Region:
    """Convert a piece of a tensor, whose matrix axes start at `first`, to a piece of a stack (count, *matrix)."""
    return Region(tuple((axis - first + 1, start, length) for axis, start, length in piece.cuts if axis >= first))


def share_by_cost(costs: Sequence[int], holders: Sequence[int | None], ranks: int) -> list[int]:
    """An owner for each cost: its holder, or else the rank with the least load so far, the most expensive first.

    Examples:
        >>> share_by_cost([1, 8, 2, 4, 1], [None] * 5, ranks=2)
        [1, 0, 1, 1, 1]
    """
    load, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (holders[i] is None, -costs[i])):
        holder = holders[index]
        owners[index] = min(range(ranks), key=load.__getitem__) if holder is None else holder
        load[owners[index]] += costs[index]
    return owners


def _rounds(wire: Wire, units: list[Unit], chunk_bytes: int) -> Iterator[Round]:
    """Units of equal shape together; a new round begins when an owner would have too much."""
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
    """The trips of a round: one each way for the matrices, and one each way for their state."""
    owned = [[unit for unit in units if unit.owner == rank] for rank in range(len(wire.grid.ranks))]
    not_owned = [unit for unit in units if unit.owner != wire.grid.me] if wire.copies else []
    there, back = [_trip(wire, owned, wire.there, {MATRIX})], [_trip(wire, owned, wire.back, {MATRIX}, back=True)]
    keys = {tensor.key for unit in units for tensor in unit.shape.tensors} - {MATRIX}
    if keys:
        dtype = wide_dtype(wire.home)
        there.append(_trip(wire, owned, dtype, keys))
        back.append(_trip(wire, owned, dtype, keys - {GRADIENT}, back=True))
    elif all(unit.holder() == unit.owner for unit in units):  # nothing travels
        there, back = [there[0]._replace(hops=())], [back[0]._replace(hops=())]
    return Round(wire, there, back, not_owned)


def _trip(wire: Wire, owned: list[list[Unit]], dtype: torch.dtype, keys: set[str], *, back: bool = False) -> Trip:
    """Plan one direction of a round, for the tensors with these keys; `owned` has the units of each owner."""

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


def exchange_updates(batches: Sequence[Batch], contexts: Sequence[StepContext], rounds: Sequence[Round]) -> None:
    """Update all parameters that need an exchange.

    While one round is computed, the next travels to its owners and the previous one travels back.
    """
    _interleave([_exchange(batches, contexts, round_) for round_ in rounds])


def exchange_nothing(rounds: Sequence[Round]) -> None:
    """Send zeros in a step that this rank cannot take, so that ranks that have begun it do not hang."""

    def exchange(round_: Round) -> Iterator[None]:
        me, device = round_.wire.grid.me, round_.wire.device
        for trips in (round_.there, round_.back):
            arriving = []
            for trip in trips:
                length = sum(trip.hops[0].lengths) if trip.hops else sum(trip.shares[me : me + 1])
                arriving.append(_send(round_, trip, torch.zeros(length, dtype=trip.dtype, device=device)))
            yield
            for arrival in arriving:
                arrival()

    _interleave([exchange(round_) for round_ in rounds])


def _interleave(tasks: Sequence[Iterator[None]]) -> None:
    """Run three-part tasks as a pipeline: each begins while the previous one is under way."""
    for tick in range(len(tasks) + 2):
        for task in tasks[max(tick - 2, 0) : tick + 1][::-1]:
            next(task, None)


def _exchange(batches: Sequence[Batch], contexts: Sequence[StepContext], round_: Round) -> Iterator[None]:
    """One round; yields while its collectives are under way."""
    arriving = [_send(round_, trip, _load(batches, contexts, round_, trip)) for trip in round_.there]
    yield
    arriving = _answer(batches, round_, arriving)
    yield
    for trip, arrival in zip(round_.back[1:], arriving[1:], strict=True):
        for (unit, number), piece in zip(trip.held, arrival().split_with_sizes(trip.lengths), strict=True):
            state, ok = _held(batches, contexts, unit, number), contexts[unit.shape.batch].ok
            after = piece.view(state.shape)
            state.copy_(after if ok is None else torch.where(ok, after, state))
    # one update for each shape
    by_shape: dict[Shape, tuple[list[Part], list[Tensor]]] = {}
    pieces = arriving[0]().split_with_sizes(round_.back[0].lengths)
    for (unit, _), piece in zip(round_.back[0].held, pieces, strict=True):
        if piece.numel():
            part = _part(batches, unit)
            parts, directions = by_shape.setdefault(unit.shape, ([], []))
            parts.append(part)
            directions.append(piece.view(part.grad.shape))
    for shape, (parts, directions) in by_shape.items():
        group, (rule, view) = batches[shape.batch].group, rule_of(batches[shape.batch])
        scale = rule.scale(group, *view.out_in(shape.rows, shape.columns))
        apply_update(group, Update(parts, directions, scale), contexts[shape.batch])


def _answer(batches: Sequence[Batch], round_: Round, arriving: list[Arrival]) -> list[Arrival]:
    """Compute the directions of the matrices that this rank owns; send them back with their new state."""
    blocks: dict[Shape, State] = {}
    for trip in round_.there:
        tensors = _assemble(round_, trip, arriving.pop(0)())  # frees the buffer
        for (shape, number, _), tensor in zip(trip.owned, tensors, strict=True):
            blocks.setdefault(shape, {})[shape.tensors[number].key] = tensor
    results: dict[Shape, State] = {}
    for shape, block in blocks.items():
        matrix, batch = shape.tensors[0].shape, batches[shape.batch]  # a matrix may have more axes than two
        flat = {
            key: tensor.reshape(-1, shape.rows, shape.columns) if tensor.shape[1:] == matrix else tensor
            for key, tensor in block.items()
        }
        X = flat.pop(MATRIX)
        directions, state = rule_of(batch)[0].directions(batch.group, X, flat, round_.wire.back)
        computed = {**state, MATRIX: directions}
        results[shape] = {t.key: computed[t.key].reshape(-1, *t.shape) for t in shape.tensors if t.key != GRADIENT}
    returning = []
    for trip in round_.back:
        owned = [results[shape][shape.tensors[number].key] for shape, number, _ in trip.owned]
        send = _packed(_pieces(round_, trip, owned), trip.dtype, round_.wire.device)
        returning.append(_send(round_, trip, send))
    return returning


def _send(round_: Round, trip: Trip, send: Tensor) -> Arrival:
    """Begin to send; the returned function waits for the arrival (on an accelerator in its stream, not on the host).

    Shards travel along each axis of the grid in turn, and only the last hop overlaps. Owners of copies send their
    results to all ranks: by one all-gather if shares are equal, else by one broadcast per owner.
    """
    if not trip.shares:
        arrival: Arrival = lambda: send  # noqa: E731
        for hop in trip.hops[:-1]:
            sent = hop.arrange(arrival())
            receive = sent.new_empty(sum(hop.received))
            sizes = hop.received, hop.sent
            arrival = _arrival(receive, partial(dist.all_to_all_single, receive, sent, *sizes, group=hop.group))
        return (lambda: trip.hops[-1].arrange(arrival())) if trip.hops else arrival
    (group,) = round_.wire.grid.groups
    receive = send.new_empty(sum(trip.shares))
    if len(set(trip.shares)) == 1:
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
        return _arrival(receive, partial(all_gather, receive, send, group=group))
    shares = receive.split_with_sizes(list(trip.shares))
    shares[round_.wire.grid.me].copy_(send)
    broadcasts = [
        partial(dist.broadcast, share, group=group, group_src=rank)
        for rank, share in enumerate(shares)
        if share.numel()
    ]
    return _arrival(receive, *broadcasts)


def _arrival(buffer: Tensor, *collectives: Callable[..., Any]) -> Arrival:
    """Start collectives that fill a buffer; the returned function waits for them."""
    handles: list[Any] = []

    def start() -> None:
        handles.extend([collective(async_op=True) for collective in collectives])

    def wait() -> None:
        while handles:
            handles.pop(0).wait()

    def arrive(_: Any = collectives) -> Tensor:  # the default keeps send buffers alive until arrival
        eagerly(wait)
        return buffer

    eagerly(start)
    return arrive


def _load(batches: Sequence[Batch], contexts: Sequence[StepContext], round_: Round, trip: Trip) -> Tensor:
    """The buffer to send to the owners: advanced momenta, or the state that travels with the matrices."""
    if trip is not round_.there[0]:
        return _packed([_held(batches, contexts, *place) for place in trip.held], trip.dtype, round_.wire.device)
    buffer = torch.empty(sum(trip.lengths), dtype=trip.dtype, device=round_.wire.device)
    places = [(unit, piece) for (unit, _), piece in zip(trip.held, buffer.split_with_sizes(trip.lengths), strict=True)]
    advanced: dict[tuple[int, bool], tuple[list[Part], list[Tensor]]] = {}
    for unit, piece in [*places, *((unit, None) for unit in round_.not_owned)]:
        if piece is None or piece.numel():
            part = _part(batches, unit)
            parts, targets = advanced.setdefault((unit.shape.batch, piece is not None), ([], []))
            parts.append(part)
            targets += [] if piece is None else [piece.view(part.grad.shape)]
    for (number, is_sent), (parts, targets) in advanced.items():
        rule, _ = rule_of(batches[number])
        rule.advance(batches[number].group, parts, targets if is_sent else None, contexts[number])
    return buffer


def _part(batches: Sequence[Batch], unit: Unit) -> Part:
    return Part(batches[unit.shape.batch].items[unit.place], unit.regions[0][1])


def _held(batches: Sequence[Batch], contexts: Sequence[StepContext], unit: Unit, number: int) -> Tensor:
    """This rank's part of a tensor that travels with a unit."""
    key, region = unit.regions[number]
    batch = batches[unit.shape.batch]
    item = batch.items[unit.place]
    if key != GRADIENT:
        return region.of(item.state[key])
    grad, ok = region.of(item.grad), contexts[unit.shape.batch].ok
    return clean([grad], [grad], batch.group["maximize"], ok)[0]


def _assemble(round_: Round, trip: Trip, arrived: Tensor) -> list[Tensor]:
    """Assemble what this rank owns from the pieces of all ranks: (count, *shape) for each shape."""
    shapes = [(count, *shape.tensors[number].shape) for shape, number, count in trip.owned]
    if round_.wire.copies:  # already assembled
        blocks = arrived.split_with_sizes([math.prod(shape) for shape in shapes])
        return [block.view(shape) for block, shape in zip(blocks, shapes, strict=True)]
    owned = [arrived.new_empty(shape) for shape in shapes]
    pieces = _pieces(round_, trip, owned)
    for piece, flat in zip(pieces, arrived.split_with_sizes([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(flat.view(piece.shape))
    return owned


def _pieces(round_: Round, trip: Trip, owned: Sequence[Tensor]) -> list[Tensor]:
    """What this rank owns, cut into the pieces of all ranks; one piece if ranks hold copies."""
    tensors = [shape.tensors[number] for shape, number, _ in trip.owned]
    blocks = list(zip(tensors, owned, strict=True))
    holders = [round_.wire.grid.me] if round_.wire.copies else range(len(round_.wire.grid.ranks))
    return [tensor.pieces[rank].of(block) for rank in holders for tensor, block in blocks]


def _packed(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    nothing = torch.empty(0, dtype=dtype, device=device)  # a rank may have no pieces
    return torch.cat([nothing, *(piece.reshape(-1).to(dtype) for piece in pieces)])
