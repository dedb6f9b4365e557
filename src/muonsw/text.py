"""Text for users: tables, counts, lists, and the line that a warning points at."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

# Modules of frames that are not the user's: torch wraps `step` in decorators and calls it from schedulers and hooks.
PASSED_OVER = ("muonsw", "torch", "contextlib", "functools")


def users_line() -> int:
    """The `stacklevel` that makes the caller's warning point at the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER:
        frame, level = frame.f_back, level + 1
    return level if frame is not None else 1


def counted(number: int, singular: str, plural: str = "") -> str:
    """A count with its noun.

    Examples:
        >>> counted(1, "matrix", "matrices"), counted(1200, "run")
        ('1 matrix', '1,200 runs')
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    Examples:
        >>> listed(["muon"]), listed(["muon", "sgd"]), listed(["adamw", "soap", "asgo"])
        ('muon', 'muon and sgd', 'adamw, soap and asgo')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def sized(count: int) -> str:
    """A number of bytes in a suitable unit.

    Examples:
        >>> sized(640), sized(3 * 2**19), sized(5 * 2**30)
        ('640 bytes', '1.5 MiB', '5.0 GiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return counted(count, "byte")


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells into columns; the first row is the header.

    Examples:
        >>> print(text_table([("role", "tensors"), ("hidden", "2")]))
        role    tensors
        hidden  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
