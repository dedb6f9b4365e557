"""Several runs at a time, each in a process of its own; only the parent draws."""

from __future__ import annotations

import multiprocessing
import queue
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from muonsw.lab.compare.arms import Job
from muonsw.lab.files import UsageError
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
    """Worker processes that take one job after another, and send back what happens."""

    def __init__(self, jobs: Sequence[Job], workers: int, audience: Audience) -> None:
        # A forked child would inherit torch's thread pool in whatever state it is in.
        spawn: Any = multiprocessing.get_context("spawn")
        self.tasks, self.news = spawn.Queue(), spawn.Queue()
        for job in jobs:
            self.tasks.put(job)
        for _ in range(workers):
            self.tasks.put(None)
        self.left, self.audience = len(jobs), audience
        self.processes: list[BaseProcess] = [
            spawn.Process(target=_work, args=(self.tasks, self.news), daemon=True) for _ in range(workers)
        ]

    def run(self) -> None:
        with stop_requests() as request:
            for process in self.processes:
                process.start()
            try:
                while self.left:
                    self._listen()
                    if request.signal is not None:
                        number = request.signal
                        raise Interrupted("stopped, all runs saved; the same command again goes on", number)
            finally:
                self._end()

    def _listen(self) -> None:
        try:
            kind, name, content = self.news.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if self.left and not any(process.is_alive() for process in self.processes):
                raise UsageError("a training process died without a word: is there enough memory?") from None
            return
        if kind == "record":
            self.audience.record(name, content)
        elif kind == "note":
            self.audience.note(name, content)
        elif kind == "finished":
            self.left -= 1
            self.audience.finished(name)
        else:
            raise UsageError(f"{name}: {content}")

    def _end(self) -> None:
        """Ask workers that are still training to save and stop, and wait for them."""
        for process in self.processes:
            if process.is_alive() and self.left:
                process.terminate()
        while any(process.is_alive() for process in self.processes):
            with suppress(queue.Empty):  # a full pipe would keep a worker from ending
                self.news.get(timeout=POLL_SECONDS)
        for process in self.processes:
            process.join()


def _work(tasks: Any, news: Any) -> None:
    # Ctrl-C reaches every process of the terminal; the parent decides, and asks with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for job in iter(tasks.get, None):
        watch = Watch(
            record=lambda record, name=job.name: news.put(("record", name, _slim(record))),  # type: ignore[misc]
            note=lambda text, name=job.name: news.put(("note", name, text)),  # type: ignore[misc]
        )
        try:
            train(job.config, job.folder, watch)
        except Interrupted:
            return
        except Exception as error:  # whatever it is, the user must hear of it from the parent
            expected = isinstance(error, UsageError | Diverged)
            news.put(("failed", job.name, str(error) if expected else f"{type(error).__name__}: {error}"))
            return
        news.put(("finished", job.name, None))


def _slim(record: Record) -> Record:
    """A record without what no display shows, so that little passes between processes."""
    return {key: value for key, value in record.items() if key not in ("parameters", "layers", "roles")}
