"""Printing sentences: harmless whatever they hold, in what the stream can encode, and past a reader that has gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, cast

from muonsw.lab.base.errors import MACHINE, OK

if TYPE_CHECKING:
    from rich.console import Console

Given = ParamSpec("Given")

# Characters that steer a terminal or reorder text (C0 and C1 controls, bidirectional overrides), and halves of
# characters, which come from file names that are not UTF-8 and cannot be printed at all.
_STEERING = chain(range(0x20), range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A), range(0xD800, 0xE000))
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _STEERING if chr(code) not in "\n\t"}

# What a stream that is not UTF-8 gets for the signs that our tables and sentences use.
_ASCII = str.maketrans(
    {
        "λ": "lambda", "φ": "phi", "η": "eta", "β": "beta", "Σ": "sum ", "Δ": "delta ", "·": " ", "±": "+-",
        "≤": "<=", "≥": ">=", "≈": "~", "→": "->", "²": "^2", "√": "sqrt ", "∞": "inf", "…": "...", "•": "-",
        "\N{MULTIPLICATION SIGN}": "x", "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{EM DASH}": "-",
    }
)  # fmt: skip


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


class _SafeStream:
    """A stream that takes any character, and is silent once it cannot be written to: a pipe is closed, a disk full."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._attempt(self.stream.write, self._encodable(text))
        return len(text)

    def _encodable(self, text: str) -> str:
        """The text, in signs that the stream's encoding has, as ASCII where the locale is C."""
        encoding = self.stream.encoding or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
        return text

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _attempt(self, act: Callable[..., object], *given: str) -> None:
        try:
            act(*given)
        except OSError as error:
            if self.error is None:
                self.error = error
                self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        """What is still waiting to be written would raise again, at the latest when Python ends."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


def enduring(main: Callable[Given, int]) -> Callable[Given, int]:
    """Let a program go on when its standard output is closed or full, and say so on standard error.

    Returns:
        A function with the same exit code; only where output was lost for another reason than that its reader had
        gone, "done" becomes "a fault of the machine".
    """

    @wraps(main)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> int:
        before = sys.stdout, sys.stderr
        out, err = (stream and _SafeStream(stream) for stream in before)
        sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
        try:
            code = main(*args, **kwargs)
        finally:
            for stream in filter(None, (out, err)):
                stream.flush()
            if out and out.error:
                reason = out.error.strerror or out.error
                print(f"muonsw: standard output could not be written ({reason}) and was left out", file=sys.stderr)
            sys.stdout, sys.stderr = before
        lost = out and out.error and not isinstance(out.error, BrokenPipeError)
        return MACHINE if code == OK and lost else code

    return run
