"""The command line: `muonsw COMMAND ...`. Commands are typed dataclasses, listed in `muonsw.lab.commands`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from muonsw.lab.errors import OK, USAGE, Interrupted, UsageError
from muonsw.lab.terminal import enduring, harmless
from muonsw.version import __version__

INTERRUPTED = 130


@enduring
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is done, 1 a claim that failed, 2 something that cannot be done as it was asked, 3 a fault of the machine. A
    command that was stopped by a signal and has saved its work returns 128 plus the signal, as shells do.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(f"muonsw {__version__}")
        return OK
    try:
        commands = importlib.import_module("muonsw.lab.commands")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "muonsw":
            raise
        print(f"muonsw: the lab needs {error.name}; install it with: pip install 'muonsw[lab]'", file=sys.stderr)
        return USAGE
    try:
        return int(commands.run(given))
    except (UsageError, Interrupted) as error:
        print(f"muonsw: {harmless(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
