"""The commands of `muonsw`: adding one is one entry in `COMMANDS`.

A command is a frozen dataclass whose fields are its options and whose `run` returns an exit code. Only the command
that is run is imported.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import NamedTuple, cast

from muonsw.lab.base.errors import USAGE, needed
from muonsw.lab.base.terminal import harmless
from muonsw.lab.commands.parsing import Command, parse, width
from muonsw.registry import unknown


class Entry(NamedTuple):
    """Where a command is, as `module:class` of this package or of another one, and what `muonsw --help` says of it."""

    place: str
    summary: str


COMMANDS: Mapping[str, Entry] = {
    "compare": Entry("compare:Compare", "train a model under several decay rules and compare the results"),
    "reproduce": Entry("reproduce:Reproduce", "run a study of the paper and check its claims"),
    "plan": Entry("plan:Plan", "compute size, cost, learning rates and decay of a run"),
    "advise": Entry("muonsw.lab.advise:Advise", "say whether decay matters in a run, and which lambda to try"),
    "data": Entry("data:Data", "prepare training data, verify it, or describe it"),
    "train": Entry("train:Train", "train a model, or continue a run that was stopped"),
    "task": Entry("task:TaskCommand", "check a task of your own, or write a file to begin with"),
    "report": Entry("report:Report", "write one page about one or several runs"),
    "diagnose": Entry("diagnose:Diagnose", "show what decay does to the weights of runs"),
    "export": Entry("export:Export", "write the model of a run as safetensors"),
    "sample": Entry("export:Sample", "let a trained model continue a text"),
    "bench": Entry("bench:Bench", "time optimizer steps and training on this machine"),
}
ABOUT = (
    "Muon-SW and its paper: train, compare, measure, and reproduce with claims that are checked.",
    "`muonsw COMMAND --help` lists the options of a command, `muonsw --version` prints the version.",
    "Exit codes: 0 done, 1 a claim failed or damage was found, 2 it cannot be done as asked, 3 a fault of the "
    "machine, 128 plus the signal if it was stopped (130 for Ctrl-C).",
)


def run(arguments: Sequence[str]) -> int:
    """Parse the words of a command line and run the command that they name; usage errors exit with 2."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else USAGE
    name, *options = arguments
    if name not in COMMANDS:
        print(f"muonsw: {unknown('command', harmless(name), list(COMMANDS))}", file=sys.stderr)
        return USAGE
    kind, shown, command = load(name), [harmless(word) for word in options], None
    if shown != options:
        # A usage error repeats what was typed. One about words that could steer a terminal is made from harmless ones.
        with suppress(SystemExit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            command = parse(name, kind, options)
    return (command or parse(name, kind, shown)).run()


def load(name: str) -> type[Command]:
    """The class of a command."""
    module, _, kind = COMMANDS[name].place.partition(":")
    path = module if "." in module else f"{__name__}.{module}"
    return cast("type[Command]", getattr(needed(path, "the lab needs", "lab"), kind))


def overview() -> str:
    """What `muonsw --help` prints."""
    longest = max(map(len, COMMANDS))
    listed = [f"  {name:<{longest}}  {entry.summary}" for name, entry in COMMANDS.items()]
    about = [textwrap.fill(paragraph, width()) for paragraph in ABOUT]
    return "\n\n".join(["usage: muonsw COMMAND [OPTIONS]", about[0], "\n".join(["commands:", *listed]), *about[1:]])
