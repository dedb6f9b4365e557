"""Prepared tokens on disk, and batches of them whose order is a pure function of the seed and the step.

A folder holds shards and `data.json`, the record of everything about them. A shard is nothing but token ids,
little-endian, two bytes each for vocabularies up to 65,536 and else four. Its name holds a hash of its texts, so that
other texts never replace those on record.

A loader keeps no position: resuming at a step means asking for that step. Ranks, micro-batches and prefetching only
decide who asks for which rows, and when.
"""

from __future__ import annotations

import hashlib
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

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
T = TypeVar("T")

SPLITS: tuple[Split, ...] = ("train", "validation")
RECORD = "data.json"
FORMAT = 2
RERUN = "make room, or choose another folder; finished shards are kept, rerun the same command to resume"
AGAIN = "delete it and prepare the data again"
# A split up to this size is compared with its checksums whenever it is opened; larger ones by `muonsw data verify`.
CHECKED_BYTES = 1 << 26
SHUFFLE_ROUNDS = 8
# The multipliers and shifts of SplitMix64's finalizer (Steele, Lea and Flood 2014; Stafford's variant 13).
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
# Tensor cores want the vocabulary in multiples of 64: GPT-2's 50,257 become 50,304.
VOCAB_MULTIPLE = 64


# ---- The record of a folder


@dataclass(frozen=True)
class Group:
    """A run of consecutive documents that was encoded together, into one shard for each split."""

    digest: str  # a hash of the texts
    documents: int
    tokens: dict[Split, int]  # a split without documents has no shard and no entry
    checksums: dict[Split, str]  # SHA-256 of each split's shard
    bytes: int = 0  # the size of the texts in UTF-8

    def __post_init__(self) -> None:
        if set(self.tokens) != set(self.checksums):
            raise ValueError("every shard needs a number of tokens and a checksum")


@dataclass(frozen=True)
class DataRecord:
    """What a folder of shards holds, and the settings that decided it."""

    tokenizer: str  # its `identity`
    vocab_size: int  # every token is below it
    validation_fraction: float  # the share of documents that is held out
    group_characters: int  # a group ends with the document that reaches this many
    groups: tuple[Group, ...] = ()  # in the order of the documents
    complete: bool = False  # whether the last document was reached
    tokenizer_description: dict[str, Any] | None = None  # from which `load_tokenizer` rebuilds it
    recipe: dict[str, Any] | None = None  # where documents and tokenizer came from

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for the same data."""
        names = ("tokenizer", "vocab_size", "validation_fraction", "group_characters")
        return {**{name: getattr(self, name) for name in names}, **(self.recipe or {})}

    @property
    def dtype(self) -> np.dtype[Any]:
        """How a token is stored: the smaller of two types that holds the vocabulary."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @property
    def padded_vocab(self) -> int:
        """The rows of an embedding for these tokens."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def documents(self) -> int:
        return sum(group.documents for group in self.groups)

    def tokens(self, split: Split) -> int:
        """The number of tokens in a split, ends of documents included."""
        return sum(group.tokens.get(split, 0) for group in self.groups)

    def shards(self, folder: Path, split: Split) -> dict[Path, Group]:
        """The files of a split, in order, and the group of each."""
        groups = enumerate(self.groups)
        return {shard_path(folder, split, n, group): group for n, group in groups if split in group.tokens}


def shard_path(folder: Path, split: Split, number: int, group: Group) -> Path:
    return folder / f"{split}-{number:05}-{group.digest[:8]}.tokens"


def read_record(folder: Path) -> DataRecord:
    path, fix = folder / RECORD, "delete the folder and prepare the data again"
    if not path.exists():
        name = shlex.quote(str(folder))
        instead = f"`muonsw data prepare {name}` makes some there"
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
    """The tokenizer of a prepared folder; a `UsageError` if it did not make the folder's tokens."""
    record = read_record(folder)
    tokenizer = restore(record.tokenizer_description or {}, folder)
    if (tokenizer.identity, tokenizer.vocab_size) != (record.tokenizer, record.vocab_size):
        ids = f"{tokenizer.identity[:12]}..., not {record.tokenizer[:12]}..."
        raise UsageError(f"the tokenizer in {folder} is not the one that made its tokens ({ids}): prepare them again")
    return tokenizer


def fingerprint(record: DataRecord) -> str:
    """A short hash of all tokens of a folder and of what made them."""
    shards = (f"{split}:{checksum}" for group in record.groups for split, checksum in group.checksums.items())
    return hashlib.sha256("\n".join([record.tokenizer, *shards]).encode()).hexdigest()[:16]


# ---- Shards


class Shard(NamedTuple):
    """The tokens of a shard, mapped from its file and not held in memory; all should be below `vocab_size`."""

    path: Path
    tokens: npt.NDArray[np.integer[Any]]
    vocab_size: int


def open_split(folder: Path, split: Split) -> list[Shard]:
    """Map the shards of a split, in order; their sizes are compared with the record, up to 64 MiB also every byte."""
    record = read_record(folder)
    if not record.complete:
        raise UsageError(f"{folder} is not prepared to the end: rerun the same `muonsw data prepare` to resume")
    if not (shards := record.shards(folder, split)):
        raise UsageError(f"{folder} has no {split} tokens: prepare more documents in a new folder")
    check = record.tokens(split) * record.dtype.itemsize <= CHECKED_BYTES
    return [open_shard(path, group, split, record, check=check) for path, group in shards.items()]


def open_shard(path: Path, group: Group, split: Split, record: DataRecord, *, check: bool) -> Shard:
    """Map one shard after comparing its size with the record, and with `check` its content."""
    count = group.tokens[split]
    try:
        # The same open file is checked and mapped, so a file that replaces it meanwhile does no harm.
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != count * record.dtype.itemsize:
                raise UsageError(f"{path} has {size} bytes, not {count * record.dtype.itemsize} as on record: {AGAIN}")
            file.seek(0)
            if check and hashlib.file_digest(file, "sha256").hexdigest() != group.checksums[split]:
                raise UsageError(f"{path} was altered, its checksum is not the one on record: {AGAIN}")
            tokens = np.memmap(file, dtype=record.dtype, mode="r", shape=(count,))
    except OSError as error:
        fix = "prepare the data again; with too many open files, raise `ulimit -n` or --group-characters"
        raise UsageError(f"{path} cannot be read ({error.strerror or error}): {fix}") from error
    return Shard(path, tokens, record.vocab_size)


def verify_folder(folder: Path) -> Iterator[str]:
    """Check the record, the tokenizer and every byte of every shard; yields what is wrong."""
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
    """Check every byte of the shards of a group; yields what is wrong."""
    for split in group.tokens:
        try:
            open_shard(shard_path(folder, split, number, group), group, split, record, check=True)
        except UsageError as error:
            yield str(error)


# ---- Batches


class Windows:
    """Windows of `sequence + 1` tokens over shards; none crosses a shard's end. `count` is their number.

    Neighboring windows share one token, the last target of one and the first input of the next, so that every token of
    a shard but the first is a target in at most one window.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int) -> None:
        self.shards, self.sequence = tuple(shards), sequence
        counts = np.array([(len(shard.tokens) - 1) // sequence for shard in shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self.count = int(self._ends[-1])
        if self.count == 0:
            tokens = sum(len(shard.tokens) for shard in shards)
            needs = f"no shard holds one window of {sequence + 1} tokens"
            raise ValueError(f"{needs} ({tokens} tokens in {len(shards)} shards): shorten the sequence or add data")

    def gather(self, ids: Indices) -> TokenBatch:
        """Inputs and targets of the windows with these ids, int64 of shape (len(ids), sequence)."""
        rows = np.empty((len(ids), self.sequence + 1), dtype=np.int64)
        owners = np.searchsorted(self._ends, ids, side="right")
        for row, window, owner in zip(rows, ids.tolist(), owners.tolist(), strict=True):
            start = (window - (int(self._ends[owner - 1]) if owner else 0)) * self.sequence
            row[:] = self.shards[owner].tokens[start : start + self.sequence + 1]
        # A model would fail on such a token without naming the shard.
        if rows.max() >= (vocab := self.shards[0].vocab_size):
            bad = self.shards[owners[rows.max(axis=1).argmax()]].path
            wrong = f"{bad} holds the token {rows.max()}, outside the vocabulary of {vocab}"
            raise UsageError(f"{wrong}: delete it and prepare the data again")
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class TokenLoader:
    """Training batches: every epoch visits every window once, in an order keyed by the seed and the epoch.

    Epochs follow each other without a gap, so a batch may hold the end of one and the beginning of the next. `batch`
    counts sequences over all ranks and micro-batches; `limit` visits only the first windows. The order of the shards is
    part of the data order.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int, batch: int, seed: int, limit: int | None = None) -> None:
        self.windows, self.batch, self.seed = Windows(shards, sequence), batch, seed
        self.size = min(limit or self.windows.count, self.windows.count)  # windows in an epoch
        if self.size < batch:
            short = f"the corpus has {self.size} windows of {sequence + 1} tokens, fewer than one batch"
            raise ValueError(f"{short} of {batch}: make the batch or the sequence smaller, or add data")

    def batch_at(self, step: int) -> TokenBatch:
        """Inputs and targets of a step, counted from 0; int64 of shape (batch, sequence)."""
        return self._rows(step, 0, self.batch)

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[TokenBatch]:
        """The micro-batches of one rank.

        Micro-batch m of all ranks, in the order of the ranks, then micro-batch m + 1: together exactly
        `batch_at(step)`, which ranks and micro-batches must divide.
        """
        rows = self.batch // (ranks * accumulation)
        starts = (rows * (ranks * micro + rank) for micro in range(accumulation))
        return (self._rows(step, start, start + rows) for start in starts)

    def epochs(self, total_steps: int) -> float:
        """How many times a run of this many steps visits the corpus."""
        return total_steps * self.batch / self.size

    def _rows(self, step: int, first: int, last: int) -> TokenBatch:
        """Rows first to last of a step's batch."""
        # Python's integers have no largest value: step * batch may pass 64 bits though no index within an epoch does.
        samples = range(step * self.batch + first, step * self.batch + last)
        size, parts = self.size, []
        for epoch in range(samples[0] // size, samples[-1] // size + 1):
            begin, end = max(samples.start - epoch * size, 0), min(samples.stop - epoch * size, size)
            parts.append(shuffled(np.arange(begin, end), size, (self.seed, epoch)))
        return self.windows.gather(np.concatenate(parts))


class ValidationLoader:
    """The same windows in the same order for every run, whatever its seed or batch; the last batch may be smaller.

    All windows, or `windows` of them, spread evenly over the shards.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int, batch: int, windows: int | None = None) -> None:
        self.windows, self.batch = Windows(shards, sequence), batch
        chosen = min(windows or self.windows.count, self.windows.count)
        self.ids: Indices = np.arange(chosen, dtype=np.int64) * self.windows.count // chosen

    def __iter__(self) -> Iterator[TokenBatch]:
        return (batch for batch, _ in self.parts(ranks=1, rank=0))

    def parts(self, *, ranks: int, rank: int) -> Iterator[tuple[TokenBatch, int]]:
        """The batches of one rank, and how many rows of each count; together all ranks read every window once.

        Every rank has as many batches, since a sharded model needs all ranks for a forward pass; a rank that has
        nothing left reads the first window again, and none of its rows count.
        """
        for start in range(0, len(self.ids), self.batch * ranks):
            ids = self.ids[start + self.batch * rank :][: self.batch]
            yield self.windows.gather(ids if len(ids) else self.ids[:1]), len(ids)


def shuffled(indices: Indices, size: int, key: tuple[int, ...]) -> Indices:
    """Where a permutation of range(size) sends these indices; the key, any integers, decides it.

    The permutation is computed, not stored. A Feistel network permutes the smallest range(4**h) that holds range(size);
    an image that falls outside is permuted again until it falls inside, which takes fewer than four rounds on average.

    Examples:
        >>> shuffled(np.arange(10), 10, (42, 0)).tolist()
        [3, 8, 7, 2, 4, 0, 6, 1, 5, 9]
    """
    half_bits = ((size - 1).bit_length() + 1) // 2
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8 * SHUFFLE_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def permuted(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = words >> bits, words & mask
        for round_key in keys:
            mixed = right ^ round_key  # arithmetic is modulo 2**64
            for shift, multiplier in MIX:
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
            mixed ^= mixed >> np.uint64(LAST_SHIFT)
            left, right = right, left ^ (mixed & mask)
        return (left << bits) | right

    images = permuted(indices.astype(np.uint64))
    while (outside := np.flatnonzero(images >= np.uint64(size))).size:
        images[outside] = permuted(images[outside])
    return images.astype(np.int64)


def prefetch(read: Callable[[int], T], start: int, stop: int, *, ahead: int = 2) -> Iterator[T]:
    """`read(start), ..., read(stop - 1)`, computed by one background thread up to `ahead` items early.

    An error in `read` is raised where its item would have come. Closing the iterator ends the thread.
    """
    steps = iter(range(start, stop))
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        waiting: deque[Future[T]] = deque(worker.submit(read, step) for step in islice(steps, ahead))
        while waiting:
            item = waiting.popleft().result()
            waiting.extend(worker.submit(read, step) for step in islice(steps, 1))
            yield item
    finally:
        worker.shutdown(cancel_futures=True)
