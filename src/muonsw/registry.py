"""A table of named functions that refuses to be overwritten by accident."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Named things of one kind, with errors that list what there is.

    Param groups store names, never functions, so that a `state_dict` is plain data; this table turns
    the name back into the function.

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
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T, *, replace: bool = False) -> None:
        """Add `entry` under `name`; a name that is taken needs `replace=True`."""
        if name in self._entries and not replace:
            raise ValueError(f"{self.kind} {name!r} is already registered; pass replace=True to replace it")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(unknown(self.kind, name, list(self._entries)))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def unknown(kind: str, name: object, known: list[str]) -> str:
    """The message for a name that is not among `known`, with the closest one that is."""
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}"
