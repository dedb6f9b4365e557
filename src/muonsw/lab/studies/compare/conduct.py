"""Running a comparison from its arms to its report, all of it resumable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from muonsw.lab.claims.claim import Claim
from muonsw.lab.report.report import write_report
from muonsw.lab.report.sections import Table
from muonsw.lab.runs import Run, load_runs
from muonsw.lab.storage import write_atomically
from muonsw.lab.studies.compare.arms import Arm, jobs
from muonsw.lab.studies.compare.claims import effects
from muonsw.lab.studies.compare.display import displaying
from muonsw.lab.studies.compare.outcome import Outcome, compare
from muonsw.lab.studies.compare.pool import run_all
from muonsw.lab.studies.compare.tables import arms_table, pairs_table
from muonsw.lab.studies.compare.verdict import verdict
from muonsw.lab.train.config import RunConfig

RUNS, OUTCOME, REPORT = "runs", "outcome.json", "report.html"


@dataclass(frozen=True)
class Bench:
    """Where and how the runs of a comparison are made.

    Attributes:
        folder: Everything goes below it.
        console: Where progress is shown.
        workers: Runs at a time.
    """

    folder: Path
    console: Console
    workers: int

    def run(self, base: RunConfig, arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, list[Run]]:
        """Train every arm with every seed, or take what is there, and read the runs back by arm."""
        todo = jobs(base, arms, seeds, self.folder / RUNS)
        with displaying(self.console, todo, self.workers) as audience:
            run_all(todo, workers=self.workers, audience=audience)
        runs = dict(zip((job.name for job in todo), load_runs(job.folder for job in todo), strict=True))
        return {arm.name: [runs[job.name] for job in todo if job.config.arm == arm.name] for arm in arms}


def write_outcome(
    folder: Path,
    title: str,
    runs: Mapping[str, Sequence[Run]],
    *,
    tuned: bool = False,
    tables: Sequence[Table] = (),
    claims: Sequence[Claim] | None = None,
) -> tuple[Outcome, str, list[Claim], list[Path]]:
    """Judge the runs of a comparison and write its numbers and its page.

    Returns:
        The outcome, the verdict, the claims, and what was written.
    """
    outcome = compare(runs)
    judged = list(effects(outcome) if claims is None else claims)
    sentence = verdict(outcome, tuned=tuned)
    data = {"verdict": sentence, **outcome.as_data(), "claims": [claim.as_data() for claim in judged]}
    paths = [write_atomically(folder / OUTCOME, json.dumps(data, indent=1))]
    everything = [run for those in runs.values() for run in those]
    paths += write_report(
        folder / REPORT,
        title,
        everything,
        verdict=sentence,
        claims={"comparison": judged} if judged else None,
        tables=[arms_table(outcome), pairs_table(outcome), *tables],
    )
    return outcome, sentence, judged, paths
