"""Checks that several commands make on their options."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from muonsw.lab.errors import UsageError


def changed(command: Any) -> list[str]:
    """The options of a command that differ from their defaults, those of its groups of options included.

    Examples:
        >>> from muonsw.lab.commands.train import Changes, Train
        >>> changed(Train(seed=3, optimizer=Changes(weight_decay=0.1)))
        ['--seed', '--weight-decay']
    """
    found = []
    for one in fields(command):
        value = getattr(command, one.name)
        if is_dataclass(value):
            found += changed(value)
        elif value != one.default:
            found.append(f"--{one.name.replace('_', '-')}")
    return found


def given(command: Any, *names: str) -> dict[str, Any]:
    """Options of a command by their names, without those that were left out.

    Examples:
        >>> from muonsw.lab.commands.train import Train
        >>> given(Train(steps=5), "steps", "batch")
        {'steps': 5}
    """
    return {name: value for name in names if (value := getattr(command, name)) is not None}


def require_at_least_one(command: Any, *names: str) -> None:
    """Refuse options that count something and are below 1."""
    for name, value in given(command, *names).items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
