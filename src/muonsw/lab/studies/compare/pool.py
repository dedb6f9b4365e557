"""Several runs at a time, each in a process of its own; only the parent draws."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from muonsw.lab.errors import UsageError
from muonsw.lab.studies.compare.arms import Job
from muonsw.lab.train.folder import RESULT, refuse_other_settings
from muonsw.lab.train.guard import Diverged
from muonsw.lab.train.interrupt import Interrupted, stop_requests
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.metrics import Record
from muonsw.lab.train.state import with_fingerprint

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Audience:
    """Who is told what the runs do; every method is called in the parent.

    Attributes:
        record: A job's name and a record of its run.
        finished: A job's name, once it is complete.
        note: A job's name and a sentence.
    """

    record: Callable[[str, Record], None] = lambda _name, _record: None
    finished: Callable[[str], None] = lambda _name: None
    note: Callable[[str, str], None] = lambda _name, _text: None


def run_all(jobs: Sequence[Job], *, workers: int, audience: Audience | None = None) -> None:
    """Bring every job to its end; those that are complete are left alone, those begun go on.

    The number of workers changes nothing but the time: threads are a setting of each run.

    Raises:
        UsageError: If a run cannot start or diverges, with its name (the others are saved), or a folder holds another.
        Interrupted: If the process was asked to stop; all runs were saved.
    """
    audience = audience or Audience()
    todo = []
    for job in jobs:
        if (job.folder / RESULT).exists():
            refuse_other_settings(job.folder, with_fingerprint(job.config))
            audience.finished(job.name)
        else:
            todo.append(job)
    if not todo:
        return
    if min(workers, len(todo)) == 1:
        _run_here(todo, audience)
    else:
        _Pool(todo, min(workers, len(todo)), audience).run()


def _run_here(jobs: Sequence[Job], audience: Audience) -> None:
    for job in jobs:
        name = job.name

        def record(record: Record, name: str = name) -> None:
            audience.record(name, record)

        def note(text: str, name: str = name) -> None:
            audience.note(name, text)

        try:
            train(job.config, job.folder, Watch(record=record, note=note))
        except Diverged as error:
            raise UsageError(f"{name}: {error}") from error
        audience.finished(name)


class _Pool:
    """Worker processes that are given one job after another, and send back what happens.

    Each has a pipe of its own: a process that dies in the middle of a message can hold no lock that another needs.
    """

    def __init__(self, jobs: Sequence[Job], workers: int, audience: Audience) -> None:
        self.todo, self.audience = deque(jobs), audience
        self.busy: set[Connection] = set()
        self.processes: dict[Connection, BaseProcess] = {}
        self.number = workers

    def run(self) -> None:
        with stop_requests() as request:
            try:
                for _ in range(self.number):
                    self._assign(self._hire())
                while self.busy:
                    for connection in wait(list(self.busy), timeout=POLL_SECONDS):
                        self._listen(cast("Connection", connection))
                    if request.signal is not None:
                        number = request.signal
                        raise Interrupted("stopped, all runs saved; the same command again goes on", number)
            finally:
                self._end()

    def _hire(self) -> Connection:
        # A forked child would inherit torch's thread pool in whatever state it is in.
        spawn: Any = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.processes[ours] = spawn.Process(target=_work, args=(theirs,), daemon=True)
        self.processes[ours].start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return cast("Connection", ours)

    def _assign(self, connection: Connection) -> None:
        job = self.todo.popleft() if self.todo else None
        connection.send(job)
        (self.busy.discard if job is None else self.busy.add)(connection)

    def _listen(self, connection: Connection) -> None:
        try:
            kind, name, content = connection.recv()
        except (EOFError, OSError) as error:
            self.busy.discard(connection)
            raise UsageError("a training process died without a word: is there enough memory?") from error
        if kind == "record":
            self.audience.record(name, content)
        elif kind == "note":
            self.audience.note(name, content)
        elif kind == "finished":
            self.audience.finished(name)
            self._assign(connection)
        else:
            raise UsageError(f"{name}: {content}")

    def _end(self) -> None:
        """Ask workers that are still training to save and stop, and read on until they have."""
        for connection in self.busy:
            self.processes[connection].terminate()
            with suppress(OSError):
                connection.send(None)
        listening = dict(self.processes)
        while listening:
            for ready in wait(list(listening)):
                waiting = cast("Connection", ready)
                try:
                    waiting.recv()
                except (EOFError, OSError):
                    listening.pop(waiting).join()


def _work(connection: Connection) -> None:
    """Train what the parent sends, until it sends None; SIGTERM saves the run at hand and ends it."""
    with stop_requests() as request, suppress(BrokenPipeError):
        while request.signal is None and (job := connection.recv()) is not None:
            if not _train(job, connection):
                return


def _train(job: Job, connection: Connection) -> bool:
    """Bring a job to its end and report on it; False where the worker should stop."""

    def record(record: Record) -> None:
        connection.send(("record", job.name, _slim(record)))

    def note(text: str) -> None:
        connection.send(("note", job.name, text))

    try:
        train(job.config, job.folder, Watch(record=record, note=note))
    except Interrupted:
        return False
    except Exception as error:  # whatever it is, the user must hear of it from the parent
        expected = isinstance(error, UsageError | Diverged)
        connection.send(("failed", job.name, str(error) if expected else f"{type(error).__name__}: {error}"))
        return False
    connection.send(("finished", job.name, None))
    return True


def _slim(record: Record) -> Record:
    """A record without what no display shows, so that little passes between processes."""
    return {key: value for key, value in record.items() if key not in ("parameters", "layers", "roles")}
