"""A grid of ranks that exchange through the process groups of a mesh, one along each axis.

No process group is created: that takes every rank of the world, and some may hold none of the parameters. A sum over
the grid is a sum along each axis in turn, and pieces between any two ranks travel along one axis after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product, starmap
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
        lines: the places along each axis through this rank, in the order of its process group.
    """

    groups: tuple[ProcessGroup, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    me: int
    lines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, groups: Sequence[ProcessGroup], shape: Sequence[int], ranks: Sequence[int]) -> Grid:
        """The grid of these ranks, of which this is one."""
        places = {rank: place for place, rank in enumerate(ranks)}
        lines = tuple(tuple(places[rank] for rank in dist.get_process_group_ranks(group)) for group in groups)
        return cls(tuple(groups), tuple(shape), tuple(ranks), places[dist.get_rank()], lines)


def row(group: ProcessGroup) -> Grid:
    """The ranks of a process group, in its order."""
    ranks = dist.get_process_group_ranks(group)
    return Grid.of([group], [len(ranks)], ranks)


class Hop(NamedTuple):
    """An exchange along one axis: pieces of these lengths are put in order, then sent.

    `sent` and `received` count elements for each rank of the axis. A last hop without a group puts in order only.
    """

    lengths: list[int]
    order: list[int]
    group: ProcessGroup | None = None
    sent: Sequence[int] = ()
    received: Sequence[int] = ()

    def arrange(self, buffer: Tensor) -> Tensor:
        """The pieces of a buffer in order."""
        if self.order == sorted(self.order):
            return buffer
        pieces = buffer.split_with_sizes(self.lengths)
        return torch.cat([pieces[number] for number in self.order])


def route(grid: Grid, size: Callable[[int, int], int]) -> list[Hop]:
    """The hops of `size(sender, receiver)` elements between any two ranks, the last into the order of senders.

    Before its hop along an axis, a piece is in its receiver's place along the axes before, and in its sender's along
    this one and those after.
    """
    size, ranks = cache(size), len(grid.ranks)
    held = [(grid.me, receiver) for receiver in range(ranks)]
    hops = []
    for axis, (group, line) in enumerate(zip(grid.groups, grid.lines, strict=True)):
        given = [_handed(grid.shape, axis, grid.me, taker) for taker in line]
        taken = [_handed(grid.shape, axis, giver, grid.me) for giver in line]
        numbers = {piece: number for number, piece in enumerate(held)}
        order = [numbers[piece] for pieces in given for piece in pieces]
        sent, received = ([sum(starmap(size, pieces)) for pieces in way] for way in (given, taken))
        hops.append(Hop(list(starmap(size, held)), order, group, sent, received))
        held = [piece for pieces in taken for piece in pieces]
    return [*hops, Hop(list(starmap(size, held)), sorted(range(ranks), key=held.__getitem__))]


def _handed(shape: Sequence[int], axis: int, giver: int, taker: int) -> list[tuple[int, int]]:
    """The pieces, by sender and receiver, that one rank hands to another in the hop along an axis."""
    block, behind = math.prod(shape[axis:]), math.prod(shape[axis + 1 :])
    senders = range(giver % block, math.prod(shape), block)
    first = taker - taker % behind
    return list(product(senders, range(first, first + behind)))
