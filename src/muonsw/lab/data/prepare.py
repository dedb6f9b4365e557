"""Encode documents into training and validation shards, with bounded memory; rerunning resumes.

Text files and JSON lines are read here, as streams; everything else by the Hugging Face library `datasets`. A source
always yields its documents in the same order. Consecutive documents form a group, whose end depends only on their
lengths. The record is written after each group, so a second run encodes only what is missing.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from muonsw.lab.config import differences
from muonsw.lab.data.loader import (
    RECORD,
    RERUN,
    SPLITS,
    DataRecord,
    Group,
    problems,
    read_record,
    save_record,
    shard_path,
    verify_folder,
)
from muonsw.lab.data.tokenizer import BYTES, BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer
from muonsw.lab.errors import UsageError, needed
from muonsw.lab.files import locked, replacing
from muonsw.lab.options import unset

Source: TypeAlias = Literal["python", "text", "fineweb"]
Kind: TypeAlias = Literal["bytes", "bpe", "gpt2"]
DEFAULT_VOCAB = 1024
# Settings that belong to a single source or tokenizer.
ONLY_FOR = {
    "files": ("source", "text"),
    "dataset": ("source", "fineweb"),
    "sample": ("source", "fineweb"),
    "vocab": ("tokenizer", "bpe"),
    "gpt2_files": ("tokenizer", "gpt2"),
}
# Training a BPE on this much text takes a second; more hardly changes its merges.
TRAINING_CHARACTERS = 1 << 22
# Encoding needs on the order of a hundred bytes per token, so batches of this size need less than a gigabyte.
BATCH_CHARACTERS = 1 << 22
# Small corpora have several shards, so a killed run loses little; large ones few enough to open at once.
SHARD_CHARACTERS: dict[Source, int] = {"python": 1 << 22, "text": 1 << 24, "fineweb": 1 << 26}
HELD_OUT: dict[Source, float] = {"python": 0.05, "fineweb": 0.001}
# Share of the characters of text files to hold out: larger below LARGE_CHARACTERS, because a loss on a few pages would
# be too noisy.
SMALL_SHARE, LARGE_SHARE = 0.05, 0.01
LARGE_CHARACTERS = 1 << 24
# A long text is cut into about this many documents, within these sizes, so that some of them can be held out.
PIECES = 64
PIECE_CHARACTERS = (1 << 11, 1 << 16)
READ_HERE = (".txt", ".md", ".jsonl")
# Files that `datasets` reads, and its builder for them.
BUILDERS = {".parquet": "parquet", ".jsonl.gz": "json", ".jsonl.xz": "json"}
KINDS = f"{', '.join((*READ_HERE, *BUILDERS))} files"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
NO_DOCUMENT = "the source gave no document: check its path, and whether its files are empty"


@dataclass(frozen=True)
class Corpus:
    """The options of `muonsw data prepare`: the documents, which of them to hold out, and the tokenizer."""

    source: Source = "python"
    """Standard library of this Python, files, or FineWeb from the Hugging Face hub."""

    files: Annotated[tuple[str, ...], unset()] = ()
    """Files, folders or quoted globs for the source `text`: .txt, .md, .jsonl (also .gz, .xz) or .parquet."""

    dataset: str = "HuggingFaceFW/fineweb"
    """Name on the hub for the source `fineweb`, or a local folder with a field `text`."""

    sample: str = "sample-10BT"
    """Part of the hub's dataset, such as `sample-100BT` or `CC-MAIN-2024-10`."""

    limit_characters: Annotated[int | None, unset(metavar="N")] = None
    """Stop after the document that reaches N characters in total."""

    tokenizer: Kind = "bpe"
    """Bytes, a byte-level BPE trained on the first training documents, or GPT-2's."""

    vocab: int = DEFAULT_VOCAB
    """Tokens of the BPE, including the end-of-document token."""

    gpt2_files: Annotated[Path | None, unset()] = None
    """Folder with GPT-2's vocab.bpe and encoder.json. Default: download them with tiktoken."""

    validation_fraction: Annotated[float | None, unset()] = None
    """Share of documents to hold out. Default: 0.05; FineWeb 0.001; text 5% of the characters, 1% above 16 million."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            option, value = f"--{setting.name.replace('_', '-')}", getattr(self, setting.name)
            kind, reader = ONLY_FOR.get(setting.name, ("source", self.source))
            if getattr(self, kind) != reader and value != setting.default:
                raise UsageError(f"{option} is for --{kind} {reader}: leave it out, or change --{kind}")
        if self.source == "text" and not self.files:
            raise UsageError("--source text needs --files: files, folders or quoted globs")
        if self.limit_characters is not None and self.limit_characters < 1:
            raise UsageError(f"--limit-characters must be at least 1, got {self.limit_characters}")
        if not 0.0 <= (self.validation_fraction or 0.0) < 1.0:
            raise UsageError(f"--validation-fraction must be at least 0 and below 1, got {self.validation_fraction}")
        if self.tokenizer == "bpe" and not BYTES < self.vocab < 1 << 31:
            raise UsageError(f"a bpe needs a --vocab above {BYTES} (below 2**31), got {self.vocab}")

    def documents(self) -> Iterator[str]:
        """The documents, always in the same order, without empty ones."""
        texts: Iterator[str]
        match self.source:
            case "python":
                texts = python_texts(Path(sysconfig.get_path("stdlib")).resolve())
            case "text":
                texts = chain.from_iterable(map(_file_texts, matching_files(self.files)))
            case "fineweb":
                sample = None if Path(self.dataset).exists() else self.sample
                label = f"the dataset {self.dataset}{f' ({sample})' if sample else ''}"
                texts = _dataset_texts(label, self.dataset, sample)
        # JSON allows lone surrogates, and UTF-8 does not: they become U+FFFD.
        texts = (text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts if text)
        return texts if self.limit_characters is None else up_to(texts, self.limit_characters)

    def recipe(self) -> dict[str, Any]:
        """The settings of the source and the tokenizer, for the record."""
        options = [name for name, reader in ONLY_FOR.items() if reader == ("source", self.source)]
        corpus = {name: getattr(self, name) for name in ("source", *options, "limit_characters")}
        if self.source == "text":
            corpus["files"] = [os.path.abspath(name) for name in self.files]
        trained = {"vocab": self.vocab, "training_characters": TRAINING_CHARACTERS} if self.tokenizer == "bpe" else {}
        return {"corpus": corpus, "made_with": {"kind": self.tokenizer, **trained}}


# ---- Documents


def up_to(documents: Iterable[str], characters: int) -> Iterator[str]:
    """The first documents, including the one that reaches this many characters."""
    size = 0
    for text in documents:
        yield text
        size += len(text)
        if size >= characters:
            return


def python_texts(root: Path) -> Iterator[str]:
    """Python files below a folder, sorted by path, without duplicates, tests, and files that cannot be decoded."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths += [path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    contents = (path.read_bytes() for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()))
    for data in dict.fromkeys(contents):
        with suppress(SyntaxError, UnicodeDecodeError):
            yield data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])


def matching_files(patterns: Iterable[str]) -> list[Path]:
    """The files that match paths, folders and globs, without duplicates, sorted within each pattern."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            below = [file.relative_to(path) for file in path.rglob("*") if _kind(file) and file.is_file()]
            visible = [name for name in below if not any(part.startswith(".") for part in name.parts)]
            matches = [path / name for name in sorted(visible, key=Path.as_posix)]
        else:
            # A file name may contain brackets.
            names = [pattern] if path.is_file() else glob.glob(pattern, recursive=True)
            matches = sorted(file for file in map(Path, names) if file.is_file())
        if not matches:
            raise UsageError(f"no file matches {pattern}: give {KINDS}, a folder of them, or a quoted glob")
        files |= dict.fromkeys(matches)
    for path in files:
        if not _kind(path):
            raise UsageError(f"unknown kind of file: {path}; give {KINDS}")
        if _kind(path) in BUILDERS:
            needed("datasets", f"{path} needs", "data")  # fail early
    return list(files)


def _kind(path: Path) -> str:
    return next((kind for kind in (*READ_HERE, *BUILDERS) if path.name.endswith(kind)), "")


def _file_texts(path: Path) -> Iterator[str]:
    kind = _kind(path)
    if kind in BUILDERS:
        yield from _dataset_texts(str(path), BUILDERS[kind], data_files=glob.escape(str(path)))
        return
    try:
        if kind == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    text = None
                    with suppress(ValueError, KeyError, TypeError):
                        text = json.loads(line)["text"] if line.strip() else ""
                    if not isinstance(text, str):
                        where = f"{path}, line {number}"
                        raise UsageError(f"{where}: not a JSON object with a string in the field `text`")
                    yield text
            return
        with path.open(encoding="utf-8-sig", newline="") as stream:
            # The size of the pieces depends only on the first block.
            blocks = iter(lambda: stream.read(PIECES * max(PIECE_CHARACTERS)), "")
            yield from pieces(next(blocks, ""), blocks)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}; repair it or leave it out") from error


def pieces(text: str, more: Iterable[str] = ()) -> Iterator[str]:
    """Cut a long text into about 64 pieces of 2,048 to 65,536 characters, after a blank line, a line or a word.

    If `more` text follows, `text` must have at least 64 pieces of the largest size.
    """
    smallest, largest = PIECE_CHARACTERS
    size, start = min(max(len(text) // PIECES, smallest), largest), 0
    for following in chain(more, [""]):
        while len(text) - start > size:
            end = start + size
            for mark in ("\n\n", "\n", " "):
                if (place := text.rfind(mark, start + size // 2, start + size)) >= 0:
                    end = place + len(mark)
                    break
            yield text[start:end]
            start = end
        text, start = text[start:] + following, 0
    yield text


def _dataset_texts(label: str, name: str, part: str | None = None, **options: Any) -> Iterator[str]:
    """Stream the field `text` of a dataset with the `datasets` library."""
    library = needed("datasets", f"{label} needs", "data")
    try:
        stream = library.load_dataset(name, part, split="train", streaming=True, **options)
        for text in (row["text"] for row in stream.select_columns(["text"])):
            if not isinstance(text, str | None):
                raise TypeError(f"the field `text` holds {type(text).__name__}, not strings")
            yield text or ""
    except Exception as error:  # the network, the hub, the library and pyarrow raise many kinds of errors
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "check the name, the connection and the files; finished shards are kept"
        raise UsageError(f"{label} cannot be read: {reason}; {fix}") from error


# ---- Shards


def prepare_corpus(
    folder: Path,
    corpus: Corpus,
    *,
    reread: bool = False,
    wait: float = 600.0,
    finished: Callable[[Group], None] = lambda _: None,
) -> DataRecord:
    """Make the tokenizer of a corpus, then `prepare` its shards; without `reread`, an undamaged folder stays as is."""
    fraction, recipe = corpus.validation_fraction, corpus.recipe()
    if fraction is None:
        fraction = held_out_fraction(corpus.documents()) if corpus.source == "text" else HELD_OUT[corpus.source]
    sizes: dict[str, Any] = {"validation_fraction": fraction, "group_characters": SHARD_CHARACTERS[corpus.source]}
    earlier = _finished_groups(folder, {**sizes, **recipe})  # refuses other settings before any work
    if earlier and not reread and not any(verify_folder(folder)):
        return read_record(folder)
    tokenizer: Tokenizer = ByteTokenizer()
    if corpus.tokenizer == "gpt2":
        tokenizer = GPT2Tokenizer(corpus.gpt2_files)
    elif corpus.tokenizer == "bpe":
        training = (text for text in corpus.documents() if not is_validation(text, fraction))
        tokenizer = BPETokenizer.train(list(up_to(training, TRAINING_CHARACTERS)), corpus.vocab)
    return prepare(corpus.documents(), tokenizer, folder, **sizes, recipe=recipe, wait=wait, finished=finished)


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float = 0.01,
    group_characters: int = 1 << 24,
    recipe: dict[str, Any] | None = None,
    wait: float = 0.0,
    finished: Callable[[Group], None] = lambda _: None,
) -> DataRecord:
    """Encode documents into the shards of a folder, and keep what an earlier run with the same settings finished.

    A hash of its text decides whether a document is held out. One group of documents is in memory at a time; it ends
    with the document that reaches `group_characters`. `finished` is called after every group. A folder with other
    settings or another `recipe` is refused, as is one that another process locks for longer than `wait` seconds.
    """
    record = DataRecord(tokenizer.identity, tokenizer.vocab_size, validation_fraction, group_characters, recipe=recipe)
    documents = iter(documents)
    if (first := next(documents, None)) is None:
        raise UsageError(NO_DOCUMENT)
    busy = f"{folder} is being prepared by another process: wait for it, or choose another folder"
    with locked(folder, busy, wait=wait):
        earlier = _finished_groups(folder, record.settings)
        record = replace(record, tokenizer_description=tokenizer.save(folder))
        if not earlier:
            save_record(folder, record)
        groups: list[Group] = []
        for number, texts in enumerate(grouped(chain([first], documents), group_characters)):
            digest, size = digest_of(texts)
            group = earlier[number] if number < len(earlier) else None
            if group is None or group.digest != digest or any(problems(folder, number, group, record)):
                group = Group(digest, len(texts), {}, {}, size)
                _write_shards(folder, record, number, group, texts, tokenizer)
                # Later groups stay in the record until their documents are compared.
                save_record(folder, replace(record, groups=(*groups, group, *earlier[number + 1 :])))
            groups.append(group)
            finished(group)
        record = replace(record, groups=tuple(groups), complete=True)
        save_record(folder, record)
        # Delete shards of documents that have changed.
        for split in SPLITS:
            for path in set(folder.glob(f"{split}-*.tokens")) - set(record.shards(folder, split)):
                path.unlink()
    return record


def _finished_groups(folder: Path, settings: dict[str, Any]) -> tuple[Group, ...]:
    """The groups that an earlier run finished; raise a `UsageError` if a setting has changed."""
    if not (folder / RECORD).exists() or not (record := read_record(folder)).groups:
        return ()
    before = {name: value for name, value in record.settings.items() if name in settings}
    # An unset option that only one of two versions of muonsw has is no change.
    unset = (None, False, "missing")
    changes = {n: pair for n, pair in differences(before, settings).items() if not all(v in unset for v in pair)}
    if changes:
        listed = ", ".join(f"{name} {old} (now {new})" for name, (old, new) in changes.items())
        raise UsageError(f"{folder} holds data with other settings: {listed}; choose another folder or delete it")
    return record.groups


def _write_shards(
    folder: Path, record: DataRecord, number: int, group: Group, texts: Sequence[str], tokenizer: Tokenizer
) -> None:
    """Write a group's shard for each split that has documents, and fill in its sizes and checksums."""
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for split in SPLITS:
        held_out = split == "validation"
        part = [text for text in texts if is_validation(text, record.validation_fraction) == held_out]
        if not part:
            continue
        checksum, written = hashlib.sha256(), 0
        with replacing(shard_path(folder, split, number, group), remedy=RERUN) as file:
            for batch in grouped(part, BATCH_CHARACTERS):
                ids = np.concatenate([ids for document in tokenizer.encode_batch(batch) for ids in (document, end)])
                data = ids.astype(record.dtype).tobytes()
                checksum.update(data)
                file.write(data)
                written += ids.size
        group.tokens[split], group.checksums[split] = written, checksum.hexdigest()


def grouped(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Group consecutive documents; a group ends with the document that reaches this many characters."""
    remaining = iter(documents)
    while group := list(up_to(remaining, characters)):
        yield group


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out. Only its text decides, so copies are always in the same split."""
    return _hash(text) < fraction * 2.0**64


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "little")


def held_out_fraction(documents: Iterable[str]) -> float:
    """The fraction for `is_validation` that holds out at least 5% of the characters of a small text, 1% of a large one.

    At least one document is held out, and at least one is not.
    """
    sizes: Counter[int] = Counter()
    for text in up_to(documents, LARGE_CHARACTERS):
        sizes[_hash(text)] += len(text)
    if not sizes:
        raise UsageError(NO_DOCUMENT)
    total = sizes.total()
    share = SMALL_SHARE if total < LARGE_CHARACTERS else LARGE_SHARE
    *candidates, _largest = sorted(sizes)
    if not candidates:
        fix = "give several documents, or a text file of 12 kB or more"
        raise UsageError(f"one document ({total:,} characters) cannot be both trained on and held out: {fix}")
    held_out = accumulate(sizes[candidate] for candidate in candidates)
    enough = (candidate for candidate, size in zip(candidates, held_out, strict=True) if size >= share * total)
    return float(np.nextafter(next(enough, candidates[-1]) / 2.0**64, 1.0))


def digest_of(texts: Iterable[str]) -> tuple[str, int]:
    """A hash of documents, and their size as UTF-8."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))  # tells ["ab", "c"] from ["a", "bc"]
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size
