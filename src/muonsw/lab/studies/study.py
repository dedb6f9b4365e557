"""Studies: a question with the work that answers it.

All have `select`, which returns the study with one of its parts, and `conduct`, which runs it to the end, judges the
claims, and writes numbers, figures and a page into a folder that exists.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from muonsw.lab.arms import Comparison, Results
from muonsw.lab.compare import write_numbers
from muonsw.lab.console import Table, say
from muonsw.lab.files import plain, refuse_folder, write_atomically
from muonsw.lab.outcome import arms_table, compare, completed, divergences, pairs_table
from muonsw.lab.report.charts import Chart
from muonsw.lab.report.page import PAGE, write_report
from muonsw.lab.stats import Claim, Claims, Evidence, Verdict, any_failed, count_verdicts, failed_first
from muonsw.lab.studies.scales import CPU, Scale
from muonsw.lab.studies.workshop import Workshop
from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.train.checkpoint import environment
from muonsw.lab.train.config import RunConfig
from muonsw.registry import Registry

NUMBERS = "claims.json"


@dataclass(frozen=True)
class Conclusion:
    """What came out of a study."""

    sentence: str
    claims: Claims  # by the experiment that makes them, those that failed first
    tables: Sequence[Table]  # the most telling one first
    paths: Sequence[Path]  # what was written, the numbers first
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether a claim fails; one that is undecided does not."""
        return any_failed(self.claims)


def counts(claims: Iterable[Claim]) -> dict[str, int]:
    """How many claims there are, and how many failed or are undecided."""
    verdicts = [claim.verdict for claim in claims]
    numbers = {"failed": verdicts.count(Verdict.FAILS), "undecided": verdicts.count(Verdict.UNDECIDED)}
    return {f"claims_{name}": number for name, number in {"total": len(verdicts), **numbers}.items()}


@dataclass(frozen=True)
class ExperimentStudy:
    """Experiments that train no run, and the picture drawn from them."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]  # in the order in which they are shown
    # Writes figures from the evidence into a folder and returns their paths.
    picture: Callable[[Mapping[str, Evidence], Path], list[Path]]
    seed: int = 0  # of every random number

    def select(self, part: str) -> ExperimentStudy:
        known: Registry[Experiment] = Registry(f"experiment of {self.name}")
        for experiment in self.experiments:
            known.register(experiment.name, experiment)
        return replace(self, experiments=(known[part],))

    def conduct(self, workshop: Workshop, folder: Path) -> Conclusion:
        refuse_folder(folder / NUMBERS)
        start = time.perf_counter()
        found = workshop.experiment(self.experiments, seed=self.seed)
        seconds = time.perf_counter() - start
        evidence = {name: own for name, (own, _) in found.items()}
        claims = {name: failed_first(own.claims) for name, own in evidence.items()}
        every = list(chain.from_iterable(claims.values()))
        sentence = count_verdicts(every)
        if not any_failed(claims):
            sentence += " Finite runs on these objectives agree with the theory, and cannot prove its limits."
        numbers = {
            "study": self.name,
            "title": self.title,
            "seed": self.seed,
            **counts(every),
            "experiments": [
                {
                    "name": experiment.name,
                    "title": experiment.title,
                    "settings": asdict(experiment.settings),
                    "claims": [claim.as_data() for claim in claims[experiment.name]],
                }
                for experiment in self.experiments
            ],
            "seconds": {name: round(own, 2) for name, (_, own) in found.items()} | {"total": round(seconds, 2)},
            "environment": environment(),
        }
        paths = [write_numbers(folder / NUMBERS, numbers, partial(say, workshop.console))]
        if curves := [asdict(series) for one in evidence.values() for series in one.series]:
            text = json.dumps(seven_digits(plain(curves)), separators=(",", ":"), allow_nan=False)
            paths.append(write_atomically(folder / "series.json", text + "\n"))
        return Conclusion(sentence, claims, (), [*paths, *self.picture(evidence, folder)], seconds)


def seven_digits(value: Any) -> Any:
    """Floats at seven significant digits, which no picture can tell from more."""
    if isinstance(value, Mapping):
        return {key: seven_digits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [seven_digits(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def nothing(_results: Results, _where: Scale | Path) -> Sequence[Any]:
    """No claim, table or figure besides those that every study has."""
    return ()


@dataclass(frozen=True)
class TrainingStudy:
    """One table or figure of the paper, or a question next to it, answered by training."""

    name: str
    title: str
    reference: str  # where the paper has it
    comparisons: Callable[[Scale], Sequence[Comparison]]  # the runs, given a scale
    claims: Callable[[Results, Scale], Sequence[Claim]] = nothing  # the claims that they allow
    own_tables: Callable[[Results, Scale], Sequence[Table]] = nothing
    charts: Callable[[Results, Scale], Sequence[Chart]] = nothing  # figures of its own, for the page
    figures: Callable[[Results, Path], Sequence[Path]] = nothing  # figures of its own, as files in a folder
    notes: Mapping[str, str] = field(default_factory=dict)  # by scale, what a reader should know, in sentences
    scale: Scale = CPU  # at which size it is run

    def at(self, scale: Scale) -> TrainingStudy:
        return replace(self, scale=scale)

    def select(self, part: str) -> TrainingStudy:
        """The study with one of its comparisons only, such as `width-256`; none where the scale lacks it."""
        own = self.comparisons
        return replace(self, comparisons=lambda scale: [one for one in own(scale) if one.key.slug == part])

    def planned(self) -> list[Comparison]:
        """All comparisons at its scale."""
        return list(self.comparisons(self.scale))

    def runs(self) -> list[RunConfig]:
        """Every run, those that comparisons share once."""
        return list(dict.fromkeys(config for one in self.planned() for config in one.configs()))

    @property
    def how_scaled(self) -> str:
        """What is run at its scale, in words, and what a reader should know of it."""
        planned = self.planned()
        if not planned:
            return "Nothing is trained, so nothing is scaled."

        def listed(sizes: Iterable[int]) -> str:
            return ", ".join(f"{size:,}" for size in sorted(set(sizes)))

        names = ("model.width", "model.layers", "steps", "tokens_per_step")
        widths, layers, steps, tokens = (listed(attrgetter(name)(one.base) for one in planned) for name in names)
        arms, seeds = listed(len(one.arms) for one in planned), listed(len(one.seeds) for one in planned)
        sizes = f"Widths {widths}; layers {layers}; steps {steps}, of {tokens} tokens; arms {arms}; seeds {seeds}. "
        return (sizes + self.notes.get(self.scale.name, "")).strip()

    def conduct(self, workshop: Workshop, folder: Path, *, images: bool = True) -> Conclusion:
        """Train everything that is missing, judge the runs that did not diverge, and write numbers and a page."""
        refuse_folder(folder / NUMBERS)
        start, planned = time.perf_counter(), self.planned()
        found = workshop.train(planned)
        # A sweep keeps runs that diverged, as bad ones; a paired comparison that lost an arm is not judged.
        usable = {
            one.key: {arm: completed(runs) if one.paired else runs for arm, runs in found[one.key].items()}
            for one in planned
        }
        usable = {key: arms for key, arms in usable.items() if all(arms.values())}
        claims = failed_first(self.claims(usable, self.scale)) if usable or not found else []
        seconds = time.perf_counter() - start

        lost = divergences(found)
        sentence = count_verdicts(claims)
        sentence += f" {'; '.join(lost)}: claims are about the runs that were completed." if lost else ""
        if planned and max(len(one.seeds) for one in planned) == 1:
            sentence += " One seed for each arm: chance is not excluded."
        sentence += f" Scale {self.scale.name}: {self.how_scaled}"

        outcomes = {key: compare(arms) for key, arms in found.items()}
        numbers = {
            "study": self.name,
            "title": self.title,
            "reference": self.reference,
            "scale": self.scale.name,
            "scaled": self.how_scaled,
            **counts(claims),
            "claims": [claim.as_data() for claim in claims],
            "comparisons": [
                {
                    "name": str(one.key),
                    "seeds": one.seeds,
                    "runs": {arm: [run.name for run in runs] for arm, runs in found[one.key].items()},
                    **outcomes[one.key].as_data(),
                }
                for one in planned
            ],
            "environment": environment(),
        }
        paths = [write_numbers(folder / NUMBERS, numbers, partial(say, workshop.console))]

        # Its own tables, then losses and norms of every arm, and of pairs where there is a baseline.
        tables = [*self.own_tables(found, self.scale)]
        for place, one in enumerate(planned):
            outcome = outcomes[one.key]
            for table in (arms_table(outcome), pairs_table(outcome.pairs))[: 2 if one.paired else 1]:
                tables.append(replace(table, name=f"{table.name}-{place}", title=f"{table.title}: {one.key}"))
        paths += self.figures(usable, folder)
        shown = [
            run.named(f"{key}: {arm}" if len(found) > 1 else arm)
            for key, arms in found.items()
            for arm, runs in arms.items()
            for run in runs
        ]
        paths += write_report(
            folder / PAGE,
            self.title,
            shown,
            verdict=sentence,
            claims={self.name: claims},
            tables=tables,
            figures=self.charts(found, self.scale),
            images=images,
        )
        return Conclusion(sentence, {self.name: claims}, tables, paths, seconds)
