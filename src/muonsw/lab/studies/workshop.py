"""Where runs and experiments are made: each once, several at a time, resumable, and shown while they are under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from muonsw.lab.base.processes import Audience, Tell, run_jobs, stop_at_failure, visible_gpus
from muonsw.lab.base.progress import View, showing
from muonsw.lab.claims.claim import Evidence
from muonsw.lab.console import say
from muonsw.lab.data.shards import read_record
from muonsw.lab.data.tokenizer import padded_vocab
from muonsw.lab.errors import Diverged
from muonsw.lab.files import read_object
from muonsw.lab.runs import Run, load_runs
from muonsw.lab.studies.arms import Arm, Comparison, Results
from muonsw.lab.studies.cluster import Cluster, run_on_cluster
from muonsw.lab.studies.jobs import Job, train_job, write_divergence
from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import RESULT, identity, refuse_other_settings
from muonsw.lab.train.progress import numbers_of
from muonsw.lab.train.records import Record
from muonsw.lab.train.state import resolve_device, with_fingerprint


@dataclass(frozen=True)
class ByArm:
    """Runs under the names of their arms: one comparison in one folder, which refuses other settings."""

    folder: Path

    def job(self, comparison: Comparison, arm: Arm, seed: int) -> Job:
        """The run of one arm with one seed."""
        config = replace(comparison.config(arm, seed), arm=arm.name)
        letters = (letter if letter.isalnum() or letter in "._=" else "-" for letter in arm.name)
        return Job(
            f"{arm.name}, seed {seed}", config, self.folder / f"{''.join(letters).replace('--', '-')}-seed{seed}"
        )


@dataclass(frozen=True)
class BySettings:
    """Runs under a hash of all their settings, so that studies share those that are equal."""

    folder: Path  # of all runs
    data: Path  # prepared tokens
    device: str  # "cpu" or "cuda"

    def job(self, comparison: Comparison, arm: Arm, seed: int) -> Job:
        """The run of one arm with one seed."""
        config = self.ready(comparison.config(arm, seed))
        folder = self.folder / f"{config.arm}-seed{config.seed}-{identity(config)}"
        return Job(f"{comparison.key}: {arm.name}, seed {seed}", config, folder)

    def ready(self, config: RunConfig) -> RunConfig:
        """The run on these tokens and this device, under a name that its settings alone decide."""
        chosen = replace(
            config,
            model=replace(config.decoder, vocab=padded_vocab(read_record(self.data).vocab_size)),
            data=replace(config.tokens, path=str(self.data)),
            device=self.device,
            threads=1 if self.device == "cpu" else config.threads,  # so that the number of workers changes nothing
            arm="",
        )
        chosen = with_fingerprint(chosen)
        return replace(chosen, arm=describe(chosen))


def describe(config: RunConfig) -> str:
    """A short name of what mostly sets a run apart.

    Examples:
        >>> from muonsw.lab.train.presets import preset_run
        >>> describe(preset_run("w512-dense", ""))
        'w512-dense-muon-scaled-lr0.007-wd0.1-T110000'
    """
    chosen, dense = config.optimizer, "-dense" if config.decoder.experts == 1 else ""
    rule = f"{chosen.algorithm}-{chosen.decay}-lr{chosen.lr:.4g}-wd{chosen.weight_decay:.4g}"
    return f"w{config.decoder.width}{dense}-{rule}-T{config.steps}"


@dataclass(frozen=True)
class ExperimentResult:
    """An experiment's evidence and how long it took."""

    evidence: Evidence
    seconds: float


@dataclass(frozen=True)
class Workshop:
    """Makes what studies ask for.

    The number of workers changes nothing but the time.
    """

    console: Console  # where progress is shown
    workers: int  # runs, or experiments, at a time
    # Where runs are kept; experiments keep nothing.
    places: ByArm | BySettings = field(default_factory=lambda: ByArm(Path("runs")))
    retry_diverged: bool = False  # whether runs that diverged in an earlier call are tried again
    # GPUs over which runs are spread, as CUDA_VISIBLE_DEVICES names them; with none, a process sees all.
    devices: tuple[str, ...] = ()
    cluster: Cluster | None = None  # where runs are jobs; None trains them in processes of this machine

    def train(self, comparisons: Sequence[Comparison]) -> Results:
        """Bring every run to its end, equal ones once, and read all back by comparison and arm.

        Runs that are complete are left alone, those begun go on. A run that diverges does not stop the others: its
        `result.json` says so.

        Raises:
            UsageError: If a run cannot start, or a folder holds a run with other settings.
            Interrupted: If the process was asked to stop; all runs were saved.
        """
        jobs = self.jobs(comparisons)
        self.bring_to_end(list(jobs.values()))
        loaded = dict(zip(jobs, load_runs(jobs), strict=True))

        def runs(one: Comparison, arm: Arm) -> list[Run]:
            folders = (self.places.job(one, arm, seed).folder for seed in one.seeds)
            return [loaded[folder].named(arm.name) for folder in folders]

        return {one.key: {arm.name: runs(one, arm) for arm in one.arms} for one in comparisons}

    def jobs(self, comparisons: Sequence[Comparison]) -> dict[Path, Job]:
        """The runs of comparisons by folder, equal ones once, under the name that is met first; seed by seed."""
        found: dict[Path, Job] = {}
        members = ((one, arm, seed) for one in comparisons for arm, seed in one.members())
        for member in sorted(members, key=lambda member: member[-1]):
            job = self.places.job(*member)
            found.setdefault(job.folder, job)
        return found

    def bring_to_end(self, jobs: Sequence[Job], after: Callable[[Job], None] | None = None) -> None:
        """Train what has not ended yet; `after` is called as soon as a run is complete."""
        todo = {job.name: job for job in jobs if not self._has_ended(job)}
        ended = [job for job in jobs if job.name not in todo]
        diverged = sum(_diverged(job) for job in ended)
        if diverged < len(ended):
            say(self.console, f"{len(ended) - diverged} of {len(jobs)} runs are complete already")
        if diverged:
            say(self.console, f"{diverged} of {len(jobs)} runs diverged earlier; --retry-diverged tries them again")
        if not todo:
            return
        steps = {name: float(job.config.steps) for name, job in todo.items()}
        with showing(self.console, steps, what="runs", workers=self.workers) as view:

            def finished(name: str, result: Mapping[str, Any]) -> None:
                view.finish(name, f"validation loss {result['final_loss']:.4f}")
                if after is not None:
                    after(todo[name])

            audience = Audience(
                message=partial(_show, view, todo),
                finished=finished,
                failed=lambda name, error: _failed(view, todo[name], error),
            )
            if self.cluster is not None:
                run_on_cluster(todo, audience, self.cluster)
                return
            tasks = list(todo.items())
            run_jobs(train_job, tasks, audience, workers=self.workers, threads=None, devices=self.devices)

    def _has_ended(self, job: Job) -> bool:
        if not (job.folder / RESULT).exists():
            return False
        refuse_other_settings(job.folder, with_fingerprint(job.config))
        if self.retry_diverged and _diverged(job):
            (job.folder / RESULT).unlink()
            return False
        return True

    def experiment(self, experiments: Sequence[Experiment], *, seed: int) -> dict[str, ExperimentResult]:
        """Run experiments, the longest first, and return what they found in the order given.

        Every experiment runs on one thread and draws from a generator of its own, so that neither the number of
        processes nor their order changes a bit of the result.
        """
        found: dict[str, ExperimentResult] = {}
        by_cost = sorted(experiments, key=lambda experiment: -experiment.cost)
        costs = {experiment.name: experiment.cost for experiment in by_cost}
        with showing(self.console, costs, what="experiments", workers=self.workers) as view:

            def finished(name: str, result: ExperimentResult) -> None:
                found[name] = result
                held = sum(claim.holds for claim in result.evidence.claims)
                view.finish(name, f"{held} of {len(result.evidence.claims)} claims hold ({result.seconds:.1f} s)")

            audience = Audience(
                message=lambda name, share: view.update(name, share * costs[name], {"share": f"{share:.0%}"}),
                finished=finished,
            )
            tasks = [(experiment.name, experiment) for experiment in by_cost]
            run = partial(_run_experiment, seed=seed)
            run_jobs(run, tasks, audience, workers=self.workers, again="the same command begins anew")
        return {experiment.name: found[experiment.name] for experiment in experiments}


def _show(view: View, todo: Mapping[str, Job], name: str, content: Record | str) -> None:
    if isinstance(content, str):
        view.say(f"{name}: {content}")
    elif content["kind"] == "job":
        view.update(name, None, {"job": content["job"]})
    else:
        done = float(content["step"]) if content["kind"] == "train" else None
        view.update(name, done, numbers_of(content, todo[name].config.steps))


def _diverged(job: Job) -> bool:
    return "diverged" in read_object(job.folder / RESULT)


def _failed(view: View, job: Job, error: Exception) -> None:
    """Let the others go on if a run diverged; end everything if it could not run."""
    if not isinstance(error, Diverged):
        stop_at_failure(job.name, error)
        return
    write_divergence(job.folder, error)
    view.finish(job.name, f"diverged at update {error.step}")
    view.say(f"{job.name}: {error}")


def _run_experiment(experiment: Experiment, tell: Tell, *, seed: int) -> ExperimentResult:
    start = time.perf_counter()
    evidence = experiment.run(seed, progress=tell)
    return ExperimentResult(evidence, time.perf_counter() - start)


def on_cpu(device: str) -> bool:
    """Whether a run on the device of this name would be on the CPU here."""
    return resolve_device(device).type == "cpu"


def gpus_for(device: str) -> tuple[str, ...]:
    """The GPUs over which runs on the device of this name are spread: all of this machine, unless it names one."""
    return visible_gpus() if ":" not in device and resolve_device(device).type == "cuda" else ()
