"""Where tensors lie, told to a kernel: one launch then works on a whole list of them.

A table holds addresses; a map says which tensor, and which part of it, each program of the grid works on. Both are
small and change rarely (parameters and state stay where they are, gradients mostly), so they are kept on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from muonsw.tensors import all_contiguous

T = TypeVar("T")


class Kept(OrderedDict[Hashable, T]):
    """What was made lately, by what it was made from."""

    def keep(self, key: Hashable, made: T) -> T:
        """Keep something new, and let go of what was not asked for longest."""
        self[key] = made
        if len(self) > _KEPT:
            self.popitem(last=False)
        return made

    def recall(self, key: Hashable) -> T | None:
        """What was made from this, if it is still here."""
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found


class AddressTable(NamedTuple):
    """Whole numbers on the device, int64 `(rows, tensors)`; and whether a kernel may read sixteen bytes at a time."""

    numbers: Tensor
    aligned: bool


_KEPT = 1024
_tables: Kept[AddressTable] = Kept()
_maps: Kept[Tensor] = Kept()


def table(rows: Sequence[Sequence[int]], device: torch.device, loose: int = 0) -> AddressTable:
    """Rows of addresses and other whole numbers, one column for each tensor.

    Args:
        rows: the numbers.
        device: where they are wanted.
        loose: how many rows after the first need not be aligned.
    """
    numbers = tuple(chain.from_iterable(rows))
    key = (device, len(rows), loose, numbers)
    found = _tables.recall(key)
    if found is not None:
        return found
    is_aligned = aligned(rows[0], *rows[1 + loose :])
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing:  # not kept: it is filled when the graph is replayed
        return AddressTable(_in_graph(numbers, device).view(len(rows), -1), is_aligned)
    return _tables.keep(key, AddressTable(_on_device(numbers, device).view(len(rows), -1), is_aligned))


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy without waiting."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    if device.type == "cuda":
        _reserve()
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


# Numbers that graphs copy to the device at each replay, in pinned memory that no one else writes to. Such memory cannot
# be had while a graph is captured, so some is kept ready; nobody says when a graph is gone, so none is taken back.
_RESERVED = 2**17
_ready: list[Tensor] = []


def _reserve() -> None:
    if not _ready or _ready[-1].numel() < _RESERVED // 2:
        _ready.append(torch.empty(_RESERVED, dtype=torch.int64, pin_memory=True))


def _in_graph(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers that a graph under capture will copy; one by one if there is no memory ready for them."""
    if not _ready or _ready[-1].numel() < len(numbers):
        return torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in numbers])
    room, _ready[-1] = _ready[-1][: len(numbers)], _ready[-1][len(numbers) :]
    room.copy_(torch.tensor(numbers, dtype=torch.int64))
    return room.to(device, non_blocking=True)


def block_map(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """For each program: the number of its tensor, and of its block in that tensor; int32 `(2, n)`."""
    key = (device, block, sizes)
    found = _maps.recall(key)
    if found is not None:
        return found
    counts = torch.tensor([-(-size // block) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(owner)) - first[owner]
    both = torch.stack([owner, place]).int()
    return _maps.keep(key, both if device.type == "cpu" else both.pin_memory().to(device, non_blocking=True))


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors begin."""
    return list(map(Tensor.data_ptr, tensors))


def lengths(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How many entries tensors have."""
    return tuple(map(Tensor.numel, tensors))


class Stretch(NamedTuple):
    """A stretch of memory that belongs to one tensor of a list."""

    address: int
    size: int
    owner: int
    position: int


# Shorter stretches are left to torch, which has strides.
_SHORTEST_RUN = 1024


def runs(tensors: Sequence[Tensor]) -> list[Stretch] | None:
    """The stretches of memory that tensors consist of, in the order of their entries; None if there are too many.

    A tensor is one stretch, or one for each index of its first axis.
    """
    if all_contiguous(tensors):
        return [Stretch(tensor.data_ptr(), tensor.numel(), owner, 0) for owner, tensor in enumerate(tensors)]
    found: list[Stretch] = []
    for owner, tensor in enumerate(tensors):
        begin, size = tensor.data_ptr(), tensor.numel()
        if tensor.is_contiguous():
            found.append(Stretch(begin, size, owner, 0))
            continue
        size //= max(1, tensor.shape[0])
        if size < _SHORTEST_RUN or not tensor[0].is_contiguous():
            return None
        stride = tensor.stride(0) * tensor.element_size()
        found.extend(Stretch(begin + stride * k, size, owner, size * k) for k in range(tensor.shape[0]))
    return found


def aligned(*rows: Sequence[int]) -> bool:
    """Whether these addresses and sizes let a kernel read sixteen bytes at a time."""
    return reduce(or_, chain.from_iterable(rows), 0) % 16 == 0
