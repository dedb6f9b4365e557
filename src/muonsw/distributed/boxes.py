"""Which part of a tensor each rank of a mesh holds: it follows from the placements, for all ranks on each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Box(NamedTuple):
    """A contiguous part of a tensor: where it starts and how long it is, along each axis."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


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


def box_at(
    coordinate: Sequence[int],
    shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    order: list[int],
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
