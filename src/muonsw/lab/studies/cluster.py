"""Runs as jobs of a cluster: submitted through `submitit`, watched, taken up again when they die, and collected.

A run's folder on the shared disk is all that a job and its watcher have in common: checkpoints and records while it
goes on, `result.json` when it is done. The watcher reads no pickle, and asks Slurm one thing only: which jobs are still
in its queue. So it works without Slurm's accounting, and goes on after it was stopped itself. submitit submits jobs,
signals them before their time is up and puts them back into the queue; ours is what it has nothing for: jobs of an
earlier command, runs whose jobs died, one question for all jobs, and time to save before a job is sent away.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from filelock import FileLock

from muonsw import machine
from muonsw.lab.base.processes import GOES_ON, POLL_SECONDS, Audience, StopRequest, stop_requests
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError, install_line
from muonsw.lab.files import LOCK, parse_json, prepare_folder, read_object, write_json
from muonsw.lab.studies.jobs import Job, train_alone, train_on_ranks
from muonsw.lab.train import checkpoint
from muonsw.lab.train.folder import CHECKPOINTS, METRICS, RESULT
from muonsw.lab.train.records import Record

# What jobs leave, beside the runs: what submitit needs, their output, and which job has which run.
FOLDER = "jobs"
# A run whose jobs end so often, one after the other, without a single update is given up.
FRUITLESS = 3
# Looks for which a job may be gone before its files have arrived on this side of the shared disk.
SETTLE = 2
# The last records of a run lie within so many bytes; those of telemetry may have some hundred thousand.
TAIL_BYTES = 1 << 20
TIMEOUTS = 10_000  # submitit counts them; what ends a run that does not move is `FRUITLESS`
# What submitit has a job sent some time before it is ended; Windows has neither the signal nor Slurm.
EARLY = getattr(signal, "SIGUSR2", signal.SIGTERM)
# States in which Slurm shows a job that will not run again; one in the queue again is PENDING.
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT")  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Where runs are jobs of their own."""

    kind: Literal["slurm", "local"]  # "local": processes of this machine
    # What every job asks for, in the words of submitit's executor of this kind.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    at_once: int | None = None  # how many jobs are submitted at a time; None is all of them
    ranks: int = 1  # processes that train a run together
    # Whether jobs of Slurm end when the watcher is stopped; those of this machine always do.
    cancel_on_stop: bool = False
    poll: float = 15.0  # seconds between two looks at the jobs


def run_on_cluster(jobs: Mapping[str, Job], audience: Audience, cluster: Cluster) -> None:
    """Bring runs to their end as jobs of a cluster, and tell the audience what becomes of them.

    A job that an earlier command left in the queue is watched, not submitted twice. One that ends without a result is
    submitted again, unless its run has not moved by an update in `FRUITLESS` jobs. A run that fails does not end the
    others; it is reported when they are done.

    Raises:
        UsageError: If jobs cannot be submitted, or if runs failed and the audience does not say otherwise.
        Interrupted: If this process was asked to stop; the message says what became of the jobs.
    """
    folder = next(iter(jobs.values())).folder.parent / FOLDER
    prepare_folder(folder)
    with stop_requests() as request:
        watcher = _Watcher(jobs, audience, cluster, scheduler_of(cluster, folder), folder)
        if not watcher.submit():
            raise MachineError("squeue does not answer, so that runs might be submitted twice: try again later")
        while watcher.left:
            _sleep(cluster.poll, request)
            if request.signal is not None:
                raise Interrupted(watcher.stop(), request.signal)
            watcher.look()
            watcher.submit()
        watcher.scheduler.close()
    watcher.complain()


def _sleep(seconds: float, request: StopRequest) -> None:
    end = time.monotonic() + seconds
    while request.signal is None and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, POLL_SECONDS))


@dataclass
class Attempt:
    """A job that has a run."""

    id: str  # the scheduler's name of it
    step: int  # the update that the run's newest checkpoint held before
    fruitless: int  # how many jobs ended before it without an update
    missing: int = 0  # looks since it was last seen in the queue
    state: str = "SUBMITTED"  # what the scheduler said of it last


class _Watcher:
    def __init__(
        self, jobs: Mapping[str, Job], audience: Audience, cluster: Cluster, scheduler: Slurm | Local, folder: Path
    ) -> None:
        self.jobs, self.audience, self.cluster, self.scheduler, self.folder = jobs, audience, cluster, scheduler, folder
        self.waiting = dict.fromkeys(jobs, 0)  # names, with the fruitless jobs so far
        self.under_way: dict[str, Attempt] = {}
        self.failures: list[Exception] = []

    @property
    def left(self) -> bool:
        return bool(self.waiting or self.under_way)

    def submit(self) -> bool:
        """Submit what waits, unless another command has, as many as may be under way at a time.

        Returns:
            Whether that could be found out.
        """
        if not self.waiting:
            return True
        with FileLock(self.folder / LOCK):  # studies share runs, and may be started at the same time
            known = self.scheduler.states()
            if known is None:
                return False
            self._adopt(known)
            most = self.cluster.at_once or len(self.jobs)
            for name in list(self.waiting)[: max(0, most - len(self.under_way))]:
                self._submit(name)
        return True

    def _adopt(self, known: Mapping[str, str]) -> None:
        """Find the jobs in the queue that another command, or this one when it was called before, has submitted."""
        found = []
        for name, fruitless in list(self.waiting.items()):
            with suppress(UsageError, KeyError):
                record = read_object(self._record(name))
                if record["cluster"] == self.cluster.kind and record["job"] in known:
                    self.under_way[name] = Attempt(record["job"], record["step"], fruitless)
                    del self.waiting[name]
                    found.append(name)
        if found:
            self.audience.message(found[0], f"{len(found)} jobs of another command, or an earlier one, go on")

    def _submit(self, name: str) -> None:
        job, fruitless = self.jobs[name], self.waiting.pop(name)
        step = saved_step(job.folder)
        self._failure(name).unlink(missing_ok=True)  # what an earlier job said is no word about this one
        number = self.scheduler.submit(Order(job, self._failure(name), self.cluster.ranks), f"muonsw-{job.folder.name}")
        self.under_way[name] = Attempt(number, step, fruitless)
        write_json(self._record(name), {"cluster": self.cluster.kind, "job": number, "step": step})

    def look(self) -> None:
        """Collect runs that are done, take up those whose jobs are gone, and show the others."""
        states = self.scheduler.states()
        for name, attempt in list(self.under_way.items()):
            if (self.jobs[name].folder / RESULT).exists():
                self._collect(name)
            elif states is None:
                continue  # Slurm does not answer; that says nothing about its jobs
            elif attempt.id in states:
                attempt.missing, attempt.state = 0, states[attempt.id]
                self._show(name, attempt)
            elif attempt.missing < SETTLE:
                attempt.missing += 1
            else:
                self._take_up(name, attempt)

    def _collect(self, name: str) -> None:
        del self.under_way[name]
        self._record(name).unlink(missing_ok=True)
        result = read_object(self.jobs[name].folder / RESULT)
        if "diverged" in result:
            self._fail(name, Diverged(str(result.get("reason", "the run diverged")), result["diverged"]))
        else:
            self.audience.finished(name, result)

    def _take_up(self, name: str, attempt: Attempt) -> None:
        """Let the run of a job that ended without a result wait for another one, or give it up."""
        del self.under_way[name]
        step, log = saved_step(self.jobs[name].folder), self.folder / f"{attempt.id}_0_log.err"
        fruitless = 0 if step > attempt.step else attempt.fruitless + 1
        failure = read_object(self._failure(name)) if self._failure(name).exists() else {}
        why = str(
            failure.get("message") or "it ended from outside, at the end of its time, or by a fault of its machine"
        )
        if failure.get("final"):
            self._fail(name, UsageError(why))
        elif fruitless >= FRUITLESS:
            often = f"{fruitless} jobs ended without an update, the last one ({attempt.id}) because: {why}"
            self._fail(name, MachineError(f"{often}; see {log}, then {GOES_ON}"))
        else:
            self.waiting[name] = fruitless
            ended = f"job {attempt.id} ended after update {step} ({why})"
            self.audience.message(name, f"{ended}; the run is taken up again")

    def _fail(self, name: str, error: Exception) -> None:
        try:
            self.audience.failed(name, error)
        except Exception as raised:
            self.failures.append(raised)

    def complain(self) -> None:
        """Tell of the runs that failed, now that the others are done."""
        if self.failures:
            kind = MachineError if all(isinstance(one, MachineError) for one in self.failures) else UsageError
            raise kind("\n".join(map(str, self.failures)))

    def stop(self) -> str:
        """Leave the jobs or end them, and say which."""
        numbers = [attempt.id for attempt in self.under_way.values()]
        if not self.cluster.cancel_on_stop and self.cluster.kind == "slurm":
            ending = f"(scancel {' '.join(numbers)} ends {'it' if len(numbers) == 1 else 'them'})" if numbers else ""
            jobs = f"{counted(numbers, 'goes', 'go')} on {ending}".strip()
            return f"stopped watching; {jobs}; the same command again collects them"
        self.scheduler.cancel(numbers)
        while (states := self.scheduler.states()) is None or set(numbers) & set(states):
            time.sleep(POLL_SECONDS)
        return f"stopped, {counted(numbers, 'was', 'were')} asked to save and end; {GOES_ON}"

    def _show(self, name: str, attempt: Attempt) -> None:
        self.audience.message(name, {"kind": "job", "job": f"{attempt.id} {attempt.state.lower()}"})
        for record in last_records(self.jobs[name].folder / METRICS):
            self.audience.message(name, record)

    def _record(self, name: str) -> Path:
        return self.folder / f"{self.jobs[name].folder.name}.json"

    def _failure(self, name: str) -> Path:
        return self.folder / f"{self.jobs[name].folder.name}.failed.json"


def counted(jobs: Sequence[str], one: str, more: str) -> str:
    """Count jobs in a sentence, with the verb in the right number."""
    return f"{len(jobs) or 'no'} {'job' if len(jobs) < 2 else 'jobs'} {one if len(jobs) < 2 else more}"


def saved_step(folder: Path) -> int:
    """The update that the newest checkpoint of a run holds; 0 without one."""
    newest = next(checkpoint.newest_first(folder / CHECKPOINTS), None)
    return 0 if newest is None else checkpoint.step_of(newest)


def last_records(path: Path) -> list[Record]:
    """The last record of each kind near the end of a run's metrics, the oldest first; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # a line without an end is still being written
    except OSError:
        return []
    found: dict[str, Record] = {}
    for line in reversed(lines):
        with suppress(ValueError):  # the first one may be cut
            record = parse_json(line.decode())
            found.setdefault(record["kind"], record)
        if "train" in found and "eval" in found:
            break
    return list(reversed(found.values()))


@dataclass(frozen=True)
class Order:
    """What a job does: bring one run to its end, from wherever its folder says it is."""

    job: Job
    failure: Path  # where to say why it failed
    ranks: int  # processes that train it together, one for each GPU

    def __call__(self) -> None:
        """Train; whatever comes of it is on disk afterwards."""
        self.failure.unlink(missing_ok=True)
        before, announced, submitits = saved_step(self.job.folder), threading.Event(), signal.getsignal(EARLY)

        def stop_early(_number: int, _frame: FrameType | None) -> None:
            announced.set()
            os.kill(os.getpid(), signal.SIGTERM)  # what training saves and stops at

        signal.signal(EARLY, stop_early)  # submitit's own handler would end the process in mid-update
        try:
            if self.ranks > 1:
                train_on_ranks(self.job, self.failure, self.ranks)
            else:
                train_alone(self.job.config, self.job.folder, self.failure)
        except Interrupted as stop:
            if announced.is_set() and saved_step(self.job.folder) > before and callable(submitits):
                submitits(EARLY, None)  # puts the job into the queue again, and leaves
            sys.exit(stop.exit_code)
        finally:
            signal.signal(EARLY, submitits)

    def checkpoint(self) -> Any:
        """What submitit puts into the queue again: the same order, since everything is in the run's folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def scheduler_of(cluster: Cluster, folder: Path) -> Slurm | Local:
    """What submits jobs, says which have not ended, and ends them; it keeps its own files in a folder.

    Raises:
        UsageError: If it is not to be had here.
    """
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise UsageError(f"--cluster needs submitit: {install_line('cluster')}") from error
    try:
        kind = submitit.SlurmExecutor if cluster.kind == "slurm" else submitit.LocalExecutor
        executor = kind(folder.absolute(), max_num_timeout=TIMEOUTS)
        executor.update_parameters(**cluster.parameters)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"jobs cannot be submitted here: {error}") from error
    return Slurm(executor) if cluster.kind == "slurm" else Local(executor)


class Slurm:
    """Jobs in the queue of Slurm, through submitit's executor."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def submit(self, order: Callable[[], None], name: str) -> str:
        """Hand a job to sbatch."""
        import submitit

        self.executor.update_parameters(job_name=name)
        try:
            with submitit.helpers.clean_env():  # what a surrounding job of Slurm has set is not for this one
                return str(self.executor.submit(order).job_id)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
            said = " ".join(str(error).split())
            raise UsageError(f"Slurm did not take the job {name}: {said}; check --partition, --time and --slurm") from (
                error
            )

    def states(self) -> dict[str, str] | None:
        """The jobs of this user that have not ended, by one question however many there are; None without an answer."""
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i %T"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
        pairs = (line.split() for line in answer.stdout.splitlines())
        return {number: state for number, state in pairs if state not in OVER}

    def cancel(self, jobs: Sequence[str]) -> None:
        """Let Slurm send SIGTERM, and SIGKILL some time later."""
        if jobs:
            subprocess.run(["scancel", *jobs], check=False, timeout=60)

    def close(self) -> None:
        """Jobs that are about to end do so by themselves."""


class Local:
    """Jobs as processes of this machine, on its GPUs in turn, through submitit's executor."""

    def __init__(self, executor: Any) -> None:
        self.executor, self.started = executor, dict[str, Any]()

    def submit(self, order: Callable[[], None], name: str) -> str:  # noqa: ARG002 (a process needs no name)
        """Start a process."""
        wanted, there = self.executor.parameters.get("gpus_per_node", 0), machine.gpus()
        if wanted > there:
            raise UsageError(f"--gpus-per-run {wanted} is more than the {there} GPUs of this machine: lower it")
        first = len(self.started) * wanted
        self.executor.update_parameters(visible_gpus=tuple((first + place) % there for place in range(wanted)))
        job = self.executor.submit(order)
        self.started[job.job_id] = job
        return str(job.job_id)

    def states(self) -> dict[str, str]:
        """Ask the processes that were started here, and look for those of an earlier command."""
        alive = {number: "RUNNING" for number, job in self.started.items() if not job.done()}
        return alive | {number: "RUNNING" for number in _earlier() if number not in self.started}

    def cancel(self, jobs: Sequence[str]) -> None:
        """Pass SIGTERM on; submitit's own way leaves a second to save."""
        for number in jobs:
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGTERM)

    def close(self) -> None:
        """Wait for processes that have written their result and are about to end."""
        while not all(job.done() for job in self.started.values()):
            time.sleep(POLL_SECONDS)


def _earlier() -> Iterator[str]:
    """Processes of this machine that look after a job of submitit."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"submitit.local._local" in path.read_bytes():
                yield path.parent.name
