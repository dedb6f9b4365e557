"""Data from settings alone: choose a corpus and a tokenizer, and get a folder that can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from muonsw.lab.data.corpus import Corpus, Source, up_to
from muonsw.lab.data.groups import digest_of, is_validation
from muonsw.lab.data.prepare import earlier_groups, fill, locked
from muonsw.lab.data.record import RECORD, SPLITS, Group, Prepared, open_split, read_record
from muonsw.lab.data.shards import ShardError
from muonsw.lab.data.stored import load_tokenizer
from muonsw.lab.data.tokenizers import BYTES, BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.processes import cores

Kind: TypeAlias = Literal["bytes", "bpe", "gpt2"]
DEFAULT_VOCAB = 1024
# merges learned from more than this hardly differ, and it takes a second
TRAINING_CHARACTERS = 1 << 22
# Threads of one process encode as fast as a few processes, and need no start; what is not in threads, the hashing and
# writing, holds them back on many cores.
_SMALL_BYTES = 1 << 28
_FEW_CORES = 4
# Small corpora get several shards, so that a killed run loses little; large ones not too many to be open at once.
# A small corpus holds out more of its documents, so that the loss on them means something.
_SHARD_CHARACTERS: dict[Source, int] = {"python": 1 << 22, "synthetic": 1 << 22, "text": 1 << 24, "fineweb": 1 << 26}
_HELD_OUT: dict[Source, float] = {"python": 0.05, "synthetic": 0.05, "text": 0.01, "fineweb": 0.001}


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer to make.

    Attributes:
        kind: `bytes`, `bpe` trained on the corpus, or `gpt2`.
        vocab: Tokens of `bpe`, the end of a document included.
        gpt2_files: A folder with GPT-2's `vocab.bpe` and `encoder.json`; `None` lets tiktoken download them.
        training_characters: `bpe` is trained on the first documents that are not held out, up to so many characters.
    """

    kind: Kind = "bpe"
    vocab: int = DEFAULT_VOCAB
    gpt2_files: Path | None = None
    training_characters: int = TRAINING_CHARACTERS

    def __post_init__(self) -> None:
        if self.kind not in ("bytes", "bpe", "gpt2"):
            raise UsageError(f"there is no tokenizer {self.kind!r}: give bytes, bpe, gpt2")
        if self.kind == "bpe" and (self.vocab <= BYTES or self.training_characters < 1):
            given = f"{self.vocab} and {self.training_characters}"
            raise UsageError(f"a bpe needs a --vocab above {BYTES} and characters to train on, got {given}")
        if self.kind != "gpt2" and self.gpt2_files is not None:
            raise UsageError(f"--gpt2-files go with --tokenizer gpt2, not with {self.kind}")

    def recorded(self) -> dict[str, Any]:
        """What decides the tokenizer, besides the corpus."""
        trained = {"vocab": self.vocab, "training_characters": self.training_characters}
        return {"kind": self.kind, **(trained if self.kind == "bpe" else {})}


@dataclass(frozen=True)
class DataSettings:
    """Everything that decides what a folder of prepared data holds.

    Attributes:
        corpus: Which documents.
        tokenizer: What encodes them.
        validation_fraction: The share of documents that is held out; `None` takes what suits the source.
        group_characters: The size of a shard before encoding; `None` takes what suits the source.
    """

    corpus: Corpus = field(default_factory=Corpus)
    tokenizer: TokenizerChoice = field(default_factory=TokenizerChoice)
    validation_fraction: float | None = None
    group_characters: int | None = None

    @property
    def held_out(self) -> float:
        """The share of documents for validation."""
        chosen = self.validation_fraction
        return _HELD_OUT[self.corpus.source] if chosen is None else chosen

    @property
    def shard_characters(self) -> int:
        """The size of a shard before encoding."""
        chosen = self.group_characters
        return _SHARD_CHARACTERS[self.corpus.source] if chosen is None else chosen


def prepare_corpus(
    folder: Path,
    settings: DataSettings,
    *,
    processes: int | None = None,
    wait: float = 0.0,
    finished: Callable[[Group], None] = lambda _: None,
    begun: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Make the tokenizer and the shards of a folder; what is there already of the same settings is kept.

    Args:
        folder: Made if missing.
        settings: What to put there.
        processes: How many encode, on one thread each; 1 is this one alone. `None` takes every core: by processes if
            there are many cores and the corpus may be large, else by threads of this one. The result is the same.
        wait: How many seconds to wait for another process that prepares the same folder.
        finished: Called after every group, in the order in which they finish.
        begun: Called with the name of a stage before it: "tokenizer", then "documents".

    Raises:
        UsageError: If the documents cannot be read, the folder cannot be written or holds other data, or a package is
            missing.
    """
    if not 0.0 <= settings.held_out < 1.0:
        raise UsageError(f"--validation-fraction is at least 0 and below 1, not {settings.held_out}")
    if settings.shard_characters < 1 or (processes is not None and processes < 1):
        given = f"{settings.shard_characters} and {processes}"
        raise UsageError(f"--group-characters and --processes must be at least 1, got {given}")
    sizes: dict[str, Any] = {
        "validation_fraction": settings.held_out,
        "group_characters": settings.shard_characters,
    }
    with locked(folder, wait=wait):
        earlier_groups(folder, {**sizes, **_recipe(settings)})
        begun("tokenizer")
        tokenizer, trained_on = _tokenizer(folder, settings)
        recipe = {**_recipe(settings), "trained_on": trained_on}
        record = Prepared(tokenizer.identity, tokenizer.vocab_size, **sizes, recipe=recipe)
        number, threads = _workforce(settings.corpus, processes)
        begun("documents")
        documents = settings.corpus.documents()
        return fill(documents, tokenizer, folder, record, finished=finished, processes=number, threads=threads)


def prepare_default(
    folder: Path,
    *,
    source: Source = "python",
    tokenizer: Kind = "bpe",
    vocab: int = DEFAULT_VOCAB,
    gpt2_files: Path | None = None,
    validation_fraction: float | None = None,
    limit_characters: int | None = None,
    processes: int | None = None,
    wait: float = 600.0,
    finished: Callable[[Group], None] = lambda _: None,
    **corpus: Any,
) -> Prepared:
    """Data without a command line: prepares the folder once, and only looks at it from then on.

    A folder that is complete and has these settings is taken as it is, without reading the documents again. Several
    processes may ask for the same folder: one prepares it, and the others wait.

    Args:
        folder: Made if missing.
        source: See `Corpus`; `python` needs nothing but this machine and takes some seconds.
        tokenizer: See `TokenizerChoice`.
        vocab: Tokens of a `bpe`.
        gpt2_files: See `TokenizerChoice`.
        validation_fraction: See `DataSettings`.
        limit_characters: How much of the source to take; `None` takes all.
        processes: As in `prepare_corpus`.
        wait: As in `prepare_corpus`.
        finished: Called after every group.
        corpus: More fields of `Corpus`, such as `files` or `seed`.

    Raises:
        UsageError: As `prepare_corpus`.
    """
    choice = TokenizerChoice(tokenizer, vocab=vocab, gpt2_files=gpt2_files)
    documents = Corpus(source, limit_characters=limit_characters, **corpus)
    settings = DataSettings(documents, choice, validation_fraction)
    if (record := _complete(folder, settings)) is not None:
        return record
    return prepare_corpus(folder, settings, processes=processes, wait=wait, finished=finished)


def _complete(folder: Path, settings: DataSettings) -> Prepared | None:
    """The record of a folder that needs no work: same settings, and every shard in its place."""
    if not (folder / RECORD).exists():
        return None
    record = read_record(folder)
    recipe = {name: value for name, value in (record.recipe or {}).items() if name != "trained_on"}
    sizes = settings.held_out, settings.shard_characters
    if recipe != _recipe(settings) or sizes != (record.validation_fraction, record.group_characters):
        return None
    try:
        for split in SPLITS:
            if record.tokens(split):
                open_split(folder, split)
        load_tokenizer(folder)
    except (ShardError, UsageError):
        return None
    return record if record.complete else None


def _recipe(settings: DataSettings) -> dict[str, Any]:
    return {"corpus": settings.corpus.recorded(), "made_with": settings.tokenizer.recorded()}


def _tokenizer(folder: Path, settings: DataSettings) -> tuple[Tokenizer, str | None]:
    """The tokenizer, and a hash of the documents it was trained on."""
    choice = settings.tokenizer
    if choice.kind == "bytes":
        return ByteTokenizer(), None
    if choice.kind == "gpt2":
        return GPT2Tokenizer(choice.gpt2_files), None
    sample = list(up_to(_trained_on(settings), choice.training_characters))
    if not sample:
        raise UsageError("the source gave no document to train a tokenizer on: check its path")
    digest, _ = digest_of(sample)
    return _trained_before(folder, settings, digest) or BPETokenizer.train(sample, choice.vocab), digest


def _trained_on(settings: DataSettings) -> Iterator[str]:
    return (text for text in settings.corpus.documents() if not is_validation(text, settings.held_out))


def _trained_before(folder: Path, settings: DataSettings, digest: str) -> Tokenizer | None:
    """The folder's own tokenizer, if it was trained on the same documents for the same vocabulary."""
    if not (folder / RECORD).exists() or read_record(folder).recipe != {**_recipe(settings), "trained_on": digest}:
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
    few = cores() <= _FEW_CORES or (size is not None and size < _SMALL_BYTES)
    return (1, cores()) if few else (cores(), 1)
