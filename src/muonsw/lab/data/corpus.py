"""Which documents a corpus has, as plain settings that can be recorded and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from muonsw.lab.data.sources import (
    FINEWEB,
    fineweb_documents,
    matching_files,
    python_documents,
    python_files,
    python_roots,
    text_documents,
)
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.errors import UsageError

Source: TypeAlias = Literal["python", "text", "fineweb", "synthetic"]
_PLAIN = {".txt", ".md"}


@dataclass(frozen=True)
class Corpus:
    """A source of documents and how much of it.

    Attributes:
        source: `python` is the running interpreter's standard library, `text` are files, `fineweb` is streamed from the
            Hugging Face hub, `synthetic` is an endless Markov chain.
        packages: Add the installed packages to `python`.
        files: Paths or globs of `text`.
        dataset: The hub's name of `fineweb`, or a local folder of the same format.
        sample: Which part of `fineweb`.
        seed: Of `synthetic`.
        limit_documents: Stop after so many documents.
        limit_characters: Stop with the document that reaches so many characters.

    Examples:
        >>> corpus = Corpus("synthetic", seed=1, limit_documents=3)
        >>> len(list(corpus.documents())), list(corpus.documents()) == list(corpus.documents())
        (3, True)
        >>> Corpus("synthetic")
        Traceback (most recent call last):
        muonsw.lab.errors.UsageError: the synthetic source has no end: give --limit-documents or --limit-characters
    """

    source: Source = "python"
    packages: bool = False
    files: tuple[str, ...] = ()
    dataset: str = FINEWEB
    sample: str = "sample-10BT"
    seed: int = 0
    limit_documents: int | None = None
    limit_characters: int | None = None

    def __post_init__(self) -> None:
        if self.source not in _DOCUMENTS:
            raise UsageError(f"there is no source {self.source!r}: give {', '.join(_DOCUMENTS)}")
        if (self.source == "text") != bool(self.files):
            raise UsageError("--source text needs --files, paths or quoted globs, and no other source takes them")
        for name, limit in (("documents", self.limit_documents), ("characters", self.limit_characters)):
            if limit is not None and limit < 1:
                raise UsageError(f"--limit-{name} must be at least 1, got {limit}")
        if self.source == "synthetic" and self.limit_documents is None and self.limit_characters is None:
            raise UsageError("the synthetic source has no end: give --limit-documents or --limit-characters")
        if self.seed < 0:
            raise UsageError(f"--seed must be at least 0, got {self.seed}")

    def documents(self) -> Iterator[str]:
        """The documents, from the first one, in an order that does not change."""
        documents = _DOCUMENTS[self.source](self)
        if self.limit_documents is not None:
            documents = islice(documents, self.limit_documents)
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
        if self.limit_documents is not None or self.limit_characters is not None:
            return Extent(self.limit_documents, self.limit_characters)
        if self.source == "python":
            roots = python_roots(packages=self.packages)
            return Extent(bytes=_size(path for root in roots for path in python_files(root)))
        files = matching_files(self.files)
        return Extent(bytes=_size(files)) if files and all(path.suffix in _PLAIN for path in files) else Extent()


@dataclass(frozen=True)
class Extent:
    """How much a corpus has at most; `None` is unknown. Bytes are those of the texts in UTF-8, or nearly so."""

    documents: int | None = None
    bytes: int | None = None

    def fraction(self, documents: int, size: int) -> float | None:
        """How much of it is done, or `None` if nobody knows.

        Examples:
            >>> Extent(documents=10).fraction(5, 100), Extent(10, 50).fraction(5, 100), Extent().fraction(5, 100)
            (0.5, 1.0, None)
        """
        parts = [done / whole for done, whole in ((documents, self.documents), (size, self.bytes)) if whole]
        return min(max(parts), 1.0) if parts else None


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


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


_DOCUMENTS: dict[Source, Callable[[Corpus], Iterator[str]]] = {
    "python": lambda corpus: python_documents(packages=corpus.packages),
    "text": lambda corpus: text_documents(corpus.files),
    "fineweb": lambda corpus: fineweb_documents(corpus.dataset, corpus.sample),
    "synthetic": lambda corpus: iter(MarkovSource(corpus.seed)),
}
