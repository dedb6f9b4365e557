"""Plan the runs of studies, launch them, and read them back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from muonsw.lab import launch
from muonsw.lab.arms import Arm, Comparison, Results
from muonsw.lab.console import showing
from muonsw.lab.data.loader import read_record
from muonsw.lab.launch import Cluster, Job
from muonsw.lab.runs import Run, load_runs
from muonsw.lab.stats import Evidence
from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.train.checkpoint import identity
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.loop import torch_threads
from muonsw.lab.train.state import with_fingerprint


@dataclass(frozen=True)
class ByArm:
    """Runs under the names of their arms: one comparison in one folder, which refuses other settings."""

    folder: Path

    def job(self, comparison: Comparison, arm: Arm, seed: int) -> Job:
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
        config = self.ready(comparison.config(arm, seed))
        folder = self.folder / f"{config.arm}-seed{config.seed}-{identity(config)}"
        return Job(f"{comparison.key}: {arm.name}, seed {seed}", config, folder)

    def ready(self, config: RunConfig) -> RunConfig:
        """The run on these tokens and this device, under a name that its settings alone decide."""
        chosen = replace(
            config,
            model=replace(config.decoder, vocab=read_record(self.data).padded_vocab),
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
        >>> from muonsw.lab.train.config import preset_run
        >>> describe(preset_run("w512-dense", ""))
        'w512-dense-muon-scaled-lr0.007-wd0.1-T110000'
    """
    chosen, dense = config.optimizer, "-dense" if config.decoder.experts == 1 else ""
    rule = f"{chosen.algorithm}-{chosen.decay}-lr{chosen.lr:.4g}-wd{chosen.weight_decay:.4g}"
    return f"w{config.decoder.width}{dense}-{rule}-T{config.steps}"


@dataclass(frozen=True)
class Workshop:
    """Trains runs and computes experiments for studies; the number of workers changes only the time."""

    console: Console  # where progress is shown
    workers: int  # runs, or experiments, at a time
    # Where runs are kept; experiments keep nothing.
    places: ByArm | BySettings = field(default_factory=lambda: ByArm(Path("runs")))
    retry_diverged: bool = False  # whether runs that diverged in an earlier call are trained again
    cluster: Cluster = field(default_factory=Cluster)  # Slurm, or this machine

    def train(self, comparisons: Sequence[Comparison]) -> Results:
        """Train every run of comparisons that has not ended; return all by comparison, arm and seed.

        Raises:
            UsageError: If a run cannot start, or a folder holds a run with other settings.
            Interrupted: If the process was asked to stop; all runs were saved.
        """
        jobs = self.jobs(comparisons)
        launch.run(
            list(jobs.values()),
            console=self.console,
            workers=self.workers,
            cluster=self.cluster,
            retry_diverged=self.retry_diverged,
        )
        loaded = dict(zip(jobs, load_runs(jobs), strict=True))

        def runs(one: Comparison, arm: Arm) -> list[Run]:
            folders = (self.places.job(one, arm, seed).folder for seed in one.seeds)
            return [loaded[folder].named(arm.name) for folder in folders]

        return {one.key: {arm.name: runs(one, arm) for arm in one.arms} for one in comparisons}

    def jobs(self, comparisons: Sequence[Comparison]) -> dict[Path, Job]:
        """Plan the runs of comparisons by folder, equal ones once, seed by seed."""
        members = ((one, arm, seed) for one in comparisons for arm, seed in one.members())
        found: dict[Path, Job] = {}
        for member in sorted(members, key=lambda member: member[-1]):
            job = self.places.job(*member)
            found.setdefault(job.folder, job)
        return found

    def experiment(self, experiments: Sequence[Experiment], *, seed: int) -> dict[str, tuple[Evidence, float]]:
        """Run experiments, the longest first; return what each found and its seconds in the order given.

        Every experiment runs on one thread and draws from a generator of its own, so that neither the number of
        processes nor their order changes a bit of the result.
        """
        found: dict[str, tuple[Evidence, float]] = {}
        by_cost = {one.name: one for one in sorted(experiments, key=lambda one: -one.cost)}
        with showing(self.console, {name: one.cost for name, one in by_cost.items()}, what="experiments") as view:

            def done(name: str, result: tuple[Evidence, float]) -> None:
                found[name], claims = result, result[0].claims
                held = sum(claim.holds for claim in claims)
                view.finish(name, f"{held} of {len(claims)} claims hold ({result[1]:.1f} s)")

            launch.each(partial(_run_experiment, seed=seed), by_cost, done, workers=self.workers, saves=False)
        return {experiment.name: found[experiment.name] for experiment in experiments}


def _run_experiment(experiment: Experiment, *, seed: int) -> tuple[Evidence, float]:
    start = time.perf_counter()
    with torch_threads(1):
        evidence = experiment.run(seed)
    return evidence, time.perf_counter() - start
