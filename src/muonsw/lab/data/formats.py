"""Documents inside files: text, JSON lines and Parquet, plain or compressed; what is damaged is named.

Text and JSON lines are read as streams and Parquet a few rows at a time, so that memory does not grow with the file,
only with its longest document.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from muonsw.lab.base.errors import UsageError, needed

_PARQUET_ROWS = 256
# A longer text is cut into documents, so that some of it can be held out: about this many, within these sizes.
_PIECES = 64
_PIECE_CHARACTERS = (1 << 11, 1 << 16)
_DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError)


def check_kind(path: Path) -> None:
    """Find out before any work whether files of this name can be read.

    Raises:
        UsageError: If the kind is unknown, or a package for it is missing.

    Examples:
        >>> check_kind(Path("notes.txt.gz"))
        >>> check_kind(Path("notes.pdf"))
        Traceback (most recent call last):
        muonsw.lab.base.errors.UsageError: notes.pdf is of no known kind: give .txt, .md, .jsonl, .parquet files...
    """
    if not is_readable(path):
        raise UsageError(f"{path} is of no known kind: give {KINDS}")
    if path.suffix in (".zst", ".parquet"):
        _arrow()


def is_readable(path: Path) -> bool:
    """Whether files of this name are of a kind that can be read.

    Examples:
        >>> [is_readable(Path(name)) for name in ("a.txt", "a.jsonl.zst", "a.pdf", "a.parquet.gz")]
        [True, True, False, False]
    """
    kind = _kind(path)
    return kind in _READERS and (kind != ".parquet" or path.suffix == kind)


def file_documents(path: Path) -> Iterator[str]:
    """The documents of one file: a .jsonl has one for each line, a .parquet one for each row, in a field `text`.

    A .txt or .md is one document, or several if it is long, as `pieces` cuts it. An empty text is no document.

    Raises:
        UsageError: At the place where the file turns out to be unreadable, damaged or cut short.
    """
    try:
        yield from filter(None, _READERS[_kind(path)](path))
    except _DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UsageError(f"{path} cannot be read: {reason}; repair it or leave it out") from error


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix


def _arrow(module: str = "pyarrow") -> Any:
    return needed(module, "files of this kind need", "data")


def _opened(path: Path) -> IO[bytes]:
    if path.suffix not in _COMPRESSED:
        return path.open("rb")
    if path.stat().st_size == 0:
        raise EOFError("it is empty, which no compressed file is")
    file: IO[bytes] = _COMPRESSED[path.suffix](path)
    return file


def pieces(text: str, more: Iterable[str] = ()) -> Iterator[str]:
    r"""A long text in about 64 pieces of 2,048 to 65,536 characters, cut after a blank line, a line or a word.

    Where `more` follows, `text` has at least 64 of the largest.

    Examples:
        >>> text = "One paragraph.\n\n" * 1000
        >>> found = list(pieces(text))
        >>> "".join(found) == text, len(found), max(map(len, found)), found[0].endswith("\n\n")
        (True, 8, 2048, True)
    """
    smallest, largest = _PIECE_CHARACTERS
    size, start = min(max(len(text) // _PIECES, smallest), largest), 0
    for following in chain(more, [""]):
        while len(text) - start > size:
            end = _cut(text, start + size // 2, start + size)
            yield text[start:end]
            start = end
        text, start = text[start:] + following, 0
    yield text


def _cut(text: str, first: int, last: int) -> int:
    """Where to cut between two places: after the last blank line there, else the last line or word, else at the end."""
    for mark in ("\n\n", "\n", " "):
        if (found := text.rfind(mark, first, last)) >= 0:
            return found + len(mark)
    return last


def _text(path: Path) -> Iterator[str]:
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as stream:
        # So many characters decide the size of the pieces, however many follow.
        blocks = iter(lambda: stream.read(_PIECES * max(_PIECE_CHARACTERS)), "")
        yield from pieces(next(blocks, ""), blocks)


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(f"{path}, line {number}: not a JSON object with a `text` field") from error
            if not isinstance(text, str):
                raise UsageError(f"{path}, line {number}: its `text` field is not a string")
            yield text


def _rows(path: Path) -> Iterator[str]:
    """Row group by row group, a few rows at a time, and the text column alone."""
    arrow, parquet = _arrow(), _arrow("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            if "text" not in schema.names:
                raise UsageError(f"{path} has no column `text`, only {', '.join(schema.names)}")
            kind = schema.field("text").type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise UsageError(f"{path}: its column `text` holds {kind}, not strings")
            for number in range(file.num_row_groups):
                # One row group at a time: over several, the library keeps all that it has read in memory.
                for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[number], columns=["text"]):
                    yield from batch.column(0).to_pylist()
    except arrow.ArrowException as error:
        raise OSError(str(error)) from error


_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _text,
    ".md": _text,
    ".jsonl": _lines,
    ".parquet": _rows,
}
# Arrow reads .zst, because it takes a file that was cut short for an error; the library zstandard takes it for the end.
_COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": lambda path: io.BufferedReader(_arrow().input_stream(path, compression="zstd")),
}
KINDS = f"{', '.join(_READERS)} files, all but the last also as {', '.join(_COMPRESSED)}"
