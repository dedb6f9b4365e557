"""How a process ends: exceptions that become a message and an exit code, stop signals, and ranks of a launcher."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

OK, FAILED, USAGE, MACHINE = 0, 1, 2, 3
INTERRUPTED = 130  # by Ctrl-C with nothing to save, or by a second Ctrl-C
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# Environment variables that torchrun sets for every rank.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ending(Exception):  # noqa: N818 (not always an error)
    """Ends the command with a message and an exit code."""

    exit_code: int


class UsageError(Ending):
    """The user asked for something that cannot be done; the message says what to do instead."""

    exit_code = USAGE


class MachineError(UsageError):
    """The machine could not do it: the disk is full, or the system killed a process."""

    exit_code = MACHINE


class Diverged(Ending):
    """At this step the loss is not finite, or far above its best."""

    exit_code = FAILED

    def __init__(self, message: str, step: int = 0) -> None:  # unpickling passes the message alone, then sets `step`
        super().__init__(message)
        self.step = step


class Interrupted(Ending):
    """A signal asked the process to stop, and it has saved its work."""

    def __init__(self, message: str, number: int = 0) -> None:  # unpickling passes the message alone
        super().__init__(message)
        self.exit_code = 128 + number  # as in a shell


def needed(name: str, who: str, extra: str) -> Any:
    """Import an optional module; if it is missing, raise a `UsageError` that begins with `who` ("FineWeb needs")."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        if package == "muonsw":
            raise
        install = f"run pip install '.[{extra}]' in the clone of muonsw"  # as docs/guide/quickstart.md says
        raise UsageError(f"{who} the package {package}: {install}") from error


class StopRequest:
    """Set by a signal handler, and checked when work can be saved."""

    signal: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request; a second Ctrl-C raises `KeyboardInterrupt`.

    When an error ends the block on a rank, the handlers stay: after losing a rank, torchrun sends SIGTERM to the
    others while they are reporting their errors.
    """
    request = StopRequest()

    def ask(number: int, _frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = number

    # nohup ignores SIGHUP, and the run should too.
    handled = [s for s in STOP_SIGNALS if s == signal.SIGINT or signal.getsignal(s) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items() if sys.exc_info()[0] is None or not is_rank() else ():
            signal.signal(number, handler)


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several."""
    return all(name in os.environ for name in VARIABLES)


def end(code: int) -> NoReturn:
    """Exit with a code; a rank exits without finalizing Python, as processes of `multiprocessing` do.

    Gloo's threads outlive `destroy_process_group` while a mesh or a layer refers to the group. They take the GIL to
    release the tensors of a finished collective. During finalization Python would end such a thread inside C++ code
    that does not allow it, and the process would abort.
    """
    if not is_rank():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
