"""The command line: `muonsw COMMAND ...`. Commands are typed dataclasses, listed in `muonsw.lab.commands`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from muonsw import __version__
from muonsw.lab.base.errors import INTERRUPTED, MACHINE, OK, Interrupted, UsageError, needed
from muonsw.lab.base.launcher import end, report_error
from muonsw.lab.base.terminal import enduring, harmless


@enduring
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is done, 1 a claim that failed or damage that was found, 2 something that cannot be done as it was asked, 3 a
    fault of the machine. A command that was stopped by a signal returns 128 plus the signal, as shells do.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(f"muonsw {__version__}")
        return OK
    try:
        return int(needed("muonsw.lab.commands", "the lab needs", "lab").run(given))
    except (UsageError, Interrupted) as error:
        report_error(f"muonsw: {harmless(error)}")
        print(f"muonsw: {harmless(error)}", file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print("muonsw: there is not enough memory: ask for something smaller, or stop other programs", file=sys.stderr)
        return MACHINE
    except KeyboardInterrupt:
        print("muonsw: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    end(main())
