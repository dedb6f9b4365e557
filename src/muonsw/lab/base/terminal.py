"""Print sentences that may hold any character."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from rich.console import Console

Given = ParamSpec("Given")

# Characters that steer a terminal or reorder text (C0 and C1 controls, bidirectional overrides), and halves of
# characters, which come from file names that are not UTF-8 and cannot be printed at all.
_STEERING = chain(range(0x20), range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A), range(0xD800, 0xE000))
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _STEERING if chr(code) not in "\n\t"}


def harmless(text: object) -> str:
    r"""A text in which nothing can steer a terminal: such characters are shown by their code.

    Names, settings and documents come from files that others may have written.

    Examples:
        >>> print(harmless("a run named \x1b]52;c;aGk=\x07"))
        a run named \x1b]52;c;aGk=\x07
    """
    return str(text).translate(_SHOWN)


def say(console: Console, text: object) -> None:
    """Print a line that may hold any character, unbroken and without colours of rich's own choice."""
    console.print(harmless(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def paragraph(console: Console, text: str) -> None:
    """Print sentences, broken between words in a terminal and not at all elsewhere."""
    if console.is_terminal:
        console.print(harmless(text), highlight=False, markup=False, emoji=False)
    else:
        say(console, text)


def enduring(main: Callable[Given, int]) -> Callable[Given, int]:
    """Let a program print any character, with a question mark where the stream's encoding has none."""

    @wraps(main)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        return main(*args, **kwargs)

    return run
