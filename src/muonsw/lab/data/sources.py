"""Where documents come from. Each source is an iterator of texts whose order does not depend on the machine's whims."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from muonsw.lab.data.formats import check_kind, file_documents
from muonsw.lab.errors import UsageError

FINEWEB = "HuggingFaceFW/fineweb"
# folders of the standard library that hold tests, installed packages, or caches
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_documents(*, packages: bool = False) -> Iterator[str]:
    """The sources of the running interpreter's standard library, without tests, each content once.

    Args:
        packages: Whether to add the installed packages.
    """
    return source_files(python_roots(packages=packages))


def python_roots(*, packages: bool = False) -> list[Path]:
    """The folders whose files `python_documents` reads."""
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], *([paths["purelib"], paths["platlib"]] if packages else [])]
    return list(dict.fromkeys(Path(root).resolve() for root in roots))


def source_files(roots: Iterable[Path]) -> Iterator[str]:
    """The Python files below folders, sorted by path, each content once; what does not decode is left out.

    Raises:
        UsageError: If a file cannot be read.
    """
    seen: set[bytes] = set()
    for path in (path for root in roots for path in python_files(root)):
        data = _read(path)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        text = None if digest in seen else _decoded(data)
        seen.add(digest)
        if text:
            yield text


def python_files(root: Path) -> list[Path]:
    """The Python files below a folder, sorted, without tests and without what is installed below it."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; make it readable") from error


def _decoded(data: bytes) -> str | None:
    """A Python file's text in the encoding that it declares."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None


def text_documents(patterns: Iterable[str | Path]) -> Iterator[str]:
    """Documents from files: .txt and .md are one each, .jsonl one for each line's `text`, .parquet one for each row's.

    All but .parquet may be compressed as .gz, .xz or .zst.

    Args:
        patterns: Paths or globs (`**` goes into folders). Files are read in the order of the patterns, sorted within
            each, and once even if two patterns name them.

    Raises:
        UsageError: Before any document if a pattern names no file, a file of another kind, or one that needs a package
            which is not installed; at the place if a file cannot be read.
    """
    files = matching_files(patterns)
    for path in files:
        check_kind(path)
    return (text for path in files for text in file_documents(path))


def matching_files(patterns: Iterable[str | Path]) -> list[Path]:
    """The files that paths or globs name, in the order in which `text_documents` reads them."""
    return list(dict.fromkeys(path for pattern in patterns for path in _matching(str(pattern))))


def _matching(pattern: str) -> list[Path]:
    """The files that a path or a glob names; a name with brackets in it may be a path."""
    named = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
    if not (files := sorted(path for path in map(Path, named) if path.is_file())):
        inside = f"; {pattern} is a folder, give {pattern}/**/*.txt for its files" if Path(pattern).is_dir() else ""
        raise UsageError(f"no file matches {pattern}: check the path, or quote the glob{inside}")
    return files


def fineweb_documents(dataset: str | Path = FINEWEB, sample: str = "sample-10BT") -> Iterator[str]:
    """The texts of FineWeb, streamed by the `datasets` library without storing them.

    Args:
        dataset: The name on the Hugging Face hub, or a local folder with Parquet files of the same fields.
        sample: Which named part of the hub's dataset: `sample-10BT`, `sample-100BT`, `sample-350BT`, a crawl such as
            `CC-MAIN-2024-10`, or `default` for all. A local folder has no parts.

    Raises:
        UsageError: If the library is missing, the dataset cannot be reached, or a file of it is damaged.
    """
    try:
        library: Any = import_module("datasets")
    except ModuleNotFoundError as error:
        raise UsageError("FineWeb needs the package datasets: pip install 'muonsw[data]'") from error
    local = Path(dataset).exists()
    name = str(dataset) if local else f"{dataset} ({sample})"
    try:
        stream = library.load_dataset(str(dataset), None if local else sample, split="train", streaming=True)
        for row in stream.select_columns(["text"]):
            if text := row["text"]:
                yield text
    except Exception as error:  # the network, the hub, the library and pyarrow each raise their own
        if local:
            _name_damaged(Path(dataset))
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "check the name, the connection and the files; what was prepared is kept"
        raise UsageError(f"the dataset {name} cannot be read: {reason}; {fix}") from error


def _name_damaged(dataset: Path) -> None:
    """Read a local dataset file by file, so that the one which cannot be read is named; streaming does not tell."""
    for path in sorted(dataset.rglob("*.parquet")) if dataset.is_dir() else [dataset]:
        for _ in file_documents(path):
            pass
