"""Running a training study: every run once, all of it resumable, then claims, tables, figures and a page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from muonsw.lab.claims.claim import Claim, failed_first
from muonsw.lab.data.record import read_record
from muonsw.lab.data.tokenizers import padded_vocab
from muonsw.lab.errors import UsageError
from muonsw.lab.processes import environment
from muonsw.lab.report.report import write_report
from muonsw.lab.report.sections import Table
from muonsw.lab.runs import load_runs
from muonsw.lab.storage import write_atomically
from muonsw.lab.studies.compare.arms import Job
from muonsw.lab.studies.compare.display import displaying
from muonsw.lab.studies.compare.outcome import compare
from muonsw.lab.studies.compare.pool import run_all
from muonsw.lab.studies.compare.tables import arms_table, pairs_table
from muonsw.lab.studies.training.evidence import relabelled
from muonsw.lab.studies.training.scales import Scale
from muonsw.lab.studies.training.study import Comparison, Results, TrainingStudy
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.state import resolve_device, with_fingerprint

CLAIMS, REPORT = "claims.json", "report.html"


@dataclass(frozen=True)
class Workshop:
    """Where and how the runs of studies are made.

    Attributes:
        runs: The folder of all runs of a scale, which its studies share.
        data: Prepared tokens.
        device: "cpu" or "cuda".
        workers: Runs at a time.
        console: Where progress is shown.
    """

    runs: Path
    data: Path
    device: str
    workers: int
    console: Console

    def ready(self, config: RunConfig) -> RunConfig:
        """The run on these tokens and this device, under a name that its settings alone decide."""
        vocab = padded_vocab(read_record(self.data).vocab_size)
        # One thread for each run on a CPU: the number of workers then changes nothing but the time.
        threads = 1 if self.device == "cpu" else config.threads
        chosen = replace(
            config,
            model=replace(config.model, vocab=vocab),
            data=replace(config.data, path=str(self.data)),
            device=self.device,
            threads=threads,
            arm="",
        )
        chosen = with_fingerprint(chosen)
        return replace(chosen, arm=describe(chosen))

    def jobs(self, comparisons: Sequence[Comparison]) -> dict[Path, Job]:
        """The runs of comparisons by folder, equal ones once."""
        found: dict[Path, Job] = {}
        for comparison in comparisons:
            for arm, seed, config in comparison.configs():
                ready = self.ready(config)
                job = Job(f"{comparison.name}: {arm.name}, seed {seed}", ready, self.folder(ready))
                found.setdefault(job.folder, job)
        return found

    def folder(self, ready: RunConfig) -> Path:
        """Where a run is kept: a readable name with a hash of all its settings."""
        text = json.dumps(ready.as_data(), sort_keys=True)
        return self.runs / f"{ready.arm}-seed{ready.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def run(self, comparisons: Sequence[Comparison]) -> Results:
        """Bring every run to its end, and read all back by comparison and arm."""
        jobs = self.jobs(comparisons)
        todo = list(jobs.values())
        if todo:
            with displaying(self.console, todo, self.workers) as audience:
                run_all(todo, workers=self.workers, audience=audience)
        loaded = dict(zip(jobs, load_runs(jobs), strict=True))
        return {
            one.name: {
                arm.name: [
                    relabelled(loaded[self.folder(self.ready(one.config(arm, seed)))], arm.name) for seed in one.seeds
                ]
                for arm in one.arms
            }
            for one in comparisons
        }


def describe(config: RunConfig) -> str:
    """A short name of what mostly sets a run apart.

    Examples:
        >>> from muonsw.lab.train.presets import preset_run
        >>> describe(preset_run("w512-dense", ""))
        'w512-dense-muon-scaled-lr0.007-wd0.1-T110000'
    """
    chosen, dense = config.optimizer, "-dense" if config.model.experts == 1 else ""
    rule = f"{chosen.algorithm}-{chosen.decay}-lr{chosen.lr:.4g}-wd{chosen.weight_decay:.4g}"
    return f"w{config.model.width}{dense}-{rule}-T{config.steps}"


def find_data(scale: Scale, given: Path | None) -> Path:
    """The tokens of a scale, prepared if need be.

    Raises:
        UsageError: If the scale needs a folder and none is given, or it has another vocabulary.
    """
    if given is None:
        return scale.tokens()
    size = read_record(given).vocab_size
    if scale.vocab is not None and size != scale.vocab:
        wanted = f"--scale {scale.name} needs GPT-2 tokens, a vocabulary of {scale.vocab:,}"
        raise UsageError(f"{wanted}; {given} has {size:,}: prepare it with --tokenizer gpt2")
    return given


def find_device(name: str) -> str:
    """The device that runs will use here, by its kind."""
    return resolve_device(name).type


@dataclass(frozen=True)
class Report:
    """A study, run and judged.

    Attributes:
        claims: Those that failed first.
        tables: What is printed beside them.
        paths: What was written.
        verdict: One sentence.
    """

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]
    paths: tuple[Path, ...]
    verdict: str

    @property
    def failed(self) -> bool:
        """Whether a claim does not hold."""
        return any(not claim.holds for claim in self.claims)


def conduct(study: TrainingStudy, scale: Scale, workshop: Workshop, folder: Path, *, images: bool = True) -> Report:
    """Run a study to its end and write what it found into a folder that exists.

    Args:
        study: What to run.
        scale: At which size.
        workshop: Where its runs are made.
        folder: For claims, figures and the page.
        images: Whether the figures of the page are written as files too.
    """
    first = study.comparisons(scale)
    results = workshop.run(first)
    later = study.follow_up(results, scale)
    comparisons = [*first, *later]
    if later:
        results = workshop.run(comparisons)
    return write_study(study, scale, comparisons, results, folder, images=images)


def write_study(
    study: TrainingStudy,
    scale: Scale,
    comparisons: Sequence[Comparison],
    results: Results,
    folder: Path,
    *,
    images: bool = True,
) -> Report:
    """Judge the runs of a study; write its numbers, its figures and its page."""
    claims = failed_first(study.judge(results, scale))
    verdict = summary(study, scale, claims)
    data = study_data(study, scale, comparisons, results, claims)
    paths = [write_atomically(folder / CLAIMS, json.dumps(data, indent=1, allow_nan=False) + "\n")]
    paths += study.draw(results, folder)
    tables = [*study.tables(results, scale), *comparison_tables(comparisons, results)]
    several = len(results) > 1
    runs = [
        relabelled(run, f"{name}: {arm}" if several else arm)
        for name, arms in results.items()
        for arm, those in arms.items()
        for run in those
    ]
    paths += write_report(
        folder / REPORT,
        study.title,
        runs,
        verdict=verdict,
        claims={study.name: claims},
        tables=tables,
        figures=study.charts(results, scale),
        images=images,
    )
    return Report(tuple(claims), tuple(tables), tuple(paths), verdict)


def summary(study: TrainingStudy, scale: Scale, claims: Sequence[Claim]) -> str:
    """What came out, and at which size."""
    failed = sum(not claim.holds for claim in claims)
    count = (
        f"{failed} of {len(claims)} claims FAILED their stated tolerance; they are shown first."
        if failed
        else f"All {len(claims)} claims hold within their stated tolerances."
    )
    seeds = [len(one.seeds) for one in study.planned(scale)]
    alone = " One seed for each arm: chance is not excluded." if seeds and max(seeds) == 1 else ""
    return f"{count}{alone} Scale {scale.name}: {study.scaled[scale.name]}"


def comparison_tables(comparisons: Sequence[Comparison], results: Results) -> list[Table]:
    """Losses and norms of every arm, and of pairs where there is a baseline."""
    tables = []
    for place, one in enumerate(comparisons):
        outcome = compare(results[one.name])
        kinds = (arms_table(outcome), pairs_table(outcome)) if one.paired else (arms_table(outcome),)
        for table in kinds:
            tables.append(replace(table, name=f"{table.name}-{place}", title=f"{table.title}: {one.name}"))
    return tables


def study_data(
    study: TrainingStudy, scale: Scale, comparisons: Sequence[Comparison], results: Results, claims: Sequence[Claim]
) -> dict[str, Any]:
    """Everything about a study that was run, except its curves."""
    return {
        "study": study.name,
        "title": study.title,
        "reference": study.reference,
        "scale": scale.name,
        "scaled": study.scaled[scale.name],
        "claims_total": len(claims),
        "claims_failed": sum(not claim.holds for claim in claims),
        "claims": [claim.as_data() for claim in claims],
        "comparisons": [
            {
                "name": one.name,
                "seeds": list(one.seeds),
                "runs": {arm: [run.name for run in runs] for arm, runs in results[one.name].items()},
                **compare(results[one.name]).as_data(),
            }
            for one in comparisons
        ],
        "environment": environment(),
    }
