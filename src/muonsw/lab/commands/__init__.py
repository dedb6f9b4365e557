"""The commands of `muonsw`: adding one is one entry in `COMMANDS`.

A command is a frozen dataclass whose fields are its options and whose `run` returns an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import tyro

from muonsw.lab.commands.reproduce import Reproduce
from muonsw.lab.files import UsageError as UsageError


class Command(Protocol):
    """What `muonsw` can run."""

    def run(self) -> int:
        """Do it and return the exit code."""
        ...


COMMANDS: Mapping[str, type[Command]] = {"reproduce": Reproduce}


def run(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command it names; usage errors exit with 2."""
    command = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS),
        prog="muonsw",
        description="Muon-SW and its paper: experiments whose claims are checked.",
        args=arguments,
    )
    return command.run()
