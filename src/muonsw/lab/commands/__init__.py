"""The commands of `muonsw`: adding one is one entry in `COMMANDS`.

A command is a frozen dataclass whose fields are its options and whose `run` returns an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import tyro

from muonsw.lab.commands.advise import Advise
from muonsw.lab.commands.compare import Compare
from muonsw.lab.commands.data import Data
from muonsw.lab.commands.diagnose import Diagnose
from muonsw.lab.commands.export import Export, Sample
from muonsw.lab.commands.plan import Plan
from muonsw.lab.commands.report import Report
from muonsw.lab.commands.reproduce import Reproduce
from muonsw.lab.commands.train import Train


class Command(Protocol):
    """What `muonsw` can run."""

    def run(self) -> int:
        """Do it and return the exit code."""
        ...


COMMANDS: Mapping[str, type[Command]] = {
    "compare": Compare,
    "reproduce": Reproduce,
    "plan": Plan,
    "advise": Advise,
    "data": Data,
    "train": Train,
    "report": Report,
    "diagnose": Diagnose,
    "export": Export,
    "sample": Sample,
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command it names; usage errors exit with 2."""
    command = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS),
        prog="muonsw",
        description="Muon-SW and its paper: train, compare, measure, and reproduce with claims that are checked. "
        "`muonsw --version` prints the version. Exit codes: 0 done, 1 a claim failed or damage was found, 2 it cannot "
        "be done as it was asked, 3 a fault of the machine, 128 plus the signal if it was stopped (130 for Ctrl-C).",
        args=arguments,
    )
    return command.run()
