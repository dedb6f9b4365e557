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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from muonsw import machine
from muonsw.lab import storage
from muonsw.lab.data.corpus import Corpus, Source, up_to
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
from muonsw.lab.data.tokenizers import BYTES, BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer, store
from muonsw.lab.errors import UsageError
from muonsw.lab.processes import Audience, Tell, run_jobs

Kind: TypeAlias = Literal["bytes", "bpe", "gpt2"]
DEFAULT_VOCAB = 1024
# Merges learned from more text than this hardly differ, and learning them takes a second.
TRAINING_CHARACTERS = 1 << 22
# What is encoded at a time, for each thread: the libraries need some hundred bytes for a token while they work.
BATCH_CHARACTERS = 1 << 20
# Small corpora get several shards, so that a killed run loses little; large ones not too many to be open at once.
_SHARD_CHARACTERS: dict[Source, int] = {"python": 1 << 22, "synthetic": 1 << 22, "text": 1 << 24, "fineweb": 1 << 26}
_HELD_OUT: dict[Source, float] = {"python": 0.05, "synthetic": 0.05, "fineweb": 0.001}
# Of text files the share of the characters, small and large: a loss on a few held-out pages means little. What counts
# as large is also as much as is read to find the documents that make up the share.
SMALL_SHARE, LARGE_SHARE = 0.05, 0.01
_LARGE_CHARACTERS = 1 << 24
# Threads of one process encode as fast as a few processes, and need no start. On many cores they are held back by what
# is not in threads, the hashing and writing.
_SMALL_BYTES = 1 << 28
_FEW_CORES = 4
_UNFINISHED = Group("", 0, tokens={}, checksums={})
_SHARD = re.compile(r"(train|validation)-\d{5}-[0-9a-f]{8}\.tokens")


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer to make; a `bpe` is trained on the first documents that are not held out."""

    kind: Kind = "bpe"
    vocab: int = DEFAULT_VOCAB  # tokens of `bpe`, the end of a document included
    gpt2_files: Path | None = None  # folder with vocab.bpe and encoder.json; None lets tiktoken download them
    training_characters: int = TRAINING_CHARACTERS  # of the documents that `bpe` is trained on

    def __post_init__(self) -> None:
        if self.kind not in ("bytes", "bpe", "gpt2"):
            raise UsageError(f"there is no tokenizer {self.kind!r}: give bytes, bpe, gpt2")
        if self.kind == "bpe" and (not BYTES < self.vocab < 1 << 31 or self.training_characters < 1):
            needs = f"a --vocab above {BYTES} (below 2**31) and characters to train on"
            raise UsageError(f"a bpe needs {needs}, got {self.vocab} and {self.training_characters}")
        if self.kind != "gpt2" and self.gpt2_files is not None:
            raise UsageError(f"--gpt2-files go with --tokenizer gpt2, not with {self.kind}")


@dataclass(frozen=True)
class DataSettings:
    """Everything that decides what a folder of prepared data holds; sizes that are None are those of the source."""

    corpus: Corpus = field(default_factory=Corpus)
    tokenizer: TokenizerChoice = field(default_factory=TokenizerChoice)
    validation_fraction: float | None = None  # the share of documents that is held out
    group_characters: int | None = None  # the size of a shard before encoding

    def sizes(self) -> dict[str, Any]:
        """The two sizes, as they are recorded.

        Raises:
            UsageError: If one of them makes no sense.
        """
        source, fraction, characters = self.corpus.source, self.validation_fraction, self.group_characters
        if fraction is None:
            fraction = held_out_fraction(self.corpus.documents()) if source == "text" else _HELD_OUT[source]
        characters = _SHARD_CHARACTERS[source] if characters is None else characters
        if not 0.0 <= fraction < 1.0:
            raise UsageError(f"--validation-fraction is at least 0 and below 1, not {fraction}")
        if characters < 1:
            raise UsageError(f"--group-characters must be at least 1, got {characters}")
        return {"validation_fraction": fraction, "group_characters": characters}

    def recipe(self) -> dict[str, Any]:
        """Corpus and tokenizer, as they are recorded."""
        choice = self.tokenizer
        trained = {"vocab": choice.vocab, "training_characters": choice.training_characters}
        made_with = {"kind": choice.kind, **(trained if choice.kind == "bpe" else {})}
        return {"corpus": self.corpus.recorded(), "made_with": made_with}


def prepare_default(
    folder: Path,
    *,
    tokenizer: Kind = "bpe",
    vocab: int = DEFAULT_VOCAB,
    gpt2_files: Path | None = None,
    validation_fraction: float | None = None,
    processes: int | None = None,
    wait: float = 600.0,
    **corpus: Any,
) -> DataRecord:
    """Data without a command line: prepares the folder once, and only looks at it from then on.

    A folder that is complete and has these settings is taken as it is, without reading the documents again. Several
    processes may ask for the same folder: one prepares it, and the others wait. The default needs nothing but this
    machine and some seconds; `corpus` are fields of `Corpus`, such as `source` or `files`.

    Raises:
        UsageError: As `prepare_corpus`.
    """
    choice = TokenizerChoice(tokenizer, vocab=vocab, gpt2_files=gpt2_files)
    settings = DataSettings(Corpus(**corpus), choice, validation_fraction)
    return _complete(folder, settings) or prepare_corpus(folder, settings, processes=processes, wait=wait)


def _complete(folder: Path, settings: DataSettings) -> DataRecord | None:
    """The record of a folder that needs no work: same settings, and every shard in its place."""
    wanted = {**settings.sizes(), **settings.recipe()}
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


def prepare_corpus(
    folder: Path,
    settings: DataSettings,
    *,
    processes: int | None = None,
    wait: float = 0.0,
    finished: Callable[[Group], None] = lambda _: None,
    begun: Callable[[str], None] = lambda _: None,
) -> DataRecord:
    """Make the tokenizer and the shards of a folder; what is there already of the same settings is kept.

    Args:
        folder: Made if missing.
        settings: What to put there.
        processes: How many encode, on one thread each; 1 is this one alone. None takes every core: by processes if
            there are many cores and the corpus may be large, else by threads of this one. The result is the same.
        wait: How many seconds to wait for another process that prepares the same folder.
        finished: Called after every group, in the order in which they finish.
        begun: Called with the name of a stage before it: "tokenizer", then "documents".

    Raises:
        UsageError: If the documents cannot be read, the folder cannot be written or holds other data, or a package is
            missing.
    """
    sizes, recipe = settings.sizes(), settings.recipe()
    if processes is not None and processes < 1:
        raise UsageError(f"--processes must be at least 1, got {processes}")
    with locked(folder, wait=wait):
        earlier_groups(folder, {**sizes, **recipe})
        begun("tokenizer")
        tokenizer, trained_on = _make_tokenizer(folder, settings, sizes["validation_fraction"])
        recipe |= {"trained_on": trained_on}
        record = DataRecord(tokenizer.identity, tokenizer.vocab_size, **sizes, recipe=recipe)
        number, threads = _workforce(settings.corpus, processes)
        begun("documents")
        documents = settings.corpus.documents()
        return _fill(documents, tokenizer, folder, record, finished=finished, processes=number, threads=threads)


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float = 0.01,
    group_characters: int = 1 << 24,
    finished: Callable[[Group], None] = lambda _: None,
    processes: int = 1,
    threads: int = 1,
) -> DataRecord:
    """Encode documents, in a fixed order, into the shards of a folder, each followed by an end of document.

    What an earlier run with the same settings finished is kept, and `finished` is called for it, too. A share of the
    documents, chosen by a hash of their text, is never trained on. At most one group of them for each process, and one
    more, is held in memory. The shards are the same for any number of processes, and of threads where it is one.

    Raises:
        UsageError: If there is no document, the folder holds data with other settings or is being prepared by another
            process, or something cannot be written.
    """
    if processes < 1 or threads < 1:
        raise ValueError(f"preparing needs at least 1 process and 1 thread, not {processes} and {threads}")
    record = DataRecord(tokenizer.identity, tokenizer.vocab_size, validation_fraction, group_characters)
    with locked(folder):
        return _fill(documents, tokenizer, folder, record, finished=finished, processes=processes, threads=threads)


def locked(folder: Path, *, wait: float = 0.0) -> AbstractContextManager[None]:
    """Make the folder and keep other processes from preparing it, as `storage.locked` does."""
    fix = "wait for it to end, or choose another folder"
    return storage.locked(folder, f"{folder} is being prepared by another process: {fix}", wait=wait)


class _Texts(NamedTuple):
    """The documents of a group, with its number, a hash of them, and their size in UTF-8."""

    number: int
    texts: Sequence[str]
    digest: str
    bytes: int


def _fill(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    record: DataRecord,
    *,
    finished: Callable[[Group], None],
    processes: int,
    threads: int,
) -> DataRecord:
    """Write every shard that a locked folder lacks, and its record."""
    earlier = earlier_groups(folder, record.settings)
    record = replace(record, tokenizer_description=store(tokenizer, folder))
    if not earlier:
        save_record(folder, record)
    done: dict[int, Group] = {}

    def missing() -> Iterator[tuple[str, _Texts]]:
        for number, texts in enumerate(grouped(documents, record.group_characters)):
            job = _Texts(number, texts, *digest_of(texts))
            if (kept := _kept_group(folder, job, earlier, record)) is not None:
                done[number] = kept
                finished(kept)
            else:
                yield f"shard {number:05}", job

    def keep(_name: str, written: tuple[int, Group]) -> None:
        number, group = written
        done[number] = group
        # Groups that come later stay on record until the documents say otherwise.
        known = {**dict(enumerate(earlier)), **done}
        groups = tuple(known.get(place, _UNFINISHED) for place in range(max(known) + 1))
        save_record(folder, replace(record, groups=groups))
        finished(group)

    several = processes > 1
    work = partial(_encode, tokenizer=tokenizer, folder=folder, record=record, threads=1 if several else threads)
    run_jobs(work, missing(), Audience(finished=keep), workers=processes, threads=1 if several else None)
    if not done:
        raise UsageError("the source gave no document: check its path")
    record = replace(record, groups=tuple(done[number] for number in sorted(done)), complete=True)
    save_record(folder, record)
    _remove_others(folder, record)
    return record


def _encode(
    job: _Texts, _tell: Tell, *, tokenizer: Tokenizer, folder: Path, record: DataRecord, threads: int
) -> tuple[int, Group]:
    """Write the shards of a group, one for each split that got documents."""
    tokens: dict[Split, int] = {}
    checksums: dict[Split, str] = {}
    for split in SPLITS:
        texts = [text for text in job.texts if is_validation(text, record.validation_fraction) == (split != "train")]
        if texts:
            path = shard_path(folder, split, job.number, job.digest)
            tokens[split], checksums[split] = write_shard(path, encoded(texts, tokenizer, threads), record)
    return job.number, Group(job.digest, len(job.texts), tokens, checksums, job.bytes)


def encoded(texts: Iterable[str], tokenizer: Tokenizer, threads: int = 1) -> Iterator[Tokens]:
    """The tokens of documents, each followed by an end of document, in pieces of many documents."""
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for batch in grouped(texts, BATCH_CHARACTERS * threads):
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
        UsageError: If all documents are the same, or there is but one.

    Examples:
        >>> texts = [f"document {number}" for number in range(10)]
        >>> sum(is_validation(text, held_out_fraction(texts)) for text in texts)
        1
    """
    sizes: Counter[int] = Counter()
    for text in up_to(documents, _LARGE_CHARACTERS):
        sizes[_lot(text)] += len(text)
    total, held_out = sum(sizes.values()), 0
    share = SMALL_SHARE if total < _LARGE_CHARACTERS else LARGE_SHARE
    *candidates, _largest = sorted(sizes) or [0]
    if not candidates:
        fix = "give 10 kB or more (`muonsw data prepare` with --validation-fraction 0 holds out nothing)"
        raise UsageError(f"there is too little text ({total:,} characters) to hold some out for validation: {fix}")
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
    theirs = record.settings
    changed = {name: value for name, value in settings.items() if name in theirs and theirs[name] != value}
    if changed:
        different = ", ".join(f"{name} {theirs[name]} (now {value})" for name, value in changed.items())
        raise UsageError(f"{folder} holds data with other settings: {different}; choose another folder or delete it")
    return record.groups


def _kept_group(folder: Path, job: _Texts, earlier: tuple[Group, ...], record: DataRecord) -> Group | None:
    """The group on record, if it was made of the same texts and its shards are still there."""
    if job.number >= len(earlier) or earlier[job.number].digest != job.digest:
        return None
    group = earlier[job.number]
    try:
        for split in group.tokens:
            open_shard(shard_path(folder, split, job.number, job.digest), group, split, record, check=True)
    except ShardError:
        return None
    return group


def _remove_others(folder: Path, record: DataRecord) -> None:
    """Delete shards of documents that have changed since they were written."""
    ours = {path for split in SPLITS for path in record.paths(folder, split)}
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path not in ours:
            path.unlink(missing_ok=True)


def _make_tokenizer(folder: Path, settings: DataSettings, fraction: float) -> tuple[Tokenizer, str | None]:
    """The tokenizer, and a hash of the documents it was trained on."""
    choice = settings.tokenizer
    if choice.kind == "bytes":
        return ByteTokenizer(), None
    if choice.kind == "gpt2":
        return GPT2Tokenizer(choice.gpt2_files), None
    allowed = (text for text in settings.corpus.documents() if not is_validation(text, fraction))
    sample = list(up_to(allowed, choice.training_characters))
    if not sample:
        raise UsageError("the source gave no document to train a tokenizer on: check its path")
    digest, _ = digest_of(sample)
    earlier = _trained_before(folder, {**settings.recipe(), "trained_on": digest})
    return earlier or BPETokenizer.train(sample, choice.vocab), digest


def _trained_before(folder: Path, recipe: dict[str, Any]) -> Tokenizer | None:
    """The folder's own tokenizer, if it was trained on the same documents for the same vocabulary."""
    if not (folder / RECORD).exists() or read_record(folder).recipe != recipe:
        return None
    try:
        return load_tokenizer(folder)
    except UsageError:
        return None


def _workforce(corpus: Corpus, processes: int | None) -> tuple[int, int]:
    """How many processes encode, and on how many threads if it is one."""
    if processes is not None:
        return processes, 1
    size = corpus.extent().bytes
    few = machine.cores() <= _FEW_CORES or (size is not None and size < _SMALL_BYTES)
    return (1, machine.cores()) if few else (machine.cores(), 1)
