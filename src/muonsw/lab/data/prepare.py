"""Documents to training and validation shards, in groups, so that memory is bounded and a killed run goes on.

A group is a stretch of consecutive documents; where it ends depends on their lengths alone. The record of finished
groups is written after each one, so a second run over the same documents only encodes what is missing.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from muonsw import machine
from muonsw.lab.base import storage
from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.settings import differences
from muonsw.lab.data.corpus import TRAINING_CHARACTERS, Corpus, Source, up_to
from muonsw.lab.data.shards import (
    RECORD,
    SPLITS,
    DataRecord,
    Group,
    ShardError,
    Split,
    Tokens,
    load_tokenizer,
    open_shard,
    open_split,
    read_record,
    save_record,
    shard_path,
    write_shard,
)
from muonsw.lab.data.tokenizers import BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer, store

# What is encoded at a time, for each of so many threads at most: libraries need some hundred bytes for a token while
# they work, which keeps them below a gigabyte.
BATCH_CHARACTERS, BATCH_THREADS = 1 << 20, 8
# Small corpora get several shards, so that a killed run loses little; large ones not too many to be open at once.
_SHARD_CHARACTERS: dict[Source, int] = {"python": 1 << 22, "synthetic": 1 << 22, "text": 1 << 24, "fineweb": 1 << 26}
_HELD_OUT: dict[Source, float] = {"python": 0.05, "synthetic": 0.05, "fineweb": 0.001}
# Of text files the share of the characters, small and large: a loss on a few held-out pages means little. What counts
# as large is also as much as is read to find the documents that make up the share.
SMALL_SHARE, LARGE_SHARE = 0.05, 0.01
_LARGE_CHARACTERS = 1 << 24
NO_DOCUMENT = "the source gave no document: check its path, and whether its files are empty"
_SHARD = re.compile(r"(train|validation)-\d{5}-[0-9a-f]{8}\.tokens")


def prepare_default(folder: Path, *, threads: int | None = None, wait: float = 600.0, **settings: Any) -> DataRecord:
    """Data without a command line: prepares the folder once, and only looks at it from then on.

    A folder that is complete and has these settings, the fields of `Corpus`, is taken as it is, without reading the
    documents again. Several processes may ask for the same folder: one prepares it, and the others wait. The default
    needs nothing but this machine and some seconds.

    Raises:
        UsageError: As `prepare_corpus`.
    """
    corpus = Corpus(**settings)
    return _complete(folder, corpus) or prepare_corpus(folder, corpus, threads=threads, wait=wait)


def _complete(folder: Path, corpus: Corpus) -> DataRecord | None:
    """The record of a folder that needs no work: same settings, and every shard in its place."""
    wanted = {**_sizes(corpus), **corpus.recipe()}
    if not (folder / RECORD).exists():
        return None
    record = read_record(folder)
    if not record.complete or not wanted.items() <= record.settings.items():
        return None
    try:
        for split in SPLITS:
            if record.tokens(split):
                open_split(folder, split)
        load_tokenizer(folder)
    except UsageError:
        return None
    return record


def _sizes(corpus: Corpus) -> dict[str, Any]:
    """The share that is held out and the size of a group: those that are given, or those of the source."""
    fraction, source = corpus.validation_fraction, corpus.source
    if fraction is None:
        fraction = held_out_fraction(corpus.documents()) if source == "text" else _HELD_OUT[source]
    return {
        "validation_fraction": fraction,
        "group_characters": corpus.group_characters or _SHARD_CHARACTERS[source],
    }


def prepare_corpus(
    folder: Path,
    corpus: Corpus,
    *,
    threads: int | None = None,
    wait: float = 0.0,
    finished: Callable[[Group], None] = lambda _: None,
    begun: Callable[[str], None] = lambda _: None,
) -> DataRecord:
    """Make the tokenizer and the shards of a folder; what is there already of the same settings is kept.

    Args:
        folder: Made if missing.
        corpus: What to put there.
        threads: How many encode; None is one for each core. The result is the same.
        wait: How many seconds to wait for another process that prepares the same folder.
        finished: Called after every group.
        begun: Called with the name of a stage before it: "tokenizer", then "documents".

    Raises:
        UsageError: If the documents cannot be read, the folder cannot be written or holds other data, or a package is
            missing.
    """
    sizes, recipe = _sizes(corpus), corpus.recipe()
    if threads is not None and threads < 1:
        raise UsageError(f"--threads must be at least 1, got {threads}")
    if next(corpus.documents(), None) is None:
        raise UsageError(NO_DOCUMENT)
    ready = _ready_tokenizer(corpus)
    with locked(folder, wait=wait):
        earlier_groups(folder, {**sizes, **recipe})
        begun("tokenizer")
        tokenizer, trained_on = (ready, None) if ready else _trained(folder, corpus, sizes["validation_fraction"])
        recipe |= {"trained_on": trained_on}
        record = DataRecord(tokenizer.identity, tokenizer.vocab_size, **sizes, recipe=recipe)
        begun("documents")
        return _fill(folder, record, corpus.documents(), tokenizer, threads or machine.cores(), finished)


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float = 0.01,
    group_characters: int = 1 << 24,
    threads: int = 1,
    finished: Callable[[Group], None] = lambda _: None,
) -> DataRecord:
    """Encode documents, in a fixed order, into the shards of a folder, each followed by an end of document.

    What an earlier run with the same settings finished is kept, and `finished` is called for it, too. A share of the
    documents, chosen by a hash of their text, is never trained on. One group of them is held in memory. The shards are
    the same for any number of threads.

    Raises:
        UsageError: If there is no document, the folder holds data with other settings or is being prepared by another
            process, or something cannot be written.
    """
    record = DataRecord(tokenizer.identity, tokenizer.vocab_size, validation_fraction, group_characters)
    with locked(folder):
        return _fill(folder, record, documents, tokenizer, threads, finished)


def locked(folder: Path, *, wait: float = 0.0) -> AbstractContextManager[object]:
    """Make the folder and keep other processes from preparing it, as `storage.locked` does."""
    fix = "wait for it to end, or choose another folder"
    return storage.locked(folder, f"{folder} is being prepared by another process: {fix}", wait=wait)


def _fill(
    folder: Path,
    record: DataRecord,
    documents: Iterable[str],
    tokenizer: Tokenizer,
    threads: int,
    finished: Callable[[Group], None],
) -> DataRecord:
    """Write every shard that a locked folder lacks, and its record."""
    earlier = earlier_groups(folder, record.settings)
    record = replace(record, tokenizer_description=store(tokenizer, folder))
    if not earlier:
        save_record(folder, record)
    groups: list[Group] = []
    for number, texts in enumerate(grouped(documents, record.group_characters)):
        digest, size = digest_of(texts)
        group = earlier[number] if number < len(earlier) else None
        if group is None or group.digest != digest or not _intact(folder, number, group, record):
            tokens, checksums = _encode(folder, record, number, digest, texts, tokenizer, threads)
            group = Group(digest, len(texts), tokens, checksums, size)
            # Groups that come later stay on record until the documents say otherwise.
            save_record(folder, replace(record, groups=(*groups, group, *earlier[number + 1 :])))
        groups.append(group)
        finished(group)
    if not groups:
        raise UsageError(NO_DOCUMENT)
    record = replace(record, groups=tuple(groups), complete=True)
    save_record(folder, record)
    _remove_others(folder, record)
    return record


def _intact(folder: Path, number: int, group: Group, record: DataRecord) -> bool:
    """Whether the shards of a group are as on record."""
    try:
        for split in group.tokens:
            open_shard(shard_path(folder, split, number, group.digest), group, split, record, check=True)
    except ShardError:
        return False
    return True


def _encode(
    folder: Path,
    record: DataRecord,
    number: int,
    digest: str,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    threads: int,
) -> tuple[dict[Split, int], dict[Split, str]]:
    """Write the shards of a group, one for each split that got documents; returns their tokens and checksums."""
    parts: dict[Split, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        parts["validation" if is_validation(text, record.validation_fraction) else "train"].append(text)
    tokens: dict[Split, int] = {}
    checksums: dict[Split, str] = {}
    for split, part in parts.items():
        if part:
            path = shard_path(folder, split, number, digest)
            tokens[split], checksums[split] = write_shard(path, encoded(part, tokenizer, threads), record)
    return tokens, checksums


def encoded(texts: Iterable[str], tokenizer: Tokenizer, threads: int = 1) -> Iterator[Tokens]:
    """The tokens of documents, each followed by an end of document, in pieces of many documents."""
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for batch in grouped(texts, BATCH_CHARACTERS * min(threads, BATCH_THREADS)):
        ids = tokenizer.encode_batch(batch, threads=threads)
        yield np.concatenate([part for document in ids for part in (document, end)])


def grouped(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Consecutive documents together; a group ends with the document that reaches so many characters.

    Examples:
        >>> list(grouped(["ab", "c", "defg", "h"], 3))
        [['ab', 'c'], ['defg'], ['h']]
    """
    rest = iter(documents)
    while group := list(up_to(rest, characters)):
        yield group


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone, so copies of it are never on both sides."""
    return _lot(text) < fraction * 2.0**64


def _lot(text: str) -> int:
    """A number of 64 bits that decides whether a document is held out."""
    digest = hashlib.blake2b(_utf8(text), digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "little")


def held_out_fraction(documents: Iterable[str]) -> float:
    """The fraction for `is_validation` that holds out a twentieth of a text, a hundredth of a large one, or just more.

    With few documents, that share of them could be none; here at least one is held out and at least one is not.

    Raises:
        UsageError: If all documents are the same, or there is but one, or none.

    Examples:
        >>> texts = [f"document {number}" for number in range(10)]
        >>> sum(is_validation(text, held_out_fraction(texts)) for text in texts)
        1
    """
    sizes: Counter[int] = Counter()
    for text in up_to(documents, _LARGE_CHARACTERS):
        sizes[_lot(text)] += len(text)
    if not sizes:
        raise UsageError(NO_DOCUMENT)
    total, held_out = sum(sizes.values()), 0
    share = SMALL_SHARE if total < _LARGE_CHARACTERS else LARGE_SHARE
    *candidates, _largest = sorted(sizes)
    if not candidates:
        more = "give several documents, or a text file of 12 kB or more"
        fix = f"{more} (`muonsw data prepare` with --validation-fraction 0 holds out nothing)"
        raise UsageError(f"one document ({total:,} characters) cannot be both trained on and held out: {fix}")
    for lot in candidates:
        held_out += sizes[lot]
        if held_out >= share * total:
            break
    return float(np.nextafter(lot / 2.0**64, 1.0))


def digest_of(texts: Iterable[str]) -> tuple[str, int]:
    """A hash of documents, and how many bytes they have in UTF-8.

    Examples:
        >>> digest_of(["ab", "c"])[1], digest_of(["ab", "c"]) == digest_of(["a", "bc"])
        (3, False)
    """
    digest, size = hashlib.blake2b(digest_size=16), 0
    for data in map(_utf8, texts):
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def earlier_groups(folder: Path, settings: dict[str, Any]) -> tuple[Group, ...]:
    """What a folder holds of these settings.

    Raises:
        UsageError: If it holds data with other settings. Only settings that are on both sides are compared:
            without a recipe the caller answers for the documents.
    """
    if not (folder / RECORD).exists() or not (record := read_record(folder)).groups:
        return ()
    shared = [name for name in settings if name in record.settings]
    theirs, ours = ({name: one[name] for name in shared} for one in (record.settings, settings))
    if changed := differences(theirs, ours):
        different = ", ".join(f"{name} {old} (now {new})" for name, (old, new) in changed.items())
        raise UsageError(f"{folder} holds data with other settings: {different}; choose another folder or delete it")
    return record.groups


def _remove_others(folder: Path, record: DataRecord) -> None:
    """Delete shards of documents that have changed since they were written."""
    ours = {path for split in SPLITS for path in record.paths(folder, split)}
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path not in ours:
            path.unlink(missing_ok=True)


def _ready_tokenizer(corpus: Corpus) -> Tokenizer | None:
    """The tokenizer, unless it is to be trained."""
    if corpus.tokenizer == "bytes":
        return ByteTokenizer()
    return GPT2Tokenizer(corpus.gpt2_files) if corpus.tokenizer == "gpt2" else None


def _trained(folder: Path, corpus: Corpus, fraction: float) -> tuple[Tokenizer, str]:
    """A BPE, and a hash of the documents it was trained on."""
    allowed = (text for text in corpus.documents() if not is_validation(text, fraction))
    sample = list(up_to(allowed, TRAINING_CHARACTERS))
    if not sample:
        raise UsageError("the source gave no document to train a tokenizer on: check its path")
    digest, _ = digest_of(sample)
    earlier = _trained_before(folder, {**corpus.recipe(), "trained_on": digest})
    return earlier or BPETokenizer.train(sample, corpus.vocab), digest


def _trained_before(folder: Path, recipe: dict[str, Any]) -> Tokenizer | None:
    """The folder's own tokenizer, if it was trained on the same documents for the same vocabulary."""
    if not (folder / RECORD).exists() or read_record(folder).recipe != recipe:
        return None
    try:
        return load_tokenizer(folder)
    except UsageError:
        return None
