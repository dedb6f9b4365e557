"""Train several runs: in this process, in worker processes, or as Slurm jobs.

Workers report only through the run's folder: records during training, `result.json` at the end. So rerunning a command
that was stopped, or whose worker was killed, resumes it.
"""

from __future__ import annotations

import gc
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
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle, islice
from multiprocessing.connection import wait as wait_for_process
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

import torch
from filelock import FileLock
from rich.console import Console

from muonsw import machine
from muonsw.lab.config import changed
from muonsw.lab.console import View, say, showing
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError, needed, stop_requests
from muonsw.lab.files import LOCK, parse_json, prepare_folder, read_object, write_atomically, write_json
from muonsw.lab.options import unset
from muonsw.lab.train import checkpoint
from muonsw.lab.train.checkpoint import CHECKPOINTS, METRICS, RESULT, recorded_settings, refuse_changes
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
POLL_SECONDS = 0.2
TAIL_BYTES = 1 << 16  # of a run's metrics, read for the progress display


@dataclass(frozen=True)
class Job:
    name: str  # on the console
    config: RunConfig
    folder: Path


def run(
    jobs: Sequence[Job],
    *,
    console: Console,
    workers: int,
    cluster: Cluster | None = None,
) -> None:
    """Train every run without a result; names and folders must differ.

    `workers` runs are trained at a time, each on its own GPU; 1 trains in this process. With Slurm, `workers` is the
    largest number of jobs in the queue. Runs that diverged in an earlier call have a result too.

    Raises:
        UsageError: If a run cannot start, or a worker was killed (`MachineError`). The other runs are saved.
        Interrupted: If a signal asked this process to stop.
    """
    todo, diverged = {}, 0
    for job in jobs:
        if (job.folder / RESULT).exists():
            refuse_changes(job.folder, recorded_settings(job.folder), with_fingerprint(job.config))
            diverged += "diverged" in read_object(job.folder / RESULT)
        else:
            todo[job.name] = job
    if complete := len(jobs) - len(todo) - diverged:
        say(console, f"{complete} of {len(jobs)} runs are complete already")
    if diverged:
        say(console, f"{diverged} of {len(jobs)} runs diverged earlier; delete their folders to train them again")
    if not todo:
        return
    with showing(console, {name: job.config.steps for name, job in todo.items()}) as view, _following(view, todo):

        def done(name: str, notes: Sequence[str] = ()) -> None:
            for note in notes:
                view.say(f"{name}: {note}")
            result = read_object(todo[name].folder / RESULT)
            failure = f"diverged at step {result['diverged']}: {result['reason']}" if "diverged" in result else ""
            view.finish(name, failure or f"validation loss {result['final_loss']:.4f}")

        if cluster is not None and cluster.cluster == "slurm":
            _run_on_slurm(todo, cluster, workers, view, done)
        else:
            run_tasks(_train, todo, done, workers=workers, devices=gpus_for(jobs[0].config.device))


def _train(job: Job, world: World | None = None) -> list[str]:
    """Train one run until it ends or diverges, and return its notes."""
    notes: list[str] = []
    try:
        with suppress(Diverged):
            train(job.config, job.folder, Watch(note=notes.append), world)
    finally:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()  # CUDA graphs are in reference cycles
            torch.cuda.empty_cache()
    return notes


@contextmanager
def _following(view: View, jobs: Mapping[str, Job]) -> Iterator[None]:
    """Show the newest records in the runs' folders while the block runs."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(1.0):
            for name in jobs.keys() - view.ended:
                for record in last_records(jobs[name].folder / METRICS):
                    step = float(record["step"]) if record["kind"] == "train" else None
                    view.update(name, step, numbers_of(record, jobs[name].config.steps))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def last_records(path: Path) -> list[Record]:
    """Return the last record of each kind near the end of a run's metrics, training first."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")
    records: dict[str, Record] = {}
    for line in lines:
        with suppress(ValueError):  # the first and the last line may be incomplete
            record = parse_json(line)
            records[record["kind"]] = record
    return sorted(records.values(), key=itemgetter("kind"), reverse=True)


# ---- Worker processes


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Mapping[str, Task],
    done: Callable[[str, Result], None],
    *,
    workers: int,
    devices: Sequence[str] = (),
) -> None:
    """Call a picklable function on every task in a pool of worker processes, or in this process if `workers` is 1.

    `done` is called here with the name and the result of each task. An error in a task, or a signal to this process,
    ends all work: SIGTERM makes workers that train save their run, and kills the others.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        for name, task in tasks.items():
            with _naming(name):
                result = function(task)
            done(name, result)
        return
    spawn = multiprocessing.get_context("spawn")  # forking is unsafe with torch's threads
    # One executor per worker, so that a killed worker takes no other task with it, and each keeps its GPU.
    gpus = islice(cycle(devices or ("",)), workers)
    pools = [ProcessPoolExecutor(1, spawn, _start_worker, (gpu,)) for gpu in gpus]
    waiting, idle, busy = deque(tasks), list(pools), dict[Future[Result], tuple[str, ProcessPoolExecutor]]()
    with stop_requests() as request:
        try:
            while (waiting or busy) and request.signal is None:
                while waiting and idle:
                    name, pool = waiting.popleft(), idle.pop(0)
                    with _naming(name):
                        busy[pool.submit(function, tasks[name])] = name, pool
                for future in wait(busy, POLL_SECONDS, FIRST_COMPLETED).done:
                    if isinstance(future.exception(), BrokenProcessPool):
                        time.sleep(POLL_SECONDS)  # a signal to all processes may reach this one later
                    if request.signal is None:
                        name, pool = busy.pop(future)
                        idle.append(pool)
                        with _naming(name):
                            result = future.result()
                        done(name, result)
        finally:
            _stop(busy)
            for pool in pools:
                pool.shutdown()
        if request.signal is not None:
            ended = [(name, future.exception()) for future, (name, _) in busy.items()]
            unsaved = [f"{name} was not saved: {error}" for name, error in ended if isinstance(error, UsageError)]
            raise Interrupted(f"stopped, {'; '.join(unsaved) or 'training runs are saved'}; {RESUME}", request.signal)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefix errors with the task's name."""
    try:
        yield
    except BrokenProcessPool as error:
        killed = f"{name}: the worker was killed; run fewer at a time if memory was short"
        raise MachineError(f"{killed}; {RESUME}") from error
    except UsageError as error:
        raise type(error)(f"{name}: {error}") from error


def _stop(busy: Mapping[Future[Any], Any]) -> None:
    """Ask workers to save and wait until they have; a second Ctrl-C kills them."""
    pending = [future for future in busy if not future.done()]
    try:
        for child in multiprocessing.active_children() if pending else ():
            child.terminate()
        wait(pending)
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise


def _start_worker(device: str) -> None:
    if device:
        os.environ[VISIBLE] = device  # before CUDA is initialized
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent forwards Ctrl-C as SIGTERM
    # Undo "spawn": the workers of a DataLoader, if spawned, could not import a task's file.
    multiprocessing.set_start_method(None, force=True)

    def exit_with_parent() -> None:  # even if it is killed: checkpoints are on disk, and locks become free
        if (parent := multiprocessing.parent_process()) is not None:
            wait_for_process([parent.sentinel])
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def gpus_for(device: str) -> tuple[str, ...]:
    """List the GPUs to share among runs with this device; none for the CPU or a device that names one GPU."""
    if ":" in device or resolve_device(device).type != "cuda":
        return ()
    count, visible = machine.gpus(), os.environ.get(VISIBLE, "")
    names = visible.split(",") if visible else map(str, range(count))
    return tuple(name.strip() for name in islice(names, count))


def runs_at_once(device: str) -> int:
    """The number of runs that this machine trains at a time: one per core, or one per GPU."""
    return machine.cores() if resolve_device(device).type == "cpu" else max(1, len(gpus_for(device)))


# ---- Slurm

JOBS = "jobs"  # a folder next to the runs, with submitit's files, the jobs' output, and the job number of each run
POLL_SLURM_SECONDS = 15.0
GRACE_POLLS = 2  # on a shared disk, files may appear some time after their job has ended
TIMEOUTS = 10_000  # how often submitit may requeue a job; one that saves nothing is not requeued


@dataclass(frozen=True)
class Cluster:
    """The Slurm options of a run; also command-line options."""

    cluster: Annotated[Literal["slurm"] | None, unset()] = None
    """Train each run as a Slurm job. The folder and the tokens must be on a disk that all machines share."""
    time: int = 0
    """Time limit of a job in minutes; required. A run that needs longer saves before it, is requeued and resumes."""
    gpus_per_run: Annotated[int | None, unset()] = None
    """GPUs for a run, on one machine, each with its own rank. Default: 1, or 0 with --device cpu."""
    slurm: Annotated[tuple[str, ...], unset()] = ()
    """Options of sbatch: partition=gpu, account=lab, mem=32G, cpus-per-task=8, constraint=h100, exclusive."""
    setup: Annotated[tuple[str, ...], unset()] = ()
    """Shell lines to run before a job starts, such as "module load cuda"."""

    def check(self, device: str) -> None:
        """Refuse options that do not fit together, before anything is prepared."""
        if self.cluster is None:
            if options := changed(self):
                raise UsageError(f"{options[0]} needs --cluster slurm")
            return
        if self.time < 1:
            raise UsageError("--cluster slurm needs --time, the time limit of a job in minutes")
        if device != "auto" and (device == "cpu") == (self.gpus(device) > 0):
            raise UsageError(f"--gpus-per-run {self.gpus_per_run} does not go with --device {device}: leave one out")

    def gpus(self, device: str) -> int:
        """The number of GPUs for a run; the cluster may have GPUs even if this machine has none."""
        return int(device != "cpu") if self.gpus_per_run is None else self.gpus_per_run

    def device_type(self, device: str) -> str:
        if self.cluster is None:
            return resolve_device(device).type
        return "cuda" if self.gpus(device) else "cpu"

    def parameters(self, device: str) -> dict[str, Any]:
        options: dict[str, str | bool] = {"requeue": True}  # some clusters do not requeue jobs by default
        for option in self.slurm:
            key, equals, value = option.removeprefix("--").partition("=")
            options[key] = value if equals else True
        gpus = self.gpus(device)
        return {
            "time": self.time,
            **({"gpus_per_node": gpus} if gpus and "gres" not in options else {}),
            "ntasks_per_node": max(1, gpus),
            "setup": list(self.setup),
            "additional_parameters": options,
        }


def _run_on_slurm(
    runs: Mapping[str, Job], cluster: Cluster, at_once: int, view: View, done: Callable[[str], None]
) -> None:
    """Submit runs as jobs and wait for their results; a failed job does not end the others."""
    first = next(iter(runs.values()))
    folder = first.folder.parent / JOBS
    submitit = needed("submitit", "--cluster needs", "cluster")
    prepare_folder(folder)
    try:
        executor = submitit.SlurmExecutor(folder.absolute(), max_num_timeout=TIMEOUTS)
        executor.update_parameters(**cluster.parameters(first.config.device))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"jobs cannot be submitted here: {error}") from error
    waiting, queued = deque(runs), dict[str, str]()  # the job number of each run
    missing, failures = Counter[str](), list[UsageError]()
    with stop_requests() as request:
        while waiting or queued:
            with FileLock(folder / LOCK):  # another command may submit the same runs
                states = queued_jobs()  # None if Slurm does not answer
                for name, number in list(queued.items()):
                    if (runs[name].folder / RESULT).exists():
                        del queued[name]
                        done(name)
                    elif states is not None and number not in states and missing[name] >= GRACE_POLLS:
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
                        number = SlurmRun(runs[name], folder).submit(executor)
                        write_json(record, {"job": number})
                    queued[name] = number
            until = time.monotonic() + POLL_SLURM_SECONDS
            while (waiting or queued) and request.signal is None and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            if request.signal is not None:
                left = f"{counted(len(queued), 'job')} left in the queue (scancel {' '.join(queued.values())})"
                raise Interrupted(f"stopped, {left}; rerun the same command to collect them", request.signal)
    if failures:
        kind = MachineError if all(isinstance(error, MachineError) for error in failures) else UsageError
        raise kind("\n".join(f"{error}; {RESUME}" for error in failures))


def queued_jobs() -> dict[str, str] | None:
    """Ask Slurm for the states of this user's unfinished jobs; None if it does not answer."""
    command = ["squeue", "--me", "--noheader", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(line.split() for line in answer.stdout.splitlines())


@dataclass(frozen=True)
class SlurmRun:
    """Trains or resumes one run in a Slurm job, with one rank per Slurm task."""

    job: Job
    folder: Path  # of all jobs

    @property
    def error(self) -> Path:
        """The file for the job's error message."""
        return self.folder / f"{self.job.folder.name}.error"

    def submit(self, executor: Any) -> str:
        submitit = import_module("submitit")
        self.error.unlink(missing_ok=True)
        executor.update_parameters(job_name=f"muonsw-{self.job.folder.name}")
        try:
            with submitit.helpers.clean_env():  # this process may itself run in a job
                return str(executor.submit(self).job_id)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"Slurm refused {self.job.name}: {reason}; check --time and --slurm") from error

    def failure(self, number: str) -> UsageError:
        """The error for a job that ended without a result."""
        log = self.folder / f"{number}_0_log.err"
        if self.error.exists():
            return UsageError(f"{self.job.name}: {self.error.read_text(encoding='utf-8')} (job {number}, see {log})")
        return MachineError(f"{self.job.name}: job {number} was cancelled, killed or ran out of time, see {log}")

    def __call__(self) -> None:
        """Train; shortly before the time limit, save and requeue."""
        submitit = import_module("submitit")
        ranks = submitit.helpers.TorchDistributedEnvironment()
        if ranks.world_size > 1:
            ranks.export(set_cuda_visible_devices=False, overwrite=True)
        # submitit's own handler for the time-limit signal requeues the job, but ends the process in mid-step.
        requeue, time_is_up, before = signal.getsignal(signal.SIGUSR2), threading.Event(), saved_step(self.job.folder)

        def stop(_number: int, _frame: FrameType | None) -> None:
            time_is_up.set()
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGUSR2, stop)
        try:
            with joined(self.job.config.parallel.timeout) as world:
                print(*_train(self.job, world), sep="\n")
        except Interrupted as interruption:
            if time_is_up.is_set() and saved_step(self.job.folder) > before and callable(requeue):
                requeue(signal.SIGUSR2, None)
            sys.exit(interruption.exit_code)
        except Exception as error:
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            write_atomically(self.error, f"{kind}{error}")
            raise

    def checkpoint(self) -> Any:
        """Tell submitit what to requeue: the same call, which resumes from the run's folder."""
        return import_module("submitit").helpers.DelayedSubmission(self)


def saved_step(folder: Path) -> int:
    """The step of a run's newest checkpoint, or 0."""
    return max(map(checkpoint.step_of, checkpoint.newest_first(folder / CHECKPOINTS)), default=0)
