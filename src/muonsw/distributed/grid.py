"""A grid of ranks that exchange through the process groups of a mesh, one along each axis.

No process group is created: that takes every rank of the world, and some may hold none of the parameters. A sum over
the grid is a sum along each axis in turn, and pieces between any two ranks travel along one axis after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, product, starmap
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Grid(NamedTuple):
    """Ranks in rows and columns, and in as many axes more as a mesh has.

    Attributes:
        groups: this rank's process group along each axis.
        shape: the length of each axis.
        ranks: all of them, by their numbers in the world; the last axis changes fastest.
        me: the place of this rank among them.
    """

    groups: tuple[ProcessGroup, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    me: int


def row(group: ProcessGroup) -> Grid:
    """The ranks of a process group, in its order."""
    ranks = dist.get_process_group_ranks(group)
    return Grid((group,), (len(ranks),), tuple(ranks), dist.get_rank(group))


class Hop(NamedTuple):
    """An exchange along one axis.

    Attributes:
        pieces: the lengths of the pieces that lie here before it.
        order: the order in which they are sent.
        sent: elements for each rank of the axis.
        received: elements from each.
    """

    pieces: list[int]
    order: list[int]
    sent: list[int]
    received: list[int]


class Route(NamedTuple):
    """How pieces travel from each rank to each: a hop along each axis, then into the order of their senders."""

    hops: list[Hop]
    pieces: list[int]
    order: list[int]


def plan_route(grid: Grid, size: Callable[[int, int], int]) -> Route:
    """The route of `size(sender, receiver)` elements between any two ranks of a grid."""
    places = {rank: place for place, rank in enumerate(grid.ranks)}
    lines = [[places[rank] for rank in dist.get_process_group_ranks(group)] for group in grid.groups]
    return route_along(lines, grid.shape, grid.me, size)


def route_along(
    lines: Sequence[Sequence[int]], shape: Sequence[int], me: int, size: Callable[[int, int], int]
) -> Route:
    """The route as rank `me` sees it; `lines` are the ranks along each axis through it, in the order of their group.

    Before its hop along an axis, a piece is in its receiver's place along the axes before, and in its sender's along
    this one and those after.
    """
    size, ranks = cache(size), math.prod(shape)
    held = [(me, receiver) for receiver in range(ranks)]
    hops = []
    for axis, line in enumerate(lines):
        given = [_handed(shape, axis, me, taker) for taker in line]
        taken = [_handed(shape, axis, giver, me) for giver in line]
        found = {piece: number for number, piece in enumerate(held)}
        order = [found[piece] for pieces in given for piece in pieces]
        sent, received = ([sum(starmap(size, pieces)) for pieces in way] for way in (given, taken))
        hops.append(Hop(list(starmap(size, held)), order, sent, received))
        held = list(chain.from_iterable(taken))
    return Route(hops, list(starmap(size, held)), sorted(range(ranks), key=held.__getitem__))


def _handed(shape: Sequence[int], axis: int, giver: int, taker: int) -> list[tuple[int, int]]:
    """The pieces, by sender and receiver, that one rank hands to another in the hop along an axis."""
    block, behind = math.prod(shape[axis:]), math.prod(shape[axis + 1 :])
    senders = range(giver % block, math.prod(shape), block)
    first = taker - taker % behind
    return list(product(senders, range(first, first + behind)))


def arranged(buffer: Tensor, lengths: list[int], order: list[int]) -> Tensor:
    """The pieces of a buffer in another order."""
    if order == sorted(order):
        return buffer
    pieces = buffer.split_with_sizes(lengths)
    return torch.cat([pieces[number] for number in order])
