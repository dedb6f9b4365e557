"""`muonsw diagnose`: what the telemetry of runs says, as a table, figures and sentences."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.storage import prepare_folder
from muonsw.lab.base.terminal import say
from muonsw.lab.diagnose.diagnosis import as_data, diagnose, print_diagnosis
from muonsw.lab.diagnose.figures import FIGURES, draw
from muonsw.lab.diagnose.history import LATE
from muonsw.lab.report.own import require_own, write_own
from muonsw.lab.runs import Run, load_runs
from muonsw.text import counted


@dataclass(frozen=True)
class Diagnose:
    """Show what decay does to the weights of one or several runs, beside what theory predicts.

    Reads run folders, and files of JSON lines that `muonsw.Telemetry` wrote in your own training loop. Prints a table
    and findings in plain words, and writes figures and `diagnose.json`.
    """

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = ()
    """Run folders, or files of JSON lines such as telemetry.jsonl; several are drawn over each other."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for figures and numbers; `RUN/diagnose` for one run folder, `FILE-diagnose` for one file, and
    `out/diagnose` for several unless given."""

    scope: str = "decayed"
    """Which weights: `decayed`, `all`, `role:NAME`, `layer:NUMBER` or `parameter:NAME`."""

    late: float = LATE
    """Share of the steps, at the end, over which the alignment is fitted."""

    momentum: Annotated[float | None, arg(metavar="BETA")] = None
    """Momentum of the optimizer, for files of JSON lines, which do not record it; two rules need it."""

    verbose: FlagCreatePairsOff[bool] = False
    """Print every column of the tables, also those that do not fit beside the others."""

    def run(self) -> int:
        """Examine, write, print."""
        if not self.runs:
            raise UsageError("say which run to diagnose: muonsw diagnose RUN...")
        if not 0.0 < self.late <= 1.0:
            raise UsageError(f"--late is a share of the steps, above 0 and at most 1, got {self.late:g}")
        if self.momentum is not None and not 0.0 <= self.momentum < 1.0:
            raise UsageError(f"--momentum is at least 0 and below 1, got {self.momentum:g}")
        loaded = [self._with_momentum(run) for run in load_runs(self.runs)]
        diagnoses = [diagnose(run, scope=self.scope, late=self.late) for run in loaded]
        folder = self.out or _folder(self.runs)
        prepare_folder(folder)
        names = ["diagnose.json", *(f"{name}{suffix}" for name in FIGURES for suffix in (".png", ".svg"))]
        require_own(folder / name for name in names)
        data = {"version": 1, "scope": self.scope, "late": self.late, "runs": [as_data(one) for one in diagnoses]}
        write_own(folder / "diagnose.json", json.dumps(data, allow_nan=False) + "\n")
        figures = [path for path in draw(diagnoses, folder) if path.suffix == ".png"]
        console = Console()
        print_diagnosis(console, diagnoses, verbose=self.verbose)
        say(console, f"\nwrote {folder}: diagnose.json and {counted(len(figures), 'figure')} as PNG and SVG")
        return 0

    def _with_momentum(self, run: Run) -> Run:
        if self.momentum is None or run.settings:
            return run
        return replace(run, settings={"optimizer": {"momentum": self.momentum}})


def _folder(runs: tuple[Path, ...]) -> Path:
    if len(runs) > 1:
        return Path("out") / "diagnose"
    return runs[0].with_name(f"{runs[0].stem}-diagnose") if runs[0].is_file() else runs[0] / "diagnose"
