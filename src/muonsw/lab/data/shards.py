"""A folder of prepared tokens: files of token ids, and `data.json`, which says everything about them.

A shard is nothing but token ids, little-endian, two bytes each for vocabularies up to 65,536 and else four. How many
there are, their SHA-256, their vocabulary and their tokenizer are on record. A hash of the texts that a shard was made
of is part of its name, so that other texts never take the place of those on record.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.settings import from_data
from muonsw.lab.base.storage import read_object, replacing, write_json
from muonsw.lab.data.tokenizers import FILES, Tokenizer, restore

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
Split: TypeAlias = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
RECORD = "data.json"
FORMAT = 2
LARGEST_VOCAB = 1 << 32
KEPT = "make room, or choose another folder; finished shards are kept, and the same command goes on"
AGAIN = "delete it and prepare the data again"
# A split up to this size is read and compared with its checksums whenever it is opened; larger ones by `verify`.
CHECKED_BYTES = 1 << 26
_READ_BYTES = 1 << 22


class ShardError(UsageError):
    """A shard that must not be used; the message names the file and says what to do."""


@dataclass(frozen=True)
class Group:
    """A stretch of documents that was encoded together, into one shard for each split."""

    digest: str  # a hash of the texts; empty while the group is not finished
    documents: int  # how many there were
    tokens: dict[Split, int]  # how many tokens each split got; a split without documents has no shard and no entry
    checksums: dict[Split, str]  # SHA-256 of each split's shard
    bytes: int = 0  # the size of the texts in UTF-8

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]*", self.digest):
            raise ValueError(f"digest {self.digest!r} is not hexadecimal")
        if set(self.tokens) != set(self.checksums) or any(count < 1 for count in self.tokens.values()):
            raise ValueError("every shard needs a checksum and at least 1 token")


@dataclass(frozen=True)
class DataRecord:
    """What a folder of shards holds, and the settings that decided it."""

    tokenizer: str  # its `identity`
    vocab_size: int  # every token is below it
    validation_fraction: float  # the share of documents that is held out
    group_characters: int  # a group ends with the document that reaches so many
    groups: tuple[Group, ...] = ()  # in the order of the documents
    complete: bool = False  # whether the last document was reached
    tokenizer_description: dict[str, Any] | None = None  # from which `load_tokenizer` rebuilds it
    recipe: dict[str, Any] | None = None  # where documents and tokenizer came from

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= LARGEST_VOCAB:
            raise ValueError(f"a vocabulary has 1 to 2**32 tokens, not {self.vocab_size}")
        if not 0.0 <= self.validation_fraction < 1.0 or self.group_characters < 1:
            given = f"{self.validation_fraction} and {self.group_characters}"
            raise ValueError(f"a validation fraction is in [0, 1) and a group has at least 1 character, not {given}")

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
        """How many documents both splits have together."""
        return sum(group.documents for group in self.groups)

    def tokens(self, split: Split) -> int:
        """How many tokens a split has, ends of documents included."""
        return sum(group.tokens.get(split, 0) for group in self.groups)

    def shards(self, folder: Path, split: Split) -> list[tuple[Path, Group]]:
        """The files of a split, in order, and what is on record about each."""
        numbered = ((number, group) for number, group in enumerate(self.groups) if split in group.tokens)
        return [(shard_path(folder, split, number, group.digest), group) for number, group in numbered]

    def paths(self, folder: Path, split: Split) -> list[Path]:
        """The shards of a split, in order; other files of the folder do not count."""
        return [path for path, _ in self.shards(folder, split)]


class Shard(NamedTuple):
    """The tokens of a shard, mapped from its file and not held in memory; all should be below `vocab_size`."""

    path: Path
    tokens: Tokens
    vocab_size: int


class ShardCheck(NamedTuple):
    """What `verify_folder` found: a file or the whole folder, what is wrong if anything, and how many good tokens."""

    path: Path
    problem: str | None
    tokens: int = 0


def shard_path(folder: Path, split: Split, number: int, digest: str) -> Path:
    """Where the tokens of a group's split are."""
    return folder / f"{split}-{number:05}-{digest[:8]}.tokens"


def read_record(folder: Path) -> DataRecord:
    """What is on record about a folder.

    Raises:
        UsageError: If the folder has no readable record, or one of another format.
    """
    path, fix = folder / RECORD, "delete the folder and prepare the data again"
    if not path.exists():
        named = shlex.quote(str(folder))
        text = f"`muonsw compare` and `muonsw train` take text as --text {named}"
        may_be_text = folder.exists() and not any(folder.glob("*.tokens"))
        instead = text if may_be_text else f"`muonsw data prepare {named}` makes some there"
        raise UsageError(f"{folder} holds no prepared data (it has no {RECORD}): {instead}")
    fields = read_object(path, remedy=fix)
    found = fields.pop("format", 1)
    if found != FORMAT:
        raise UsageError(f"{path} is of format {found}, and this muonsw reads format {FORMAT}: {fix}")
    try:
        return from_data(DataRecord, fields)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read ({error}): {fix}") from error


def save_record(folder: Path, record: DataRecord) -> None:
    """Replace the record of a folder."""
    write_json(folder / RECORD, {"format": FORMAT, **asdict(record)}, remedy=KEPT)


def write_shard(path: Path, pieces: Iterable[Tokens], record: DataRecord) -> tuple[int, str]:
    """Write tokens, in pieces of which one at a time is held in memory; returns how many they are and their SHA-256.

    Raises:
        ShardError: If a token is outside the vocabulary.
        MachineError: If the shard cannot be written.
    """
    checksum, count = hashlib.sha256(), 0
    with replacing(path, remedy=KEPT) as file:
        for piece in pieces:
            if piece.size and not 0 <= int(piece.min()) <= int(piece.max()) < record.vocab_size:
                wrong = int(piece.min() if piece.min() < 0 else piece.max())
                fix = "encode with the tokenizer that this vocabulary belongs to"
                raise ShardError(f"{path}: token {wrong} is outside the vocabulary of {record.vocab_size}: {fix}")
            data = piece.astype(record.dtype).tobytes()
            checksum.update(data)
            file.write(data)
            count += piece.size
    return count, checksum.hexdigest()


def open_split(folder: Path, split: Split) -> list[Shard]:
    """Map the shards of a split, in order.

    Their sizes are compared with the record, and so is every byte where that is quick (up to 64 MiB).

    Raises:
        UsageError: If the folder was not prepared to the end, the split is empty, or a shard is not as on record.
    """
    record = read_record(folder)
    if not record.complete:
        raise UsageError(f"{folder} is not prepared to the end: run the same `muonsw data prepare` again, it goes on")
    if not (shards := record.shards(folder, split)):
        raise UsageError(f"{folder} has no {split} tokens: prepare more documents in a new folder")
    _allow_open_files(len(shards))
    check = record.tokens(split) * record.dtype.itemsize <= CHECKED_BYTES
    return [open_shard(path, group, split, record, check=check) for path, group in shards]


def open_shard(path: Path, group: Group, split: Split, record: DataRecord, *, check: bool = False) -> Shard:
    """Map one shard after comparing its size with the record, and with `check` its content."""
    count = group.tokens[split]
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != count * record.dtype.itemsize:
                raise ShardError(f"{path} has {size} bytes, not {count * record.dtype.itemsize} as on record: {AGAIN}")
            # The same open file is checked and mapped: no other can come between and end in a bus error.
            file.seek(0)
            if check and hashlib.file_digest(file, "sha256").hexdigest() != group.checksums[split]:
                raise ShardError(f"{path} was altered, its checksum is not the one on record: {AGAIN}")
            tokens = np.memmap(file, dtype=record.dtype, mode="r", shape=(count,))
    except OSError as error:
        fix = "prepare the data again; if it is one of very many, raise `ulimit -n` or prepare larger shards"
        raise ShardError(f"{path} cannot be read ({error.strerror or error}): {fix}") from error
    return Shard(path, tokens, record.vocab_size)


def check_tokens(shard: Shard) -> None:
    """Read all tokens of a shard; one outside the vocabulary is an error with its place."""
    for start in range(0, len(shard.tokens), _READ_BYTES):
        piece = shard.tokens[start : start + _READ_BYTES]
        if int(piece.max()) >= shard.vocab_size:
            where = int(np.argmax(piece >= shard.vocab_size))
            outside = f"token {int(piece[where])} at position {start + where}"
            raise ShardError(f"{shard.path}: {outside} is outside the vocabulary of {shard.vocab_size}: {AGAIN}")


def verify_folder(folder: Path) -> Iterator[ShardCheck]:
    """Check the record, the tokenizer, and every token of every shard, one after the other."""
    record = read_record(folder)
    if not record.complete:
        yield ShardCheck(folder, f"{folder} is not prepared to the end: run the same `muonsw data prepare` again")
    try:
        load_tokenizer(folder)
    except UsageError as error:
        yield ShardCheck(folder, str(error))
    for split in SPLITS:
        for path, group in record.shards(folder, split):
            try:
                check_tokens(open_shard(path, group, split, record, check=True))
                yield ShardCheck(path, None, group.tokens[split])
            except ShardError as error:
                yield ShardCheck(path, str(error))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a prepared folder; one that is not on record is refused."""
    record = read_record(folder)
    tokenizer = restore(record.tokenizer_description, folder)
    if tokenizer is None:
        raise UsageError(f"{folder} does not say which tokenizer made it: prepare the data again")
    if (tokenizer.identity, tokenizer.vocab_size) != (record.tokenizer, record.vocab_size):
        ids = f"{tokenizer.identity[:12]}..., not {record.tokenizer[:12]}..."
        raise UsageError(f"the tokenizer in {folder} is not the one that made its tokens ({ids}): prepare them again")
    return tokenizer


def lost_tokenizer(folder: Path) -> Path | None:
    """A file of the tokenizer that is on record and not there; None where all are."""
    described = read_record(folder).tokenizer_description or {}
    names = FILES.get(str(described.get("kind")), ()) if described.get("files") else ()
    return next((folder / name for name in names if not (folder / name).is_file()), None)


def fingerprint(record: DataRecord) -> str:
    """A short hash of all tokens of a folder and of what made them."""
    shards = (f"{split}:{checksum}" for group in record.groups for split, checksum in group.checksums.items())
    return hashlib.sha256("\n".join([record.tokenizer, *shards]).encode(errors="surrogatepass")).hexdigest()[:16]


def _allow_open_files(more: int) -> None:
    """Raise the process's own limit, as far as the system lets it: a mapped shard counts as an open file."""
    try:
        resource: Any = import_module("resource")
    except ModuleNotFoundError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
    if more > soft // 4 and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
