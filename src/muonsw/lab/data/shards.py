"""A folder of prepared tokens: files of token ids, and `data.json`, which says everything about them.

A shard is nothing but token ids, little-endian, two bytes each for vocabularies up to 65,536 and else four. Their
number, SHA-256, vocabulary and tokenizer are on record. The name of a shard holds a hash of its texts, so that other
texts never take the place of those on record.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from muonsw.lab.config import from_data
from muonsw.lab.data.tokenizer import Tokenizer, restore
from muonsw.lab.errors import UsageError
from muonsw.lab.files import read_object, write_json

Split: TypeAlias = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
RECORD = "data.json"
FORMAT = 2
RERUN = "make room, or choose another folder; finished shards are kept, rerun the same command to resume"
AGAIN = "delete it and prepare the data again"
# A split up to this size is compared with its checksums whenever it is opened; larger ones by `muonsw data verify`.
CHECKED_BYTES = 1 << 26


class ShardError(UsageError):
    """A shard that must not be used; the message names the file and says what to do."""


@dataclass(frozen=True)
class Group:
    """A stretch of documents that was encoded together, into one shard for each split."""

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
        """How a token is stored: the smaller of two kinds that holds the vocabulary."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @property
    def documents(self) -> int:
        """The number of documents in both splits."""
        return sum(group.documents for group in self.groups)

    def tokens(self, split: Split) -> int:
        """The number of tokens in a split, ends of documents included."""
        return sum(group.tokens.get(split, 0) for group in self.groups)

    def shards(self, folder: Path, split: Split) -> list[tuple[Path, Group]]:
        """The files of a split, in order, and the group of each."""
        named = ((shard_path(folder, split, number, group), group) for number, group in enumerate(self.groups))
        return [(path, group) for path, group in named if split in group.tokens]

    def paths(self, folder: Path, split: Split) -> list[Path]:
        return [path for path, _ in self.shards(folder, split)]


class Shard(NamedTuple):
    """The tokens of a shard, mapped from its file and not held in memory; all should be below `vocab_size`."""

    path: Path
    tokens: npt.NDArray[np.integer[Any]]
    vocab_size: int


def shard_path(folder: Path, split: Split, number: int, group: Group) -> Path:
    """Where the tokens of a group's split are."""
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


def open_split(folder: Path, split: Split) -> list[Shard]:
    """Map the shards of a split, in order; their sizes are compared with the record, up to 64 MiB also every byte."""
    record = read_record(folder)
    if not record.complete:
        raise UsageError(f"{folder} is not prepared to the end: rerun the same `muonsw data prepare` to resume")
    if not (shards := record.shards(folder, split)):
        raise UsageError(f"{folder} has no {split} tokens: prepare more documents in a new folder")
    check = record.tokens(split) * record.dtype.itemsize <= CHECKED_BYTES
    return [open_shard(path, group, split, record, check=check) for path, group in shards]


def open_shard(path: Path, group: Group, split: Split, record: DataRecord, *, check: bool) -> Shard:
    """Map one shard after comparing its size with the record, and with `check` its content."""
    count = group.tokens[split]
    try:
        # The same open file is checked and mapped, so a file that replaces it meanwhile does no harm.
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != count * record.dtype.itemsize:
                raise ShardError(f"{path} has {size} bytes, not {count * record.dtype.itemsize} as on record: {AGAIN}")
            file.seek(0)
            if check and hashlib.file_digest(file, "sha256").hexdigest() != group.checksums[split]:
                raise ShardError(f"{path} was altered, its checksum is not the one on record: {AGAIN}")
            tokens = np.memmap(file, dtype=record.dtype, mode="r", shape=(count,))
    except OSError as error:
        fix = "prepare the data again; with too many open files, raise `ulimit -n` or --group-characters"
        raise ShardError(f"{path} cannot be read ({error.strerror or error}): {fix}") from error
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
        except ShardError as error:
            yield str(error)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a prepared folder; one that did not make its tokens is refused."""
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
