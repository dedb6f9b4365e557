"""The commands of `muonsw`: adding one is one entry in `COMMANDS`.

A command is a frozen dataclass whose fields are its options and whose `run` returns an exit code.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Protocol

import tyro

from muonsw.lab.commands.advise import Advise
from muonsw.lab.commands.bench import Bench
from muonsw.lab.commands.compare import Compare
from muonsw.lab.commands.data import Data
from muonsw.lab.commands.diagnose import Diagnose
from muonsw.lab.commands.export import Export, Sample
from muonsw.lab.commands.plan import Plan
from muonsw.lab.commands.report import Report
from muonsw.lab.commands.reproduce import Reproduce
from muonsw.lab.commands.train import Train
from muonsw.lab.terminal import harmless


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
    "bench": Bench,
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command it names; usage errors exit with 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    shown, command = [harmless(word) for word in given], None
    if shown != given:
        # A usage error repeats what was typed. One about words that could steer a terminal is made from harmless ones.
        with suppress(SystemExit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            command = _parsed(given)
    return (command or _parsed(shown)).run()


def _parsed(arguments: Sequence[str]) -> Command:
    return tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS),
        prog="muonsw",
        description="Muon-SW and its paper: train, compare, measure, and reproduce with claims that are checked. "
        "`muonsw --version` prints the version. Exit codes: 0 done, 1 a claim failed or damage was found, 2 it cannot "
        "be done as it was asked, 3 a fault of the machine, 128 plus the signal if it was stopped (130 for Ctrl-C).",
        args=arguments,
    )
