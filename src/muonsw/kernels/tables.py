"""Addresses of tensors for a kernel: one launch then works on a whole list of them.

A table holds addresses; a map says which tensor, and which part of it, each program of the grid works on. Both are
small and change rarely (parameters and state stay where they are, gradients mostly), so they are kept on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from muonsw.work import all_contiguous

T = TypeVar("T")

# Brings whole numbers to a device, as int64.
Copy = Callable[[Sequence[int], torch.device], Tensor]

_KEPT = 1024

# What graphs read at every replay: held by the code that captures (`held_by`), else for ever, because no callback
# tells when a graph is destroyed.
_for_ever: list[Any] = []
_holder: ContextVar[list[Any]] = ContextVar("holder", default=_for_ever)


@contextmanager
def held_by(holder: list[Any]) -> Iterator[None]:
    """Let a list hold the tables that a graph captured meanwhile reads; it must live as long as the graph."""
    token = _holder.set(holder)
    try:
        yield
    finally:
        _holder.reset(token)


class TensorCache(Generic[T]):
    """What was made lately, by what it was made from and where."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, tuple[int, T]] = OrderedDict()

    def get(self, key: Hashable, device: torch.device, make: Callable[[Copy], T]) -> T:
        """What was made from this in the current stream, now or before; another stream might read it unfilled."""
        found = self._made.get(key)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if found is None:
                return make(_in_graph)  # not kept: it is filled when the graph is replayed
            _holder.get().append(found[1])  # a capture waits for the device first, so it is filled
            return found[1]
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if found is None or found[0] != stream:
            found = self._made[key] = stream, make(_on_device)
        self._made.move_to_end(key)
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return found[1]


class AddressTable(NamedTuple):
    """Whole numbers on the device, int64 `(rows, tensors)`; and whether a kernel may read sixteen bytes at a time."""

    numbers: Tensor
    aligned: bool


_tables: TensorCache[AddressTable] = TensorCache()
_maps: TensorCache[Tensor] = TensorCache()


def table(rows: Sequence[Sequence[int]], device: torch.device, loose: int = 0) -> AddressTable:
    """Rows of addresses and other whole numbers, one column for each tensor.

    Args:
        rows: the numbers, equally many in each row.
        device: where they are wanted.
        loose: how many rows after the first need not be aligned.
    """
    lengths_of_rows = [len(row) for row in rows]
    if len(set(lengths_of_rows)) != 1:  # a kernel would read the numbers of one row as those of another
        raise ValueError(f"rows of an address table must have one length, not {lengths_of_rows}")
    numbers = tuple(chain.from_iterable(rows))

    def make(copy: Copy) -> AddressTable:
        return AddressTable(copy(numbers, device).view(len(rows), -1), aligned(rows[0], *rows[1 + loose :]))

    return _tables.get((device, len(rows), loose, numbers), device, make)


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy without waiting."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        _reserve()
    return torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)


# Numbers that graphs copy to the device at each replay, in pinned memory that nothing else writes to. Such memory
# cannot be had while a graph is captured, so some is kept ready; none is taken back, as for tables above.
_RESERVED = 2**17
_ready: list[Tensor] = []


def _reserve() -> None:
    if not _ready or _ready[-1].numel() < _RESERVED // 2:
        _ready.append(torch.empty(_RESERVED, dtype=torch.int64, device="cpu", pin_memory=True))


def _in_graph(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers that a graph under capture will copy; one by one if there is no memory ready for them."""
    if not _ready or _ready[-1].numel() < len(numbers):
        return torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in numbers])
    room, _ready[-1] = _ready[-1][: len(numbers)], _ready[-1][len(numbers) :]
    room.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
    return room.to(device, non_blocking=True)


def block_map(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """For each program: the number of its tensor, and of its block in that tensor; int32 `(2, n)`."""

    def make(copy: Copy) -> Tensor:
        counts = [-(-size // block) for size in sizes]
        blocks = copy(counts, device)
        owner = torch.repeat_interleave(blocks, output_size=sum(counts))
        first = blocks.cumsum(0) - blocks
        place = torch.arange(len(owner), dtype=torch.int64, device=blocks.device) - first[owner]
        return torch.stack([owner, place]).int()

    return _maps.get((device, block, sizes), device, make)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors begin."""
    return list(map(Tensor.data_ptr, tensors))


def lengths(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How many entries tensors have."""
    return tuple(map(Tensor.numel, tensors))


class Stretch(NamedTuple):
    """A stretch of memory, by its address on the device (a `Region` is by indices), of one tensor of a list."""

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
