"""Train from a config file, without any command-line library: `python -m muonsw.lab.train.__main__ config.json RUN`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from muonsw.lab.errors import UsageError
from muonsw.lab.terminal import say
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import read_json
from muonsw.lab.train.guard import Diverged
from muonsw.lab.train.interrupt import Interrupted
from muonsw.lab.train.loop import train
from muonsw.lab.train.progress import showing

USAGE = "usage: python -m muonsw.lab.train.__main__ CONFIG.json RUN_FOLDER"
OK, FAILED, UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and return an exit code: 0 done, 1 diverged, 2 not usable, 130 or 143 stopped and saved."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 2:
        print(USAGE, file=sys.stderr)
        return UNUSABLE
    try:
        return run(read_config_file(Path(given[0])), Path(given[1]))
    except UsageError as error:
        print(f"muonsw: {error}", file=sys.stderr)
        return UNUSABLE


def read_config_file(path: Path) -> RunConfig:
    """The run that a JSON file describes.

    Raises:
        UsageError: If it cannot be read or a setting is wrong.
    """
    try:
        return RunConfig.from_data(read_json(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def run(config: RunConfig, folder: Path) -> int:
    """Train with progress on the terminal, and report how it ended."""
    console = Console()
    try:
        with showing(console) as watch:
            result = train(config, folder, watch)
    except Diverged as error:
        print(f"muonsw: {error}", file=sys.stderr)
        return FAILED
    except Interrupted as error:
        print(f"muonsw: {error}", file=sys.stderr)
        return 128 + (error.signal or signal.SIGINT)
    best = f"best {result['best_loss']:.4f} after {result['best_step']:,}"
    ended = f"validation loss {result['final_loss']:.4f} after {result['steps']:,} updates ({best})"
    say(console, f"{ended}, {result['seconds']:.0f} s, in {folder}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
