"""`muonsw diagnose`: findings and norms of runs, printed, drawn and written."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from muonsw.lab.console import say
from muonsw.lab.diagnose import as_data, diagnose, draw, print_diagnosis, recorded_settings
from muonsw.lab.errors import UsageError
from muonsw.lab.files import prepare_folder, write_atomically
from muonsw.lab.runs import Run, load_runs


def _with_recorded_settings(run: Run) -> Run:
    """Give a file of JSON lines, which has no configuration, the settings in its first telemetry record."""
    if run.settings or not run.path.is_file():
        return run
    with run.path.open("rb") as lines, suppress(ValueError):  # a line that is being written
        first = next((line for line in lines if b'"groups"' in line), b"{}")
        return replace(run, settings=recorded_settings(json.loads(first)))
    return run


@dataclass(frozen=True)
class Diagnose:
    """Show what decay does to the weights of runs, and what is wrong.

    Prints findings in plain words and a table of norms beside theory. Writes
    every number to diagnose.json, and one figure.
    """

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = ()
    """Run folders, or JSON lines that `muonsw.Telemetry` wrote in your own loop; several are drawn together."""

    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder to write to. Default: RUN/diagnose for a run, FILE-diagnose for a file, out/diagnose for several."""

    scope: str = ""
    """Which weights: decayed (the default), all, role:NAME, layer:NUMBER or parameter:NAME."""

    def run(self) -> int:
        if not self.runs:
            raise UsageError("missing run: muonsw diagnose RUN...")
        runs = [_with_recorded_settings(run) for run in load_runs(self.runs)]
        diagnoses = [diagnose(run, scope=self.scope) for run in runs]
        folder, first = self.out, self.runs[0]
        if folder is None:
            folder = first.with_name(f"{first.stem}-diagnose") if first.is_file() else first / "diagnose"
            folder = folder if len(runs) == 1 else Path("out/diagnose")
        prepare_folder(folder)
        data = {"version": 1, "scope": self.scope, "runs": [as_data(diagnosis) for diagnosis in diagnoses]}
        write_atomically(folder / "diagnose.json", json.dumps(data, allow_nan=False) + "\n")
        draw(diagnoses, folder / "diagnose")
        console = Console()
        print_diagnosis(console, diagnoses)
        say(console, f"\nwrote diagnose.json, diagnose.png and diagnose.svg to {folder}")
        return 0
