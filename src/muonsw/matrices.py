"""View parameters as matrices, and cut matrices into chunks.

`matrix="stack"` (experts): the last two axes of a parameter are a matrix, the others count matrices.
`matrix="flatten"` (convolutions): the first axis is the rows, the others together are the columns. `split_sizes` and
`heads` split these along one axis into several matrices, such as the projections of a fused QKV. Each matrix is
orthogonalized separately, in batches of equal shape. Local and sharded parameters share one planner of batches.

An orthogonal (m, n) matrix has elements of RMS `1/sqrt(max(m, n))`, so without a shape scale large matrices would move
less than small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from muonsw.registry import Registry
from muonsw.work import Group, Item

STACK, FLATTEN = "stack", "flatten"

Cut = tuple[int, int, int]
T = TypeVar("T")

# Longer than any axis: the length along an axis that is not cut.
_ALL = 2**62


class Region(NamedTuple):
    """A rectangular part of a parameter, its gradient or its state.

    `cuts` are (axis, start, length) for each cut axis; `flat` cuts the tensor flattened to a vector.
    """

    cuts: tuple[Cut, ...] = ()
    flat: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        part = tensor.view(-1) if self.flat else tensor
        for axis, start, length in self.cuts:
            part = part.narrow(axis, start, length)
        return part

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length for _, _, length in self.cuts)

    def shape_in(self, shape: Sequence[int]) -> torch.Size:
        lengths = list(shape)
        for axis, _, length in self.cuts:
            lengths[axis] = length
        return torch.Size(lengths)

    def within(self, outer: Region) -> Region:
        """The intersection with `outer`, in the coordinates of `outer`; length 0 along an axis if empty.

        Examples:
            >>> Region(((0, 2, 4),)).within(Region(((0, 3, 8),)))
            Region(cuts=((0, 0, 3),), flat=False)
        """
        inner_cuts, outer_cuts = ({axis: cut for axis, *cut in region.cuts} for region in (self, outer))
        cuts = []
        for axis in sorted({*inner_cuts, *outer_cuts}):
            begin, length = inner_cuts.get(axis, (0, _ALL))
            start, size = outer_cuts.get(axis, (0, _ALL))
            last = min(max(begin + length - start, 0), size)
            first = min(max(begin - start, 0), last)
            cuts.append((axis, first, last - first))
        return Region(tuple(cuts))


WHOLE = Region()


def box(starts: Sequence[int], lengths: Sequence[int]) -> Region:
    """A region that is cut along every axis.

    Examples:
        >>> box((0, 2), (4, 2)).of(torch.arange(16).view(4, 4)).tolist()
        [[2, 3], [6, 7], [10, 11], [14, 15]]
    """
    return Region(
        tuple((axis, start, length) for axis, (start, length) in enumerate(zip(starts, lengths, strict=True)))
    )


class Part(NamedTuple):
    """A region of one item: the unit that algorithms batch and `apply_update` writes."""

    item: Item
    region: Region

    @property
    def grad(self) -> Tensor:
        return self.region.of(self.item.grad)

    def state(self, key: str) -> Tensor:
        return self.region.of(self.item.state[key])


def views(parts: Sequence[Part], tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t if part.region is WHOLE else part.region.of(t) for part, t in zip(parts, tensors, strict=True)]


class MatrixCell(NamedTuple):
    """A region of a parameter that holds a stack of `rows` x `columns` matrices."""

    region: Region
    rows: int
    columns: int


class MatrixView(NamedTuple):
    """The options of a group that define the matrices in its parameters."""

    matrix: str | None = None
    transposed: bool = False
    split_sizes: tuple[int, ...] | None = None
    split_dim: int = 0
    heads: int | None = None

    @classmethod
    def of(cls, group: Group) -> MatrixView:
        return cls(**{option: group[option] for option in cls._fields if option in group})

    def unsplit(self) -> MatrixView:
        return self._replace(split_sizes=None, heads=None)

    def stack_axes(self, axes: int) -> int:
        return 0 if self.matrix == FLATTEN else axes - 2

    def split_axis(self, shape: Sequence[int]) -> int:
        """The tensor axis of `split_dim`, which counts the axes of the matrix: 0 out, 1 in."""
        first = self.stack_axes(len(shape))
        return first + 1 if bool(self.split_dim) != self.transposed else first

    def cells(self, shape: Sequence[int]) -> Iterator[MatrixCell]:
        if len(shape) < 2:
            raise ValueError(
                f"a matrix has become a vector of {math.prod(shape)} elements since the optimizer was built: something "
                f"flattened the parameters, as DeepSpeed's ZeRO does. Use ZeRO stage 0, DDP or FSDP2"
            )
        sizes, axis, start = self.split_sizes, self.split_axis(shape), 0
        if self.heads is not None:
            sizes = (shape[axis] // self.heads,) * self.heads
        for size in sizes or (None,):
            region = WHOLE if size is None else Region(((axis, start, size),))
            cut = region.shape_in(shape)
            first = self.stack_axes(len(cut))
            yield MatrixCell(region, cut[first], math.prod(cut[first + 1 :]))
            start += size or 0

    def count(self, shape: Sequence[int]) -> int:
        stack = math.prod(shape[: self.stack_axes(len(shape))])
        return stack * sum(cell.rows * cell.columns > 0 for cell in self.cells(shape))

    def cell_keys(self, key: str) -> tuple[str, ...]:
        """The keys of per-cell state: `key` for one cell, `key.0`, `key.1`, ... for several."""
        cells = self.heads or (1 if self.split_sizes is None else len(self.split_sizes))
        return (key,) if cells == 1 else tuple(f"{key}.{number}" for number in range(cells))

    def cell_number(self, shape: Sequence[int], cuts: Sequence[Cut]) -> int:
        cells = enumerate(self.cells(shape))
        return next(number for number, cell in cells if set(cell.region.cuts) <= set(cuts))

    def out_in(self, rows: int, columns: int) -> tuple[int, int]:
        """(out, in) of matrices that may be stored as (in, out). polar(M^T) = polar(M)^T needs nothing else."""
        return (columns, rows) if self.transposed else (rows, columns)


def runs(
    shape: Sequence[int], view: MatrixView, chunk_bytes: int, fewest: int = 1
) -> Iterator[tuple[MatrixCell, tuple[Cut, ...], int]]:
    """The matrices of a parameter in even runs of about `chunk_bytes` or less, at least `fewest` if possible.

    Each run has its cell, its cut of the stack along the first axis (none if it is whole), and its number of matrices.
    """
    stack = shape[: view.stack_axes(len(shape))]
    slices, per_slice = stack[0] if stack else 1, math.prod(stack[1:])
    for cell in view.cells(shape):
        if slices * per_slice * cell.rows * cell.columns:
            pieces = math.ceil(slices * per_slice / _capacity(cell.rows, cell.columns, chunk_bytes))
            pieces = min(slices, max(fewest, pieces))
            for start, end in pairwise(slices * i // pieces for i in range(pieces + 1)):
                yield cell, () if pieces == 1 else ((0, start, end - start),), (end - start) * per_slice


def _capacity(rows: int, columns: int, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // (4 * rows * columns))


# Rows, columns and dtype of matrices.
Kind = tuple[int, int, torch.dtype]


class Chunk(NamedTuple):
    """Matrices of one shape and dtype, to update together."""

    view: MatrixView
    rows: int
    columns: int
    dtype: torch.dtype
    parts: list[Part]


def matrix_chunks(view: MatrixView, items: list[Item], chunk_bytes: int) -> list[Chunk]:
    shapes, dtypes = tuple([item.param.shape for item in items]), tuple([item.param.dtype for item in items])
    planned = _planned_chunks(shapes, dtypes, view, chunk_bytes)
    return [Chunk(view, *kind, [Part(items[index], region) for index, region in regions]) for kind, regions in planned]


@lru_cache(maxsize=128)
def _planned_chunks(
    shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...], view: MatrixView, chunk_bytes: int
) -> list[tuple[Kind, list[tuple[int, Region]]]]:
    """The parameters and regions in each chunk, from shapes and settings alone."""
    alike: dict[Kind, list[tuple[tuple[int, Region], int]]] = {}
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        for (cell, rows, columns), stack, matrices in runs(shape, view, chunk_bytes):
            region = WHOLE if cell is WHOLE and not stack else Region((*cell.cuts, *stack))
            alike.setdefault((rows, columns, dtype), []).append(((index, region), matrices))
    return [
        (kind, regions)
        for kind, members in alike.items()
        for regions in filled(members, _capacity(kind[0], kind[1], chunk_bytes))
    ]


def filled(sized: Iterable[tuple[T, int]], room: int) -> list[list[T]]:
    """Lists of consecutive elements, each with as many as fit into `room`, but at least one.

    Examples:
        >>> filled([("a", 2), ("b", 1), ("c", 1), ("d", 9)], room=3)
        [['a', 'b'], ['c'], ['d']]
    """
    lists: list[list[T]] = []
    left = 0
    for element, size in sized:
        if not lists or size > left:
            lists.append([])
            left = room
        lists[-1].append(element)
        left -= size
    return lists


def scatter(batch: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a batch (count, rows, columns) into tensors shaped like those in `like`, `count` matrices together."""
    if all(t.dim() == 2 for t in like):
        return list(batch.unbind())
    area = batch.shape[-2] * batch.shape[-1]
    pieces = batch.split_with_sizes([t.numel() // area for t in like])
    return [piece.reshape(t.shape) for piece, t in zip(pieces, like, strict=True)]


# The RMS of a typical AdamW update (Liu et al. 2025, "Muon is scalable for LLM training").
ADAMW_RMS = 0.2

# Shape scales: the factor for an orthogonal direction of (m, n) = (out, in).
SHAPE_SCALES: Registry[Callable[[int, int], float]] = Registry("shape scale")
# Elements of RMS 0.2, so AdamW's learning rate fits.
SHAPE_SCALES.register("match_rms_adamw", lambda m, n: ADAMW_RMS * math.sqrt(max(m, n)))
# Jordan's Muon and the default of `torch.optim.Muon`.
SHAPE_SCALES.register("original", lambda m, n: math.sqrt(max(1.0, m / n)))
# muP's spectral condition: activations change equally at every width.
SHAPE_SCALES.register("spectral", lambda m, n: math.sqrt(m / n))
# The direction itself, as in the convergence theory.
SHAPE_SCALES.register("none", lambda *_: 1.0)
