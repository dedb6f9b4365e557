"""What this process runs on, how it is asked to stop, and the lab's one pool of worker processes.

The pool is ours because those of `concurrent.futures` and loky give up all jobs when one process dies, take no messages
from a job under way, pass no signal on (a run could not save), and leave their processes behind when they are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar, cast

import torch

from muonsw import __version__, machine
from muonsw.lab.base.launcher import is_rank
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError

Task = TypeVar("Task")
Result = TypeVar("Result")
Tell = Callable[[Any], None]

PACKAGES = ("torch", "numpy", "matplotlib", "plotly", "transformers", "timm")
POLL_SECONDS = 0.2
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# What a job may raise as its answer; anything else is a fault of the program, and its process is not used again.
EXPECTED = (UsageError, Diverged)
VISIBLE = "CUDA_VISIBLE_DEVICES"
GOES_ON = "the same command again goes on"


def visible_gpus() -> tuple[str, ...]:
    """GPUs that this process may use, under the names that CUDA_VISIBLE_DEVICES has for them."""
    number, given = machine.gpus(), os.environ.get(VISIBLE, "")
    names = given.split(",") if given else [str(place) for place in range(number)]
    return tuple(name.strip() for name in names[:number])


def next_device(devices: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """The device that the fewest processes have, the first of those; None where there are none to give."""
    return min(devices, key=taken.count) if devices else None


def environment() -> dict[str, Any]:
    """Versions and the class of machine; nothing that identifies it or its user."""
    return {
        "muonsw": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_cores": machine.cores(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class StopRequest:
    """Set by a signal, read where work can be saved."""

    signal: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request; a second Ctrl-C ends the process at once.

    They stay requests where a rank leaves the block by an error: torchrun sends SIGTERM to the other ranks of a lost
    one just when they are about to say why they end.
    """
    request = StopRequest()

    def ask(number: int, _frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = number

    if threading.current_thread() is not threading.main_thread():
        yield request  # Python delivers signals to the main thread alone
        return
    before = {number: signal.signal(number, ask) for number in STOP_SIGNALS if not _under_nohup(number)}
    try:
        yield request
    finally:
        for number, handler in before.items() if sys.exc_info()[0] is None or not is_rank() else ():
            signal.signal(number, handler)


def _under_nohup(number: int) -> bool:
    return number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch use so many threads inside the block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def explain(error: BaseException) -> str:
    """An error in words: its message alone if it was written for the user, else with its kind."""
    return str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"


def stop_at_failure(name: str, error: Exception) -> None:
    """End all jobs because one failed."""
    kind = MachineError if isinstance(error, MachineError) else UsageError
    raise kind(f"{name}: {explain(error)}") from error


@dataclass(frozen=True)
class Audience:
    """Callbacks about the jobs; every function is called in the parent, and may raise to end them all."""

    # A job's name, and what it reported while it ran.
    message: Callable[[str, Any], None] = lambda _name, _content: None
    finished: Callable[[str, Any], None] = lambda _name, _result: None  # a job's name and its result
    # A job's name and its error. The other jobs go on if this returns.
    failed: Callable[[str, Exception], None] = stop_at_failure


def run_jobs(
    work: Callable[[Task, Tell], Result],
    jobs: Iterable[tuple[str, Task]],
    audience: Audience,
    *,
    workers: int,
    threads: int | None = 1,
    again: str = GOES_ON,
    devices: Sequence[str] = (),
) -> None:
    """Do jobs, several at a time in processes of their own, and tell the audience what they say and find.

    Processes end with this one, however it ends. A signal to stop is passed on to them: a job that raises
    `Interrupted` says that it saved its work; one that does not listen to signals is ended.

    Args:
        work: Does one job: is given a task and a function that sends a message to the audience. With several workers
            it and its tasks must be picklable; what all jobs share belongs into it (`functools.partial`), and is sent
            once to each process.
        jobs: Names and tasks. Read one job ahead of those at work, so that an endless stream is no burden.
        audience: Who hears of it.
        workers: Jobs at a time; with 1 they are done in this process.
        threads: Threads of torch in each job; None leaves them to the job.
        again: What the same command does after jobs were stopped.
        devices: GPUs as CUDA_VISIBLE_DEVICES names them. Each process sees one, and none is given to a second process
            before all have one; without any, and with one worker, a process sees what this one does.

    Raises:
        Interrupted: If this process was asked to stop, after all jobs at work have ended.
        UsageError: If a job failed and the audience does not say otherwise.

    Examples:
        >>> found = {}
        >>> audience = Audience(finished=found.__setitem__)
        >>> run_jobs(lambda task, tell: task**2, [("two", 2), ("three", 3)], audience, workers=1)
        >>> found
        {'two': 4, 'three': 9}
    """
    most = min(workers, len(jobs)) if isinstance(jobs, Sequence) else workers
    if most <= 1:
        _run_here(work, jobs, audience, threads)
    else:
        _Pool(work, audience, most, threads, again, devices).run(jobs)


def _run_here(
    work: Callable[[Task, Tell], Result], jobs: Iterable[tuple[str, Task]], audience: Audience, threads: int | None
) -> None:
    with torch_threads(threads):
        for name, task in jobs:

            def tell(content: Any, name: str = name) -> None:
                audience.message(name, content)

            try:
                result = work(task, tell)
            except EXPECTED as error:
                audience.failed(name, error)
            else:
                audience.finished(name, result)


class _Pool:
    """Worker processes that are given one job after another, and send back what happens.

    Each has a pipe of its own: a process that dies in the middle of a message can hold no lock that another needs.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        audience: Audience,
        workers: int,
        threads: int | None,
        again: str,
        devices: Sequence[str],
    ) -> None:
        self.work, self.audience, self.workers, self.threads, self.again = work, audience, workers, threads, again
        self.devices, self.device_of = devices, dict[Connection, str | None]()
        self.processes: dict[Connection, BaseProcess] = {}
        self.busy: dict[Connection, str] = {}
        self.saved = 0

    def run(self, jobs: Iterable[tuple[str, Any]]) -> None:
        with stop_requests() as request:
            try:
                for name, task in jobs:
                    while len(self.busy) >= self.workers:
                        self._listen(request)
                    self._assign(name, task)
                while self.busy:
                    self._listen(request)
            except _Stop as stop:
                raise Interrupted(self._stop(), stop.signal) from None
            finally:
                self._end(sys.exc_info()[0] is KeyboardInterrupt)

    def _assign(self, name: str, task: Any) -> None:
        idle = next((connection for connection in self.processes if connection not in self.busy), None)
        connection = idle or self._start_worker()
        self.busy[connection] = name
        with suppress(BrokenPipeError):  # it has died since its last job: `_hear` finds that out
            connection.send(task)

    def _start_worker(self) -> Connection:
        # A forked child would inherit the threads of torch and of the tokenizers in whatever state they are.
        spawn: Any = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.device_of[ours] = next_device(self.devices, [self.device_of[other] for other in self.processes])
        # No daemon: a daemon may have no processes of its own, as the DataLoader of a task may.
        process = spawn.Process(target=_serve, args=(theirs, self.work, self.threads))
        with _showing_alone(self.device_of[ours]):
            process.start()
        self.processes[ours] = process
        theirs.close()  # so that the end of the process is the end of the pipe
        return cast("Connection", ours)

    def _listen(self, request: StopRequest) -> None:
        for ready in wait(list(self.busy), timeout=POLL_SECONDS):
            if request.signal is None:
                self._hear(cast("Connection", ready), request)
        if request.signal is not None:
            raise _Stop(request.signal)

    def _hear(self, connection: Connection, request: StopRequest) -> None:
        kind, content = self._receive(connection)
        if kind == "message":
            self.audience.message(self.busy[connection], content)
            return
        name = self.busy.pop(connection)
        if kind == "finished":
            self.audience.finished(name, content)
        elif kind == "failed":
            self.audience.failed(name, content)
        elif not _asked(request):  # else the signal that ended the job was meant for all of us
            fix = f"run fewer at a time if memory was short; {self.again}"
            self.audience.failed(name, MachineError(f"its process was ended from outside ({_ending(content)}): {fix}"))

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        """What a worker says: `message`, `finished`, `failed`, `stopped`; or that it `died`, and how."""
        try:
            kind, content, stays = connection.recv()
        except (EOFError, OSError):
            process = self._stop_worker(connection)
            return "died", process.exitcode
        self.saved += kind == "stopped"
        if not stays:
            self._stop_worker(connection)
        return kind, content

    def _stop_worker(self, connection: Connection) -> BaseProcess:
        connection.close()
        process = self.processes.pop(connection)
        process.join()
        return process

    def _stop(self) -> str:
        """Ask the jobs at work to save and stop, wait until they have, and say how that went."""
        for connection in self.busy:
            self.processes[connection].terminate()
        unsaved = []
        while self.busy:
            for ready in wait(list(self.busy)):
                connection = cast("Connection", ready)
                kind, content = self._receive(connection)
                if kind == "message":
                    continue
                name = self.busy.pop(connection)
                if kind == "failed":
                    unsaved.append(f"{name} was not saved: {explain(content)}")
                elif kind == "died" and content not in STOP_EXIT_CODES:
                    unsaved.append(f"{name} was not saved: its process was ended from outside ({_ending(content)})")
                elif kind == "finished":
                    self.audience.finished(name, content)
        how = "; ".join(unsaved) or ("all runs saved" if self.saved else "")
        return f"{', '.join(filter(None, ('stopped', how)))}; {self.again}"

    def _end(self, at_once: bool) -> None:
        """Let idle workers go; end those that are still at work, which save what they can unless it must be at once."""
        try:
            if self.busy and not at_once:
                self._stop()
            for process in self.processes.values() if self.busy else ():
                process.kill()
            for connection in list(self.processes):
                self._stop_worker(connection)
        finally:  # a second Ctrl-C, or an audience that raises again
            for process in self.processes.values():
                process.kill()


# How a job ends that was asked to stop and does not listen: it has nothing to save.
STOP_EXIT_CODES = tuple(-number for number in STOP_SIGNALS)


class _Stop(Exception):  # noqa: N818 (leaves the loop over jobs)
    def __init__(self, number: int) -> None:
        self.signal = number


def _asked(request: StopRequest) -> bool:
    """Whether this process was sent the signal too; it may see it a moment after a worker has died of it."""
    threading.Event().wait(POLL_SECONDS)
    return request.signal is not None


def _ending(exit_code: int | None) -> str:
    return f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"


@contextmanager
def _showing_alone(device: str | None) -> Iterator[None]:
    """Let processes that start in the block see one device: CUDA looks once, perhaps while modules are imported."""
    before = os.environ.get(VISIBLE)
    try:
        if device is not None:
            os.environ[VISIBLE] = device
        yield
    finally:
        if device is not None:
            del os.environ[VISIBLE]
            os.environ.update({} if before is None else {VISIBLE: before})


def _serve(connection: Connection, work: Callable[[Any, Tell], Any], threads: int | None) -> None:
    """A worker's life: do the tasks that the parent sends until it closes the pipe."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # An interrupt at the keyboard reaches every process. A job that can save installs a handler of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Else this process would spawn the workers of a DataLoader, too, which cannot import a task's file.
    multiprocessing.set_start_method(None, force=True)
    _pin_threads(threads)
    stays = True
    with suppress(EOFError, BrokenPipeError):
        while stays:
            task = connection.recv()
            kind, content, stays = _answer(work, task, lambda message: connection.send(("message", message, True)))
            connection.send((kind, content, stays))


def _answer(work: Callable[[Any, Tell], Any], task: Any, tell: Tell) -> tuple[str, Any, bool]:
    """What to tell the parent about a job, and whether this process can do another."""
    try:
        return "finished", work(task, tell), True
    except Interrupted as stop:
        return "stopped", str(stop), False
    except EXPECTED as error:
        return "failed", error, True
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever it is, the user must hear of it from the parent
        failure = UsageError(explain(error))
        failure.add_note(traceback.format_exc())
        return "failed", failure, False


def _end_with_parent() -> None:
    """End this process as soon as its parent has, even by SIGKILL: what was saved is there, and locks are free."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


def _pin_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
        os.environ.update(OMP_NUM_THREADS=str(threads), RAYON_NUM_THREADS=str(threads))
