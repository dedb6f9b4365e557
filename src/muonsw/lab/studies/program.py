"""The one program that trains a run from its config file, without any command-line library.

    python -m muonsw.lab.run CONFIG.json RUN [NOTE.json]

A note is for jobs of a cluster: what failed is written there, and a run that diverges says so in its folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from muonsw.lab.base.errors import FAILED, INTERRUPTED, OK, USAGE, Diverged, Interrupted, UsageError
from muonsw.lab.base.launcher import report_error
from muonsw.lab.base.terminal import enduring, harmless, say
from muonsw.lab.studies.jobs import train_alone
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import read_config_file
from muonsw.lab.train.loop import train
from muonsw.lab.train.progress import watching
from muonsw.lab.train.world import joined, known_to_all, speaker
from muonsw.text import counted


@enduring
def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return an exit code: 0 done, 1 diverged, 2 not usable, 3 the machine, 130 or 143 stopped and saved."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) not in (2, 3) or "" in given:
        usage = "usage: python -m muonsw.lab.run CONFIG.json RUN_FOLDER"
        report_error(usage)
        print(usage, file=sys.stderr)
        return USAGE
    try:
        config, folder, *note = map(Path, given)
        return as_job(config, folder, *note) if note else run(read_config_file(config), folder)
    except (UsageError, Interrupted) as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:  # before there was anything to save, or the second one
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


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
