"""Plain text for a terminal or a log: tables, and counts in grammar."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, one: str, more: str = "") -> str:
    """A number of things, in the singular where it is one.

    Examples:
        >>> counted(1, "matrix", "matrices"), counted(1200, "run")
        ('1 matrix', '1,200 runs')
    """
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first one a header, in columns as wide as they need.

    Examples:
        >>> print(text_table([("role", "tensors"), ("hidden", "2")]))
        role    tensors
        hidden  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
