"""`muonsw diagnose`: what the telemetry of runs says, as a table, figures and sentences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, arg

from muonsw.lab.diagnose.diagnosis import as_data, diagnose
from muonsw.lab.diagnose.figures import draw_all
from muonsw.lab.diagnose.history import LATE
from muonsw.lab.diagnose.terminal import print_diagnosis
from muonsw.lab.errors import UsageError
from muonsw.lab.runs import load_runs
from muonsw.lab.storage import prepare_folder, write_atomically


@dataclass(frozen=True)
class Diagnose:
    """Show what decay does to the weights of one or several runs, beside what theory predicts.

    Prints a table and findings in plain words, and writes figures and `diagnose.json`.
    """

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = ()
    """Run folders; several are drawn over each other."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for figures and numbers; `RUN/diagnose` for one run and `out/diagnose` for several unless given."""

    scope: str = "decayed"
    """Which weights: `decayed`, `all`, `role:NAME`, `layer:NUMBER` or `parameter:NAME`."""

    late: float = LATE
    """Share of the steps, at the end, over which the alignment is fitted."""

    def run(self) -> int:
        """Examine, write, print."""
        if not self.runs:
            raise UsageError("say which run to diagnose: muonsw diagnose RUN...")
        if not 0.0 < self.late <= 1.0:
            raise UsageError(f"--late is a share of the steps, above 0 and at most 1, got {self.late:g}")
        diagnoses = [diagnose(run, scope=self.scope, late=self.late) for run in load_runs(self.runs)]
        folder = self.out or (self.runs[0] / "diagnose" if len(self.runs) == 1 else Path("out") / "diagnose")
        prepare_folder(folder)
        data = {"version": 1, "scope": self.scope, "late": self.late, "runs": [as_data(one) for one in diagnoses]}
        paths = [write_atomically(folder / "diagnose.json", json.dumps(data, allow_nan=False) + "\n")]
        paths += draw_all(diagnoses, folder)
        console = Console()
        print_diagnosis(console, diagnoses)
        console.print()
        for path in paths:
            console.print(f"wrote {escape(str(path))}", highlight=False, soft_wrap=True)
        return 0
