"""The one protocol of all studies: run, judge, draw. What they share, and the two kinds that the catalogue has."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from muonsw.lab.claims.claim import Claim, Evidence, Verdict, count_verdicts, failed_first
from muonsw.lab.claims.table import Claims, any_failed
from muonsw.lab.console import Table, say
from muonsw.lab.errors import UsageError
from muonsw.lab.files import (
    numbered,
    plain,
    read_object,
    refuse_folder,
    reported,
    write_atomically,
    write_json,
)
from muonsw.lab.report.report import write_report
from muonsw.lab.report.sections import Chart
from muonsw.lab.studies.arms import Comparison, Results
from muonsw.lab.studies.outcome import arms_table, compare, completed, divergences, pairs_table
from muonsw.lab.studies.scales import CPU, Scale
from muonsw.lab.studies.workshop import ExperimentResult, Workshop
from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import environment
from muonsw.registry import Registry

PAGE = "report.html"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Conclusion:
    """What came out of a study that was run and judged."""

    sentence: str
    claims: Claims  # by the experiment that makes them
    tables: Sequence[Table]  # numbers beside them, the most telling one first
    paths: Sequence[Path]  # what was written, the numbers first
    seconds: float

    @property
    def all_claims(self) -> list[Claim]:
        """The claims, those that failed first."""
        return failed_first(chain.from_iterable(self.claims.values()))

    @property
    def failed(self) -> bool:
        """Whether a claim fails; one that is undecided does not."""
        return any_failed(self.claims)


class Study(ABC, Generic[Found]):
    """A question with the work that answers it; `conduct` runs it, judges it and draws it."""

    name: str  # what `muonsw reproduce` is given
    title: str  # one line for lists and pages
    numbers: ClassVar[str] = "claims.json"  # the file that its numbers are written to

    @abstractmethod
    def run(self, workshop: Workshop) -> Found:
        """Make what is needed; what exists already is taken."""

    @abstractmethod
    def judge(self, found: Found) -> Claims:
        """The claims that it allows."""

    @abstractmethod
    def sentence(self, found: Found, claims: Claims) -> str:
        """What came out, claiming no more than the numbers carry."""

    @abstractmethod
    def record(self, found: Found, claims: Claims, seconds: float) -> dict[str, Any]:
        """All numbers as data, with how long they took."""

    def tables(self, found: Found) -> Sequence[Table]:  # noqa: ARG002 (a study may have none)
        """Numbers beside the claims, the most telling table first."""
        return ()

    @abstractmethod
    def draw(self, found: Found, conclusion: Conclusion, folder: Path, *, images: bool) -> list[Path]:
        """Write figures and a page; with `images` the figures of the page as files too."""


def conduct(study: Study[Found], workshop: Workshop, folder: Path, *, images: bool = True) -> Conclusion:
    """Run a study to its end, judge it, and write what it found into a folder that exists."""
    refuse_folder(numbers := folder / study.numbers)
    start = time.perf_counter()
    found = study.run(workshop)
    claims, seconds = study.judge(found), time.perf_counter() - start
    conclusion = Conclusion(
        sentence=study.sentence(found, claims),
        claims=claims,
        tables=study.tables(found),
        paths=[write_numbers(numbers, study.record(found, claims, seconds), partial(say, workshop.console))],
        seconds=seconds,
    )
    return replace(conclusion, paths=[*conclusion.paths, *study.draw(found, conclusion, folder, images=images)])


def write_numbers(path: Path, record: Mapping[str, Any], note: Callable[[str], None] = lambda _text: None) -> Path:
    """Write the numbers of a study; those of another one, or at other settings, are kept under a further name."""
    if path.is_file() and _lasting(_read_numbers(path)) != _lasting(plain(record)):
        aside = numbered(path)
        with reported(path):
            path.rename(aside)
        note(f"{path} held the numbers of another study, or at other settings: they are now {aside}")
    return write_json(path, record)


def _lasting(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the same study finds again."""
    return {key: value for key, value in record.items() if key not in ("seconds", "environment")}


def _read_numbers(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except UsageError:
        return {}


def counts(claims: Claims) -> dict[str, int]:
    """How many claims there are, and how many failed or are undecided."""
    verdicts = [claim.verdict for those in claims.values() for claim in those]
    return {
        "claims_total": len(verdicts),
        "claims_failed": verdicts.count(Verdict.FAILS),
        "claims_undecided": verdicts.count(Verdict.UNDECIDED),
    }


@dataclass(frozen=True)
class ExperimentStudy(Study[Mapping[str, ExperimentResult]]):
    """Experiments that are reproduced together under one name, and the picture drawn from them."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]  # in the order in which they are shown
    # Writes figures from the evidence into a folder and returns their paths.
    picture: Callable[[Mapping[str, Evidence], Path], list[Path]]
    seed: int = 0  # of every random number

    def select(self, name: str) -> ExperimentStudy:
        """The study with one of its experiments only."""
        known: Registry[Experiment] = Registry(f"experiment of {self.name}")
        for experiment in self.experiments:
            known.register(experiment.name, experiment)
        return replace(self, experiments=(known[name],))

    def run(self, workshop: Workshop) -> Mapping[str, ExperimentResult]:
        """Run all experiments."""
        return workshop.experiment(self.experiments, seed=self.seed)

    def judge(self, found: Mapping[str, ExperimentResult]) -> Claims:
        """Experiments judge themselves; those claims that failed come first."""
        return {name: failed_first(result.evidence.claims) for name, result in found.items()}

    def sentence(self, found: Mapping[str, ExperimentResult], claims: Claims) -> str:  # noqa: ARG002
        """How many claims hold, and what a finite run cannot show."""
        count = count_verdicts([claim for those in claims.values() for claim in those])
        if any_failed(claims):
            return count
        return f"{count} Finite runs on these objectives agree with the theory, and cannot prove its limits."

    def record(self, found: Mapping[str, ExperimentResult], claims: Claims, seconds: float) -> dict[str, Any]:
        """Everything except the curves."""
        each = {name: round(result.seconds, 2) for name, result in found.items()}
        return {
            "study": self.name,
            "title": self.title,
            "seed": self.seed,
            **counts(claims),
            "experiments": [
                {
                    "name": experiment.name,
                    "title": experiment.title,
                    "hypotheses": experiment.hypotheses,
                    "settings": asdict(experiment.settings),
                    "claims": [claim.as_data() for claim in claims[experiment.name]],
                }
                for experiment in self.experiments
            ],
            "seconds": each | {"total": round(seconds, 2)},
            "environment": environment(),
        }

    def draw(
        self,
        found: Mapping[str, ExperimentResult],
        conclusion: Conclusion,  # noqa: ARG002
        folder: Path,
        *,
        images: bool,  # noqa: ARG002
    ) -> list[Path]:
        """The curves as data, and the picture."""
        evidence = {name: result.evidence for name, result in found.items()}
        curves = [asdict(series) for one in evidence.values() for series in one.series]
        text = json.dumps(seven_digits(plain(curves)), separators=(",", ":"), allow_nan=False)
        paths = [write_atomically(folder / "series.json", text + "\n")] if curves else []
        return [*paths, *self.picture(evidence, folder)]


def seven_digits(value: Any) -> Any:
    """Floats at seven significant digits, which no picture can tell from more."""
    if isinstance(value, Mapping):
        return {key: seven_digits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [seven_digits(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def nothing(_results: Results, _where: Scale | Path) -> Sequence[Any]:
    """No claim, no table or figure beside those that every study has."""
    return ()


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(f"{size:,}" for size in sorted(set(sizes)))


@dataclass(frozen=True)
class TrainingStudy(Study[Results]):
    """One table or figure of the paper, or a question next to it, answered by training."""

    name: str
    title: str
    reference: str  # where the paper has it
    comparisons: Callable[[Scale], Sequence[Comparison]]  # the runs, given a scale
    # Further runs, given what those found; before that, runs of the same sizes, for plans.
    then: Callable[[Results, Scale], Sequence[Comparison]] = nothing
    claims: Callable[[Results, Scale], Sequence[Claim]] = nothing  # the claims that they allow
    own_tables: Callable[[Results, Scale], Sequence[Table]] = nothing
    charts: Callable[[Results, Scale], Sequence[Chart]] = nothing  # figures of its own, for the page
    figures: Callable[[Results, Path], Sequence[Path]] = nothing  # figures of its own, as files in a folder
    # By scale, what a reader should know of it there, in sentences.
    notes: Mapping[str, str] = field(default_factory=dict)
    scale: Scale = CPU  # at which size it is run

    def at(self, scale: Scale) -> TrainingStudy:
        """The study at another scale."""
        return replace(self, scale=scale)

    def planned(self, found: Results | None = None) -> list[Comparison]:
        """All comparisons, given what was found so far."""
        return [*self.comparisons(self.scale), *self.then(found or {}, self.scale)]

    def runs(self, found: Results | None = None) -> list[RunConfig]:
        """Every run, those that comparisons share once."""
        return list(dict.fromkeys(config for one in self.planned(found) for config in one.configs()))

    def run(self, workshop: Workshop) -> Results:
        """Train everything, one stage after the other."""
        found = workshop.train(self.comparisons(self.scale))
        while more := self.next_stage(found):
            found = {**found, **workshop.train(more)}
        return found

    def next_stage(self, found: Results) -> list[Comparison]:
        """What follows from what was found and is not there yet."""
        return [one for one in self.then(found, self.scale) if one.key not in found]

    def judge(self, found: Results) -> Claims:
        """The claims about runs that were completed; those that failed first."""
        usable = self._usable(found)
        return {self.name: failed_first(self.claims(usable, self.scale)) if usable or not found else []}

    def _usable(self, found: Results) -> Results:
        """The runs that did not diverge, without paired comparisons that lost all runs of an arm.

        A sweep keeps them: a learning rate at which training diverges is a bad one.
        """
        sweeps = {one.key for one in self.planned(found) if not one.paired}
        kept = {
            key: arms if key in sweeps else {arm: completed(runs) for arm, runs in arms.items()}
            for key, arms in found.items()
        }
        return {key: arms for key, arms in kept.items() if all(arms.values())}

    def sentence(self, found: Results, claims: Claims) -> str:
        """What came out, and at which size."""
        lost = divergences(found)
        diverged = f" {'; '.join(lost)}: claims are about the runs that were completed." if lost else ""
        seeds = [len(one.seeds) for one in self.planned()]
        alone = " One seed for each arm: chance is not excluded." if seeds and max(seeds) == 1 else ""
        return f"{count_verdicts(claims[self.name])}{diverged}{alone} Scale {self.scale.name}: {self.how_scaled}"

    @property
    def how_scaled(self) -> str:
        """What is run at its scale, in words, and what a reader should know of it."""
        planned = self.planned()
        if not planned:
            return "Nothing is trained, so nothing is scaled."
        runs = [one.base for one in planned]
        names = ("model.width", "model.layers", "steps", "tokens_per_step")
        widths, layers, steps, tokens = (_listed(map(attrgetter(name), runs)) for name in names)
        arms, seeds = _listed(len(one.arms) for one in planned), _listed(len(one.seeds) for one in planned)
        sizes = f"Widths {widths}; layers {layers}; updates {steps}, of {tokens} tokens; arms {arms}; seeds {seeds}. "
        return (sizes + self.notes.get(self.scale.name, "")).strip()

    def record(self, found: Results, claims: Claims, seconds: float) -> dict[str, Any]:  # noqa: ARG002 (see its runs)
        """Everything except the curves."""
        seeds = {one.key: one.seeds for one in self.planned(found)}
        return {
            "study": self.name,
            "title": self.title,
            "reference": self.reference,
            "scale": self.scale.name,
            "scaled": self.how_scaled,
            **counts(claims),
            "claims": [claim.as_data() for claim in claims[self.name]],
            "comparisons": [
                {
                    "name": str(key),
                    "seeds": seeds[key],
                    "runs": {arm: [run.name for run in runs] for arm, runs in arms.items()},
                    **compare(arms).as_data(),
                }
                for key, arms in found.items()
            ],
            "environment": environment(),
        }

    def tables(self, found: Results) -> list[Table]:
        """Its own, then losses and norms of every arm, and of pairs where there is a baseline."""
        tables = [*self.own_tables(found, self.scale)]
        for place, one in enumerate(one for one in self.planned(found) if one.key in found):
            outcome = compare(found[one.key])
            for table in (arms_table(outcome), pairs_table(outcome.pairs))[: 2 if one.paired else 1]:
                tables.append(replace(table, name=f"{table.name}-{place}", title=f"{table.title}: {one.key}"))
        return tables

    def draw(self, found: Results, conclusion: Conclusion, folder: Path, *, images: bool) -> list[Path]:
        """Figures of its own, and the page."""
        several, usable = len(found) > 1, self._usable(found)
        runs = [
            run.named(f"{key}: {arm}" if several else arm)
            for key, arms in found.items()
            for arm, those in arms.items()
            for run in those
        ]
        own = self.figures(usable, folder)
        page = write_report(
            folder / PAGE,
            self.title,
            runs,
            verdict=conclusion.sentence,
            claims=conclusion.claims,
            tables=conclusion.tables,
            figures=self.charts(found, self.scale),
            images=images,
        )
        return [*own, *page]
