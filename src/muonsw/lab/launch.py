"""Run training configs to their end: in this process, in worker processes, or as jobs of Slurm.

A worker and the launcher share nothing but the run's folder: records while it trains, `result.json` when it has ended.
So a command that was stopped, or lost a worker, resumes when it is run again.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import cycle, islice
from multiprocessing.connection import wait as wait_for_process
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from filelock import FileLock
from rich.console import Console

from muonsw import machine
from muonsw.lab.console import View, say, showing
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError, needed, stop_requests
from muonsw.lab.files import LOCK, parse_json, prepare_folder, read_object, write_atomically, write_json
from muonsw.lab.train import checkpoint
from muonsw.lab.train.checkpoint import CHECKPOINTS, METRICS, RESULT, refuse_other_settings
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.ranks import World, joined
from muonsw.lab.train.records import Record, numbers_of
from muonsw.lab.train.state import resolve_device, with_fingerprint
from muonsw.text import counted

Task = TypeVar("Task")
Result = TypeVar("Result")

RESUME = "rerun the same command to resume"
VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS, RESEND_SECONDS = 0.2, 2.0
TAIL_BYTES = 1 << 16  # how much of the end of a run's metrics is read to show them


@dataclass(frozen=True)
class Job:
    """One run: its name on the console, its settings, its folder."""

    name: str
    config: RunConfig
    folder: Path


def run(
    jobs: Sequence[Job],
    *,
    console: Console,
    workers: int,
    cluster: Cluster | None = None,
    retry_diverged: bool = False,
) -> None:
    """Train every run that has not ended; the caller then reads their folders.

    Args:
        jobs: The runs, with different names and folders.
        console: Where progress is shown.
        workers: Runs at a time; one is trained in this process, several see one GPU each. On Slurm, jobs in the queue.
        cluster: Where runs are trained: Slurm, or else this machine.
        retry_diverged: Whether to train runs again that diverged in an earlier call.

    Raises:
        UsageError: If a run cannot start, or a worker was killed (`MachineError`). Runs under way are saved.
        Interrupted: If this process was asked to stop.
    """
    todo, diverged = {}, 0
    for job in jobs:
        result = read_object(job.folder / RESULT) if (job.folder / RESULT).exists() else None
        if result is not None:
            refuse_other_settings(job.folder, with_fingerprint(job.config))
        if result is None or (retry_diverged and "diverged" in result):
            (job.folder / RESULT).unlink(missing_ok=True)
            todo[job.name] = job
        else:
            diverged += "diverged" in result
    if complete := len(jobs) - len(todo) - diverged:
        say(console, f"{complete} of {len(jobs)} runs are complete already")
    if diverged:
        say(console, f"{diverged} of {len(jobs)} runs diverged earlier; --retry-diverged tries them again")
    if not todo:
        return
    with showing(console, {name: job.config.steps for name, job in todo.items()}) as view, _following(view, todo):

        def done(name: str, notes: Sequence[str] = ()) -> None:
            for note in notes:
                view.say(f"{name}: {note}")
            result = read_object(todo[name].folder / RESULT)
            lost = f"diverged at step {result['diverged']}: {result['reason']}" if "diverged" in result else ""
            view.finish(name, lost or f"validation loss {result['final_loss']:.4f}")

        if cluster is not None and cluster.cluster == "slurm":
            _run_on_slurm(todo, cluster, workers, view, done)
        else:
            each(_train, todo, done, workers=workers, devices=gpus_for(jobs[0].config.device))


def _train(job: Job, world: World | None = None) -> list[str]:
    """Train one run until it ends or diverges, which its folder then says, and return its notes."""
    notes: list[str] = []
    try:
        with suppress(Diverged):
            train(job.config, job.folder, Watch(note=notes.append), world)
    finally:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()  # graphs lie in cycles, and other processes need their memory
            torch.cuda.empty_cache()
    return notes


@contextmanager
def _following(view: View, jobs: Mapping[str, Job]) -> Iterator[None]:
    """Show the newest records of the runs, read from their folders, while the block runs."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(1.0):
            for name in jobs.keys() - view.ended:
                records = last_records(jobs[name].folder / METRICS)
                for record in sorted(records, key=itemgetter("kind"), reverse=True):  # "train" has the first columns
                    done = float(record["step"]) if record["kind"] == "train" else None
                    view.update(name, done, numbers_of(record, jobs[name].config.steps))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def last_records(path: Path) -> list[Record]:
    """Return the last record of each kind near the end of a run's metrics."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # a line without an end is still being written
    except OSError:
        return []
    records: dict[str, Record] = {}
    for line in lines:
        with suppress(ValueError):  # the first line may be cut
            record = parse_json(line)
            records[record["kind"]] = record
    return list(records.values())


# ---- Worker processes


def each(
    function: Callable[[Task], Result],
    tasks: Mapping[str, Task],
    done: Callable[[str, Result], None],
    *,
    workers: int,
    devices: Sequence[str] = (),
    saves: bool = True,
) -> None:
    """Call a picklable function on every task, several at a time, in processes that are reused.

    With one worker, tasks run in this process. Any error ends all work. `done` is called in this process with the name
    and the result of each task. With `saves=False`, SIGTERM ends tasks at once; others save their work and raise
    `Interrupted`.

    Examples:
        >>> each(abs, {"first": -2, "second": 3}, lambda name, result: print(name, result), workers=1)
        first 2
        second 3
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        for name, task in tasks.items():
            with _naming(name):
                result = function(task)
            done(name, result)
        return
    spawn = multiprocessing.get_context("spawn")  # a forked child would inherit torch's threads in any state
    # An executor for each worker: if one dies, no other task is lost, and each keeps its GPU.
    gpus = islice(cycle(devices or ("",)), workers)
    pools = [ProcessPoolExecutor(1, spawn, _start_worker, (gpu, saves)) for gpu in gpus]
    waiting, idle, busy = deque(tasks), list(pools), dict[Future[Result], tuple[str, ProcessPoolExecutor]]()
    with stop_requests() as request:
        try:
            while waiting or busy:
                while waiting and idle:
                    name, pool = waiting.popleft(), idle.pop(0)
                    with _naming(name):
                        busy[pool.submit(function, tasks[name])] = name, pool
                for future in wait(busy, POLL_SECONDS, FIRST_COMPLETED).done:
                    if isinstance(future.exception(), BrokenProcessPool):
                        time.sleep(POLL_SECONDS)  # a signal to all processes may reach this one a moment later
                    if request.signal is None:
                        name, pool = busy.pop(future)
                        idle.append(pool)
                        with _naming(name):
                            result = future.result()
                        done(name, result)
                if request.signal is not None:
                    _stop(busy)
                    failed = [
                        f"{name} {problem}" for future, (name, _) in busy.items() if (problem := _unsaved(future))
                    ]
                    saved = f"stopped, {'; '.join(failed) or 'all runs saved'}; {RESUME}"
                    raise Interrupted(saved if saves else "stopped; nothing is kept", request.signal)
        finally:
            _stop(busy)
            for pool in pools:
                pool.shutdown()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefix errors with the name of the task."""
    try:
        yield
    except BrokenProcessPool as error:
        killed = f"{name}: the worker was killed; run fewer at a time if memory was short"
        raise MachineError(f"{killed}; {RESUME}") from error
    except UsageError as error:
        raise (MachineError if isinstance(error, MachineError) else UsageError)(f"{name}: {error}") from error


def _stop(busy: Mapping[Future[Any], Any]) -> None:
    """Ask workers to save and wait until they have; a second Ctrl-C kills them."""
    try:
        while pending := [future for future in busy if not future.done()]:
            for child in multiprocessing.active_children():
                child.terminate()  # repeatedly: a run that is just starting does not listen yet
            wait(pending, RESEND_SECONDS)
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise


def _unsaved(future: Future[Any]) -> str:
    error = future.exception()
    if isinstance(error, BrokenProcessPool):  # killed, or still starting
        return "keeps its last checkpoint"
    return "" if error is None or isinstance(error, Interrupted) else f"was not saved: {error}"


def _start_worker(device: str, saves: bool) -> None:
    if device:
        os.environ[VISIBLE] = device  # before anything asks CUDA for its devices
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent passes Ctrl-C on
    if saves:
        signal.signal(signal.SIGTERM, lambda *_: None)  # training installs its own handler
    # Else this process would spawn the workers of a DataLoader, too, which cannot import a task's file.
    multiprocessing.set_start_method(None, force=True)

    def end_with_parent() -> None:
        """End even if the parent is killed: checkpoints are on disk, and locks become free."""
        if (parent := multiprocessing.parent_process()) is not None:
            wait_for_process([parent.sentinel])
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def gpus_for(device: str) -> tuple[str, ...]:
    """List the GPUs that runs on this device share: all of this machine, unless the device names one."""
    if ":" in device or resolve_device(device).type != "cuda":
        return ()
    number, visible = machine.gpus(), os.environ.get(VISIBLE, "")
    names = visible.split(",") if visible else [str(place) for place in range(number)]
    return tuple(name.strip() for name in names[:number])


def runs_at_once(device: str) -> int:
    """Count the runs that this machine trains at a time: one for each core, or for each GPU."""
    return machine.cores() if resolve_device(device).type == "cpu" else max(1, len(gpus_for(device)))


# ---- Slurm

JOBS = "jobs"  # the folder beside the runs with submitit's files, the jobs' output, and which job has which run
LOOK_SECONDS = 15.0
SETTLE_LOOKS = 2  # a job may be gone before its files arrive on this side of a shared disk
TIMEOUTS = 10_000  # submitit counts them; a job that saves nothing is not queued again
EARLY = getattr(signal, "SIGUSR2", signal.SIGTERM)  # submitit has it sent before a job's time is up


@dataclass(frozen=True)
class Cluster:
    """What every run asks Slurm for; also the options of commands that train."""

    cluster: Literal["slurm"] | None = None
    """Train every run as a job of Slurm. Folder and tokens must lie on a disk that all machines share. Unless given,
    runs are trained in processes of this machine."""
    time: int = 0
    """The longest that a job may take, in minutes. A run that needs longer saves before that, is queued again and
    continues."""
    gpus_per_run: int | None = None
    """GPUs for a run, of one machine, each with a rank of its own; 1 unless given, or 0 with --device cpu."""
    slurm: tuple[str, ...] = ()
    """Options of sbatch: partition=gpu, account=lab, mem=32G, cpus-per-task=8, constraint=h100, exclusive."""
    setup: tuple[str, ...] = ()
    """Shell lines before a job begins, such as "module load cuda"."""

    def check(self, device: str) -> None:
        """Refuse what cannot be submitted, before anything is prepared."""
        if self.cluster is None:
            for option in fields(self):
                if getattr(self, option.name) != option.default:
                    raise UsageError(f"--{option.name.replace('_', '-')} needs --cluster slurm")
            return
        if self.time < 1:
            raise UsageError("--cluster slurm needs --time, the longest that a job may take, in minutes")
        low, high = {"cpu": (0, 0), "cuda": (1, math.inf), "auto": (0, math.inf)}.get(device, (1, 1))
        if self.gpus_per_run is not None and not low <= self.gpus_per_run <= high:
            raise UsageError(f"--gpus-per-run {self.gpus_per_run} does not go with --device {device}: leave one out")

    def gpus(self, device: str) -> int:
        """Count the GPUs for a run on this device; a cluster has some even where this machine has none."""
        return int(device != "cpu") if self.gpus_per_run is None else self.gpus_per_run

    def device_type(self, device: str) -> str:
        """Name the type of device where runs are trained, which need not be this machine."""
        if self.cluster is None:
            return resolve_device(device).type
        return "cuda" if self.gpus(device) else "cpu"

    def parameters(self, device: str) -> dict[str, Any]:
        """Name what a job asks for as submitit's executor does."""
        # Some clusters requeue only jobs that ask for it.
        options: dict[str, str | bool] = {"requeue": True}
        for option in self.slurm:
            key, equals, value = option.removeprefix("--").partition("=")
            options[key] = value if equals else True
        gpus = self.gpus(device)
        devices = {"gpus_per_node": gpus} if gpus and "gres" not in options else {}
        shared = {"ntasks_per_node": max(1, gpus), "setup": list(self.setup), "additional_parameters": options}
        return {"time": self.time, **devices, **shared}


def _run_on_slurm(
    runs: Mapping[str, Job], cluster: Cluster, at_once: int, view: View, done: Callable[[str], None]
) -> None:
    """Submit runs as jobs, wait until they have ended, and collect them; a job that fails does not end the others."""
    first = next(iter(runs.values()))
    folder = first.folder.parent / JOBS
    submit = _submitter(folder, cluster.parameters(first.config.device))
    waiting, queued = deque(runs), dict[str, str]()  # the number of each run's job
    missing, failures = Counter[str](), list[UsageError]()
    with stop_requests() as request:
        while waiting or queued:
            with FileLock(folder / LOCK):  # another command may want the same runs
                states = queued_jobs()  # None says nothing about the jobs
                for name, number in list(queued.items()):
                    if (runs[name].folder / RESULT).exists():
                        del queued[name]
                        done(name)
                    elif states is not None and number not in states and missing[name] >= SETTLE_LOOKS:
                        del queued[name]
                        failures.append(SlurmRun(runs[name], folder).failure(number))
                        view.finish(name, f"job {number} ended without a result")
                    elif states is not None:
                        missing[name] = 0 if number in states else missing[name] + 1
                        view.update(name, None, {"job": f"{number} {states.get(number, '').lower()}"})
                while states is not None and waiting and len(queued) < at_once:
                    name = waiting.popleft()
                    record = folder / f"{runs[name].folder.name}.json"
                    number = str(read_object(record)["job"]) if record.exists() else ""
                    if number not in states:
                        number = submit(runs[name])
                        write_json(record, {"job": number})
                    queued[name] = number
            until = time.monotonic() + LOOK_SECONDS
            while (waiting or queued) and request.signal is None and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            if request.signal is not None:
                left = f"{counted(len(queued), 'job')} left in the queue (scancel {' '.join(queued.values())})"
                raise Interrupted(f"stopped, {left}; rerun the same command to collect them", request.signal)
    if failures:
        kind = MachineError if all(isinstance(error, MachineError) for error in failures) else UsageError
        raise kind("\n".join(f"{error}; {RESUME}" for error in failures))


def _submitter(folder: Path, parameters: Mapping[str, Any]) -> Callable[[Job], str]:
    """Return a function that submits a run and returns the number of its job."""
    submitit = needed("submitit", "--cluster needs", "cluster")
    prepare_folder(folder)
    try:
        executor = submitit.SlurmExecutor(folder.absolute(), max_num_timeout=TIMEOUTS)
        executor.update_parameters(**parameters)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"jobs cannot be submitted here: {error}") from error
    refused = (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError)

    def submit(job: Job) -> str:
        order = SlurmRun(job, folder)
        order.error.unlink(missing_ok=True)
        executor.update_parameters(job_name=f"muonsw-{job.folder.name}")
        try:
            with submitit.helpers.clean_env():  # variables of a surrounding job must not leak into this one
                return str(executor.submit(order).job_id)
        except refused as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"Slurm refused {job.name}: {reason}; check --time and --slurm") from error

    return submit


def queued_jobs() -> dict[str, str] | None:
    """Ask Slurm for the states of this user's jobs that have not ended; None if it does not answer."""
    command = ["squeue", "--me", "--noheader", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(line.split() for line in answer.stdout.splitlines())


@dataclass(frozen=True)
class SlurmRun:
    """The work of one Slurm job: train one run, on one rank for each task, from wherever its folder says it is."""

    job: Job
    folder: Path  # of all jobs

    @property
    def error(self) -> Path:
        """The file in which a job says why it failed."""
        return self.folder / f"{self.job.folder.name}.error"

    def failure(self, number: str) -> UsageError:
        """Explain a job that ended without a result."""
        log = self.folder / f"{number}_0_log.err"
        if self.error.exists():
            return UsageError(f"{self.job.name}: {self.error.read_text(encoding='utf-8')} (job {number}, see {log})")
        return MachineError(f"{self.job.name}: job {number} was cancelled, killed or ran out of time, see {log}")

    def __call__(self) -> None:
        """Train; save and requeue when the time is nearly up."""
        submitit = needed("submitit", "--cluster needs", "cluster")
        ranks = submitit.helpers.TorchDistributedEnvironment()
        if ranks.world_size > 1:
            ranks.export(set_cuda_visible_devices=False, overwrite=True)
        requeue, early, before = signal.getsignal(EARLY), threading.Event(), saved_step(self.job.folder)

        def stop_early(_number: int, _frame: FrameType | None) -> None:
            early.set()
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(EARLY, stop_early)  # submitit's own handler would end the process in mid-step
        try:
            with joined(self.job.config.parallel.timeout) as world:
                print(*_train(self.job, world), sep="\n")
        except Interrupted as stop:
            if early.is_set() and saved_step(self.job.folder) > before and callable(requeue):
                requeue(EARLY, None)  # submitit's: puts the job back into the queue, and exits
            sys.exit(stop.exit_code)
        except Exception as error:
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            write_atomically(self.error, f"{kind}{error}")
            raise

    def checkpoint(self) -> Any:
        """Tell submitit what to put back into the queue: the same work, since the run's folder has the rest."""
        return needed("submitit", "--cluster needs", "cluster").helpers.DelayedSubmission(self)


def saved_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint; 0 without one."""
    return max(map(checkpoint.step_of, checkpoint.newest_first(folder / CHECKPOINTS)), default=0)
