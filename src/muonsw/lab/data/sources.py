"""Where documents come from. Each source is an iterator of texts whose order does not depend on the machine's whims."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from muonsw.lab.files import UsageError

# folders of the standard library that hold tests, installed packages, or caches
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open}


def python_documents(*, packages: bool = False) -> Iterator[str]:
    """The sources of the running interpreter's standard library, without tests, each content once.

    Args:
        packages: Whether to add the installed packages.
    """
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], *([paths["purelib"], paths["platlib"]] if packages else [])]
    return source_files(dict.fromkeys(Path(root).resolve() for root in roots))


def source_files(roots: Iterable[Path]) -> Iterator[str]:
    """The Python files below folders, sorted by path, each content once; what does not decode is left out."""
    seen: set[bytes] = set()
    for root in roots:
        for path in _python_files(root):
            data = path.read_bytes()
            digest = hashlib.blake2b(data, digest_size=16).digest()
            text = None if digest in seen else _decoded(data)
            seen.add(digest)
            if text:
                yield text


def _python_files(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _decoded(data: bytes) -> str | None:
    """A Python file's text in the encoding that it declares."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None


def text_documents(patterns: Iterable[str | Path]) -> Iterator[str]:
    """Documents from files: .txt and .md are one each, .jsonl one for each line's `text`; also as .gz or .xz.

    Args:
        patterns: Paths or globs (`**` goes into folders). Files are read in the order of the patterns, sorted within
            each, and once even if two patterns name them.

    Raises:
        UsageError: Before any document if a pattern names no file or a file of another kind; at the place if a file
            cannot be read.
    """
    files = list(dict.fromkeys(path for pattern in patterns for path in _matching(str(pattern))))
    readers = [(_reader(path), path) for path in files]
    return (text for reader, path in readers for text in _reported(reader, path))


def _matching(pattern: str) -> list[Path]:
    """The files that a path or a glob names; a name with brackets in it may be a path."""
    named = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
    if not (files := sorted(path for path in map(Path, named) if path.is_file())):
        raise UsageError(f"no file matches {pattern}: check the path, or quote the glob")
    return files


def _reader(path: Path) -> Callable[[Path], Iterator[str]]:
    kind = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    if (reader := _READERS.get(kind)) is None:
        known = ", ".join(_READERS)
        raise UsageError(f"{path} is of no known kind: give {known} files, plain or as {' or '.join(_COMPRESSED)}")
    return reader


def _reported(reader: Callable[[Path], Iterator[str]], path: Path) -> Iterator[str]:
    try:
        yield from reader(path)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _whole(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        if text := file.read().decode():
            yield text


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and (text := _text_field(path, number, line)):
                yield text


def _text_field(path: Path, number: int, line: bytes) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}, line {number}: not a JSON object with a `text` field") from error
    if not isinstance(text, str):
        raise UsageError(f"{path}, line {number}: its `text` field is not a string")
    return text


_READERS = {".txt": _whole, ".md": _whole, ".jsonl": _lines}


def _opened(path: Path) -> IO[bytes]:
    file: IO[bytes] = _COMPRESSED[path.suffix](path) if path.suffix in _COMPRESSED else path.open("rb")
    return file
