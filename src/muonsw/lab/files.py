"""Writing results so that a reader never sees half a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class UsageError(Exception):
    """Something the user asked for cannot be done; the message says what to do instead."""


def prepare_folder(folder: Path) -> None:
    """Make the folder, and find out before the work whether its files can be written.

    Raises:
        UsageError: If it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot write to the folder {folder}: {reason}; choose another") from error


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write beside the file, to disk, and rename, so that `path` is either the old or the new one."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)
    return path


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk; a system that cannot open folders has no need to."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
