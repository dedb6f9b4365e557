"""A study: a question, the work that answers it, and the claims that were written before the work.

The work is experiments, which take minutes, or training runs at a scale. Rerunning a study resumes its runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from muonsw.lab import launch
from muonsw.lab.compare import (
    RULES,
    Arm,
    Comparison,
    Conclusion,
    Outcome,
    PlaceJob,
    Results,
    Train,
    arms_table,
    compare,
    completed,
    describe_divergence,
    differences_table,
    slug,
)
from muonsw.lab.console import Table, showing
from muonsw.lab.data.loader import read_record
from muonsw.lab.diagnose import draw, open_history
from muonsw.lab.files import refuse_folder, write_json
from muonsw.lab.launch import Job
from muonsw.lab.report import PAGE, write_report
from muonsw.lab.stats import Claim, Evidence, count_verdicts, failed_first
from muonsw.lab.train.checkpoint import environment, identity
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.loop import torch_threads
from muonsw.lab.train.state import with_fingerprint

if TYPE_CHECKING:
    from muonsw.lab.charts import Chart
    from muonsw.lab.studies.scales import Scale
    from muonsw.lab.theory.chains import Experiment

NUMBERS = "claims.json"


def by_settings(folder: Path, data: Path, device: str) -> PlaceJob:
    """Place each run in a folder named after a hash of its settings, so that studies share equal runs."""
    vocab = read_record(data).padded_vocab

    def place(comparison: Comparison, arm: Arm, seed: int) -> Job:
        config = comparison.config(arm, seed)
        config = replace(
            config,
            model=replace(config.decoder, vocab=vocab),
            data=replace(config.tokens, path=str(data)),
            device=device,
            threads=1 if device == "cpu" else config.threads,  # the number of workers must not change results
            arm="",
        )
        config = with_fingerprint(config)
        # The name follows from the settings, not from the study's name for the arm.
        chosen = config.optimizer
        rule = f"{chosen.algorithm}-{chosen.decay}-lr{chosen.lr:.4g}-wd{chosen.weight_decay:.4g}"
        config = replace(config, arm=f"w{config.decoder.width}-{rule}-T{config.steps}")
        name = f"{config.arm}-seed{config.seed}-{identity(config)}"
        return Job(f"{comparison.key}: {arm.name}, seed {seed}", config, folder / name)

    return place


def run_experiments(
    experiments: Sequence[Experiment], *, console: Console, workers: int, seed: int
) -> dict[str, Evidence]:
    """Run experiments; return the evidence of each in the given order.

    Each experiment runs on one thread with its own generator, so neither the number of workers nor the order changes
    a bit of the result.
    """
    evidence: dict[str, Evidence] = {}
    by_name = {experiment.name: experiment for experiment in experiments}
    with showing(console, dict.fromkeys(by_name, 1.0), what="experiments") as view:

        def done(name: str, result: Evidence) -> None:
            evidence[name] = result
            held = sum(claim.holds for claim in result.claims)
            view.finish(name, f"{held} of {len(result.claims)} claims hold")

        launch.run_tasks(partial(_run_experiment, seed=seed), by_name, done, workers=workers)
    return {name: evidence[name] for name in by_name}


def _run_experiment(experiment: Experiment, *, seed: int) -> Evidence:
    with torch_threads(1):
        return experiment.run(seed)


@dataclass(frozen=True)
class Study:
    """A question, and the experiments (each with its own claims) or training runs (judged together) that answer it."""

    name: str
    title: str
    experiments: tuple[Experiment, ...] = ()
    # Writes figures from the evidence of experiments into a folder and returns their paths.
    picture: Callable[[Mapping[str, Evidence], Path], list[Path]] = lambda _evidence, _folder: []
    comparisons: Callable[[Scale], Sequence[Comparison]] = lambda _scale: ()  # the runs at a scale
    judge: Callable[[Results, Scale], Sequence[Claim]] = lambda _results, _scale: ()
    # Further tables, and charts for the page.
    show: Callable[[Results, Scale], tuple[Sequence[Table], Sequence[Chart]]] = lambda _results, _scale: ((), ())
    scales: tuple[str, ...] = ()  # at which runs are trained; empty for experiments

    def parts(self, scale: Scale) -> list[str]:
        """The names of its experiments, or of its comparisons at a scale."""
        return [each.name for each in self.experiments] or [slug(each.key) for each in self.comparisons(scale)]

    def select(self, part: str) -> Study:
        """The study with only one experiment or one comparison, such as `width-256`."""
        return replace(
            self,
            experiments=tuple(each for each in self.experiments if each.name == part),
            comparisons=lambda scale: [each for each in self.comparisons(scale) if slug(each.key) == part],
        )

    def runs(self, scale: Scale) -> list[RunConfig]:
        """All runs at a scale, without duplicates."""
        return list(dict.fromkeys(config for comparison in self.comparisons(scale) for config in comparison.configs()))

    def conduct(
        self,
        folder: Path,
        scale: Scale,
        *,
        console: Console,
        workers: int = 1,
        seed: int = 0,
        train: Train | None = None,
    ) -> Conclusion:
        """Do all missing work, judge it, and write numbers, figures and a page into an existing folder.

        `workers` and `seed` are for experiments. `train`, such as `train_all`, completes the runs of comparisons.
        """
        refuse_folder(folder / NUMBERS)
        start, planned = time.perf_counter(), self.comparisons(scale)
        evidence = run_experiments(self.experiments, console=console, workers=workers, seed=seed)
        results = train(planned) if train is not None else {}

        usable = usable_results(planned, results)
        shown, charts = self.show(usable, scale) if usable else ((), ())
        claims = {name: failed_first(result.claims) for name, result in evidence.items()}
        if planned:
            claims[self.name] = failed_first(self.judge(usable, scale) if usable else ())
        seconds = time.perf_counter() - start

        every_claim = [claim for group in claims.values() for claim in group]
        outcomes = {key: compare(arms) for key, arms in results.items()}
        sentence = " ".join((count_verdicts(every_claim), *caveats(planned, outcomes)))

        # Numbers, figures, and for training runs a page: the study's tables, then losses and norms of every arm.
        numbers = {
            "study": self.name,
            "scale": scale.name if planned else None,
            "seed": seed,
            "claims": {name: [claim.as_data() for claim in group] for name, group in claims.items()},
            "comparisons": [
                {
                    "name": key,
                    "runs": {arm: [run.name for run in runs] for arm, runs in arms.items()},
                    **asdict(outcomes[key]),
                }
                for key, arms in results.items()
            ],
            "seconds": round(seconds, 2),
            "environment": environment(),
        }
        paths = [write_json(folder / NUMBERS, numbers)]
        paths += self.picture(evidence, folder)
        tables = [*shown]
        for place, comparison in enumerate(planned):
            key, outcome = comparison.key, outcomes[comparison.key]
            for table in (arms_table(outcome), differences_table(outcome.differences))[: 2 if comparison.paired else 1]:
                tables.append(replace(table, name=f"{table.name}-{place}", title=f"{table.title}: {key}"))
            if comparison.paired and key in usable:  # the first seed of the two rules as one figure
                (folder / "figures").mkdir(parents=True, exist_ok=True)
                paths += draw([open_history(usable[key][rule][0]) for rule in RULES], folder / "figures" / slug(key))
        if planned:
            runs = [
                run.named(f"{key}: {arm}" if len(results) > 1 else arm)
                for key, arms in results.items()
                for arm, members in arms.items()
                for run in members
            ]
            page = write_report(
                folder / PAGE, self.title, runs, verdict=sentence, claims=claims, tables=tables, figures=charts
            )
            paths.append(page)
        return Conclusion(sentence, tables, paths, claims)


def usable_results(planned: Sequence[Comparison], results: Results) -> Results:
    """Keep the seeds that every arm of a paired comparison completed; a sweep counts a diverged run as worst."""
    usable = {}
    for comparison in planned:
        arms = results[comparison.key]
        if comparison.paired:
            done = ({run.seed for run in completed(runs)} for runs in arms.values())
            shared = set(comparison.seeds).intersection(*done)
            arms = {name: [run for run in runs if run.seed in shared] for name, runs in arms.items()}
        if all(arms.values()):
            usable[comparison.key] = arms
    return usable


def caveats(planned: Sequence[Comparison], outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Name the arms that lost runs, and say if there is only one seed."""
    lost = [
        f"{(f'{key}: {arm.name}' if len(outcomes) > 1 else arm.name)!r} diverged {describe_divergence(arm.diverged)}"
        for key, outcome in outcomes.items()
        for arm in outcome.arms
        if arm.diverged
    ]
    if lost:
        paired = planned[0].paired
        judged = "claims are about the seeds that every arm completed" if paired else "counted as worst in the sweep"
        yield f"{'; '.join(lost)}: {judged}."
    if planned and max(len(comparison.seeds) for comparison in planned) == 1:
        yield "One seed per arm gives no error bar."
