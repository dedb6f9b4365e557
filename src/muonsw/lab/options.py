"""How `muonsw COMMAND --help` shows options, and which of them the user gave."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any

try:
    from tyro.conf import arg
except ModuleNotFoundError:  # training needs no command line

    def arg(**_: Any) -> None: ...  # type: ignore[no-redef]


unset = partial(arg, help_behavior_hint="")  # hides tyro's note on the default, where the help explains it or need not
Flag = Annotated[bool, unset()]  # a switch that is off by default


def changed(command: Any) -> list[str]:
    """List the options of a command that differ from their defaults, including those of its option groups."""
    names = []
    for option in fields(command):
        value = getattr(command, option.name)
        if is_dataclass(value):
            names += changed(value)
        elif value != option.default:
            names.append(f"--{option.name.replace('_', '-')}")
    return names
