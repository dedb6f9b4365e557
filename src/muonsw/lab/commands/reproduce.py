"""`muonsw reproduce`: run a study of the paper, judge its claims, draw its figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from muonsw import machine
from muonsw.lab.commands.shared import print_conclusion, require_at_least_one
from muonsw.lab.console import Column, Table, Value, paragraph, print_table, say
from muonsw.lab.errors import UsageError
from muonsw.lab.files import prepare_folder
from muonsw.lab.launch import Cluster, runs_at_once
from muonsw.lab.plan import Cost, amount, cost
from muonsw.lab.report.page import PAGE, check_target
from muonsw.lab.runs import load_runs
from muonsw.lab.stats import claims_table
from muonsw.lab.studies.catalogue import STUDIES, find_study
from muonsw.lab.studies.records import append
from muonsw.lab.studies.scales import SCALES, find_data
from muonsw.lab.studies.study import ExperimentStudy, TrainingStudy
from muonsw.lab.studies.workshop import BySettings, Workshop
from muonsw.text import counted

DEFAULT_SCALE = "cpu"


@dataclass(frozen=True)
class Reproduce:
    """Run a study of the paper and print claim, prediction, measurement and verdict.

    Exits with 1 when a claim fails, else with 0; a claim that is undecided does not fail. Training studies are
    resumable: the same command again continues where it stopped, and studies of one scale share their runs.
    """

    name: Annotated[str, Positional, arg(metavar="NAME")] = ""
    """The study, such as `main-table` or `theory`, or a part of it, such as `main-table/width-256` or
    `theory/matrix`."""

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
    """Runs of a training study at a time; one for each core or GPU, or all of them on a cluster, unless given."""

    record: Annotated[Path | None, arg(metavar="FILE")] = None
    """Append the runs of a training study to this JSONL table; run folders can then be deleted."""

    retry_diverged: FlagCreatePairsOff[bool] = False
    """Try runs again that diverged in an earlier call."""

    device: str = "auto"
    """cpu, cuda or auto, for training."""

    seed: int = 0
    """Seed of every random number of theory and coordinates."""

    processes: Annotated[int | None, arg(metavar="N")] = None
    """How many experiments of theory and coordinates run at a time, on one thread each; one for each core unless
    given."""

    verbose: FlagCreatePairsOff[bool] = False
    """Print all columns of every table, and what each claim assumes and tolerates."""

    cluster: OmitArgPrefixes[Cluster] = field(default_factory=Cluster)
    """Training as jobs of a cluster."""

    def run(self) -> int:
        """Run, write, print; the exit code says whether a claim fails."""
        console = Console()
        if self.list:
            print_studies(console, STUDIES.values())
            return 0
        require_at_least_one(self, "workers", "seeds", "processes")
        self.cluster.check(self.device)
        if not self.name:
            raise UsageError(f"missing study name: one of {', '.join(STUDIES)} (or --list)")
        try:
            study = find_study(self.name)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return self._train(console, study) if isinstance(study, TrainingStudy) else self._run(console, study)

    def _run(self, console: Console, study: ExperimentStudy) -> int:
        """A study that trains no run, and is run anew each time."""
        if self.cluster.cluster is not None:
            raise UsageError(f"{study.name} trains nothing and takes minutes here: leave --cluster out")
        if self.scale is not None:
            say(console, f"{study.name} has one size; --scale {self.scale} changes nothing")
        if self.dry_run:
            count, seconds = counted(len(study.experiments), "experiment"), sum(one.cost for one in study.experiments)
            say(console, f"{study.name}: {count}, about {seconds:.0f} s on one core; no training runs")
            return 0
        prepare_folder(folder := self.out or Path("out") / study.name)
        workshop = Workshop(console, self.processes or machine.cores())
        conclusion = replace(study, seed=self.seed).conduct(workshop, folder)
        table = claims_table(conclusion.claims, ("predicted", "measured"), named=True)
        print_conclusion(console, conclusion, folder, [table], verbose=self.verbose)
        return int(conclusion.failed)

    def _train(self, console: Console, study: TrainingStudy) -> int:
        """A study that trains."""
        scale = SCALES[self.scale or DEFAULT_SCALE].with_seeds(self.seeds)
        study = study.at(scale)
        runs, whole = study.runs(), STUDIES[study.name]
        if not runs and isinstance(whole, TrainingStudy) and (planned := whole.at(scale).planned()):
            raise UsageError(
                f"scale {scale.name} has no {self.name}: it has {', '.join(one.key.slug for one in planned)}"
            )
        if self.dry_run:
            if self.tflops is not None and not self.tflops > 0:
                raise UsageError(f"--tflops must be above zero, got {self.tflops:g}")
            usual = scale.workers if self.cluster.cluster is None else len(runs)
            print_cost(console, study, self.tflops or scale.tflops, self.workers or usual)
            return 0
        folder = self.out or Path("out") / f"{study.name}-{scale.name}"
        check_target(folder / PAGE, images=True)
        data = find_data(scale, self.data) if runs else Path()
        places = BySettings(folder.parent / f"runs-{scale.name}", data, self.cluster.device_type(self.device))
        prepare_folder(folder)
        workers = self.workers or (len(runs) if self.cluster.cluster else runs_at_once(self.device))
        workshop = Workshop(console, workers, places, self.retry_diverged, self.cluster)
        conclusion = study.conduct(workshop, folder)
        if self.record is not None:
            count = append(self.record, load_runs(workshop.jobs(study.planned())), study=study.name, arm=None)
            say(console, f"added {counted(count, 'run')} to {self.record}")
        tables = [claims_table(conclusion.claims, ("expected", "measured")), *conclusion.tables]
        kept = f"; runs are in {places.folder}" if runs else ""
        print_conclusion(console, conclusion, folder, tables, verbose=self.verbose, more=kept)
        return int(conclusion.failed)


def print_studies(console: Console, studies: Iterable[ExperimentStudy | TrainingStudy]) -> None:
    """What can be reproduced: the experiments of each study, or the scales of one that trains."""
    for study in studies:
        if isinstance(study, TrainingStudy):
            say(console, f"{study.name}: {study.title} (--scale {', '.join(SCALES)})")
            continue
        say(console, f"{study.name}: {study.title}")
        for experiment in study.experiments:
            name = f"{study.name}/{experiment.name}"
            say(console, f"  {name:<28} {experiment.title}")
    for scale in SCALES.values():
        say(console, f"scale {scale.name}: {scale.title}")
    say(console, "what a study takes at a scale: muonsw reproduce NAME --scale SCALE --dry-run")


def print_cost(console: Console, study: TrainingStudy, tflops: float, workers: int) -> None:
    """What a study would take, and how it was scaled."""
    paragraph(console, f"{study.name}, scale {study.scale.name} ({study.scale.title}); {study.reference}")
    paragraph(console, study.how_scaled)
    print_table(console, cost_table(study, tflops, workers), hint="a pipe shows them, as in | cat")


def cost_table(study: TrainingStudy, tflops: float, workers: int) -> Table:
    """One row for each comparison, and the whole."""

    def numbers(total: Cost) -> tuple[Value, ...]:
        hours = hours_text(total.hours(tflops, workers))
        return total.runs, amount(total.tokens), f"{total.flops:.3g}", hours

    names = ("seeds", "steps", "runs", "tokens", "FLOPs", "hours")
    ranks = {"runs": 0, "hours": 0}
    columns = [Column("comparison"), Column("arms", rank=2)]
    columns += [Column(name, number=True, rank=ranks.get(name, 1)) for name in names]
    rows: list[Sequence[Value]] = []
    for one in study.planned():
        arms = "; ".join(arm.name for arm in one.arms)
        rows.append((str(one.key), arms, len(one.seeds), one.base.steps, *numbers(cost(one.configs()))))
    rows.append(("all, shared runs once", "", None, None, *numbers(cost(study.runs()))))
    at_once = "one run at a time" if workers == 1 else f"{workers} runs at a time"
    note = (
        f"Hours at {tflops:g} TFLOP/s sustained by each run, {at_once}. Runs are kept and shared between studies of "
        "a scale: what is complete is not trained again."
    )
    return Table("cost", "What it takes", columns, rows, note)


def hours_text(hours: float) -> str:
    """Hours in two or three digits, never as a power of ten.

    Examples:
        >>> hours_text(1630.4), hours_text(12.34), hours_text(0.0512)
        ('1,630', '12.3', '0.051')
    """
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 1 else f"{hours:.2g}"
