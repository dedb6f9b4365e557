"""How the matrices of a parameter are placed over ranks, and what follows for their exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.distributed.grid import Grid, row
from muonsw.distributed.shards import as_dtensor, box_at, cutting_order, is_dtensor, state_placements
from muonsw.matrices import Region, box

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Layout(NamedTuple):
    """How a parameter lies over ranks.

    Attributes:
        shape: what the ranks of `grid` hold together: the whole parameter, or the experts of one rank of an
            expert-parallel mesh.
        grid: the ranks that exchange its matrices; None where each holds whole matrices that no other needs.
        boxes: what each of them holds, in the order of the grid.
        copies: every rank holds all of it; each orthogonalizes its share of the matrices, and all get the results.
    """

    shape: torch.Size
    grid: Grid | None = None
    boxes: tuple[Region, ...] = ()
    copies: bool = False


class Layouts:
    """Finds layouts and remembers them.

    Fewer than `fewest` ranks have nothing to exchange; a test of the exchange on a single device lowers it.
    """

    fewest = 2

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self._process_group = process_group
        self._known: dict[Any, Layout] = {}

    def of(self, param: Tensor, first_matrix_axis: int) -> Layout:
        """The layout of a parameter whose axes before `first_matrix_axis` count matrices."""
        if not is_dtensor(param):
            return self._plain(param.shape)
        like = as_dtensor(param)
        key = (like.device_mesh, like.placements, like.shape, first_matrix_axis)
        if key not in self._known:
            self._known[key] = self._on_mesh(like.shape, like.device_mesh, like.placements, first_matrix_axis)
        return self._known[key]

    def of_state(self, param: Tensor, shape: torch.Size, first_matrix_axis: int) -> Layout:
        """The layout of a tensor of state of this shape, which has axes of its own in the place of the matrix axes."""
        if not is_dtensor(param):
            return self._plain(shape)
        placements = state_placements(param, first_matrix_axis)
        return self._on_mesh(shape, as_dtensor(param).device_mesh, placements, first_matrix_axis)

    def sharding_groups(self, param: Tensor) -> tuple[ProcessGroup, ...]:
        """The process groups over which, one after another, the shards of a parameter add up; none for a whole one."""
        if not is_dtensor(param):
            return ()
        mesh, placements = as_dtensor(param).device_mesh, as_dtensor(param).placements
        dims = [dim for dim, place in enumerate(placements) if not place.is_replicate() and mesh.shape[dim] > 1]
        return _grid(mesh, dims).groups if dims else ()

    def _plain(self, shape: torch.Size) -> Layout:
        if self._process_group is None:
            return Layout(shape)
        if shape not in self._known:
            self._known[shape] = self._copies(shape, self._process_group)
        return self._known[shape]

    def _copies(self, shape: torch.Size, group: ProcessGroup) -> Layout:
        ranks = dist.get_world_size(group)
        if ranks < self.fewest:
            return Layout(shape)
        return Layout(shape, row(group), (box((0,) * len(shape), shape),) * ranks, copies=True)

    def _on_mesh(self, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Any], first: int) -> Layout:
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


def _grid(mesh: DeviceMesh, dims: Sequence[int]) -> Grid:
    """The ranks of a mesh that differ from this one along some of its axes only."""
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
    """The ranks that hold parts of these parameters."""
    meshes = {as_dtensor(param).device_mesh for param in params if is_dtensor(param)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
