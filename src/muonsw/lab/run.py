"""Train from a config file: `python -m muonsw.lab.run CONFIG.json RUN_FOLDER`, also as ranks of torchrun.

It needs no command-line library, so it runs on machines where only torch and the lab's few packages are installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from muonsw.lab.base.launcher import end, report_error
from muonsw.lab.console import enduring, harmless, say
from muonsw.lab.errors import FAILED, INTERRUPTED, OK, USAGE, Diverged, Interrupted, UsageError
from muonsw.text import counted

if TYPE_CHECKING:
    from muonsw.lab.train.config import RunConfig


@enduring
def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return an exit code: 0 done, 1 diverged, 2 not usable, 3 the machine, 130 or 143 stopped and saved."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 2 or "" in given:
        usage = "usage: python -m muonsw.lab.run CONFIG.json RUN_FOLDER"
        report_error(usage)
        print(usage, file=sys.stderr)
        return USAGE
    try:
        folder = importlib.import_module("muonsw.lab.train.folder")
        return run(folder.read_config_file(Path(given[0])), Path(given[1]))
    except (UsageError, Interrupted) as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:  # while modules load, or a second Ctrl-C
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(config: RunConfig, folder: Path) -> int:
    """Train on all ranks that were started, with progress on the console of the first; print how it ended."""
    from muonsw.lab.train.loop import train
    from muonsw.lab.train.progress import watching
    from muonsw.lab.train.world import joined

    console = Console()
    try:
        with joined(config.parallel.timeout) as world, watching(console) if world.leads else nullcontext() as watch:
            result = train(config, folder, watch, world)
    except Diverged as error:
        _report(error)
        return FAILED
    if not world.leads:
        return OK
    best = f"best {result['best_loss']:.4f} after {result['best_step']:,}"
    ended = f"validation loss {result['final_loss']:.4f} after {counted(result['steps'], 'update')} ({best})"
    if skipped := result["skipped"]:
        ended += f", {skipped:,} of them skipped because their gradients were not finite"
    say(console, f"{ended}, {result['seconds']:.0f} s, in {folder}")
    return OK


def _report(error: Exception) -> None:
    """Print how it ended; rank 0 alone reports what all ranks know."""
    from muonsw.lab.train.world import known_to_all, speaker

    other = speaker()
    report_error(f"muonsw: {harmless(error)}")
    if other is None or not known_to_all(error):
        print(f"muonsw: {other or ''}{harmless(error)}", file=sys.stderr)


if __name__ == "__main__":
    end(main())
