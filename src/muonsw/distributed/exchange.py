"""The exchange: pieces of matrices travel to the owner of each matrix, directions travel back.

Each round is one packed collective there and one back. While a round is multiplied, the next one is on its way, and the
results of the one before it return.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms.base import LARGE, Update
from muonsw.distributed.layout import COPIES, SHARDS
from muonsw.distributed.rounds import ExchangeBatch, Round, Shape, Unit
from muonsw.distributed.shards import as_dtensor, shard_like
from muonsw.matrices import WHOLE, Part, Region

Blocks = dict[Shape, Tensor]


class Transfer(NamedTuple):
    """A buffer that collectives are filling, and what they read, which must stay until then."""

    buffer: Tensor
    handles: list[Any]
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """The buffer, filled; on an accelerator its stream waits, not the host."""
        for handle in self.handles:
            handle.wait()
        return self.buffer


class Exchange(Protocol):
    """How the matrices of one round meet at their owners and part again."""

    def gather(self, batches: Sequence[ExchangeBatch], one: Round) -> Transfer:
        """Advance the momenta of a round and send what is to be orthogonalized."""

    def matrices(self, one: Round, arrived: Tensor) -> Blocks:
        """The whole matrices that this rank owns, (count, *cell) for each shape."""

    def scatter(self, one: Round, results: Blocks) -> Transfer:
        """Send the results of the owned matrices to the ranks that hold pieces of them."""


def exchanged_updates(batches: Sequence[ExchangeBatch], rounds: Sequence[Round]) -> Iterator[tuple[int, Update]]:
    """Updates of all parameters that need an exchange, each with the number of its batch."""
    gathering = _gather(batches, rounds, 0)
    returning: Transfer | None = None
    for number, one in enumerate(rounds):
        arrived = gathering.wait()
        gathering = _gather(batches, rounds, number + 1)
        exchange = EXCHANGES[one.wire.kind]
        results = _orthogonalize(batches, one, exchange.matrices(one, arrived))
        before, returning = returning, exchange.scatter(one, results)
        if before is not None:
            yield from _updates(batches, rounds[number - 1], before.wait())
    if returning is not None:
        yield from _updates(batches, rounds[-1], returning.wait())


def _gather(batches: Sequence[ExchangeBatch], rounds: Sequence[Round], number: int) -> Transfer:
    if number == len(rounds):
        return Transfer(torch.empty(0, dtype=torch.float32, device="cpu"), [])
    return EXCHANGES[rounds[number].wire.kind].gather(batches, rounds[number])


def redistributed_updates(batch: ExchangeBatch) -> Iterator[Update]:
    """The slow way that is always right: every rank gets every matrix whole and keeps its part of the direction."""
    from torch.distributed.tensor import DTensor, Replicate

    for item in batch.items:
        assert item.whole is not None
        like = as_dtensor(item.whole)
        ahead = torch.empty_like(item.param, dtype=batch.rule.sent_dtype(batch.group, item.param.dtype))
        batch.rule.advance(batch.group, [Part(item, WHOLE)], [ahead], None)
        whole = as_dtensor(shard_like(item.whole, ahead)).full_tensor()
        direction = torch.zeros_like(whole, dtype=item.param.dtype)
        scales = []
        for region, rows, columns in batch.view.cells(like.shape):
            cell, target = region.of(whole), region.of(direction)
            scales.append(batch.rule.scale(batch.group, rows, columns))
            result = batch.rule.directions(batch.group, cell.reshape(-1, rows, columns), item.param.dtype)
            target.copy_(result.reshape(cell.shape) * (scales[-1] / scales[0]))
        everywhere = DTensor.from_local(direction, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
        mine = everywhere.redistribute(like.device_mesh, like.placements).to_local()
        yield Update([Part(item, WHOLE)], [mine], scales[0])


class Shards:
    """Every rank holds a piece of each matrix: one all-to-all there, one back."""

    def gather(self, batches: Sequence[ExchangeBatch], one: Round) -> Transfer:
        """Write what the momenta look ahead to straight into the buffer that is sent."""
        send = torch.empty(sum(one.held), dtype=one.wire.there, device=one.wire.device)
        _advance(batches, one.units, send, one.wire.me)
        return _all_to_all(one, send, one.held, one.pieces)

    def matrices(self, one: Round, arrived: Tensor) -> Blocks:
        """Put the pieces of all ranks together."""
        found = {shape: arrived.new_empty(count, *shape.cell) for shape, count in one.counts.items()}
        start = 0
        for rank in range(one.wire.ranks):
            for shape, whole in found.items():
                piece = _cut(whole, shape, rank)
                piece.copy_(arrived[start : start + piece.numel()].view(piece.shape))
                start += piece.numel()
        return found

    def scatter(self, one: Round, results: Blocks) -> Transfer:
        """Cut the results into the pieces of all ranks."""
        pieces = [_cut(whole, shape, rank) for rank in range(one.wire.ranks) for shape, whole in results.items()]
        return _all_to_all(one, _packed(pieces, one), one.pieces, one.held)


class Copies:
    """Every rank holds the same matrices: nothing is sent there, and the owners' results go to all."""

    def gather(self, batches: Sequence[ExchangeBatch], one: Round) -> Transfer:
        """Advance the momenta that are kept here, and lay the owned ones side by side."""
        me = one.wire.me
        buffer = torch.empty(one.held[me], dtype=one.wire.there, device=one.wire.device)
        _advance(batches, one.owned[me], buffer, me)
        _advance(batches, (unit for unit in one.units if unit.owner != me), None, me)
        return Transfer(buffer, [])

    def matrices(self, one: Round, arrived: Tensor) -> Blocks:
        """The owned matrices, which lie there already."""
        sizes = [count * math.prod(shape.cell) for shape, count in one.counts.items()]
        pieces = arrived.split_with_sizes(sizes) if sizes else ()
        return {shape: piece.view(-1, *shape.cell) for shape, piece in zip(one.counts, pieces, strict=True)}

    def scatter(self, one: Round, results: Blocks) -> Transfer:
        """Give the results to all: one gathering where the shares are equal, else one broadcast for each owner."""
        mine, group = _packed(list(results.values()), one), one.wire.group
        receive = mine.new_empty(sum(one.held))
        if len(set(one.held)) == 1:
            return Transfer(receive, [_all_gather(receive, mine, group=group, async_op=True)], mine)
        shares = receive.split_with_sizes(one.held)
        shares[one.wire.me].copy_(mine)
        handles = [
            dist.broadcast(share, group=group, group_src=rank, async_op=True)
            for rank, share in enumerate(shares)
            if share.numel()
        ]
        return Transfer(receive, handles)


EXCHANGES: dict[str, Exchange] = {SHARDS: Shards(), COPIES: Copies()}


def _all_gather(receive: Tensor, mine: Tensor, **options: Any) -> Any:
    """What torch 2.13 renamed."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(receive, mine, **options)


def _all_to_all(one: Round, send: Tensor, sizes: list[int], expected: list[int]) -> Transfer:
    receive = send.new_empty(sum(expected))
    handle = dist.all_to_all_single(receive, send, expected, sizes, group=one.wire.group, async_op=True)
    return Transfer(receive, [handle], send)


def _orthogonalize(batches: Sequence[ExchangeBatch], one: Round, blocks: Blocks) -> Blocks:
    results = {}
    for shape, whole in blocks.items():
        batch = batches[shape.batch]
        matrices = whole.reshape(-1, shape.rows, shape.columns)
        results[shape] = batch.rule.directions(batch.group, matrices, one.wire.back).reshape(whole.shape)
    return results


def _updates(batches: Sequence[ExchangeBatch], one: Round, arrived: Tensor) -> Iterator[tuple[int, Update]]:
    """The directions of a round, cut out of what came back, one update for each shape."""
    if not arrived.is_cpu and sum(one.held) < LARGE * sum(map(len, one.owned)):
        arrived = arrived.to(one.wire.home)  # one cast for all: kernels for many tensors want one dtype
    found: dict[Shape, tuple[list[Part], list[Tensor]]] = {}
    start = 0
    for unit in one.units:
        size = unit.held(one.wire.me)
        if size:
            part = _part(batches, unit)
            parts, directions = found.setdefault(unit.shape, ([], []))
            parts.append(part)
            directions.append(arrived[start : start + size].view(part.grad.shape))
        start += size
    for shape, (parts, directions) in found.items():
        batch = batches[shape.batch]
        yield shape.batch, Update(parts, directions, batch.rule.scale(batch.group, shape.rows, shape.columns))


def _advance(batches: Sequence[ExchangeBatch], units: Iterable[Unit], buffer: Tensor | None, me: int) -> None:
    """Advance the momenta of units, and write what they look ahead to into a buffer, one after another.

    A momentum that is not kept here is left to its owner.
    """
    chosen: dict[int, tuple[list[Part], list[Tensor]]] = {}
    start = 0
    for unit in units:
        batch, size, part = batches[unit.shape.batch], unit.held(me), _part(batches, unit)
        if size and all(key in part.item.state for key in batch.keys):
            parts, targets = chosen.setdefault(unit.shape.batch, ([], []))
            parts.append(part)
            if buffer is not None:
                targets.append(buffer[start : start + size].view(part.grad.shape))
        start += size
    for number, (parts, targets) in chosen.items():
        batches[number].rule.advance(batches[number].group, parts, targets if buffer is not None else None, None)


def _part(batches: Sequence[ExchangeBatch], unit: Unit) -> Part:
    return Part(batches[unit.shape.batch].items[unit.place], unit.region)


def _cut(whole: Tensor, shape: Shape, rank: int) -> Tensor:
    """The piece of a rank within whole matrices (count, *cell)."""
    return Region(tuple((axis + 1, start, length) for axis, start, length in shape.pieces[rank].cuts)).of(whole)


def _packed(pieces: list[Tensor], one: Round) -> Tensor:
    if not pieces:
        return torch.empty(0, dtype=one.wire.back, device=one.wire.device)
    return torch.cat([piece.reshape(-1) for piece in pieces])
