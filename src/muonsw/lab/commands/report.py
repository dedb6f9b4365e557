"""`muonsw report`: show runs beside each other on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from muonsw.lab.console import say
from muonsw.lab.errors import UsageError
from muonsw.lab.report.page import check_target, write_report
from muonsw.lab.runs import load_runs, runs_below
from muonsw.lab.train.folder import CONFIG
from muonsw.text import counted


@dataclass(frozen=True)
class Report:
    """Write one self-contained interactive page about runs, and its figures as PNG and SVG beside it.

    A run that is still in progress is shown as far as it has got.
    """

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = ()
    """Run folders, folders that hold run folders, such as those of `muonsw compare`, or files of JSON lines that
    `muonsw.Telemetry` wrote."""

    out: Annotated[Path, arg(aliases=("-o",), metavar="FILE")] = Path("report.html")
    """The page; its figures go into a folder of the same name beside it."""

    title: str = ""
    """Heading of the page; made from the runs' names unless given."""

    no_images: FlagCreatePairsOff[bool] = False
    """Write the page alone, without PNG and SVG."""

    def run(self) -> int:
        if not self.runs:
            raise UsageError("missing run: muonsw report RUN [RUN ...] -o report.html")
        check_target(self.out, images=not self.no_images)
        loaded = load_runs(find_runs(self.runs))
        title = self.title or (f"Run {loaded[0].name}" if len(loaded) == 1 else f"{len(loaded)} runs")
        written = write_report(self.out, title, loaded, images=not self.no_images)
        charts = counted((len(written) - 1) // 2, "chart")
        images = f", and {charts} as PNG and SVG in {written[1].parent}" if written[1:] else ""
        say(Console(), f"wrote {written[0]}{images}")
        return 0


def find_runs(paths: tuple[Path, ...]) -> list[Path]:
    """The run folders among paths; a folder that is none itself stands for those inside it or its `runs`."""
    found: list[Path] = []
    for path in paths:
        single = path.is_file() or (path / CONFIG).is_file()
        found += [path] if single else runs_below(path) or [path]
    return list(dict.fromkeys(found))
