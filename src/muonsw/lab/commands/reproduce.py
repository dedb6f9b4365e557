"""`muonsw reproduce`: run a study of the paper, judge its claims, draw its figures."""

from __future__ import annotations

from collections.abc import Sequence
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

    Exits with 1 when a claim fails, else with 0; an undecided claim does not fail. Rerun the same command to resume
    a training study. Studies of one scale share their runs.
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
        console = Console()
        if self.list:
            for study in STUDIES.values():
                scales = f" (--scale {', '.join(SCALES)})" if isinstance(study, TrainingStudy) else ""
                say(console, f"{study.name}: {study.title}{scales}")
                for experiment in () if isinstance(study, TrainingStudy) else study.experiments:
                    say(console, f"  {f'{study.name}/{experiment.name}':<28} {experiment.title}")
            for scale in SCALES.values():
                say(console, f"scale {scale.name}: {scale.title}")
            say(console, "what a study takes at a scale: muonsw reproduce NAME --scale SCALE --dry-run")
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
        """A study that trains nothing; it runs from the start each time."""
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
            paragraph(console, f"{study.name}, scale {scale.name} ({scale.title}); {study.reference}")
            paragraph(console, study.how_scaled)
            table = cost_table(study, self.tflops or scale.tflops, self.workers or usual)
            print_table(console, table, hint="a pipe shows them, as in | cat")
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


def cost_table(study: TrainingStudy, tflops: float, workers: int) -> Table:
    """One row for each comparison, and the whole."""

    def numbers(total: Cost) -> tuple[Value, ...]:
        hours = total.hours(tflops, workers)
        text = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 1 else f"{hours:.2g}"
        return total.runs, amount(total.tokens), f"{total.flops:.3g}", text

    columns = [Column("comparison"), Column("arms", rank=2)]
    for name in ("seeds", "steps", "runs", "tokens", "FLOPs", "hours"):
        columns.append(Column(name, number=True, rank=0 if name in ("runs", "hours") else 1))
    rows: list[Sequence[Value]] = []
    for one in study.planned():
        arms = "; ".join(arm.name for arm in one.arms)
        rows.append((str(one.key), arms, len(one.seeds), one.base.steps, *numbers(cost(one.configs()))))
    rows.append(("all, shared runs once", "", None, None, *numbers(cost(study.runs()))))
    note = (
        f"Hours at {tflops:g} TFLOP/s sustained by each run, {counted(workers, 'run')} at a time. Studies of one scale "
        "share their runs: a completed run is not trained again."
    )
    return Table("cost", "What it takes", columns, rows, note)
