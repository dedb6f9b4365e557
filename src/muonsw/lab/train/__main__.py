"""Train from a config file, without any command-line library: `python -m muonsw.lab.run CONFIG.json RUN`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from muonsw.lab.errors import FAILED, INTERRUPTED, OK, USAGE, Diverged, Interrupted, UsageError
from muonsw.lab.launcher import end, report_error
from muonsw.lab.terminal import enduring, harmless, say
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import read_config_file
from muonsw.lab.train.loop import train
from muonsw.lab.train.progress import watching
from muonsw.lab.train.world import joined, known_to_all, speaker

__all__ = ["main", "read_config_file", "run"]


@enduring
def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return an exit code: 0 done, 1 diverged, 2 not usable, 3 the machine, 130 or 143 stopped and saved."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 2:
        usage = "usage: python -m muonsw.lab.run CONFIG.json RUN_FOLDER"
        report_error(usage)
        print(usage, file=sys.stderr)
        return USAGE
    try:
        return run(read_config_file(Path(given[0])), Path(given[1]))
    except (UsageError, Interrupted) as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:  # before there was anything to save, or the second one
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


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
        with joined() as world, watching(console) if world.leads else nullcontext() as watch:
            result = train(config, folder, watch, world)
    except Diverged as error:
        report(error)
        return FAILED
    if not world.leads:
        return OK
    best = f"best {result['best_loss']:.4f} after {result['best_step']:,}"
    ended = f"validation loss {result['final_loss']:.4f} after {result['steps']:,} updates ({best})"
    if skipped := result["skipped"]:
        ended += f", {skipped:,} of them skipped because their gradients were not finite"
    say(console, f"{ended}, {result['seconds']:.0f} s, in {folder}")
    return OK


if __name__ == "__main__":
    end(main())
