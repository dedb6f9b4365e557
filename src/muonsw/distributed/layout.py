"""How the matrices of a parameter lie over ranks, and what follows for their exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.distributed.shards import as_spread, is_spread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Every rank holds whole matrices that no other needs: nothing is sent.
HERE = "here"
# Every rank holds a piece of each matrix: pieces meet at its owner and part again.
SHARDS = "shards"
# Every rank holds the same matrices: each orthogonalizes its share, and all get the results.
COPIES = "copies"
# Anything else: every rank gets every matrix, which is slow and right.
OTHER = "other"


class Box(NamedTuple):
    """A contiguous part of a tensor: where it starts and how long it is, along each axis."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


class Layout(NamedTuple):
    """How a parameter lies over ranks.

    `shape` is what the ranks of `group` hold together: the whole parameter, or the experts of one rank of an
    expert-parallel mesh. `boxes` are the shards of these ranks within it, in the order of the group.
    """

    kind: str
    shape: torch.Size
    group: ProcessGroup | None = None
    boxes: tuple[Box, ...] = ()


class Layouts:
    """Finds layouts and remembers them, with the process groups that were made for them.

    Fewer than `fewest` ranks have nothing to exchange; a test of the exchange on a single device lowers it.
    """

    fewest = 2

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self._process_group = process_group
        self._known: dict[Any, Layout] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def of(self, param: Tensor, first_matrix_axis: int) -> Layout:
        """The layout of a parameter whose axes before `first_matrix_axis` count matrices."""
        if not is_spread(param):
            return self._plain(param.shape)
        like = as_spread(param)
        key = (like.device_mesh, like.placements, like.shape, first_matrix_axis)
        if key not in self._known:
            self._known[key] = self._spread(like.shape, like.device_mesh, like.placements, first_matrix_axis)
        return self._known[key]

    def sharding_group(self, param: Tensor) -> ProcessGroup | None:
        """The ranks that hold other parts of a parameter than this one."""
        like = as_spread(param)
        mesh = like.device_mesh
        dims = [dim for dim, one in enumerate(like.placements) if not one.is_replicate() and mesh.shape[dim] > 1]
        return self._group(mesh, dims) if dims else None

    def _plain(self, shape: torch.Size) -> Layout:
        if self._process_group is None:
            return Layout(HERE, shape)
        if shape not in self._known:
            self._known[shape] = self._copies(shape, self._process_group)
        return self._known[shape]

    def _spread(self, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Any], first: int) -> Layout:
        order = cutting_order(placements, mesh.shape)
        if order is None:
            return Layout(OTHER, shape)
        if not order:
            return self._copies(shape, self._group(mesh, range(mesh.ndim)))
        dims = [dim for dim in order if placements[dim].dim >= first and mesh.shape[dim] >= self.fewest]
        if not dims:
            return Layout(HERE, shape)
        group = self._group(mesh, sorted(dims))
        coordinates = _coordinates(mesh)
        boxes = [_box(shape, placements, mesh.shape, coordinates[rank], order) for rank in _ranks(group)]
        held = torch.Size((*boxes[0].lengths[:first], *shape[first:]))
        shifted = (Box((*(0,) * first, *box.starts[first:]), box.lengths) for box in boxes)
        return Layout(SHARDS, held, group, tuple(shifted))

    def _copies(self, shape: torch.Size, group: ProcessGroup) -> Layout:
        ranks = dist.get_world_size(group)
        if ranks < self.fewest:
            return Layout(HERE, shape)
        return Layout(COPIES, shape, group, (Box((0,) * len(shape), tuple(shape)),) * ranks)

    def _group(self, mesh: DeviceMesh, dims: Sequence[int]) -> ProcessGroup:
        """The ranks of a mesh that differ from this one along some of its axes only."""
        if len(dims) == 1:
            return mesh.get_group(dims[0])
        mine = mesh.get_coordinate()
        assert mine is not None
        chosen = mesh.mesh[tuple(slice(None) if dim in dims else mine[dim] for dim in range(mesh.ndim))]
        ranks = tuple(sorted(chosen.flatten().tolist()))
        if len(ranks) == dist.get_world_size():
            return _world()
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]


def cutting_order(placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[int] | None:
    """The mesh axes along which a tensor was cut, in the order of the cuts; None where shards are not boxes.

    FSDP after tensor parallelism cuts along the first mesh axis last and calls that a strided shard, whose stride
    must then be the number of pieces that there were before.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard

    plain: list[int] = []
    strided: list[int] = []
    for dim, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        if factor is not None:
            before = math.prod(
                mesh_shape[other]
                for other in range(dim + 1, len(placements))
                if getattr(placements[other], "dim", None) == placement.dim
            )
            if factor != before or any(placements[other].dim == placement.dim for other in strided):
                return None
            strided.append(dim)
        elif isinstance(placement, Shard):
            plain.append(dim)
        elif not isinstance(placement, Replicate):
            return None
    return plain + strided


def spread_ranks(params: Iterable[Tensor]) -> set[int]:
    """The ranks that hold parts of these parameters."""
    meshes = {as_spread(param).device_mesh for param in params if is_spread(param)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


def _box(
    shape: torch.Size, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int], order: list[int]
) -> Box:
    """The shard at one place of a mesh: each cut makes pieces of equal length, the last ones shorter or empty."""
    starts, lengths = [0] * len(shape), list(shape)
    for dim in order:
        axis = placements[dim].dim
        length = math.ceil(lengths[axis] / mesh_shape[dim])
        start = min(coordinate[dim] * length, lengths[axis])
        starts[axis] += start
        lengths[axis] = min(length, lengths[axis] - start)
    return Box(tuple(starts), tuple(lengths))


def _coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Where each rank stands in a mesh."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in mesh.shape)).view(-1, mesh.ndim)
    return {rank: tuple(place) for rank, place in zip(mesh.mesh.flatten().tolist(), places.tolist(), strict=True)}


def _ranks(group: ProcessGroup) -> list[int]:
    return list(dist.get_process_group_ranks(group))


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
