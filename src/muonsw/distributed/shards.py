"""How parameters are laid out across ranks: this rank's shard, its gradient and state, and where all shards are.

Ranks exchange matrices over the process groups of a mesh, one for each axis of a grid. Creating a process group would
need every rank of the world, and some may hold none of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.matrices import Region, box
from muonsw.precision import LOW_PRECISION
from muonsw.work import Item

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, without the slow import of their module."""
    return hasattr(type(tensor), "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or the tensor itself."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The local part of each tensor; checks each type once, because this runs before every step."""
    sharded = {kind for kind in set(map(type, tensors)) if hasattr(kind, "device_mesh")}
    return [t._local_tensor if type(t) in sharded else t for t in tensors]  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor; a collective if it is a DTensor."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor


def local_gradient(param: Tensor, name: str = "a parameter") -> Tensor | None:
    """The gradient of what this rank holds, redistributed if its placements are not those of the parameter."""
    grad = param.grad
    if grad is None or not is_dtensor(param):
        return grad
    if not is_dtensor(grad):
        raise ValueError(
            f"{name} is a DTensor but its gradient is a plain tensor; give it a gradient with the same placements"
        )
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad._local_tensor


def shard_like(param: DTensor, shard: Tensor) -> Tensor:
    """A DTensor placed like `param` with this local shard."""
    return _on_mesh_of(param, shard, param.placements, param.shape, param.stride())


def _on_mesh_of(
    param: DTensor, shard: Tensor, placements: Sequence[Any], shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    from torch.distributed.tensor import DTensor

    tensor = DTensor.from_local(shard, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return cast("Tensor", tensor)


def state_placements(param: DTensor, axis: int) -> tuple[Any, ...]:
    """Placements of a state tensor that has a parameter's axes before `axis`, and its own axes from there.

    If the parameter is sharded along `axis` or later, the state is sharded along `axis`.
    """
    from torch.distributed.tensor import Replicate, Shard

    places: list[Any] = list(param.placements)  # the type of a placement has no axis
    if cutting_order(places, param.device_mesh.shape) is None:  # can be shown and loaded; a step refuses it
        return (Replicate(),) * len(places)
    return tuple(place if place.is_replicate() or place.dim < axis else Shard(axis) for place in places)


def held_state(param: DTensor, shape: torch.Size, axis: int) -> tuple[int, ...]:
    """The local shape of a state tensor, placed by `state_placements`, whose global shape is `shape`."""
    mine = _box_here(param, shape, state_placements(param, axis))
    assert mine is not None
    return mine.lengths


def zeros_like_state(param: DTensor, shape: torch.Size, axis: int, dtype: torch.dtype) -> Tensor:
    """Zeros of a global shape, placed by `state_placements`, on the device of this rank's shard."""
    held = torch.zeros(held_state(param, shape, axis), dtype=dtype, device=param._local_tensor.device)
    stride = torch.empty(shape, dtype=dtype, device="meta").stride()
    return _on_mesh_of(param, held, state_placements(param, axis), shape, stride)


def put_state(param: DTensor, value: Tensor, places: tuple[Any, ...]) -> Tensor:
    """Put a saved state tensor, whole or sharded, on the mesh of its DTensor parameter.

    A whole tensor is cut locally, because every rank has loaded the same one.
    """
    from torch.distributed.tensor import distribute_tensor

    if is_dtensor(value):
        if (value.device_mesh, value.placements) == (param.device_mesh, places):
            return value
        value = whole(value)
    moved = value.to(param._local_tensor.device)
    return cast("Tensor", distribute_tensor(moved, param.device_mesh, places, src_data_rank=None))


def cutting_order(placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[int] | None:
    """The mesh axes along which a tensor was cut, in the order of the cuts; None if shards are not boxes.

    FSDP after tensor parallelism cuts along the first mesh axis last. It calls the result a strided shard, whose split
    factor must equal the number of pieces before that cut.
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


def refuse_interleaved(name: str, param: Tensor) -> None:
    """Refuse a DTensor whose shards are not contiguous boxes, for which there is no exchange."""
    if is_dtensor(param) and cutting_order(param.placements, param.device_mesh.shape) is None:
        raise ValueError(
            f"{name} has placements {param.placements} on a mesh of {tuple(param.device_mesh.shape)}, whose shards are "
            f"not contiguous blocks; Muon, other whole-matrix rules, norm rules and QK-clip need Shard or Replicate "
            f"on each mesh axis (as under DDP, FSDP2, HSDP, tensor or expert parallelism) or the strided shards that "
            f"FSDP2 makes over tensor parallelism"
        )


def box_at(
    coordinate: Sequence[int],
    shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    order: list[int],
) -> Region:
    """The shard at one mesh coordinate. Pieces are equal, except that the last ones may be shorter or empty."""
    starts, lengths = [0] * len(shape), list(shape)
    for dim in order:
        axis = placements[dim].dim
        length = math.ceil(lengths[axis] / mesh_shape[dim])
        start = min(coordinate[dim] * length, lengths[axis])
        starts[axis] += start
        lengths[axis] = min(length, lengths[axis] - start)
    return box(starts, lengths)


def _box_here(param: DTensor, shape: Sequence[int], placements: Sequence[Any]) -> Region | None:
    """This rank's box of a tensor on the mesh of a DTensor; None if shards are not contiguous."""
    mesh = param.device_mesh
    order, mine = cutting_order(placements, mesh.shape), mesh.get_coordinate()
    return None if order is None or mine is None else box_at(mine, shape, placements, mesh.shape, order)


def offset(param: Tensor) -> tuple[int, ...]:
    """Where this rank's shard begins along each axis; zeros if shards are not contiguous."""
    mine = _box_here(param, param.shape, param.placements) if is_dtensor(param) else None
    return (0,) * param.dim() if mine is None else tuple(start for _, start, _ in mine.cuts)


def shard_misfit(param: DTensor, axis: int) -> str:
    """Describe a DTensor cut along `axis` or later whose local shard has the wrong shape; empty if it is right.

    `DTensor.from_local` can make such tensors, and an exchange would put their pieces in the wrong places.
    """
    placements: list[Any] = list(param.placements)
    mine, shape = _box_here(param, param.shape, placements), tuple(param._local_tensor.shape)
    if mine is None or mine.lengths == shape or all(p.is_replicate() or p.dim < axis for p in placements):
        return ""
    here = f"rank {dist.get_rank()}"  # the text differs between ranks, so that all of them refuse the step
    return f", on {here} a shard of {shape} instead of {mine.lengths}: make it with distribute_tensor or fully_shard"


def position(param: Tensor) -> int:
    """The index, in the flattened parameter, of the first element of this rank's shard."""
    return sum(begin * math.prod(param.shape[axis + 1 :]) for axis, begin in enumerate(offset(param)))


def noise_place(param: Tensor) -> int:
    """A number for the position of this shard: shards get different rounding noise, copies the same."""
    return position(param) if param.dtype in LOW_PRECISION else 0


def local_item(position: int, name: str, param: DTensor) -> Item:
    """This rank's shard of a DTensor parameter at one step, with a zero gradient if it has none."""
    shard, grad = param._local_tensor, local_gradient(param, name)
    return Item(
        position + noise_place(param), name, shard, torch.zeros_like(shard) if grad is None else grad, {}, param
    )


# where the matrices of a parameter lie


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

    def of(self, param: Tensor, first_matrix_axis: int, state_shape: torch.Size | None = None) -> Layout:
        """The layout of a parameter whose axes before `first_matrix_axis` count matrices.

        With `state_shape`, the layout of a state tensor, which has other axes from `first_matrix_axis`.
        """
        places = None
        if is_dtensor(param):
            placements = param.placements if state_shape is None else state_placements(param, first_matrix_axis)
            places = param.device_mesh, placements
        key = (param.shape if state_shape is None else state_shape, places, first_matrix_axis)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

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
