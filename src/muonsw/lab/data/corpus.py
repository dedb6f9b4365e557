"""A corpus: its settings, and the sources of documents behind them.

Each source is an iterator of texts in an order that does not change from one machine or day to the next.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from muonsw.lab.base.errors import UsageError, needed
from muonsw.lab.data.formats import KINDS, check_kind, file_documents, is_readable
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.data.tokenizers import BYTES

Source: TypeAlias = Literal["python", "text", "fineweb", "synthetic"]
Kind: TypeAlias = Literal["bytes", "bpe", "gpt2"]
DEFAULT_VOCAB = 1024
# Settings that mean something for one source, or for one tokenizer.
OF_ONE_KIND = {
    "packages": ("source", "python"),
    "files": ("source", "text"),
    "dataset": ("source", "fineweb"),
    "sample": ("source", "fineweb"),
    "seed": ("source", "synthetic"),
    "vocab": ("tokenizer", "bpe"),
    "gpt2_files": ("tokenizer", "gpt2"),
}
# Of the documents that a BPE is trained on: merges learned from more hardly differ, and learning them takes a second.
TRAINING_CHARACTERS = 1 << 22
_PLAIN = {".txt", ".md"}
FINEWEB = "HuggingFaceFW/fineweb"
# folders of the standard library that hold tests, installed packages, or caches
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Which documents there are, which are held out, and which tokens they become.

    The fields are the options of `muonsw data prepare`, and decide everything that a folder of prepared data holds.

    Examples:
        >>> corpus = Corpus("synthetic", seed=1, limit_documents=3)
        >>> len(list(corpus.documents())), list(corpus.documents()) == list(corpus.documents())
        (3, True)
        >>> Corpus("synthetic")
        Traceback (most recent call last):
        muonsw.lab.base.errors.UsageError: the synthetic source has no end: give --limit-documents or --limit-characters
    """

    source: Source = "python"
    """Standard library of this Python, files, FineWeb from the Hugging Face hub, or a Markov chain."""

    packages: bool = False
    """Add the installed packages to the source `python`."""

    files: tuple[str, ...] = ()
    """Files, folders or quoted globs for the source `text`: .txt, .md, .jsonl (also .gz, .xz, .zst) and .parquet."""

    dataset: str = FINEWEB
    """Name on the hub for the source `fineweb`, or a local folder of Parquet files with the same fields."""

    sample: str = "sample-10BT"
    """Part of the hub's dataset, such as `sample-100BT` or `CC-MAIN-2024-10`."""

    seed: int = 0
    """Seed of the source `synthetic`."""

    limit_documents: int | None = None
    """Stop after N documents."""

    limit_characters: int | None = None
    """Stop with the document that reaches N characters in total."""

    tokenizer: Kind = "bpe"
    """Bytes, a byte-level BPE trained on the first documents that are not held out, or GPT-2's."""

    vocab: int = DEFAULT_VOCAB
    """Tokens of the BPE, the end of a document included."""

    gpt2_files: Path | None = None
    """Folder with GPT-2's vocab.bpe and encoder.json; tiktoken downloads them unless given."""

    validation_fraction: float | None = None
    """Share of documents held out, chosen by their text; 0.05, of FineWeb 0.001 unless given. Of text files a twentieth
    of the characters, of more than 16 million a hundredth."""

    group_characters: int | None = None
    """Characters in a shard; some millions, as suits the source, unless given."""

    def __post_init__(self) -> None:
        if self.source not in _DOCUMENTS:
            raise UsageError(f"there is no source {self.source!r}: give {', '.join(_DOCUMENTS)}")
        if self.source == "text" and not self.files:
            raise UsageError("--source text needs --files: files, folders or quoted globs")
        for one in fields(self):
            kind, of = OF_ONE_KIND.get(one.name, ("source", self.source))
            if getattr(self, kind) != of and getattr(self, one.name) != one.default:
                option = f"--{one.name.replace('_', '-')}"
                raise UsageError(f"{option} is for --{kind} {of}: leave it out, or change --{kind}")
        for name in ("limit_documents", "limit_characters", "group_characters"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {number}")
        if self.source == "synthetic" and not self._limited:
            raise UsageError("the synthetic source has no end: give --limit-documents or --limit-characters")
        if self.seed < 0:
            raise UsageError(f"--seed must be at least 0, got {self.seed}")
        if not 0.0 <= (self.validation_fraction or 0.0) < 1.0:
            raise UsageError(f"--validation-fraction is at least 0 and below 1, not {self.validation_fraction}")
        if self.tokenizer not in get_args(Kind):
            raise UsageError(f"there is no tokenizer {self.tokenizer!r}: give {', '.join(get_args(Kind))}")
        if self.tokenizer == "bpe" and not BYTES < self.vocab < 1 << 31:
            raise UsageError(f"a bpe needs a --vocab above {BYTES} (below 2**31), got {self.vocab}")

    @property
    def _limited(self) -> bool:
        return self.limit_documents is not None or self.limit_characters is not None

    def documents(self) -> Iterator[str]:
        """The documents, from the first one, in an order that does not change."""
        documents = islice(_DOCUMENTS[self.source](self), self.limit_documents)
        return documents if self.limit_characters is None else up_to(documents, self.limit_characters)

    def recipe(self) -> dict[str, Any]:
        """What decides documents and tokenizer, as it is recorded: without the settings of other sources."""
        own: dict[Source, dict[str, Any]] = {
            "python": {"packages": self.packages},
            "text": {"files": [os.path.abspath(name) for name in self.files]},
            "fineweb": {"dataset": self.dataset, "sample": self.sample},
            "synthetic": {"seed": self.seed},
        }
        limits = {"limit_documents": self.limit_documents, "limit_characters": self.limit_characters}
        trained = {"vocab": self.vocab, "training_characters": TRAINING_CHARACTERS} if self.tokenizer == "bpe" else {}
        return {
            "corpus": {"source": self.source, **own[self.source], **limits},
            "made_with": {"kind": self.tokenizer, **trained},
        }

    def size(self) -> int | None:
        """How many bytes there are to read, or nearly so; None where that is not known without reading them."""
        if self._limited:
            return self.limit_characters
        if self.source == "python":
            files = [path for root in python_roots(packages=self.packages) for path in python_files(root)]
        else:
            files = matching_files(self.files)
            if not files or any(path.suffix not in _PLAIN for path in files):
                return None
        return sum(path.stat().st_size for path in files)


def up_to(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Documents until one reaches so many characters, that one included.

    Examples:
        >>> list(up_to(["ab", "cd", "ef"], 3))
        ['ab', 'cd']
    """
    size = 0
    for text in documents:
        yield text
        size += len(text)
        if size >= characters:
            return


def python_roots(*, packages: bool = False) -> list[Path]:
    """The folders of the running interpreter's standard library and, if asked for, of the installed packages."""
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], *([paths["purelib"], paths["platlib"]] if packages else [])]
    return list(dict.fromkeys(Path(root).resolve() for root in roots))


def python_files(root: Path) -> list[Path]:
    """The Python files below a folder, sorted, without tests and without what is installed below it."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def source_files(roots: Iterable[Path]) -> Iterator[str]:
    """The Python files below folders, sorted by path, each content once; what does not decode is left out.

    Raises:
        UsageError: If a file cannot be read.
    """
    seen: set[bytes] = set()
    for path in (path for root in roots for path in python_files(root)):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}; make it readable") from error
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in seen and (text := _decoded(data)):
            yield text
        seen.add(digest)


def _decoded(data: bytes) -> str | None:
    """A Python file's text in the encoding that it declares."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None


def text_documents(patterns: Iterable[str | Path]) -> Iterator[str]:
    """Documents from files, in the order of the patterns, sorted within each; `file_documents` says which kinds.

    Args:
        patterns: Files, folders (all files below them that can be read) or globs (`**` goes into folders).

    Raises:
        UsageError: Before any document if a pattern names no file, a file of another kind, or one that needs a package
            which is not installed; at the place if a file cannot be read.
    """
    files = matching_files(patterns)
    for path in files:
        check_kind(path)
    return (text for path in files for text in file_documents(path))


def matching_files(patterns: Iterable[str | Path]) -> list[Path]:
    """The files that paths, folders or globs name, each once even if two of them name it."""
    return list(dict.fromkeys(path for pattern in patterns for path in _matching(str(pattern))))


def _matching(pattern: str) -> list[Path]:
    """The files that a path, a folder or a glob names; a name with brackets in it may be a path."""
    path = Path(pattern)
    if path.is_dir():
        return _readable_below(path)
    named = [pattern] if path.is_file() else glob.glob(pattern, recursive=True)
    if not (files := sorted(path for path in map(Path, named) if path.is_file())):
        raise UsageError(f"no file matches {pattern}: check the path, or quote the glob")
    return files


def _readable_below(folder: Path) -> list[Path]:
    """All files below a folder whose kind can be read, sorted; hidden files and folders are left out."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if is_readable(path) and path.is_file()}
    seen = {name: path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)}
    if not seen:
        raise UsageError(f"the folder {folder} holds no file that can be read: put {KINDS} into it")
    return [seen[name] for name in sorted(seen, key=Path.as_posix)]


def fineweb_documents(dataset: str | Path = FINEWEB, sample: str = "sample-10BT") -> Iterator[str]:
    """The texts of FineWeb, streamed by the `datasets` library without storing them.

    Args:
        dataset: The name on the Hugging Face hub, or a local folder with Parquet files of the same fields.
        sample: Which named part of the hub's dataset: `sample-10BT`, `sample-100BT`, `sample-350BT`, a crawl such as
            `CC-MAIN-2024-10`, or `default` for all. A local folder has no parts.

    Raises:
        UsageError: If the library is missing, the dataset cannot be reached, or a file of it is damaged.
    """
    library = needed("datasets", "FineWeb needs", "data")
    local = Path(dataset).exists()
    try:
        stream = library.load_dataset(str(dataset), None if local else sample, split="train", streaming=True)
        yield from filter(None, (row["text"] for row in stream.select_columns(["text"])))
    except Exception as error:  # the network, the hub, the library and pyarrow each raise their own
        if local:
            _name_damaged(Path(dataset))
        name = str(dataset) if local else f"{dataset} ({sample})"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "check the name, the connection and the files; what was prepared is kept"
        raise UsageError(f"the dataset {name} cannot be read: {reason}; {fix}") from error


def _name_damaged(dataset: Path) -> None:
    """Read a local dataset file by file, so that the one which cannot be read is named; streaming does not say."""
    for path in sorted(dataset.rglob("*.parquet")) if dataset.is_dir() else [dataset]:
        for _ in file_documents(path):
            pass


_DOCUMENTS: dict[Source, Callable[[Corpus], Iterator[str]]] = {
    "python": lambda corpus: source_files(python_roots(packages=corpus.packages)),
    "text": lambda corpus: text_documents(corpus.files),
    "fineweb": lambda corpus: fineweb_documents(corpus.dataset, corpus.sample),
    "synthetic": lambda corpus: iter(MarkovSource(corpus.seed)),
}
