"""Files: readers never see a partial file, and a failed write is an error that names the file and the remedy."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from itertools import count
from pathlib import Path
from secrets import randbits
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from muonsw.lab.errors import MachineError, UsageError

LOCK, UNFINISHED = ".lock", ".unfinished"
MAKE_ROOM = "make room on the disk, or choose another folder"
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@contextmanager
def reported(path: Path, remedy: str = MAKE_ROOM) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `MachineError` that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def prepare_folder(folder: Path) -> None:
    """Create the folder, after checking that files can be written there."""
    require_writable(folder)
    with reported(folder):
        folder.mkdir(parents=True, exist_ok=True)


def require_writable(folder: Path) -> None:
    """Check that files can be written to a folder, without creating it; else raise a `UsageError`."""
    try:
        # A dangling link counts as existing: it prevents creating the folder.
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        kind, remedy = (MachineError, MAKE_ROOM) if error.errno in DISK_FAULTS else (UsageError, "choose another")
        raise kind(f"cannot write to the folder {folder}: {error.strerror or error}; {remedy}") from error


@contextmanager
def locked(folder: Path, busy: str, *, wait: float = 0.0) -> Iterator[None]:
    """Create a folder if needed, lock it for the block, and delete the partial files of killed processes.

    If another process holds the lock for longer than `wait` seconds, raise a `UsageError` with the text `busy`. The
    operating system releases the lock of a killed process.
    """
    prepare_folder(folder)
    lock = FileLock(folder / LOCK, timeout=wait)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(busy) from error
    except OSError as error:
        raise UsageError(f"{folder / LOCK} cannot be locked: {error.strerror or error}; delete it") from error
    try:
        for path in folder.glob(f".*{UNFINISHED}"):
            path.unlink()
        yield
    finally:
        lock.release()


def write_atomically(path: Path, content: str | bytes, *, remedy: str = MAKE_ROOM) -> Path:
    """Replace a file's content; readers see the old or the new content, never a part."""
    with replacing(path, remedy=remedy) as file:
        # Text may hold file names that are not UTF-8.
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    return path


def write_json(path: Path, data: Any, *, remedy: str = MAKE_ROOM) -> Path:
    """Replace a file with JSON data; numbers that are not finite become null."""
    text = json.dumps(plain(data), indent=1, allow_nan=False)
    return write_atomically(path, text + "\n", remedy=remedy)


@contextmanager
def replacing(path: Path, *, remedy: str = MAKE_ROOM) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends without an error."""
    refuse_folder(path)
    # Random, because hosts that share a disk may have equal process numbers.
    temporary = path.with_name(f".{path.name}.{randbits(32)}{UNFINISHED}")
    with reported(path, remedy):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, but a file of this name must be written: move it away, or delete it")


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numbered(path: Path) -> Path:
    """The first free name of `path.1`, `path.2`, ..., for moving a file aside."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def read_object(path: Path, *, remedy: str = "check the file, or delete it") -> dict[str, Any]:
    """The JSON object in a file; a `UsageError` if it cannot be read or is not an object."""
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: check the path") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; {remedy}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} does not hold a JSON object; {remedy}")
    return data


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: a `ValueError` also for NaN and infinities, which Python would accept."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not valid JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def plain(value: Any) -> Any:
    """Data for JSON, with None for NaN and infinities, lists for arrays, and strings for enumerations."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays, tensors, and the scalars of numpy
        return plain(value.tolist())
    return str(value) if isinstance(value, StrEnum) else value
