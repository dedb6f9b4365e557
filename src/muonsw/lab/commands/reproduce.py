"""`muonsw reproduce`: run a study of the paper, judge its claims, draw its figures."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from muonsw.lab.experiments.experiment import Study
from muonsw.lab.experiments.runner import run_all
from muonsw.lab.experiments.store import write_results
from muonsw.lab.files import UsageError, prepare_folder
from muonsw.lab.report.progress import watching
from muonsw.lab.report.terminal import print_list, print_results
from muonsw.lab.studies import STUDIES, find_study


@dataclass(frozen=True)
class Reproduce:
    """Run a study of the paper and print claim, prediction, measurement and verdict.

    Exits with 0 when every claim holds, with 1 when one fails.
    """

    name: Annotated[str, Positional, arg(metavar="NAME")] = ""
    """The study, such as `theory`, or one experiment of it, such as `theory/matrix`."""

    list: FlagCreatePairsOff[bool] = False
    """Show what can be reproduced, and run nothing."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for claims and figures; `out/NAME` unless given."""

    seed: int = 0
    """Seed of every random number."""

    processes: Annotated[int | None, arg(metavar="N")] = None
    """How many experiments run at a time, on one thread each; one for each core unless given."""

    def run(self) -> int:
        """Run, write, print; the exit code says whether all claims hold."""
        console = Console()
        if self.list:
            print_list(console, STUDIES.values())
            return 0
        study = self._study()
        folder = self.out or Path("out") / study.name
        prepare_folder(folder)
        start = time.perf_counter()
        with watching(console, study) as watch:
            results = run_all(study.experiments, seed=self.seed, processes=self._processes(), watch=watch)
        figures = study.draw({name: result.outcome for name, result in results.items()}, folder)
        seconds = time.perf_counter() - start
        paths = write_results(study, results, folder, seed=self.seed, seconds=seconds) + figures
        print_results(console, results, paths, seconds)
        return int(any(not claim.holds for result in results.values() for claim in result.outcome.claims))

    def _study(self) -> Study:
        if not self.name:
            raise UsageError(f"say what to reproduce: {', '.join(STUDIES)} (or --list)")
        try:
            return find_study(self.name)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _processes(self) -> int:
        if self.processes is None:
            return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.processes < 1:
            raise UsageError(f"--processes must be at least 1, got {self.processes}")
        return self.processes
