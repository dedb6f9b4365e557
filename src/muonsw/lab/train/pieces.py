"""Tensors in pieces: which rank writes what of a checkpoint, and any part of a tensor read from the files that hold it.

A checkpoint of several ranks has one file for each rank and part, `model-00001-of-00004.safetensors`. Its index says
for every tensor its shape and, by rank, where the piece in that rank's file begins. A checkpoint of one process has no
index: its files hold whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from muonsw.distributed.rounds import share_by_cost
from muonsw.distributed.shards import as_dtensor, is_dtensor, local, offset
from muonsw.matrices import Region, box

Index = dict[str, Any]


def file_name(part: str, rank: int, size: int) -> str:
    """The name of a rank's file, without its ending.

    Examples:
        >>> file_name("model", 1, 4)
        'model-00001-of-00004'
    """
    return f"{part}-{rank:05d}-of-{size:05d}"


def own_piece(tensor: Tensor) -> Region:
    """The part of a tensor that this rank holds."""
    return box(offset(tensor), local(tensor).shape)


def own_pieces(tensors: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Region]:
    """What this rank writes: its shard of what is divided, and a share of what every rank holds whole."""
    whole = [name for name, tensor in tensors.items() if not is_dtensor(tensor)]
    owners = dict(zip(whole, share_by_cost([tensors[name].nbytes for name in whole], size), strict=True))
    pieces = {
        name: own_piece(tensor)
        for name, tensor in tensors.items()
        if (owners[name] == rank if name in owners else _is_first_copy(tensor))
    }
    return {name: piece for name, piece in pieces.items() if math.prod(piece.lengths)}


def _is_first_copy(tensor: Tensor) -> bool:
    """Whether no rank before this one holds the same shard."""
    sharded = as_dtensor(tensor)
    places = sharded.device_mesh.get_coordinate() or ()
    return not any(place for place, how in zip(places, sharded.placements, strict=True) if how.is_replicate())


def merged(shapes: Mapping[str, Sequence[int]], by_rank: Iterable[Mapping[str, Region]]) -> Index:
    """The index of one part of a checkpoint, from what each rank writes of it."""
    index: Index = {name: {"shape": list(shape), "pieces": {}} for name, shape in shapes.items()}
    for rank, pieces in enumerate(by_rank):
        for name, piece in pieces.items():
            index[name]["pieces"][str(rank)] = list(piece.starts)
    return index


def follow_each_other(shape: tuple[int, ...], pieces: Sequence[Region]) -> bool:
    """Whether pieces fill a tensor, one after another along one axis, as ranks divide it.

    Examples:
        >>> follow_each_other((4, 2), [box((3, 0), (1, 2)), box((0, 0), (3, 2))])
        True
        >>> follow_each_other((4, 2), [box((1, 0), (3, 2)), box((0, 0), (3, 2))])
        False
    """
    axis = next((axis for piece in pieces for axis, size in enumerate(piece.lengths) if size != shape[axis]), 0)
    place = 0
    for piece in sorted(pieces):
        beside = [size for number, size in enumerate(piece.lengths) if number != axis]
        if len(piece.starts) != len(shape) or beside != [size for number, size in enumerate(shape) if number != axis]:
            return False
        if any(begin != (place if number == axis else 0) for number, begin in enumerate(piece.starts)):
            return False
        place += piece.lengths[axis] if shape else 1
    return place == (shape[axis] if shape else 1) or 0 in shape


class Reader:
    """Reads parts of tensors from the files of one part of a checkpoint, whatever number of ranks wrote them.

    Args:
        folder: The checkpoint.
        part: "model" or "optimizer".
        index: As `merged` made it; None where one file holds whole tensors.
        ranks: How many ranks wrote it.

    Raises:
        OSError: If a file is no file of tensors.
        KeyError, TypeError, ValueError: If index and files do not belong together.
    """

    def __init__(self, folder: Path, part: str, index: Index | None, ranks: int) -> None:
        self.folder, self.part, self.index, self.ranks = folder, part, index, ranks
        self._stack, self._files = ExitStack(), dict[str, Any]()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        """The tensors of this part."""
        return list(self._file(self.part).keys()) if self.index is None else list(self.index)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        if self.index is None:
            return tuple(self._file(self.part).get_slice(name).get_shape())
        return tuple(int(size) for size in self.index[name]["shape"])

    def read(self, name: str, part: Region | None = None) -> Tensor:
        """A part of a tensor, or all of it."""
        shape = self.shape(name)
        wanted = part or box((0,) * len(shape), shape)
        pieces = list(self._pieces(name, shape))
        if not follow_each_other(shape, [piece for _, piece in pieces]):
            raise ValueError(f"the pieces of {name} do not make a whole")
        if len(pieces) == 1 and pieces[0][1] == wanted:
            return self._file(pieces[0][0]).get_tensor(name)  # type: ignore[no-any-return]
        found = self._nothing(pieces, name).new_empty(wanted.lengths)
        for file, piece in pieces:
            there, here = wanted.within(piece), piece.within(wanted)
            if math.prod(there.lengths):
                found[here.slices] = self._file(file).get_slice(name)[there.slices]
        return found

    def _pieces(self, name: str, shape: tuple[int, ...]) -> Iterable[tuple[str, Region]]:
        """Which file holds which part of a tensor; sizes are those of the files, not of the index."""
        if self.index is None:
            yield self.part, box((0,) * len(shape), shape)
            return
        for rank, start in self.index[name]["pieces"].items():
            file = file_name(self.part, int(rank), self.ranks)
            yield file, box(tuple(map(int, start)), self._file(file).get_slice(name).get_shape())

    def _nothing(self, pieces: Sequence[tuple[str, Region]], name: str) -> Tensor:
        """No number of a tensor, in the dtype of all of them."""
        if not pieces:
            return torch.empty(0)
        file, piece = pieces[0]
        none = tuple(slice(0, 0) for _ in piece.lengths)
        return self._file(file).get_slice(name)[none]  # type: ignore[no-any-return]

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self.folder / f"{name}.safetensors"
            self._files[name] = self._stack.enter_context(_opened(path))
        return self._files[name]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of tensors; the library takes names in UTF-8 alone, so that a file of another name is opened here."""
    with ExitStack() as stack:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            path = Path(f"/dev/fd/{stack.enter_context(path.open('rb')).fileno()}")
        yield stack.enter_context(safe_open(path, framework="pt"))
