"""Printing sentences as they are."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, text: object) -> None:
    """Print a line that may hold any character, unbroken and without colours of rich's own choice."""
    console.print(str(text), highlight=False, markup=False, soft_wrap=True)
