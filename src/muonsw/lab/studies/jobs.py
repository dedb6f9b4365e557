"""One run as a job: what it is, and how a process brings it to its end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from muonsw.lab.errors import Diverged
from muonsw.lab.processes import Tell
from muonsw.lab.storage import prepare_folder, write_json
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import RESULT
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.records import Record
from muonsw.lab.train.state import compiles

# Parts of a record that no display shows; they stay in the process that made them.
DETAILS = ("parameters", "layers", "roles")


@dataclass(frozen=True)
class Job:
    """One run: its settings, its folder, and what it is called while it is under way."""

    name: str
    config: RunConfig
    folder: Path


def train_job(job: Job, tell: Tell) -> dict[str, Any]:
    """Bring one run to its end, perhaps in a process of its own."""
    with compiling_alone(job) as compiled:

        def record(record: Record) -> None:
            if record["kind"] == "train":
                compiled()
            tell({key: value for key, value in record.items() if key not in DETAILS})

        return train(job.config, job.folder, Watch(record=record, note=tell))


@contextmanager
def compiling_alone(job: Job) -> Iterator[Callable[[], None]]:
    """Let one process at a time compile a model; the others then take its code from torch's caches on disk.

    Yields:
        What to call once the model is compiled, that is after the first update; nothing happens where none is.
    """
    if not compiles(job.config):
        yield lambda: None
        return
    prepare_folder(job.folder.parent)
    model = hashlib.sha256(repr(job.config.model).encode()).hexdigest()[:10]
    lock = FileLock(job.folder.parent / f".compiling-{model}")
    lock.acquire()
    try:
        yield lock.release
    finally:
        lock.release()


def write_divergence(folder: Path, error: Diverged) -> None:
    """Say that a run diverged, so that nobody tries it again unasked."""
    write_json(folder / RESULT, {"diverged": error.step, "steps": error.step, "reason": str(error)})
