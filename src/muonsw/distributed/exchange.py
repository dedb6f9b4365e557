"""The exchange: pieces of matrices travel to the owner of each matrix, directions travel back.

What a rule keeps of whole matrices travels with them: a second collective there and back, in the dtype of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms.base import Update
from muonsw.distributed.rounds import GRADIENT, MATRIX, Round, Shape, Trip, Unit, rule_of
from muonsw.matrices import Part
from muonsw.work import Batch, State

Apply = Callable[[int, Update], None]
Arrival = Callable[[], Tensor]


def exchange_updates(batches: Sequence[Batch], rounds: Sequence[Round], apply: Apply) -> None:
    """Update all parameters that need an exchange; `apply` takes each update with the number of its batch.

    While a round is multiplied, the next one travels to its owners and the one before travels back.
    """
    tasks = [_exchange(batches, round_, apply) for round_ in rounds]
    for tick in range(len(tasks) + 2):
        for task in tasks[max(tick - 2, 0) : tick + 1][::-1]:
            next(task, None)


def _exchange(batches: Sequence[Batch], round_: Round, apply: Apply) -> Iterator[None]:
    """One round; it pauses while its collectives are under way."""
    arriving = [_send(round_, trip, _load(batches, round_, trip)) for trip in round_.there]
    yield
    arriving = _answer(batches, round_, arriving)
    yield
    for trip, arrival in zip(round_.back[1:], arriving[1:], strict=True):
        for (unit, number), piece in zip(trip.held, arrival().split_with_sizes(trip.lengths), strict=True):
            state = _held(batches, unit, number)
            state.copy_(piece.view(state.shape))
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
        rule, view = rule_of(batches[shape.batch])
        scale = rule.scale(batches[shape.batch].group, *view.out_in(shape.rows, shape.columns))
        apply(shape.batch, Update(parts, directions, scale))


def _answer(batches: Sequence[Batch], round_: Round, arriving: list[Arrival]) -> list[Arrival]:
    """Compute the directions of the matrices that this rank owns, and send them and their new state back."""
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
        found = {**state, MATRIX: directions}
        results[shape] = {t.key: found[t.key].reshape(-1, *t.shape) for t in shape.tensors if t.key != GRADIENT}
    returning = []
    for trip in round_.back:
        owned = [results[shape][shape.tensors[number].key] for shape, number, _ in trip.owned]
        send = _packed(_pieces(round_, trip, owned), trip.dtype, round_.wire.device)
        returning.append(_send(round_, trip, send))
    return returning


def _send(round_: Round, trip: Trip, send: Tensor) -> Arrival:
    """Begin to send; the returned function waits for the arrival, on an accelerator in its stream, not on the host.

    Shards travel along each axis of the grid in turn; every hop but the last is waited for. Owners send their results
    for copies to all: one all-gather where shares are equal, else one broadcast per owner.
    """
    if not trip.shares:
        arrival = _arrival(send)
        for hop in trip.hops[:-1]:
            sent = hop.arrange(arrival())
            receive = sent.new_empty(sum(hop.received))
            handle = dist.all_to_all_single(receive, sent, hop.received, hop.sent, group=hop.group, async_op=True)
            arrival = _arrival(receive, handle, sent=sent)
        return (lambda: trip.hops[-1].arrange(arrival())) if trip.hops else arrival
    (group,) = round_.wire.grid.groups
    receive = send.new_empty(sum(trip.shares))
    if len(set(trip.shares)) == 1:
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
        return _arrival(receive, all_gather(receive, send, group=group, async_op=True), sent=send)
    shares = receive.split_with_sizes(list(trip.shares))
    shares[round_.wire.grid.me].copy_(send)
    handles = [
        dist.broadcast(share, group=group, group_src=rank, async_op=True)
        for rank, share in enumerate(shares)
        if share.numel()
    ]
    return _arrival(receive, *handles)


def _arrival(buffer: Tensor, *handles: Any, sent: Tensor | None = None) -> Arrival:
    """Wait for collectives that fill a buffer; `sent` is what they read, which must stay until then."""

    def wait(_: Tensor | None = sent) -> Tensor:
        for handle in handles:
            handle.wait()
        return buffer

    return wait


def _load(batches: Sequence[Batch], round_: Round, trip: Trip) -> Tensor:
    """The buffer that is sent to the owners: what the momenta look ahead to, or what travels with the matrices."""
    if trip is not round_.there[0]:
        return _packed([_held(batches, *place) for place in trip.held], trip.dtype, round_.wire.device)
    buffer = torch.empty(sum(trip.lengths), dtype=trip.dtype, device=round_.wire.device)
    places = [(unit, piece) for (unit, _), piece in zip(trip.held, buffer.split_with_sizes(trip.lengths), strict=True)]
    advanced: dict[tuple[int, bool], tuple[list[Part], list[Tensor]]] = {}
    for unit, piece in [*places, *((unit, None) for unit in round_.others)]:
        if piece is None or piece.numel():
            part = _part(batches, unit)
            parts, targets = advanced.setdefault((unit.shape.batch, piece is not None), ([], []))
            parts.append(part)
            targets += [] if piece is None else [piece.view(part.grad.shape)]
    for (number, is_sent), (parts, targets) in advanced.items():
        rule, _ = rule_of(batches[number])
        rule.advance(batches[number].group, parts, targets if is_sent else None)
    return buffer


def _part(batches: Sequence[Batch], unit: Unit) -> Part:
    return Part(batches[unit.shape.batch].items[unit.place], unit.regions[0][1])


def _held(batches: Sequence[Batch], unit: Unit, number: int) -> Tensor:
    """What this rank holds of a tensor that travels with a unit."""
    key, region = unit.regions[number]
    batch = batches[unit.shape.batch]
    item = batch.items[unit.place]
    if key != GRADIENT:
        return region.of(item.state[key])
    grad = region.of(item.grad)
    return -grad if batch.group["maximize"] else grad


def _assemble(round_: Round, trip: Trip, arrived: Tensor) -> list[Tensor]:
    """What this rank owns, put together from the pieces of all ranks: (count, *shape) for each shape."""
    shapes = [(count, *shape.tensors[number].shape) for shape, number, count in trip.owned]
    if round_.wire.copies:  # they lie there already
        blocks = arrived.split_with_sizes([math.prod(shape) for shape in shapes])
        return [block.view(shape) for block, shape in zip(blocks, shapes, strict=True)]
    owned = [arrived.new_empty(shape) for shape in shapes]
    pieces = _pieces(round_, trip, owned)
    for piece, flat in zip(pieces, arrived.split_with_sizes([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(flat.view(piece.shape))
    return owned


def _pieces(round_: Round, trip: Trip, owned: Sequence[Tensor]) -> list[Tensor]:
    """What this rank owns in the pieces of all ranks; in one piece where ranks hold copies."""
    ranks = [round_.wire.grid.me] if round_.wire.copies else range(len(round_.wire.grid.ranks))
    tensors = [shape.tensors[number] for shape, number, _ in trip.owned]
    return [tensor.pieces[rank].of(block) for rank in ranks for tensor, block in zip(tensors, owned, strict=True)]


def _packed(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    nothing = torch.empty(0, dtype=dtype, device=device)  # a rank may have no piece
    return torch.cat([nothing, *(piece.reshape(-1).to(dtype) for piece in pieces)])
