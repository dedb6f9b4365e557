"""A process that is killed at its n-th file operation or when a file reaches n bytes, or whose disk is full.

The work runs in a child process and is ended by SIGKILL, so no `finally` runs.
"""

import io
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from tests.common.children import start_child

# Operations on names, as Python's audit events call them, and calls of C functions that write or wait for the disk.
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
CALLS = {"write", "fsync", "serialize_file"}


class Counter:
    """Counts the file operations of this process below a folder, and ends it before the n-th, if one is given."""

    def __init__(self, folder: Path, last: int = 0) -> None:
        self.folder, self.last, self.count = str(folder), last, 0

    def start(self) -> None:
        sys.addaudithook(self._audit)
        sys.setprofile(self._profile)

    def _audit(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _mode, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and self._ours(path):
                self._tick()
        elif event in EVENTS and self._ours(arguments[0]):
            self._tick()

    def _ours(self, path: object) -> bool:
        # A name that is relative to an open folder, as in `rmtree`, is below it as well.
        return isinstance(path, str | os.PathLike) and (str(path).startswith(self.folder) or "/" not in str(path))

    def _profile(self, _frame: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__name__", "") in CALLS:
            owner = getattr(function, "__self__", None)
            if not isinstance(owner, io.IOBase) or self._ours(getattr(owner, "name", None)):
                self._tick()

    def _tick(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], int]) -> int:
    """Run in a child process and return its exit code, or minus the signal that ended it; show what it printed."""
    with tempfile.NamedTemporaryFile() as output:
        child = start_child(work, Path(output.name))
        child.join()
        print(Path(output.name).read_text(encoding="utf-8"))
    return child.exitcode


def operations(work: Callable[[], object], folder: Path) -> int:
    """Count the file operations of the work below a folder."""
    with tempfile.NamedTemporaryFile() as answer:
        path = Path(answer.name)

        def counted() -> int:
            counter = Counter(folder)
            counter.start()
            work()
            sys.setprofile(None)
            path.write_text(str(counter.count), encoding="utf-8")
            return 0

        assert in_child(counted) == 0
        return int(path.read_text(encoding="utf-8"))


def killed_at(number: int, work: Callable[[], object], folder: Path) -> bool:
    """Do the work in a child that is killed before its n-th operation; return whether it got that far."""
    return _killed(Counter(folder, number).start, work, signal.SIGKILL)


def killed_at_size(size: int, work: Callable[[], object]) -> bool:
    """Do the work in a child that is killed when a write makes a file larger than `size`; return whether it was."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_files(size)

    return _killed(limit, work, signal.SIGXFSZ)


def _killed(prepare: Callable[[], None], work: Callable[[], object], number: signal.Signals) -> bool:
    def doomed() -> int:
        prepare()
        work()
        return 0

    code = in_child(doomed)
    assert code in (0, -number), code
    return code != 0


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond `size` bytes: the system then refuses to write, as on a full disk.

    Bytecode is not written either: CPython keeps a truncated file, and every later import of it fails.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for child processes
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Call `limit_files` for the block, then lift the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.dict(os.environ), mock.patch.object(sys, "dont_write_bytecode"):
        limit_files(size)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
