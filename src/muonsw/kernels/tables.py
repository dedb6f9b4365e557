"""Tables of addresses, so that one kernel launch works on a whole list of tensors.

A table holds addresses; a block map assigns a part of a tensor to each program of the grid. Both are small
and rarely change (parameters and state stay in place, gradients mostly do), so they are cached on the device.
"""

from __future__ import annotations

from bisect import bisect_right
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

# Copies integers to a device, as int64.
Copy = Callable[[Sequence[int], torch.device], Tensor]

_MOST_CACHED = 1024


class GraphTables:
    """The tables of a captured step whose gradients may move between replays.

    A graph reads fixed addresses, so it starts by computing its tables: each entry is the address of a gradient plus an
    offset, or `0 + offset` for everything else. Before a replay the host copies in the gradients' addresses only.

    Attributes:
        overlap: whether gradients share memory, which makes it unclear which of them an entry points into.
        held: cached tables that the graph reads too.
    """

    def __init__(self, grads: Sequence[Tensor], device: torch.device, room: int) -> None:
        self.held: list[Any] = []
        self._spans = []  # of each gradient: address, extent in bytes, index
        for number, grad in enumerate(grads):
            reach = sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True))
            self._spans.append((grad.data_ptr(), (reach + 1) * grad.element_size(), number))
        self._spans.sort()
        ends = [begin + size for begin, size, _ in self._spans]
        self.overlap = any(end > later[0] for end, later in zip(ends, self._spans[1:], strict=False))
        self._places = torch.zeros(len(grads) + 1, dtype=torch.int64, device=device)
        self._owners, self._offsets, self._entries = (
            torch.zeros(room, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._numbers: list[int] = []
        self._placed: tuple[int, ...] = ()

    def compute(self) -> None:
        """Compute the tables; the first operations of the graph."""
        torch.index_select(self._places, 0, self._owners, out=self._entries)
        self._entries.add_(self._offsets)

    def take(self, numbers: Sequence[int]) -> Tensor:
        """Add a table of these numbers, aligned like a separate tensor, as kernels expect."""
        begin = len(self._numbers)
        self._numbers += [*numbers, *[0] * (-len(numbers) % _ENTRIES_APART)]
        if len(self._numbers) > len(self._entries):
            raise TooManyEntriesError
        return self._entries[begin : begin + len(numbers)]

    def finish(self) -> None:
        """Fill in what the tables are computed from, once all of them have been captured."""
        starts = [begin for begin, _, _ in self._spans]
        pairs = []  # (gradient that an entry points into, offset), or (the zero at the end, the entry itself)
        for number in self._numbers:
            span = bisect_right(starts, number) - 1
            inside = span >= 0 and number < starts[span] + self._spans[span][1]
            pairs.append((self._spans[span][2], number - starts[span]) if inside else (len(starts), number))
        for target, values in zip((self._owners, self._offsets), zip(*pairs, strict=True), strict=False):
            target[: len(values)].copy_(on_host(values, target.device), non_blocking=True)

    def move(self, places: tuple[int, ...]) -> None:
        """Set the addresses of the gradients for the next replay."""
        if places != self._placed:
            self._places.copy_(on_host((*places, 0), self._places.device), non_blocking=True)
            self._placed = places  # last, because pinned memory may run out


class TooManyEntriesError(RuntimeError):
    """The tables of a step do not fit into the memory reserved for them."""


_ENTRIES_APART = 64


# The tables of the step that is being captured.
_captured: ContextVar[GraphTables | None] = ContextVar("captured", default=None)


@contextmanager
def in_graph(tables: GraphTables) -> Iterator[None]:
    """Make kernels captured inside this context use these tables, which must live as long as the graph."""
    token = _captured.set(tables)
    try:
        yield
    finally:
        _captured.reset(token)


class TensorCache(Generic[T]):
    """LRU cache of tensors by key and stream."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, tuple[int, T]] = OrderedDict()

    def get(self, key: Hashable, device: torch.device, make: Callable[[Copy], T]) -> T:
        """Return the cached value, or make it. One made in another stream might not be filled yet, so it is remade."""
        cached, graph = self._made.get(key), _captured.get()
        if graph is not None and device.type == "cuda":
            if cached is None:
                return make(lambda numbers, _: graph.take(numbers))  # not cached, because each replay fills it
            graph.held.append(cached[1])  # filled, because a capture begins by waiting for the device
            return cached[1]
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if cached is None or cached[0] != stream:
            cached = self._made[key] = (
                stream,
                make(lambda numbers, to: on_host(numbers, to).to(to, non_blocking=True)),
            )
        self._made.move_to_end(key)
        if len(self._made) > _MOST_CACHED:
            self._made.popitem(last=False)
        return cached[1]


class AddressTable(NamedTuple):
    """Integers on the device, int64 `(rows, tensors)`, and whether a kernel may read sixteen bytes at a time."""

    numbers: Tensor
    aligned: bool


_tables: TensorCache[AddressTable] = TensorCache()
_maps: TensorCache[Tensor] = TensorCache()


def table(rows: Sequence[Sequence[int]], device: torch.device, loose: range = range(0)) -> AddressTable:
    """Rows of addresses and other integers, one column for each tensor; `loose` rows need not be aligned."""
    lengths_of_rows = [len(row) for row in rows]
    if len(set(lengths_of_rows)) != 1:  # a kernel would read the numbers of one row as those of another
        raise ValueError(f"rows of an address table must have one length, not {lengths_of_rows}")
    numbers = tuple(chain.from_iterable(rows))
    tight = [row for number, row in enumerate(rows) if number not in loose]
    graph = _captured.get()
    if graph is not None:
        return AddressTable(graph.take(numbers).view(len(rows), -1), aligned(*tight))

    def make(copy: Copy) -> AddressTable:
        return AddressTable(copy(numbers, device).view(len(rows), -1), aligned(*tight))

    return _tables.get((device, len(rows), loose, numbers), device, make)


def on_host(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Integers in memory that a device copies from without waiting."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")


def block_map(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """For each program, the index of its tensor and of its block in that tensor; int32 `(2, n)`."""

    def make(copy: Copy) -> Tensor:
        counts = [-(-size // block) for size in sizes]
        blocks = copy(counts, device)
        owner = torch.repeat_interleave(blocks, output_size=sum(counts))
        first = blocks.cumsum(0) - blocks
        place = torch.arange(len(owner), dtype=torch.int64, device=blocks.device) - first[owner]
        return torch.stack([owner, place]).int()

    return _maps.get((device, block, sizes), device, make)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def lengths(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.numel, tensors))


class Stretches(NamedTuple):
    """Stretches of memory, such as matrices, that a list of tensors consists of, in the order of their elements.

    Attributes:
        addresses: the address of each.
        sizes: its number of elements.
        owners: the index of its tensor.
        positions: the index of its first element in that tensor.
        rows: the widths and strides of its rows; empty if there are no gaps between rows.
    """

    addresses: list[int]
    sizes: tuple[int, ...]
    owners: list[int]
    positions: list[int]
    rows: tuple[list[int], list[int]] | tuple[()] = ()

    def in_others(self, tensors: Sequence[Tensor]) -> list[int]:
        """The addresses of the same elements in other tensors, which have no gaps."""
        begins, width = addresses(tensors), tensors[0].element_size()
        return [begins[owner] + width * place for owner, place in zip(self.owners, self.positions, strict=True)]


def runs(tensors: Sequence[Tensor], area: int = 0) -> Stretches | None:
    """The stretches that tensors consist of, cut into matrices of `area` elements if that is given.

    Returns None if a tensor is neither contiguous nor made of contiguous rows, or does not consist of such matrices.
    """
    if all_contiguous(tensors) and (not area or set(lengths(tensors)) == {area}):
        return Stretches(addresses(tensors), lengths(tensors), list(range(len(tensors))), [0] * len(tensors))
    begins: list[int] = []
    positions: list[int] = []
    sizes: list[int] = []
    owners: list[int] = []
    widths: list[int] = []
    strides: list[int] = []
    for owner, tensor in enumerate(tensors):
        has_gaps = not tensor.is_contiguous()
        for place, part in enumerate(tensor.unbind() if has_gaps and tensor.dim() > 2 else (tensor,)):
            total = part.numel()
            size = area or total or 1
            if (not has_gaps or part.is_contiguous()) and total % size == 0:
                width = stride = size
            elif part.dim() == 2 and part.stride(1) == 1 and total == size:
                width, stride = part.shape[1], part.stride(0)
            else:
                return None
            begin, step, count = part.data_ptr(), part.element_size(), total // size
            begins += range(begin, begin + step * total, step * size)  # no Python call per matrix
            positions += range(total * place, total * (place + 1), size)
            sizes += [size] * count
            owners += [owner] * count
            widths += [width] * count
            strides += [stride] * count
    return Stretches(begins, tuple(sizes), owners, positions, () if widths == strides else (widths, strides))


def aligned(*rows: Sequence[int]) -> bool:
    """Whether these addresses and sizes let a kernel read sixteen bytes at a time."""
    return reduce(or_, chain.from_iterable(rows), 0) % 16 == 0
