"""Documents to training and validation shards, in groups, so that memory is bounded and a killed run goes on.

A group is a stretch of consecutive documents; where it ends depends on their lengths alone. The record of finished
groups is written after each one, so a second run over the same documents only encodes what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from muonsw.lab.data.shards import Shard, ShardError, Tokens, open_shard, write_shard
from muonsw.lab.data.tokenizers import Tokenizer
from muonsw.lab.files import UsageError, prepare_folder, write_atomically

Split: TypeAlias = Literal["train", "validation"]
RECORD = "data.json"


@dataclass(frozen=True)
class Group:
    """A finished stretch of documents.

    Attributes:
        digest: A hash of the texts that were read.
        documents: How many there were.
        tokens: How many tokens each split got; a split without documents has no shard and no entry.
        checksums: What the header of each split's shard must say.
    """

    digest: str
    documents: int
    tokens: dict[Split, int]
    checksums: dict[Split, str]


@dataclass(frozen=True)
class Prepared:
    """What a folder of shards holds, and the settings that decided it."""

    tokenizer: str
    vocab_size: int
    validation_fraction: float
    group_characters: int
    groups: tuple[Group, ...] = ()
    complete: bool = False

    def tokens(self, split: Split) -> int:
        """How many tokens a split has, ends of documents included."""
        return sum(group.tokens.get(split, 0) for group in self.groups)

    def paths(self, folder: Path, split: Split) -> list[Path]:
        """The shards of a split, in order; other files of the folder do not count."""
        return [_shard_path(folder, split, number) for number, group in enumerate(self.groups) if split in group.tokens]


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float = 0.01,
    group_characters: int = 1 << 24,
    finished: Callable[[Group], None] = lambda _: None,
) -> Prepared:
    """Encode documents into the shards of a folder, each followed by an end of document.

    Args:
        documents: In a fixed order. At most one group of them is held in memory.
        tokenizer: What encodes them.
        folder: Made if missing; what an earlier run with the same settings finished there is kept.
        validation_fraction: The share of documents, chosen by a hash of their text, that is never trained on.
        group_characters: A group ends with the document that reaches so many.
        finished: Called after every group, also after one that was already there.

    Raises:
        UsageError: If there is no document, or the folder holds data with other settings.
    """
    if not 0.0 <= validation_fraction < 1.0 or group_characters < 1:
        given = f"{validation_fraction} and {group_characters}"
        raise ValueError(f"a validation fraction is in [0, 1) and a group has at least 1 character, not {given}")
    prepare_folder(folder)
    settings = Prepared(tokenizer.identity, tokenizer.vocab_size, validation_fraction, group_characters)
    earlier = _earlier_groups(folder, settings)
    done = settings
    for number, texts in enumerate(_grouped(documents, group_characters)):
        digest = _digest(texts)
        kept = _kept_group(folder, number, digest, earlier, tokenizer)
        group = kept or _write_group(folder, number, texts, digest, tokenizer, settings)
        done = replace(done, groups=(*done.groups, group))
        if kept is None:
            # groups that come later stay on record until the documents say otherwise
            _save(folder, replace(done, groups=(*done.groups, *earlier[number + 1 :])))
        finished(group)
    if not done.groups:
        raise UsageError("the source gave no document: check its path")
    done = replace(done, complete=True)
    _save(folder, done)
    return done


def read_record(folder: Path) -> Prepared:
    """What `prepare` recorded in a folder.

    Raises:
        UsageError: If the folder has no readable record.
    """
    path = folder / RECORD
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Prepared(**{**fields, "groups": tuple(Group(**group) for group in fields["groups"])})
    except FileNotFoundError as error:
        raise UsageError(f"{folder} holds no prepared data: run `muonsw data prepare` on it first") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} cannot be read ({error}): delete the folder and prepare the data again") from error


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
    shards = [open_shard(path, tokenizer=tokenizer or record.tokenizer) for path in paths]
    checksums = [group.checksums[split] for group in record.groups if split in group.tokens]
    for shard, checksum in zip(shards, checksums, strict=True):
        if shard.header.checksum != checksum:
            raise ShardError(f"{shard.path} is not the shard on record: delete it and prepare the data again")
    return shards


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone, so copies of it are never on both sides."""
    digest = hashlib.blake2b(_encoded(text), digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _grouped(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in documents:
        group.append(text)
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_group(
    folder: Path, number: int, texts: list[str], digest: str, tokenizer: Tokenizer, settings: Prepared
) -> Group:
    group = Group(digest, len(texts), tokens={}, checksums={})
    sides: dict[Split, list[str]] = {"train": [], "validation": []}
    for text in texts:
        sides["validation" if is_validation(text, settings.validation_fraction) else "train"].append(text)
    for split, chosen in sides.items():
        path = _shard_path(folder, split, number)
        if not chosen:
            path.unlink(missing_ok=True)
            continue
        pieces = (_with_end(tokenizer, text) for text in chosen)
        header = write_shard(path, pieces, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity)
        group.tokens[split], group.checksums[split] = header.count, header.checksum
    return group


def _with_end(tokenizer: Tokenizer, text: str) -> Tokens:
    return np.append(tokenizer.encode(text), np.uint32(tokenizer.end_of_document))


def _earlier_groups(folder: Path, settings: Prepared) -> tuple[Group, ...]:
    """What the folder holds of these settings; another tokenizer or split in the same folder is refused."""
    if not (folder / RECORD).exists():
        return ()
    record = read_record(folder)
    ours, theirs = asdict(replace(settings, groups=())), asdict(replace(record, groups=(), complete=False))
    if different := ", ".join(
        f"{name} {theirs[name]} (now {ours[name]})" for name in ours if ours[name] != theirs[name]
    ):
        raise UsageError(f"{folder} holds data with other settings: {different}; choose another folder or delete it")
    return record.groups


def _kept_group(
    folder: Path, number: int, digest: str, earlier: tuple[Group, ...], tokenizer: Tokenizer
) -> Group | None:
    """The group on record, if it was made of the same texts and its shards are still the ones it made."""
    if number >= len(earlier) or earlier[number].digest != digest:
        return None
    try:
        for split, checksum in earlier[number].checksums.items():
            shard = open_shard(_shard_path(folder, split, number), tokenizer=tokenizer.identity)
            if shard.header.checksum != checksum:
                return None
    except ShardError:
        return None
    return earlier[number]


def _save(folder: Path, record: Prepared) -> None:
    write_atomically(folder / RECORD, json.dumps(asdict(record), indent=1) + "\n")


def _shard_path(folder: Path, split: Split, number: int) -> Path:
    return folder / f"{split}-{number:05}.tokens"


def _digest(texts: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = _encoded(text)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
