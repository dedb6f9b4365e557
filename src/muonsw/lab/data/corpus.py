"""Which documents a corpus has: its settings, and the sources behind them.

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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from muonsw.lab.data.formats import KINDS, check_kind, file_documents, is_readable
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.errors import UsageError, needed

Source: TypeAlias = Literal["python", "text", "fineweb", "synthetic"]
_PLAIN = {".txt", ".md"}
FINEWEB = "HuggingFaceFW/fineweb"
# folders of the standard library that hold tests, installed packages, or caches
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Extent(NamedTuple):
    """How much a corpus has at most; None is unknown. Bytes are those of the texts in UTF-8, or nearly so."""

    documents: int | None = None
    bytes: int | None = None

    def fraction(self, documents: int, size: int) -> float | None:
        """How much of it is done, or None if it is not known.

        Examples:
            >>> Extent(documents=10).fraction(5, 100), Extent(10, 50).fraction(5, 100), Extent().fraction(5, 100)
            (0.5, 1.0, None)
        """
        parts = [done / whole for done, whole in zip((documents, size), self, strict=True) if whole]
        return min(max(parts), 1.0) if parts else None


@dataclass(frozen=True)
class Corpus:
    """A source of documents and how much of it.

    `python` is the running interpreter's standard library, `text` are files, `fineweb` is streamed from the Hugging
    Face hub, `synthetic` is an endless Markov chain.

    Examples:
        >>> corpus = Corpus("synthetic", seed=1, limit_documents=3)
        >>> len(list(corpus.documents())), list(corpus.documents()) == list(corpus.documents())
        (3, True)
        >>> Corpus("synthetic")
        Traceback (most recent call last):
        muonsw.lab.errors.UsageError: the synthetic source has no end: give --limit-documents or --limit-characters
    """

    source: Source = "python"
    packages: bool = False  # add the installed packages to `python`
    files: tuple[str, ...] = ()  # files, folders or globs of `text`
    dataset: str = FINEWEB  # the hub's name of `fineweb`, or a local folder of the same format
    sample: str = "sample-10BT"  # which part of `fineweb`
    seed: int = 0  # of `synthetic`
    limit_documents: int | None = None
    limit_characters: int | None = None  # stop with the document that reaches so many

    def __post_init__(self) -> None:
        if self.source not in _DOCUMENTS:
            raise UsageError(f"there is no source {self.source!r}: give {', '.join(_DOCUMENTS)}")
        if (self.source == "text") != bool(self.files):
            given = "--files (files, folders or quoted globs)"
            raise UsageError(f"--source text needs {given}, and no other source takes them")
        for name, limit in (("documents", self.limit_documents), ("characters", self.limit_characters)):
            if limit is not None and limit < 1:
                raise UsageError(f"--limit-{name} must be at least 1, got {limit}")
        if self.source == "synthetic" and not self._limited:
            raise UsageError("the synthetic source has no end: give --limit-documents or --limit-characters")
        if self.seed < 0:
            raise UsageError(f"--seed must be at least 0, got {self.seed}")

    @property
    def _limited(self) -> bool:
        return self.limit_documents is not None or self.limit_characters is not None

    def documents(self) -> Iterator[str]:
        """The documents, from the first one, in an order that does not change."""
        documents = islice(_DOCUMENTS[self.source](self), self.limit_documents)
        return documents if self.limit_characters is None else up_to(documents, self.limit_characters)

    def recorded(self) -> dict[str, Any]:
        """What decides the documents, without the settings of other sources."""
        own: dict[Source, dict[str, Any]] = {
            "python": {"packages": self.packages},
            "text": {"files": [os.path.abspath(name) for name in self.files]},
            "fineweb": {"dataset": self.dataset, "sample": self.sample},
            "synthetic": {"seed": self.seed},
        }
        limits = {"limit_documents": self.limit_documents, "limit_characters": self.limit_characters}
        return {"source": self.source, **own[self.source], **limits}

    def extent(self) -> Extent:
        """How much there is to read, as far as that is known without reading it."""
        if self._limited:
            return Extent(self.limit_documents, self.limit_characters)
        if self.source == "python":
            files = [path for root in python_roots(packages=self.packages) for path in python_files(root)]
        else:
            files = matching_files(self.files)
            if not files or any(path.suffix not in _PLAIN for path in files):
                return Extent()
        return Extent(bytes=sum(path.stat().st_size for path in files))


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
