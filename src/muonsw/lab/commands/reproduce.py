"""`muonsw reproduce`: run a study of the paper, judge its claims, draw its figures."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from muonsw.lab.claims.table import print_claims
from muonsw.lab.errors import UsageError
from muonsw.lab.processes import cores
from muonsw.lab.storage import prepare_folder
from muonsw.lab.studies.catalogue import STUDIES, AnyStudy, find_study
from muonsw.lab.studies.experiment import Study
from muonsw.lab.studies.progress import watching
from muonsw.lab.studies.runner import run_all
from muonsw.lab.studies.store import write_results
from muonsw.lab.studies.terminal import print_list, print_results
from muonsw.lab.studies.training import SCALES, Scale, TrainingStudy
from muonsw.lab.studies.training.conduct import Workshop, conduct, find_data, find_device
from muonsw.lab.studies.training.costs import cost_table
from muonsw.lab.tables import print_table
from muonsw.lab.terminal import say

DEFAULT_SCALE = "cpu"


@dataclass(frozen=True)
class Reproduce:
    """Run a study of the paper and print claim, prediction, measurement and verdict.

    Exits with 0 when every claim holds, with 1 when one fails. Training studies are resumable: the same command again
    goes on where it stopped, and studies of one scale share their runs.
    """

    name: Annotated[str, Positional, arg(metavar="NAME")] = ""
    """The study, such as `main-table` or `theory`, or one experiment of it, such as `theory/matrix`."""

    list: FlagCreatePairsOff[bool] = False
    """Show what can be reproduced, and run nothing."""

    scale: Literal["cpu", "mini", "paper"] | None = None
    """How large: cpu for a laptop (unless given), mini for minutes to an hour on one GPU, paper for the paper's own
    configuration. Theory and coordinates have one size."""

    dry_run: FlagCreatePairsOff[bool] = False
    """Print runs, tokens, FLOPs and hours, and train nothing."""

    tflops: Annotated[float | None, arg(metavar="X")] = None
    """For the hours: what one run sustains, in 1e12 FLOPs a second; a guess for the scale unless given."""

    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """Prepared tokens; without it Python source is prepared in out/data. Scale paper needs GPT-2 tokens here."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for claims, figures and page; `out/NAME`, for training `out/NAME-SCALE`, unless given. Runs are kept
    beside it in `runs-SCALE`, which studies share."""

    seeds: Annotated[int | None, arg(metavar="N")] = None
    """How many seeds for each arm of a training study, instead of the scale's."""

    workers: Annotated[int | None, arg(metavar="N")] = None
    """Runs of a training study at a time; one for each core, or one on a GPU, unless given."""

    device: str = "auto"
    """cpu, cuda or auto, for training."""

    seed: int = 0
    """Seed of every random number of theory and coordinates."""

    processes: Annotated[int | None, arg(metavar="N")] = None
    """How many experiments of theory and coordinates run at a time, on one thread each; one for each core unless
    given."""

    def run(self) -> int:
        """Run, write, print; the exit code says whether all claims hold."""
        console = Console()
        if self.list:
            print_studies(console, STUDIES.values())
            return 0
        study = self._study()
        if isinstance(study, TrainingStudy):
            return self._train(console, study)
        return self._run(console, study)

    def _run(self, console: Console, study: Study) -> int:
        """A study that needs no training runs."""
        processes = _at_least_one("--processes", self.processes) or cores()
        if self.scale is not None:
            say(console, f"{study.name} has one size; --scale {self.scale} changes nothing")
        if self.dry_run:
            seconds = sum(experiment.cost for experiment in study.experiments)
            count = len(study.experiments)
            say(console, f"{study.name}: {count} experiments, about {seconds:.0f} s on one core; no training runs")
            return 0
        folder = self.out or Path("out") / study.name
        prepare_folder(folder)
        start = time.perf_counter()
        with watching(console, study) as watch:
            results = run_all(study.experiments, seed=self.seed, processes=processes, watch=watch)
        figures = study.draw({name: result.outcome for name, result in results.items()}, folder)
        seconds = time.perf_counter() - start
        paths = write_results(study, results, folder, seed=self.seed, seconds=seconds) + figures
        print_results(console, results, paths, seconds)
        return int(any(not claim.holds for result in results.values() for claim in result.outcome.claims))

    def _train(self, console: Console, study: TrainingStudy) -> int:
        """A study that trains."""
        scale = SCALES[self.scale or DEFAULT_SCALE].with_seeds(_at_least_one("--seeds", self.seeds))
        workers = _at_least_one("--workers", self.workers)
        if self.tflops is not None and not self.tflops > 0:
            raise UsageError(f"--tflops must be above zero, got {self.tflops:g}")
        if self.dry_run:
            print_cost(console, study, scale, self.tflops or scale.tflops, workers or scale.workers)
            return 0
        folder = self.out or Path("out") / f"{study.name}-{scale.name}"
        device = find_device(self.device)
        prepare_folder(folder)
        data = find_data(scale, self.data) if study.planned(scale) else Path()
        workers = workers or (cores() if device == "cpu" else 1)
        workshop = Workshop(folder.parent / f"runs-{scale.name}", data, device, workers, console)
        start = time.perf_counter()
        report = conduct(study, scale, workshop, folder)
        for table in report.tables:
            print_table(console, table)
        print_claims(console, report.claims)
        say(console, f"\n{report.verdict} ({time.perf_counter() - start:.0f} s)")
        kept = [path for path in report.paths if path.suffix in (".html", ".json")]
        for path in kept:
            say(console, f"wrote {path}")
        say(console, f"wrote {len(report.paths) - len(kept)} figures below {folder}; runs are in {workshop.runs}")
        return int(report.failed)

    def _study(self) -> AnyStudy:
        if not self.name:
            raise UsageError(f"say what to reproduce: {', '.join(STUDIES)} (or --list)")
        try:
            return find_study(self.name)
        except ValueError as error:
            raise UsageError(str(error)) from error


def print_studies(console: Console, studies: Iterable[AnyStudy]) -> None:
    """What can be reproduced, with the scales of each study that trains."""
    for study in studies:
        if isinstance(study, TrainingStudy):
            say(console, f"{study.name}: {study.title} (--scale {', '.join(study.scaled)})")
        else:
            print_list(console, [study])
    for scale in SCALES.values():
        say(console, f"scale {scale.name}: {scale.title}")
    say(console, "what a study takes at a scale: muonsw reproduce NAME --scale SCALE --dry-run")


def print_cost(console: Console, study: TrainingStudy, scale: Scale, tflops: float, workers: int) -> None:
    """What a study would take, and how it was scaled."""
    say(console, f"{study.name}, scale {scale.name} ({scale.title}); {study.reference}")
    say(console, study.scaled[scale.name])
    print_table(console, cost_table(study, scale, tflops, workers))


def _at_least_one(option: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{option} must be at least 1, got {value}")
    return value
