"""A table of named functions that refuses accidental overwrites."""

from __future__ import annotations

import difflib
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """Functions by name, with errors that list the valid names.

    Param groups store names, never functions, to keep `state_dict` plain data; this table maps names to functions.

    Examples:
        >>> rules = Registry[int]("rule")
        >>> rules.register("one", 1)
        >>> rules["one"]
        1
        >>> rules["on"]
        Traceback (most recent call last):
        ValueError: unknown rule 'on' (did you mean 'one'?); known: one
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str, entry: T) -> None:
        """Add `entry` under a new name."""
        if name in self:
            raise ValueError(
                f"{self.kind} {name!r} is already registered; choose another name, or assign to registry[{name!r}]"
            )
        self[name] = entry

    def __missing__(self, name: str) -> NoReturn:
        raise ValueError(unknown(self.kind, name, list(self)))


def unknown(kind: str, name: object, known: list[str]) -> str:
    """The message for a name that is not in `known`, with the closest one."""
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(known) or 'none'}"
