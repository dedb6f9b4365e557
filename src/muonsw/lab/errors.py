"""What can go wrong, as exceptions that the command line turns into a message and an exit code."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

OK, FAILED, USAGE, MACHINE = 0, 1, 2, 3
INTERRUPTED = 130  # by Ctrl-C, before there was anything to save, or at once by a second one


class UsageError(Exception):
    """Something the user asked for cannot be done; the message says what to do instead."""

    exit_code: ClassVar[int] = USAGE


class MachineError(UsageError):
    """The machine could not do it: no room on the disk, or a process that the system ended."""

    exit_code: ClassVar[int] = MACHINE


class Diverged(Exception):  # noqa: N818 (an outcome of training that the caller reports, not a fault of the program)
    """The loss is not finite, or far above where it was.

    Attributes:
        step: The update that showed it.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class Interrupted(Exception):  # noqa: N818 (not a fault: the work was saved and can go on)
    """The process was asked to stop by a signal, and has saved its work."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)
        self.signal = number

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def exit_code(self) -> int:
        """128 plus the signal, as shells say it."""
        return 128 + self.signal


def needed(name: str, who: str, extra: str) -> Any:
    """Import a module of an optional package; if it is missing, raise a `UsageError` that names its extra.

    `who` is the beginning of the message, with a verb: "FineWeb needs".
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        if package == "muonsw":
            raise
        raise UsageError(f"{who} the package {package}: {install_line(extra)}") from error


def install_line(extra: str) -> str:
    """How an extra is installed; docs/install.md has the same line."""
    return f"run pip install '.[{extra}]' in the clone of muonsw"
