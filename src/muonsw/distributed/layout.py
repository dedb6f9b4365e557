"""How the matrices of a parameter are placed over ranks, and how pieces travel between them.

Ranks use the process groups of a mesh, one for each axis of a grid. Creating a process group would need every rank of
the world, and some may hold none of the parameters. A sum over the grid is a sum along each axis in turn, and pieces
travel between any two ranks along one axis after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.distributed.shards import box_at, cutting_order, is_dtensor, state_placements
from muonsw.matrices import Region, box

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Grid(NamedTuple):
    """Ranks in a grid with as many axes as the mesh."""

    groups: tuple[dist.ProcessGroup, ...]  # of this rank, one for each axis
    shape: tuple[int, ...]  # the length of each axis
    ranks: tuple[int, ...]  # global ranks; the last axis changes fastest
    me: int  # the index of this rank among them
    lines: tuple[tuple[int, ...], ...]  # indices along each axis through this rank, in process group order

    @classmethod
    def of(cls, groups: Sequence[dist.ProcessGroup], shape: Sequence[int], ranks: Sequence[int]) -> Grid:
        places = {rank: place for place, rank in enumerate(ranks)}
        lines = tuple(tuple(places[rank] for rank in dist.get_process_group_ranks(group)) for group in groups)
        return cls(tuple(groups), tuple(shape), tuple(ranks), places[dist.get_rank()], lines)


def row(group: dist.ProcessGroup) -> Grid:
    ranks = dist.get_process_group_ranks(group)
    return Grid.of([group], [len(ranks)], ranks)


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
        given = [_handed(grid.shape, axis, grid.me, taker) for taker in line]
        taken = [_handed(grid.shape, axis, giver, grid.me) for giver in line]
        numbers = {piece: number for number, piece in enumerate(held)}
        order = [numbers[piece] for pieces in given for piece in pieces]
        sent, received = ([sum(starmap(size, pieces)) for pieces in way] for way in (given, taken))
        hops.append(Hop(list(starmap(size, held)), order, group, sent, received))
        held = [piece for pieces in taken for piece in pieces]
    return [*hops, Hop(list(starmap(size, held)), sorted(range(ranks), key=held.__getitem__))]


def _handed(shape: Sequence[int], axis: int, giver: int, taker: int) -> list[tuple[int, int]]:
    """The pieces (sender, receiver) that one rank passes to another in the hop along an axis."""
    block, behind = math.prod(shape[axis:]), math.prod(shape[axis + 1 :])
    senders = range(giver % block, math.prod(shape), block)
    first = taker - taker % behind
    return list(product(senders, range(first, first + behind)))


class Layout(NamedTuple):
    """How a parameter is placed over ranks.

    `shape` is what the ranks of `grid` hold together: the whole parameter, or one expert-parallel rank's experts.
    """

    shape: torch.Size
    grid: Grid | None = None  # ranks that exchange its matrices; None if every rank holds whole matrices
    boxes: tuple[Region, ...] = ()  # what each rank of the grid holds
    copies: bool = False  # every rank holds everything, orthogonalizes a share of the matrices and gets all results


Places = tuple["DeviceMesh", Sequence[Any]] | None  # mesh and placements of a DTensor


class Layouts:
    """Finds and caches layouts."""

    fewest = 2  # ranks that an exchange needs; a test on a single device lowers it

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._process_group = process_group
        self._known: dict[Any, Layout] = {}

    def of(self, param: Tensor, first_matrix_axis: int) -> Layout:
        """The layout of a parameter whose axes before `first_matrix_axis` count matrices."""
        places = (param.device_mesh, param.placements) if is_dtensor(param) else None
        key = (param.shape, places, first_matrix_axis)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def of_state(self, param: Tensor, shape: torch.Size, first_matrix_axis: int) -> Layout:
        """The layout of a state tensor of this shape, whose last axes are not those of the matrices."""
        places = (param.device_mesh, state_placements(param, first_matrix_axis)) if is_dtensor(param) else None
        return self._find(shape, places, first_matrix_axis)

    def sharding_groups(self, param: Tensor) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which to reduce, in turn, a sum over the shards of a parameter."""
        if not is_dtensor(param):
            return ()
        mesh, placements = param.device_mesh, param.placements
        dims = [dim for dim, place in enumerate(placements) if not place.is_replicate() and mesh.shape[dim] > 1]
        return _grid(mesh, dims).groups if dims else ()

    def _find(self, shape: torch.Size, places: Places, first: int) -> Layout:
        if places is None:
            return self._copies(shape, self._process_group)
        mesh, placements = places
        order = cutting_order(placements, mesh.shape)
        assert order is not None, "the step refuses other placements"
        if not order:
            grid = _grid(mesh, range(mesh.ndim))
            return self._copies(shape, grid.groups[grid.shape.index(max(grid.shape))])  # along the longest axis
        dims = [dim for dim in order if placements[dim].dim >= first and mesh.shape[dim] >= self.fewest]
        if not dims:
            return Layout(shape)
        grid = _grid(mesh, sorted(dims))
        coordinates = dict(zip(mesh.mesh.flatten().tolist(), product(*map(range, mesh.shape)), strict=True))
        boxes = [box_at(coordinates[rank], shape, placements, mesh.shape, order) for rank in grid.ranks]
        held = torch.Size((*boxes[0].shape_in(shape)[:first], *shape[first:]))
        shifted = (Region(tuple((a, start if a >= first else 0, n) for a, start, n in box.cuts)) for box in boxes)
        return Layout(held, grid, tuple(shifted))

    def _copies(self, shape: torch.Size, group: dist.ProcessGroup | None) -> Layout:
        if group is None or dist.get_world_size(group) < self.fewest:
            return Layout(shape)
        grid = row(group)
        return Layout(shape, grid, (box((0,) * len(shape), shape),) * len(grid.ranks), copies=True)


def _grid(mesh: DeviceMesh, dims: Sequence[int]) -> Grid:
    """The ranks of a mesh that differ from this one only along these axes."""
    dims = [dim for dim in dims if mesh.shape[dim] > 1] or dims[:1]
    if len(dims) == 1:
        return row(mesh.get_group(dims[0]))
    mine = mesh.get_coordinate()
    assert mine is not None
    chosen = mesh.mesh[tuple(slice(None) if dim in dims else mine[dim] for dim in range(mesh.ndim))]
    if chosen.numel() == dist.get_world_size() and dist.group.WORLD is not None:
        return row(dist.group.WORLD)
    return Grid.of([mesh.get_group(dim) for dim in dims], chosen.shape, chosen.flatten().tolist())


def mesh_ranks(params: Iterable[Tensor]) -> set[int]:
    meshes = {param.device_mesh for param in params if is_dtensor(param)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
