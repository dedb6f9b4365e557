"""Files: written so that a reader never sees half of one, read so that no content can do more than be refused.

Every file of the lab is written through this module. What the disk or the system refuses becomes a `MachineError` that
names the file and says what to do.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from itertools import count
from pathlib import Path
from secrets import randbits
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from muonsw.lab.base.errors import MachineError, UsageError

# No JSON file of the lab comes near these; a file beyond them is not one of ours.
JSON_BYTES = 1 << 28
JSON_DIGITS, JSON_DEPTH = 40, 64
LOCK = ".lock"
MAKE_ROOM = "make room on the disk, or choose another folder"
# No file takes so long to write.
ABANDONED_SECONDS = 3600
# The names of files that are being written: see `placing`.
_LEFTOVER = re.compile(r"\..+\.(json|jsonl|safetensors|tokens|bpe|html|png|svg)\.\d+")
# What a disk says when it, and not the name of the folder, is the trouble.
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@contextmanager
def reported(path: Path, remedy: str = MAKE_ROOM) -> Iterator[None]:
    """Turn the system's refusal to write inside the block into a `MachineError` that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def prepare_folder(folder: Path) -> None:
    """Make the folder, and find out before the work whether its files can be written.

    Raises:
        UsageError: If it cannot be made or written to.
        MachineError: If the disk is full or fails.
    """
    _try_to_write(folder, make=True)


def require_writable(folder: Path) -> None:
    """Find out the same without making the folder: other input may still be refused."""
    _try_to_write(folder, make=False)


def _try_to_write(folder: Path, *, make: bool) -> None:
    try:
        # A link that leads nowhere counts: no folder can be made in its place.
        there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=there):
            pass
        if make:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write to the folder {folder}: {error.strerror or error}"
        if error.errno in _DISK_FAULTS:
            raise MachineError(f"{message}; {MAKE_ROOM}") from error
        raise UsageError(f"{message}; choose another") from error


@contextmanager
def locked(folder: Path, busy: str, *, wait: float = 0.0) -> Iterator[Callable[[], None]]:
    """Make a folder if it is missing, and hold it while the block runs.

    The lock is the system's, so a process that is killed leaves none behind; the files that such a one was writing are
    removed. What `busy` says is raised where another process holds it for longer than `wait` seconds.

    Yields:
        What raises a `UsageError` once the folder is no longer the one that is held.
    """
    prepare_folder(folder)
    path = folder / LOCK
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a lock of ours: delete it")
    lock = FileLock(path, timeout=wait)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(busy) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be locked: {error.strerror or error}; choose another folder") from error
    try:
        held = path.stat()
        remove_leftovers(folder)
        yield lambda: _require_same(path, held)
    finally:
        lock.release()


def _require_same(lock: Path, held: os.stat_result) -> None:
    with suppress(OSError):
        if os.path.samestat(lock.stat(), held):
            return
    lost = f"{lock.parent} was deleted or replaced while a run was training in it"
    raise UsageError(f"{lost}: what came after its last checkpoint is lost; start it again in another folder")


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes left beside the files that they were about to replace."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def remove_abandoned(path: Path) -> None:
    """Delete what killed processes left of one file, in a folder without a lock where living ones may be writing it.

    By its age: they may run on another machine.
    """
    for left in path.parent.iterdir():
        name, _, number = left.name.rpartition(".")
        if name == f".{path.name}" and number.isdecimal():
            with suppress(FileNotFoundError):  # its process has just ended
                if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                    left.unlink()


def write_atomically(path: Path, content: str | bytes, *, remedy: str = MAKE_ROOM) -> Path:
    """Replace a file by one with this content; a reader sees the old or the new one, never a part.

    Halves of characters, which come from file names that are not UTF-8, are written as their code.
    """
    with replacing(path, remedy=remedy) as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    return path


def write_json(path: Path, data: Any, *, remedy: str = MAKE_ROOM) -> Path:
    """Replace a file by plain data in JSON, with None for what JSON has no number for."""
    text = json.dumps(plain(data), indent=1, allow_nan=False)
    return write_atomically(path, text + "\n", remedy=remedy)


@contextmanager
def replacing(path: Path, *, remedy: str = MAKE_ROOM) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its name, once it is on disk, when the block ends without an error."""
    with placing(path, remedy=remedy) as beside, beside.open("wb") as file:
        yield file


@contextmanager
def placing(path: Path, *, remedy: str = MAKE_ROOM) -> Iterator[Path]:
    """A name beside `path` under which the block writes a file; that file then takes the place of `path`."""
    refuse_folder(path)
    beside = path.with_name(f".{path.name}.{randbits(32)}")  # hosts that share a disk have equal process numbers
    with reported(path, remedy):
        try:
            yield beside
            sync(beside)
            beside.replace(path)
            sync(path.parent)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def refuse_folder(path: Path) -> None:
    """Refuse a folder that has the name of a file which is to be written; also before the work, if that takes long."""
    if path.is_dir() and not path.is_symlink():
        raise UsageError(f"{path} is a folder, and a file of this name is to be written: move it away, or delete it")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # a system that cannot open folders has no need to
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numbered(path: Path) -> Path:
    """The first of `path.1`, `path.2`, ... that is not taken, for what is put aside: nothing kept before is lost."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def read_object(path: Path, *, remedy: str = "check the file, or delete it") -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UsageError: If it cannot be read, is larger than any file of ours, or holds something else than the lab writes.
    """
    try:
        data = parse_json(_bounded_bytes(path))
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: check the path") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; {remedy}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} does not hold a JSON object; {remedy}")
    return data


def _bounded_bytes(path: Path) -> bytes:
    """What a file holds; in pieces, since a buffer of the largest size would be taken for the smallest file."""
    content = bytearray()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            content += piece
            if len(content) > JSON_BYTES:
                raise ValueError(f"it is larger than {JSON_BYTES >> 20} MiB")
    return bytes(content)


def parse_json(text: str | bytes) -> Any:
    """Data from JSON text.

    Raises:
        ValueError: If it is not JSON, or nested or with numbers such as the lab never writes.

    Examples:
        >>> parse_json('{"loss": 2.5}')
        {'loss': 2.5}
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ...
        ValueError: it is nested too deeply
        >>> parse_json("9" * 400)
        Traceback (most recent call last):
        ...
        ValueError: it has a whole number of 400 digits
    """
    try:
        data = json.loads(text, parse_int=_whole_number, parse_float=_finite_number, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _require_shallow(data)
    return data


def _require_shallow(data: Any) -> None:
    """Refuse what would end a function that calls itself for each level."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(JSON_DEPTH):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    if level:
        raise ValueError("it is nested too deeply")


def _whole_number(digits: str) -> int:
    if len(digits) > JSON_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits)} digits")
    return int(digits)


def _finite_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:JSON_DIGITS]} is too large a number")
    return number


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def plain(value: Any) -> Any:
    """Numbers, strings, lists and dictionaries: no infinities, no NaN, no arrays, strings for enumerations.

    Examples:
        >>> import numpy as np
        >>> plain({"a": (1.0, float("nan")), "b": np.array([2, 3])})
        {'a': [1.0, None], 'b': [2, 3]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays, tensors, and the scalars of numpy
        return plain(value.tolist())
    return str(value) if isinstance(value, StrEnum) else value
