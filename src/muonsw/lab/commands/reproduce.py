"""`muonsw reproduce`: run a study of the paper, judge its claims, draw its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import Positional

from muonsw import machine
from muonsw.lab.commands.training import ManyRuns, require_at_least_one
from muonsw.lab.compare import jobs_of
from muonsw.lab.console import Column, Table, Value, paragraph, print_table, say
from muonsw.lab.errors import UsageError
from muonsw.lab.files import prepare_folder
from muonsw.lab.options import Flag, unset
from muonsw.lab.plan import Cost, amount, cost
from muonsw.lab.report import PAGE, check_target
from muonsw.lab.stats import any_failed, claims_table
from muonsw.lab.studies.catalogue import STUDIES
from muonsw.lab.studies.scales import SCALES, Scale, find_data
from muonsw.lab.studies.study import Study, by_settings
from muonsw.registry import unknown
from muonsw.text import counted


@dataclass(frozen=True)
class Reproduce(ManyRuns):
    """Run a study of the paper and print claim, prediction, measurement and verdict.

    Exits with 1 if a claim fails; an undecided claim is not a failure.

    Studies of one scale share their runs. Rerun the same command to resume.
    """

    name: Annotated[str, Positional, unset(metavar="NAME")] = ""
    """The study, such as `main-table`, or a part of it, such as `main-table/width-256`."""
    list: Flag = False
    """Show what can be reproduced, and run nothing."""
    scale: Annotated[Literal["cpu", "mini", "paper"] | None, unset()] = None
    """cpu (the default) for a laptop, mini for up to an hour on one GPU, paper for the paper's own configuration."""
    dry_run: Flag = False
    """Print runs, tokens, FLOPs and hours, and train nothing."""
    data: Annotated[Path | None, unset(metavar="DIR")] = None
    """Prepared tokens; scale paper needs GPT-2 tokens. Default, at scale cpu only: the Python standard library."""
    out: Annotated[Path | None, unset(metavar="DIR")] = None
    """Folder for claims, figures and page, next to runs-SCALE. Default: out/NAME-SCALE; out/NAME if nothing trains."""
    seeds: Annotated[int | None, unset(metavar="N")] = None
    """Seeds of each arm of a training study. Default: the scale's."""
    device: str = "auto"
    """cpu, cuda or auto, for training."""
    seed: int = 0
    """Random seed of a study that trains nothing."""

    def run(self) -> int:
        console = Console()
        if self.list:
            list_studies(console)
            return 0
        require_at_least_one(self, "workers", "seeds")
        self.cluster.check(self.device)
        study, scale = self._study()
        planned, runs = study.comparisons(scale), study.runs(scale)
        if not planned and self.scale is not None:
            raise UsageError(f"{study.name} has only one size: leave --scale out")
        if not planned and self.cluster.cluster is not None:
            raise UsageError(f"{study.name} trains nothing and takes minutes here: leave --cluster out")
        if self.dry_run and not planned:
            say(console, f"{study.name} trains nothing and takes minutes")
            return 0
        if self.dry_run:
            paragraph(console, f"{study.name}, scale {scale.name} ({scale.title})")
            print_table(console, cost_table(study, scale, self.workers or (len(runs) if self.cluster.cluster else 1)))
            return 0

        name = self.name.replace("/", "-")
        folder = self.out or Path("out") / (f"{name}-{scale.name}" if planned else name)
        if planned:
            check_target(folder / PAGE)
            data = find_data(scale, self.data)
            runs_folder = folder.parent / f"runs-{scale.name}"
            place = by_settings(runs_folder, data, self.cluster.device_type(self.device))
            workers = self.at_once(len(runs), self.device)
            train = self.trainer(console, place, workers)
        else:
            workers, train = self.workers or machine.cores(), None
        prepare_folder(folder)
        conclusion = study.conduct(folder, scale, console=console, workers=workers, seed=self.seed, train=train)
        claims = claims_table(conclusion.claims)
        where = f"; runs are in {runs_folder}" if planned else ""
        self.conclude(console, conclusion, folder, [claims, *conclusion.tables], where)
        if planned:
            self.add_to_record(console, jobs_of(planned, place), study=study.name, arm=None)
        return int(any_failed(conclusion.claims))

    def _study(self) -> tuple[Study, Scale]:
        """Find the study (or its part) and the scale; refuse unknown names and scales."""
        if not self.name:
            raise UsageError(f"missing study name: one of {', '.join(STUDIES)} (or --list)")
        name, _, part = self.name.partition("/")
        scale = SCALES[self.scale or "cpu"]
        scale = scale if self.seeds is None else replace(scale, seeds=self.seeds)
        if name not in STUDIES:
            raise UsageError(unknown("study", name, list(STUDIES)))
        study = STUDIES[name]
        if study.scales and scale.name not in study.scales:
            raise UsageError(f"{name} has no scale {scale.name}: give --scale {' or '.join(study.scales)}")
        if part and part not in (parts := study.parts(scale)):
            raise UsageError(unknown(f"part of {name}", part, parts))
        return study.select(part) if part else study, scale


def list_studies(console: Console) -> None:
    for study in STUDIES.values():
        scales = f" (--scale {', '.join(study.scales)})" if study.scales else ""
        say(console, f"{study.name}: {study.title}{scales}")
        for experiment in study.experiments:
            say(console, f"  {f'{study.name}/{experiment.name}':<28} {experiment.title}")
    for scale in SCALES.values():
        say(console, f"scale {scale.name}: {scale.title}")
    say(console, "the cost of a study: muonsw reproduce NAME --scale SCALE --dry-run")


def cost_table(study: Study, scale: Scale, workers: int) -> Table:
    """One row for each comparison, and their sum."""

    def numbers(total: Cost) -> tuple[Value, ...]:
        hours = total.hours(scale.tflops, workers)
        text = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
        return total.runs, amount(total.tokens), f"{total.flops:.3g}", text

    columns = [Column("comparison"), Column("arms")]
    for name in ("seeds", "steps", "runs", "tokens", "FLOPs", "hours"):
        columns.append(Column(name, number=True))
    rows: list[Sequence[Value]] = []
    for comparison in study.comparisons(scale):
        arms = "; ".join(arm.name for arm in comparison.arms)
        settings = comparison.key, arms, len(comparison.seeds), comparison.base.steps
        rows.append((*settings, *numbers(cost(comparison.configs()))))
    rows.append(("all, shared runs once", "", None, None, *numbers(cost(study.runs(scale)))))
    note = (
        f"Hours at an assumed {scale.tflops:g} TFLOP/s in each run, {counted(workers, 'run')} at a time. "
        "Studies of one scale share their runs: a completed run is not trained again."
    )
    return Table("cost", "Cost", columns, rows, note)
