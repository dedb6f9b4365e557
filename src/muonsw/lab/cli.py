"""The command line: `muonsw COMMAND ...`. Commands are typed dataclasses, listed in `muonsw.lab.commands`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

OK, CLAIM_FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 all well, 1 a claim failed, 2 it was not usable.

    A command that was stopped by a signal and has saved its work returns 128 plus the signal, as shells do.
    """
    try:
        commands = importlib.import_module("muonsw.lab.commands")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "muonsw":
            raise
        print(f"muonsw: the lab needs {error.name}; install it with: pip install 'muonsw[lab]'", file=sys.stderr)
        return USAGE
    try:
        return int(commands.run(arguments))
    except commands.UsageError as error:
        print(f"muonsw: {error}", file=sys.stderr)
        return USAGE
    except commands.Interrupted as error:
        print(f"muonsw: {error}", file=sys.stderr)
        return 128 + int(error.signal)
    except KeyboardInterrupt:
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
