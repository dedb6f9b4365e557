"""Writing results so that a reader never sees half a file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from muonsw.lab.errors import UsageError


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
