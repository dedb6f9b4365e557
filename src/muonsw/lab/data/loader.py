"""Prepared tokens on disk, and batches that are a pure function of the seed and the step.

A folder holds shards and `data.json`, which describes them. A shard is an array of little-endian token ids, of two
bytes each for vocabularies up to 65,536 and four above. Its name has a hash of its texts, so other texts never
overwrite it.

A loader has no position: to resume at a step, ask for that step. The number of ranks and micro-batches does not change
the data of a step.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muonsw.lab.config import from_data
from muonsw.lab.data.tokenizer import Tokenizer, restore
from muonsw.lab.errors import UsageError
from muonsw.lab.files import read_object, write_json

Split: TypeAlias = Literal["train", "validation"]
TokenBatch: TypeAlias = tuple[Tensor, Tensor]
Indices: TypeAlias = npt.NDArray[np.int64]
Shard: TypeAlias = npt.NDArray[np.integer[Any]]  # the tokens of a shard, memory-mapped

SPLITS: tuple[Split, ...] = ("train", "validation")
RECORD = "data.json"
FORMAT = 2
RERUN = "make room, or choose another folder; finished shards are kept, rerun the same command to resume"
AGAIN = "delete it and prepare the data again"
# Larger splits are compared with their checksums only by `muonsw data verify`, not whenever they are opened.
CHECKED_BYTES = 1 << 26
SHUFFLE_ROUNDS = 8
# The shifts and multipliers of SplitMix64's finalizer (Steele, Lea and Flood 2014; Stafford's variant 13).
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
# Tensor cores are fastest with multiples of 64: GPT-2's 50,257 tokens become 50,304.
VOCAB_MULTIPLE = 64


# ---- The record of a folder


@dataclass(frozen=True)
class Group:
    """Consecutive documents that were encoded together, into one shard for each split."""

    digest: str  # a hash of the texts
    documents: int
    tokens: dict[Split, int]  # a split without documents has no shard and no entry
    checksums: dict[Split, str]  # SHA-256 of each shard
    bytes: int = 0  # the size of the texts in UTF-8


@dataclass(frozen=True)
class DataRecord:
    """The shards in a folder, and the settings they were made with."""

    tokenizer: str  # its `identity`
    vocab_size: int
    validation_fraction: float  # the fraction of documents to hold out
    group_characters: int  # a group ends with the document that reaches this many
    groups: tuple[Group, ...] = ()  # in the order of the documents
    complete: bool = False  # whether all documents are encoded
    tokenizer_description: dict[str, Any] | None = None  # for `restore`
    recipe: dict[str, Any] | None = None  # the source of the documents and the kind of tokenizer

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the data."""
        names = ("tokenizer", "vocab_size", "validation_fraction", "group_characters")
        return {**{name: getattr(self, name) for name in names}, **(self.recipe or {})}

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @property
    def padded_vocab(self) -> int:
        """The number of rows in an embedding for these tokens."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def documents(self) -> int:
        return sum(group.documents for group in self.groups)

    def tokens(self, split: Split) -> int:
        """The number of tokens in a split, including the ends of documents."""
        return sum(group.tokens.get(split, 0) for group in self.groups)

    def shards(self, folder: Path, split: Split) -> dict[Path, Group]:
        """The files of a split, in order, with their groups."""
        groups = enumerate(self.groups)
        return {shard_path(folder, split, n, group): group for n, group in groups if split in group.tokens}


def shard_path(folder: Path, split: Split, number: int, group: Group) -> Path:
    return folder / f"{split}-{number:05}-{group.digest[:8]}.tokens"


def read_record(folder: Path) -> DataRecord:
    path, fix = folder / RECORD, "delete the folder and prepare the data again"
    if not path.exists():
        name = shlex.quote(str(folder))
        instead = f"run `muonsw data prepare {name}`"
        if folder.exists() and not any(folder.glob("*.tokens")):
            instead = f"`muonsw compare` and `muonsw train` take text as --text {name}"
        raise UsageError(f"{folder} holds no prepared data (it has no {RECORD}): {instead}")
    fields = read_object(path, remedy=fix)
    if (version := fields.pop("format", 1)) != FORMAT:
        raise UsageError(f"{path} is of format {version}, and this muonsw reads format {FORMAT}: {fix}")
    try:
        return from_data(DataRecord, fields)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read ({error}): {fix}") from error


def save_record(folder: Path, record: DataRecord) -> None:
    write_json(folder / RECORD, {"format": FORMAT, **asdict(record)}, remedy=RERUN)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a prepared folder; raise a `UsageError` if the tokens were made by another one."""
    record = read_record(folder)
    tokenizer = restore(record.tokenizer_description or {}, folder)
    if (tokenizer.identity, tokenizer.vocab_size) != (record.tokenizer, record.vocab_size):
        ids = f"{tokenizer.identity[:12]}..., not {record.tokenizer[:12]}..."
        raise UsageError(f"the tokenizer in {folder} is not the one that made its tokens ({ids}): prepare them again")
    return tokenizer


def fingerprint(record: DataRecord) -> str:
    """A short hash of the tokenizer and all tokens of a folder."""
    shards = (f"{split}:{checksum}" for group in record.groups for split, checksum in group.checksums.items())
    return hashlib.sha256("\n".join([record.tokenizer, *shards]).encode()).hexdigest()[:16]


# ---- Shards


def open_split(folder: Path, split: Split) -> list[Shard]:
    """Memory-map the shards of a split, in order, after checking their sizes and, up to 64 MiB, their checksums."""
    record = read_record(folder)
    if not record.complete:
        raise UsageError(f"{folder} is not prepared to the end: rerun the same `muonsw data prepare` to resume")
    if not (shards := record.shards(folder, split)):
        raise UsageError(f"{folder} has no {split} tokens: prepare more documents in a new folder")
    check = record.tokens(split) * record.dtype.itemsize <= CHECKED_BYTES
    return [open_shard(path, group, split, record, check=check) for path, group in shards.items()]


def open_shard(path: Path, group: Group, split: Split, record: DataRecord, *, check: bool) -> Shard:
    """Memory-map one shard after checking its size and, with `check`, its checksum."""
    count = group.tokens[split]
    try:
        # Check and map the same open file, in case another process replaces it.
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != count * record.dtype.itemsize:
                raise UsageError(f"{path} has {size} bytes instead of {count * record.dtype.itemsize}: {AGAIN}")
            file.seek(0)
            if check and hashlib.file_digest(file, "sha256").hexdigest() != group.checksums[split]:
                raise UsageError(f"{path} was altered: it does not match its checksum; {AGAIN}")
            return np.memmap(file, dtype=record.dtype, mode="r", shape=(count,))
    except OSError as error:
        fix = "prepare the data again; with too many open files, raise `ulimit -n`"
        raise UsageError(f"{path} cannot be read ({error.strerror or error}): {fix}") from error


def verify_folder(folder: Path) -> Iterator[str]:
    """Check the record, the tokenizer and all shards; yield every problem."""
    record = read_record(folder)
    if not record.complete:
        yield f"{folder} is not prepared to the end: rerun the same `muonsw data prepare` to resume"
    try:
        load_tokenizer(folder)
    except UsageError as error:
        yield str(error)
    for number, group in enumerate(record.groups):
        yield from problems(folder, number, group, record)


def problems(folder: Path, number: int, group: Group, record: DataRecord) -> Iterator[str]:
    """Check the shards of a group; yield every problem."""
    for split in group.tokens:
        try:
            open_shard(shard_path(folder, split, number, group), group, split, record, check=True)
        except UsageError as error:
            yield str(error)


# ---- Batches


class Windows:
    """All `count` windows of `sequence + 1` tokens over shards; none crosses the end of a shard.

    Neighboring windows share one token: the last target of one is the first input of the next.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int) -> None:
        self.shards, self.sequence = tuple(shards), sequence
        counts = np.array([(len(shard) - 1) // sequence for shard in shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self.count = int(self._ends[-1])
        if self.count == 0:
            tokens = sum(map(len, shards))
            needs = f"no shard holds one window of {sequence + 1} tokens"
            raise ValueError(f"{needs} ({tokens} tokens in {len(shards)} shards): shorten the sequence or add data")

    def gather(self, ids: Indices) -> TokenBatch:
        """Inputs and targets of these windows, int64 of shape (len(ids), sequence)."""
        rows = np.empty((len(ids), self.sequence + 1), dtype=np.int64)
        owners = np.searchsorted(self._ends, ids, side="right")
        for row, window, owner in zip(rows, ids.tolist(), owners.tolist(), strict=True):
            start = (window - (int(self._ends[owner - 1]) if owner else 0)) * self.sequence
            row[:] = self.shards[owner][start : start + self.sequence + 1]
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class TokenLoader:
    """Training batches: every epoch visits every window once, in an order that depends on the seed and the epoch.

    A batch may hold the end of one epoch and the start of the next. `batch` counts sequences over all ranks and
    micro-batches; `limit` uses only the first windows.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int, batch: int, seed: int, limit: int | None = None) -> None:
        self.windows, self.batch, self.seed = Windows(shards, sequence), batch, seed
        self.size = min(limit or self.windows.count, self.windows.count)  # windows in an epoch
        if self.size < batch:
            short = f"the corpus has {self.size} windows of {sequence + 1} tokens, fewer than one batch"
            raise ValueError(f"{short} of {batch}: make the batch or the sequence smaller, or add data")

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[TokenBatch]:
        """The micro-batches of one rank; micro-batch m of all ranks comes before micro-batch m + 1 in the batch."""
        rows = self.batch // (ranks * accumulation)
        starts = (rows * (ranks * micro + rank) for micro in range(accumulation))
        return (self.batch_at(step, start, start + rows) for start in starts)

    def batch_at(self, step: int, first: int = 0, last: int | None = None) -> TokenBatch:
        """Inputs and targets of a step, counted from 0, or of some of its rows; int64 of shape (rows, sequence)."""
        # Python's integers do not overflow: step * batch may exceed 64 bits, unlike an index within an epoch.
        samples = range(step * self.batch + first, step * self.batch + (self.batch if last is None else last))
        size, parts = self.size, []
        for epoch in range(samples[0] // size, samples[-1] // size + 1):
            begin, end = max(samples.start - epoch * size, 0), min(samples.stop - epoch * size, size)
            parts.append(shuffled(np.arange(begin, end), size, (self.seed, epoch)))
        return self.windows.gather(np.concatenate(parts))


class ValidationLoader:
    """All windows, or `windows` of them at even distances, the same for every run; the last batch may be smaller."""

    def __init__(self, shards: Sequence[Shard], sequence: int, batch: int, windows: int | None = None) -> None:
        self.windows, self.batch = Windows(shards, sequence), batch
        chosen = min(windows or self.windows.count, self.windows.count)
        self.ids: Indices = np.arange(chosen, dtype=np.int64) * self.windows.count // chosen

    def parts(self, *, ranks: int = 1, rank: int = 0) -> Iterator[tuple[TokenBatch, int]]:
        """The batches of one rank, each with the number of rows that count; together, ranks read every window once.

        Every rank gets the same number of batches, because a sharded model needs all ranks for a forward pass. A rank
        without windows left reads the first one again, and no row counts.
        """
        for start in range(0, len(self.ids), self.batch * ranks):
            ids = self.ids[start + self.batch * rank :][: self.batch]
            yield self.windows.gather(ids if len(ids) else self.ids[:1]), len(ids)


def shuffled(indices: Indices, size: int, key: tuple[int, ...]) -> Indices:
    """Map indices by a permutation of range(size), which the key, a tuple of integers, determines.

    The permutation is computed, not stored. A Feistel network permutes the smallest range(4**h) that contains
    range(size); an image outside range(size) is permuted again, fewer than four times on average.
    """
    half_bits = ((size - 1).bit_length() + 1) // 2
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * SHUFFLE_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def permuted(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = words >> bits, words & mask
        for round_key in keys:
            mixed = right ^ round_key  # arithmetic is modulo 2**64
            for shift, multiplier in MIX:
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
            left, right = right, left ^ (mixed & mask)
        return (left << bits) | right

    images = permuted(indices.astype(np.uint64))
    while (outside := np.flatnonzero(images >= np.uint64(size))).size:
        images[outside] = permuted(images[outside])
    return images.astype(np.int64)
