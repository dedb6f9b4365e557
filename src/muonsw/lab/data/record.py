"""What a prepared folder says about itself, and opening what it holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

from muonsw.lab.data.shards import Shard, ShardError, open_shard
from muonsw.lab.errors import UsageError
from muonsw.lab.storage import write_atomically

Split: TypeAlias = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
RECORD = "data.json"


@dataclass(frozen=True)
class Group:
    """A finished stretch of documents.

    Attributes:
        digest: A hash of the texts that were read; empty while the group is not finished.
        documents: How many there were.
        tokens: How many tokens each split got; a split without documents has no shard and no entry.
        checksums: What the header of each split's shard must say.
        bytes: The size of the texts in UTF-8.
    """

    digest: str
    documents: int
    tokens: dict[Split, int]
    checksums: dict[Split, str]
    bytes: int = 0


@dataclass(frozen=True)
class Prepared:
    """What a folder of shards holds, and the settings that decided it.

    Attributes:
        tokenizer: The `identity` of the tokenizer.
        vocab_size: Every token is below it.
        validation_fraction: The share of documents that is held out.
        group_characters: A group ends with the document that reaches so many.
        groups: In the order of the documents.
        complete: Whether the last document was reached.
        tokenizer_description: `{"kind": ..., "files": ...}`, from which `load_tokenizer` rebuilds the tokenizer.
        recipe: Where the documents and the tokenizer came from, for whoever asks for the same data again.
    """

    tokenizer: str
    vocab_size: int
    validation_fraction: float
    group_characters: int
    groups: tuple[Group, ...] = ()
    complete: bool = False
    tokenizer_description: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None

    @property
    def documents(self) -> int:
        """How many documents both splits have together."""
        return sum(group.documents for group in self.groups)

    def tokens(self, split: Split) -> int:
        """How many tokens a split has, ends of documents included."""
        return sum(group.tokens.get(split, 0) for group in self.groups)

    def paths(self, folder: Path, split: Split) -> list[Path]:
        """The shards of a split, in order; other files of the folder do not count."""
        return [shard_path(folder, split, number) for number, group in enumerate(self.groups) if split in group.tokens]

    def checksums(self, split: Split) -> list[str]:
        """What the headers of a split's shards must say, in the order of `paths`."""
        return [group.checksums[split] for group in self.groups if split in group.tokens]


def read_record(folder: Path) -> Prepared:
    """What `prepare` recorded in a folder.

    Raises:
        UsageError: If the folder has no readable record.
    """
    path = folder / RECORD
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Prepared(**{**fields, "groups": tuple(Group(**group) for group in fields["groups"])})
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{folder} holds no prepared data: run `muonsw data prepare` on it first") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} cannot be read ({error}): delete the folder and prepare the data again") from error


def save_record(folder: Path, record: Prepared) -> None:
    """Replace the record of a folder."""
    try:
        write_atomically(folder / RECORD, json.dumps(asdict(record), indent=1) + "\n")
    except OSError as error:
        raise cannot_write(folder / RECORD, error) from error


def open_split(folder: Path, split: Split, *, tokenizer: str | None = None) -> list[Shard]:
    """Open the shards of a split, in order.

    Args:
        folder: What `prepare` filled.
        split: "train" or "validation".
        tokenizer: The identity that every shard must have; `None` takes the record's.

    Raises:
        UsageError: If the folder was not prepared to the end, or the split is empty.
        ShardError: If a shard is missing, damaged, of another tokenizer, or not the one on record.
    """
    record = read_record(folder)
    if not record.complete:
        raise UsageError(f"{folder} is not prepared to the end: run the same `muonsw data prepare` again, it goes on")
    if not (paths := record.paths(folder, split)):
        raise UsageError(f"{folder} has no {split} tokens: prepare more documents, or another validation fraction")
    _allow_open_files(len(paths))
    shards = [open_shard(path, tokenizer=tokenizer or record.tokenizer) for path in paths]
    for shard, checksum in zip(shards, record.checksums(split), strict=True):
        check_on_record(shard.path, shard.header.checksum, checksum)
    return shards


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


def check_on_record(path: Path, found: str, recorded: str) -> None:
    """Refuse a whole shard that is not the one its folder's record speaks of."""
    if found != recorded:
        raise ShardError(f"{path} is not the shard on record: delete it and prepare the data again")


def shard_path(folder: Path, split: Split, number: int) -> Path:
    """Where the tokens of a group's split are."""
    return folder / f"{split}-{number:05}.tokens"


def cannot_write(path: Path, error: OSError) -> UsageError:
    """What to say when the disk is full or the folder has gone."""
    fix = "make room, or choose another folder; finished shards are kept, and the same command goes on"
    return UsageError(f"{path} cannot be written: {error.strerror or error}; {fix}")
