"""The exchange: pieces of matrices travel to the owner of each matrix, directions travel back.

What a rule keeps of whole matrices travels with them: a second collective there and back, in the dtype of the state.

Each round is one packed collective there and one back. While a round is multiplied, the next one is on its way, and the
results of the one before it return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms.base import LARGE, Update
from muonsw.distributed.grid import Route, arranged
from muonsw.distributed.layout import COPIES, SHARDS
from muonsw.distributed.rounds import GRADIENT, ExchangeBatch, Round, Shape, Sizes, Unit
from muonsw.matrices import Part, Region
from muonsw.slots import State

Blocks = dict[Shape, Tensor]
States = dict[Shape, State]


class EqualTensors(NamedTuple):
    """Equal tensors of the matrices that this rank owns: how many, the shape of one, and each rank's piece of it."""

    matrices: int
    shape: tuple[int, ...]
    pieces: tuple[Region, ...]


class Transfer(NamedTuple):
    """A buffer that collectives are filling, and what they read, which must stay until then.

    What came along a route is then put in order.
    """

    buffer: Tensor
    handles: list[Any]
    sent: Tensor | None = None
    route: Route | None = None

    def wait(self) -> Tensor:
        """The buffer, filled; on an accelerator its stream waits, not the host."""
        for handle in self.handles:
            handle.wait()
        return self.buffer if self.route is None else arranged(self.buffer, self.route.pieces, self.route.order)


class Transfers(NamedTuple):
    """The matrices of a round on their way, to their owners or back, and what travels with them."""

    matrices: Transfer
    beside: Transfer | None = None


def exchange_updates(
    batches: Sequence[ExchangeBatch], rounds: Sequence[Round], apply: Callable[[int, Update], None]
) -> None:
    """Update all parameters that need an exchange; `apply` takes each update with the number of its batch."""
    gathering = _gather(batches, rounds[0]) if rounds else None
    returning: tuple[Round, Transfers] | None = None
    for number, one in enumerate(rounds):
        assert gathering is not None
        matrices, states = _arrived(one, gathering)
        gathering = _gather(batches, rounds[number + 1]) if number + 1 < len(rounds) else None
        before, returning = returning, (one, _scatter(one, *_directions(batches, one, matrices, states)))
        if before is not None:
            _apply_returned(batches, *before, apply)
    if returning is not None:
        _apply_returned(batches, *returning, apply)


def _gather(batches: Sequence[ExchangeBatch], one: Round) -> Transfers:
    exchange = EXCHANGES[one.wire.kind]
    matrices = exchange.gather(batches, one)
    return Transfers(matrices, None if one.beside is None else exchange.gather_beside(batches, one, one.beside[0]))


def _arrived(one: Round, gathering: Transfers) -> tuple[Blocks, States]:
    """The whole matrices that this rank owns, (count, *cell) for each shape, and what has come with them."""
    exchange = EXCHANGES[one.wire.kind]
    matrices = dict(zip(one.counts, exchange.assemble(one, gathering.matrices.wait(), _owned(one)), strict=True))
    if gathering.beside is None:
        return matrices, {}
    tensors = iter(exchange.assemble(one, gathering.beside.wait(), _beside(one)))
    return matrices, {shape: {kept.key: next(tensors) for kept in shape.companions} for shape in one.counts}


def _owned(one: Round) -> list[EqualTensors]:
    """The matrices that this rank owns."""
    return [EqualTensors(count, shape.cell, shape.pieces) for shape, count in one.counts.items()]


def _beside(one: Round, *, returning: bool = False) -> list[EqualTensors]:
    """What travels with the matrices that this rank owns."""
    return [
        EqualTensors(count, kept.shape, kept.pieces)
        for shape, count in one.counts.items()
        for kept in shape.companions
        if kept.returns or not returning
    ]


def _directions(
    batches: Sequence[ExchangeBatch], one: Round, matrices: Blocks, states: States
) -> tuple[list[Tensor], list[Tensor]]:
    """The directions of the matrices that this rank owns, and their new state, in the order in which they return."""
    results, kept = [], []
    for shape, whole in matrices.items():
        batch = batches[shape.batch]
        X, state = whole.reshape(-1, shape.rows, shape.columns), _as_matrices(shape, states.get(shape, {}))
        directions, new = batch.rule.directions(batch.group, X, state, one.wire.back)
        results.append(directions.reshape(whole.shape))
        kept += [new[beside.key].reshape(-1, *beside.shape) for beside in shape.companions if beside.returns]
    return results, kept


def _as_matrices(shape: Shape, state: State) -> State:
    """State with an element for each of the matrix has the shape of its cell, which may have more axes."""
    return {
        key: tensor.reshape(-1, shape.rows, shape.columns) if tensor.shape[1:] == shape.cell else tensor
        for key, tensor in state.items()
    }


def _scatter(one: Round, results: list[Tensor], kept: list[Tensor]) -> Transfers:
    exchange = EXCHANGES[one.wire.kind]
    send = _packed(exchange.cut(one, results, _owned(one)), one.wire.back, one)
    returning = exchange.scatter(one, send, one.sizes)
    if one.beside is None:
        return Transfers(returning)
    send = _packed(exchange.cut(one, kept, _beside(one, returning=True)), one.wire.beside, one)
    return Transfers(returning, exchange.scatter(one, send, one.beside[1]))


def _apply_returned(
    batches: Sequence[ExchangeBatch], one: Round, returning: Transfers, apply: Callable[[int, Update], None]
) -> None:
    """Keep the state that has come back, and apply the directions, one update for each shape."""
    if returning.beside is not None:
        arrived = returning.beside.wait()
        mine = _held_beside(batches, one.units, returning=True)
        pieces = arrived.split_with_sizes([tensor.numel() for tensor in mine]) if mine else []
        for tensor, piece in zip(mine, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))
    arrived = returning.matrices.wait()
    if not arrived.is_cpu and sum(one.sizes.held) < LARGE * sum(map(len, one.owned)):
        arrived = arrived.to(one.wire.home)  # one cast for all: kernels for many tensors want one dtype
    by_shape: dict[Shape, tuple[list[Part], list[Tensor]]] = {}
    start = 0
    for unit in one.units:
        size = unit.held(one.wire.me)
        if size:
            part = _part(batches, unit)
            parts, directions = by_shape.setdefault(unit.shape, ([], []))
            parts.append(part)
            directions.append(arrived[start : start + size].view(part.grad.shape))
        start += size
    for shape, (parts, directions) in by_shape.items():
        batch = batches[shape.batch]
        scale = batch.rule.scale(batch.group, *batch.view.out_in(shape.rows, shape.columns))
        apply(shape.batch, Update(parts, directions, scale))


def _held_beside(batches: Sequence[ExchangeBatch], units: Iterable[Unit], *, returning: bool = False) -> list[Tensor]:
    """What this rank holds of the tensors that travel with units, by shape and key: the order in which they travel."""
    found: list[Tensor] = []
    for shape, same in groupby(units, key=attrgetter("owner", "shape")):
        alike = list(same)
        for place, kept in enumerate(shape[1].companions):
            if kept.returns or not returning:
                found += [_companion(batches, unit, place) for unit in alike]
    return found


def _companion(batches: Sequence[ExchangeBatch], unit: Unit, place: int) -> Tensor:
    key, region = unit.companions[place]
    batch = batches[unit.shape.batch]
    item = batch.items[unit.place]
    if key != GRADIENT:
        return region.of(item.state[key])
    grad = region.of(item.grad)
    return -grad if batch.group["maximize"] else grad


class Shards:
    """Every rank holds a piece of each matrix: an all-to-all there, and one back, along each axis of the grid."""

    def gather(self, batches: Sequence[ExchangeBatch], one: Round) -> Transfer:
        """Write what the momenta look ahead to straight into the buffer that is sent."""
        send = torch.empty(sum(one.sizes.held), dtype=one.wire.there, device=one.wire.device)
        _advance(batches, one.units, send, one.wire.me)
        return _all_to_all(one, send, one.sizes.there)

    def gather_beside(self, batches: Sequence[ExchangeBatch], one: Round, sizes: Sizes) -> Transfer:
        """Send what this rank holds to the owners."""
        send = _packed(_held_beside(batches, one.units), one.wire.beside, one)
        return _all_to_all(one, send, sizes.there)

    def assemble(self, one: Round, arrived: Tensor, blocks: Sequence[EqualTensors]) -> list[Tensor]:
        """What this rank owns, put together from the pieces of all ranks: (count, *shape) for each block."""
        found = [arrived.new_empty(block.matrices, *block.shape) for block in blocks]
        start = 0
        for rank in range(one.wire.ranks):
            for whole, block in zip(found, blocks, strict=True):
                piece = _cut(whole, block, rank)
                piece.copy_(arrived[start : start + piece.numel()].view(piece.shape))
                start += piece.numel()
        return found

    def cut(self, one: Round, results: Sequence[Tensor], blocks: Sequence[EqualTensors]) -> list[Tensor]:
        """What this rank owns in the pieces of all ranks."""
        pairs = list(zip(results, blocks, strict=True))
        return [_cut(whole, block, rank) for rank in range(one.wire.ranks) for whole, block in pairs]

    def scatter(self, one: Round, send: Tensor, sizes: Sizes) -> Transfer:
        """Give each rank its pieces."""
        return _all_to_all(one, send, sizes.back)


class Copies:
    """Every rank holds the same matrices: nothing is sent there, and the owners' results go to all."""

    def gather(self, batches: Sequence[ExchangeBatch], one: Round) -> Transfer:
        """Advance all momenta, and lay the owned ones side by side."""
        me = one.wire.me
        buffer = torch.empty(one.sizes.held[me], dtype=one.wire.there, device=one.wire.device)
        _advance(batches, one.owned[me], buffer, me)
        _advance(batches, (unit for unit in one.units if unit.owner != me), None, me)
        return Transfer(buffer, [])

    def gather_beside(self, batches: Sequence[ExchangeBatch], one: Round, sizes: Sizes) -> Transfer:  # noqa: ARG002
        """Lay what belongs to the owned matrices side by side."""
        return Transfer(_packed(_held_beside(batches, one.owned[one.wire.me]), one.wire.beside, one), [])

    def assemble(self, one: Round, arrived: Tensor, blocks: Sequence[EqualTensors]) -> list[Tensor]:  # noqa: ARG002
        """What is owned lies there already."""
        pieces = (
            arrived.split_with_sizes([block.matrices * math.prod(block.shape) for block in blocks]) if blocks else ()
        )
        return [piece.view(-1, *block.shape) for block, piece in zip(blocks, pieces, strict=True)]

    def cut(self, one: Round, results: Sequence[Tensor], blocks: Sequence[EqualTensors]) -> list[Tensor]:  # noqa: ARG002
        """All of it, since every rank gets it whole."""
        return list(results)

    def scatter(self, one: Round, send: Tensor, sizes: Sizes) -> Transfer:
        """Give the results to all: one gathering where the shares are equal, else one broadcast for each owner."""
        (group,), held = one.wire.grid.groups, sizes.held
        receive = send.new_empty(sum(held))
        if len(set(held)) == 1:
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
            return Transfer(receive, [all_gather(receive, send, group=group, async_op=True)], send)
        shares = receive.split_with_sizes(held)
        shares[one.wire.me].copy_(send)
        handles = [
            dist.broadcast(share, group=group, group_src=rank, async_op=True)
            for rank, share in enumerate(shares)
            if share.numel()
        ]
        return Transfer(receive, handles)


EXCHANGES: dict[str, Shards | Copies] = {SHARDS: Shards(), COPIES: Copies()}


def _all_to_all(one: Round, send: Tensor, route: Route | None) -> Transfer:
    """Send pieces along each axis of the grid in turn; only the last is not waited for."""
    transfer = Transfer(send, [])
    if one.stays:
        return transfer
    assert route is not None
    for group, hop in zip(one.wire.grid.groups, route.hops, strict=True):
        sent = arranged(transfer.wait(), hop.pieces, hop.order)
        receive = sent.new_empty(sum(hop.received))
        handle = dist.all_to_all_single(receive, sent, hop.received, hop.sent, group=group, async_op=True)
        transfer = Transfer(receive, [handle], sent)
    return transfer._replace(route=route)


def _advance(batches: Sequence[ExchangeBatch], units: Iterable[Unit], buffer: Tensor | None, me: int) -> None:
    """Advance the momenta of units, and write what they look ahead to into a buffer, one after another."""
    chosen: dict[int, tuple[list[Part], list[Tensor]]] = {}
    start = 0
    for unit in units:
        size, part = unit.held(me), _part(batches, unit)
        if size:
            parts, targets = chosen.setdefault(unit.shape.batch, ([], []))
            parts.append(part)
            if buffer is not None:
                targets.append(buffer[start : start + size].view(part.grad.shape))
        start += size
    for number, (parts, targets) in chosen.items():
        batches[number].rule.advance(batches[number].group, parts, targets if buffer is not None else None)


def _part(batches: Sequence[ExchangeBatch], unit: Unit) -> Part:
    return Part(batches[unit.shape.batch].items[unit.place], unit.region)


def _cut(whole: Tensor, block: EqualTensors, rank: int) -> Tensor:
    """The piece of a rank within whole tensors (count, *shape)."""
    return Region(tuple((axis + 1, start, length) for axis, start, length in block.pieces[rank].cuts)).of(whole)


def _packed(pieces: Sequence[Tensor], dtype: torch.dtype, one: Round) -> Tensor:
    if not pieces:
        return torch.empty(0, dtype=dtype, device=one.wire.device)
    return torch.cat([piece.reshape(-1).to(dtype) for piece in pieces])
