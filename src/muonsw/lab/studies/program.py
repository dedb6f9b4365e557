"""The one program that trains, without any command-line library: a run from its config file, or runs of the evidence.

    python -m muonsw.lab.run CONFIG.json RUN [NOTE.json]
    python -m muonsw.lab.run evidence/NAME --data DIR [--workers N] [--seeds N] [--only NAME ...]

A note is for jobs of a cluster: what failed is written there, and a run that diverges says so in its folder.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from muonsw.lab.base.launcher import report_error
from muonsw.lab.console import enduring, harmless, say
from muonsw.lab.errors import FAILED, INTERRUPTED, OK, USAGE, Diverged, Interrupted, UsageError
from muonsw.lab.studies.jobs import train_alone
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import read_config_file
from muonsw.lab.train.loop import train
from muonsw.lab.train.progress import watching
from muonsw.lab.train.state import resolve_device
from muonsw.lab.train.world import joined, known_to_all, speaker
from muonsw.text import counted


@enduring
def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return an exit code: 0 done, 1 diverged, 2 not usable, 3 the machine, 130 or 143 stopped and saved."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    evidence = bool(given) and given[0].partition("/")[0] == "evidence"
    if not evidence and (len(given) not in (2, 3) or "" in given):
        usage = "usage: python -m muonsw.lab.run CONFIG.json RUN_FOLDER (or evidence/STUDY -h)"
        report_error(usage)
        print(usage, file=sys.stderr)
        return USAGE
    try:
        if evidence:
            return gather(given)
        config, folder, *note = map(Path, given)
        return as_job(config, folder, *note) if note else run(read_config_file(config), folder)
    except (UsageError, Interrupted) as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:  # before there was anything to save, or the second one
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


def gather(arguments: Sequence[str]) -> int:
    """Make the runs of the evidence that have no record yet."""
    from muonsw.lab.studies import evidence  # a run by itself needs none of this
    from muonsw.lab.studies.workshop import BySettings, Workshop, gpus_for

    parser = ArgumentParser("python -m muonsw.lab.run", description="Make runs of the evidence, and export them.")
    parser.add_argument("name", help=f"{evidence.NAME}, or one study: {', '.join(evidence.TEXTS)}")
    parser.add_argument("--data", type=Path, required=True, help="a folder that `muonsw data prepare` filled")
    parser.add_argument("--records", type=Path, default=evidence.FOLDER, help="folder of the records")
    parser.add_argument("--runs", type=Path, default=Path("out/runs-mini"), help="folder of the runs")
    parser.add_argument("--workers", type=at_least_one, default=1, help="runs at a time; several share a GPU")
    parser.add_argument("--seeds", type=at_least_one, help="train so many seeds of each comparison alone")
    parser.add_argument("--only", nargs="+", help="train comparisons with one of these in their names, such as muon")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    given = parser.parse_args(arguments)
    console, places = Console(), BySettings(given.runs, given.data, resolve_device(given.device).type)
    shop = Workshop(console, given.workers, places, devices=gpus_for(given.device))
    for name in evidence.chosen(given.name, given.data, given.records):
        made = evidence.gather(name, shop, evidence.file_of(name, given.records), given.seeds, given.only)
        say(console, f"{name}: {made} runs exported to {evidence.file_of(name, given.records)}")
    return OK


def at_least_one(text: str) -> int:
    """A count from the command line."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def as_job(config: Path, folder: Path, note: Path) -> int:
    """Be one of the ranks of a job."""
    run = read_config_file(config)
    with joined(run.parallel.timeout) as world:
        train_alone(run, folder, note, world)
    return OK


def report(error: Exception) -> None:
    """Say how it ended; what all ranks know is said by rank 0 alone."""
    other = speaker()
    report_error(f"muonsw: {harmless(error)}")
    if other is None or not known_to_all(error):
        print(f"muonsw: {other or ''}{harmless(error)}", file=sys.stderr)


def run(config: RunConfig, folder: Path) -> int:
    """Train, on all ranks that were started, with progress on the terminal of the first; and report how it ended."""
    console = Console()
    try:
        with joined(config.parallel.timeout) as world, watching(console) if world.leads else nullcontext() as watch:
            result = train(config, folder, watch, world)
    except Diverged as error:
        report(error)
        return FAILED
    if not world.leads:
        return OK
    best = f"best {result['best_loss']:.4f} after {result['best_step']:,}"
    ended = f"validation loss {result['final_loss']:.4f} after {counted(result['steps'], 'update')} ({best})"
    if skipped := result["skipped"]:
        ended += f", {skipped:,} of them skipped because their gradients were not finite"
    say(console, f"{ended}, {result['seconds']:.0f} s, in {folder}")
    return OK
