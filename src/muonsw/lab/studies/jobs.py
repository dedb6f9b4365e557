"""One run as a job: what it is, and how a process, or several ranks, bring it to its end."""

from __future__ import annotations

import gc
import hashlib
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from muonsw.lab.base.processes import POLL_SECONDS, Tell, explain, stop_requests
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError
from muonsw.lab.files import prepare_folder, write_json
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import RESULT
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.records import Record
from muonsw.lab.train.state import compiles, has_compiled
from muonsw.lab.train.world import World

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

        try:
            return train(job.config, job.folder, Watch(record=record, note=tell))
        finally:
            _free_memory()


def _free_memory() -> None:
    """Give back what a run held on a GPU: its graphs lie in cycles, and other processes need their memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def compiling_alone(job: Job) -> Iterator[Callable[[], None]]:
    """Let one process compile a model while the others wait, which then take its code from torch's caches on disk.

    Yields:
        What to call once the model is compiled, that is after the first update; nothing happens where none is.
    """
    if not compiles(job.config) or has_compiled(job.config):
        yield lambda: None
        return
    prepare_folder(job.folder.parent)
    shape = job.config.batch // job.config.accumulation, asdict(job.config.task or job.config.decoder)
    name = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:10]
    done, lock = job.folder.parent / f".compiled-{name}", FileLock(job.folder.parent / f".compiling-{name}")

    def compiled() -> None:
        done.touch()
        lock.release()

    lock.acquire()
    if done.exists():
        lock.release()
    try:
        yield compiled
    finally:
        lock.release()


def write_divergence(folder: Path, error: Diverged) -> None:
    """Say that a run diverged, so that it is not tried again unasked."""
    write_json(folder / RESULT, {"diverged": error.step, "steps": error.step, "reason": str(error)})


def train_alone(config: RunConfig, folder: Path, note: Path, world: World | None = None) -> None:
    """Bring one run to its end without an audience: what comes of it is on disk afterwards.

    The note says why it failed, and whether trying again is of any use.
    """
    leads = world is None or world.leads
    try:
        train(config, folder, world=world)
    except Diverged as error:
        if leads:
            write_divergence(folder, error)
    except Interrupted:
        raise
    except Exception as error:
        if leads:
            final = isinstance(error, UsageError) and not isinstance(error, MachineError)
            write_json(note, {"message": explain(error), "final": final, "trace": traceback.format_exc()})
        raise


def train_on_ranks(job: Job, note: Path, ranks: int) -> None:
    """Bring one run to its end on so many ranks of this machine, which torchrun starts.

    Raises:
        Interrupted: If this process was asked to stop; ranks that could save have.
        SystemExit: If they failed; the note says why.
    """
    config = write_json(note.with_suffix(".config"), job.config.as_data())
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "muonsw.lab.run"]
    command = [sys.executable, "-m", *launcher, str(config), str(job.folder), str(note)]
    with stop_requests() as request:
        process = _deaf_to(signal.SIGUSR2, command)
        asked = False
        while process.poll() is None:
            if request.signal is not None and not asked:
                asked = True
                process.terminate()  # torchrun passes it on, and waits for ranks to save
            time.sleep(POLL_SECONDS)
    if (job.folder / RESULT).exists():
        return
    if request.signal is not None:
        raise Interrupted(f"{ranks} ranks were stopped", request.signal)
    if not note.exists():
        write_json(note, {"message": f"its {ranks} ranks ended with exit code {process.returncode}", "final": False})
    sys.exit(1)


def _deaf_to(number: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that a signal to all processes of the job does not end: this one passes on what it means."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        return subprocess.Popen(command)
    finally:
        signal.signal(number, before)
