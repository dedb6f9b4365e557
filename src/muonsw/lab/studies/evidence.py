"""The evidence: studies at scale mini whose runs are kept as records, and the page that they make.

`gather` trains what has no record yet and exports it; `write_page` needs the records alone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.tables import markdown
from muonsw.lab.claims.table import claims_table
from muonsw.lab.data.shards import fingerprint, read_record
from muonsw.lab.report.sections import Chart, LegendEntry, Sheet
from muonsw.lab.runs import Run, load_runs
from muonsw.lab.runs.records import Records
from muonsw.lab.studies.arms import RULES, Comparison, Key, Results, Runs
from muonsw.lab.studies.catalogue import find_study
from muonsw.lab.studies.conclusions import SENTENCES, conclusion
from muonsw.lab.studies.jobs import Job
from muonsw.lab.studies.scales import MINI
from muonsw.lab.studies.study import TrainingStudy
from muonsw.lab.studies.training import (
    family,
    lambda_scaling,
    regret,
    untuned,
    worked_tasks,
)
from muonsw.lab.studies.training.regret import Optimum
from muonsw.lab.studies.workshop import Workshop
from muonsw.lab.train.folder import CHECKPOINTS, RESULT
from muonsw.registry import unknown

NAME, FOLDER = "evidence", Path("evidence")
TEMPLATE, STEP_TIME = "evidence.md.in", "step-time.json"
PAGE, ASSETS = Path("docs/evidence.md"), Path("docs/assets")
# By study, the file of its records in `FOLDER`: a file holds the runs of one text.
TEXTS: Mapping[str, str] = {
    **dict.fromkeys(("regret", "best-rules", "hard-cases", "adamw"), "enwiki-23M"),
    **dict.fromkeys(("main-table", "steady-state", "diagnostics", "long", "repeated-text"), "enwiki-123M"),
    **dict.fromkeys(("schedules", "rate-drift", "lambda-scaling", "gradient-growth", "family"), "enwiki-123M"),
    **dict.fromkeys(("tokens-per-parameter", "adamw-lambda", "which-peak"), "enwiki-123M"),
}
# The texts of the map and of the longer runs, as tables name them.
MAP_TEXT, FRESH_TEXT = "23M tokens", "123M tokens"
UNTUNED = "untuned"
# By study whose charts are a picture of the page: the stem of its file, and what it shows.
PICTURES = {
    UNTUNED: (
        "never-tuned",
        "Cost over the length of the run, and over the width, where lambda is 0.1 for every run, 0.01 for every run, "
        "and as advised, under both rules.",
    ),
    "regret": (
        "regret-map",
        "Regret over lambda under both rules, one panel for each horizon: in the longer runs constant decay's curve "
        "rises sooner and more steeply to the right of its minimum.",
    ),
    "steady-state": (
        "dynamics",
        "Weight RMS over the updates: under constant decay it rises and then falls by half, under scaled decay it "
        "settles; the recursion lies on both. Beside it the alignment of weights and updates.",
    ),
    "long": ("long-horizons", "Regret over lambda under both rules, for both lengths on fresh text."),
    "adamw-lambda": ("adamw-lambda", "Validation loss of AdamW over lambda under both rules, means and single seeds: "
                     "seeds lie as far apart as the rules."),
    "lambda-scaling": ("lambda-scaling", "The best lambda of both rules over width, batch and size, beside what was "
                       "published."),
    "family": ("family", "Loss of both rules over what decay takes in all, a panel for each member of the family."),
    "repeated-text": ("repeated-text", "Loss of constant, scaled and rising decay over lambda on repeated text."),
    "schedules": ("schedules", "Loss of both rules over lambda, a panel for each schedule."),
    "gradient-growth": ("gradient-growth", "The gradient over the run under both rules, a panel for each optimizer and "
                        "peak rate."),
    "rate-drift": ("rate-drift", "The best learning rate over the width, and loss over the rate at each width, under "
                   "constant and scaled decay and Hyperball."),
}  # fmt: skip
# Panels of a picture in a row.
MOST_COLUMNS = 4


def part(name: str) -> TrainingStudy:
    """A study of the evidence, at its scale."""
    found = find_study(name)
    assert isinstance(found, TrainingStudy)
    return found.at(MINI)


def file_of(name: str, folder: Path = FOLDER) -> Path:
    """The file of a study's records."""
    return folder / f"{TEXTS[name]}.jsonl"


def chosen(name: str, data: Path | None, folder: Path = FOLDER) -> list[str]:
    """The studies that `evidence/NAME` means, or for `evidence` alone all whose records are of this text, if any.

    Raises:
        UsageError: If there are none.
    """
    one = name.partition("/")[2]
    if one:
        if one not in TEXTS:
            raise UsageError(unknown(f"study of {NAME}", one, list(TEXTS)))
        return [one]
    if data is None:
        return []
    text = fingerprint(read_record(data))
    found = [name for name, records in read_records(folder).items() if records.base.tokens.fingerprint == text]
    if not found:
        raise UsageError(f"no records in {folder} are of the text in {data} ({text}): name a study, as evidence/long")
    return found


def gather(
    name: str, workshop: Workshop, path: Path, seeds: int | None = None, only: Sequence[str] | None = None
) -> int:
    """Train the runs of a study that have no record yet, add each to its file as soon as it has ended, and count them.

    Of each comparison so many seeds alone, if that is given; comparisons with one of `only` in their names alone, such
    as `muon` or `6400 updates`, if that is.

    Raises:
        UsageError: If the file holds runs on other text, or a run cannot start.
        Interrupted: If the process was asked to stop; all runs were saved.
    """
    study = part(name)
    first = study.comparisons(study.scale)
    config = next(iter(workshop.jobs(first).values())).config
    text = read_record(Path(config.tokens.path))
    sizes = {"documents": text.documents, "tokens": text.tokens("train"), "vocabulary": text.vocab_size}
    records = Records.open(path, config, **sizes)

    def train(comparisons: Sequence[Comparison]) -> int:
        wanted = [one for one in comparisons if only is None or set(only) & set(str(one.key).split(", "))]
        return _train_missing([replace(one, seeds=one.seeds[:seeds]) for one in wanted], workshop, records)

    made = train(first)
    while more := train(study.then(results_of(study, records), study.scale)):
        made += more
    return made


def _train_missing(comparisons: Sequence[Comparison], workshop: Workshop, records: Records) -> int:
    wanted = workshop.jobs(comparisons)
    todo = [job for job in wanted.values() if records.find(job.config) is None]

    def export(jobs: Sequence[Job]) -> None:
        ended = [job.folder for job in jobs if (job.folder / RESULT).exists()]
        records.add(load_runs(ended), workers=workshop.workers)
        for folder in ended:  # hundreds of runs would fill the disk
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)

    export(todo)
    try:
        workshop.bring_to_end(todo, after=lambda job: export([job]))  # a machine on loan may be gone at any time
    finally:
        export(todo)
    return sum(records.find(job.config) is not None for job in todo)


def read_page(folder: Path) -> EvidencePage:
    """Everything that the page is made of."""
    times, tasks = folder / STEP_TIME, folder / f"{worked_tasks.NAME}.jsonl"
    return EvidencePage(
        read_records(folder),
        json.loads(times.read_text("utf-8")) if times.exists() else None,
        Records.read(tasks) if tasks.exists() else None,
    )


def read_records(folder: Path) -> dict[str, Records]:
    """The records of every study whose file is there."""
    files = {path: Records.read(path) for path in {file_of(name, folder) for name in TEXTS} if path.exists()}
    return {name: files[path] for name in TEXTS if (path := file_of(name, folder)) in files}


def results_of(study: TrainingStudy, records: Records | None) -> Results:
    """What the records have of a study: of each comparison the seeds that all its arms have, up to the first gap.

    So two comparisons have the same seeds as far as both have any, and claims may pair them by place.
    """
    if records is None:
        return {}
    found = _found(study.comparisons(study.scale), records)
    while more := _found(study.next_stage(found), records):
        found |= more
    return found


def _found(comparisons: Sequence[Comparison], records: Records) -> dict[Key, Runs]:
    found = {one.key: _runs_of(one, records) for one in comparisons}
    return {key: arms for key, arms in found.items() if arms}


def _runs_of(one: Comparison, records: Records) -> Runs:
    found: dict[str, list[Run]] = {arm.name: [] for arm in one.arms}
    for seed in one.seeds:
        made = [records.find(one.config(arm, seed)) for arm in one.arms]
        runs = [run.named(arm.name) for run, arm in zip(made, one.arms, strict=True) if run is not None]
        if len(runs) < len(one.arms):
            break
        for run in runs:
            found[run.arm].append(run)
    return found if all(found.values()) else {}


def missing(study: TrainingStudy, records: Records | None, found: Results) -> int:
    """How many runs of a study have no record, given what the records have of it."""
    planned = study.runs(found)
    return sum(records is None or records.find(config) is None for config in planned)


class EvidencePage:
    """What all records say, study by study; and what members of the family take, as `bench/step_time.py` wrote it."""

    def __init__(
        self,
        records: Mapping[str, Records],
        step_time: Mapping[str, Any] | None = None,
        own_tasks: Records | None = None,
    ) -> None:
        self.records, self.step_time, self.own_tasks = records, step_time, own_tasks
        self.studies = {name: part(name) for name in TEXTS}
        self.results = {name: results_of(study, records.get(name)) for name, study in self.studies.items()}

    def section(self, name: str) -> str:
        """What came out of a study, its picture, tables and claims, and what is missing of it."""
        study, found = self.studies[name], self.results[name]
        lacking = missing(study, self.records.get(name), found)
        lack = f"{lacking} of {len(study.runs(found))} planned runs of `{name}` are missing."
        if not found:
            return f"Not measured yet: {lack}"
        said = SENTENCES[name](found, study.scale) if name in SENTENCES else ""
        picture = "![{1}](assets/{0}.png)".format(*PICTURES[name]) if self._charts(name) else ""
        tables = [markdown(table) for table in study.own_tables(found, study.scale)]
        claims = study.judge(found)[name]
        judged = markdown(claims_table({name: claims}, ("asked", "found"))) if claims else ""
        lacks = lack if lacking else ""
        return "\n\n".join(filter(None, (said, picture, *tables, judged, self._of_one_seed(name), lacks)))

    def _of_one_seed(self, name: str) -> str:
        """Which comparisons, of those for which several seeds were planned, have one."""
        found = self.results[name]
        seeds = {
            one.key: len(next(iter(found[one.key].values())))
            for one in self.studies[name].planned(found)
            if one.key in found and len(one.seeds) > 1
        }
        alone = [str(key) for key, number in seeds.items() if number == 1]
        which = "" if len(alone) == len(seeds) else f": {'; '.join(alone)}"
        return f"One seed so far, so without intervals{which}." if alone else ""

    def optima(self) -> list[Optimum]:
        """The best lambda of every rule and horizon of the map."""
        return regret.optima(self.results["regret"]) if self.results["regret"] else []

    def prices(self) -> list[untuned.Price]:
        """What a lambda that is never tuned costs in runs of the map, on fresh text, and of other sizes."""
        found = untuned.prices(MAP_TEXT, self.results["regret"]) + untuned.prices(FRESH_TEXT, self.results["long"])
        for axis in lambda_scaling.AXES:
            points = lambda_scaling.points_of(axis, self.results["lambda-scaling"])
            found += untuned.prices(FRESH_TEXT, points, over=axis.name)
        return found

    def untuned(self) -> str:
        """Their picture, table and claims."""
        found = self.prices()
        if not found:
            return "Not measured yet."
        file, words = PICTURES[UNTUNED]
        claims = untuned.judge_prices(found, FRESH_TEXT)
        judged = [markdown(claims_table({UNTUNED: claims}, ("asked", "found")))] if claims else []
        return "\n\n".join([f"![{words}](assets/{file}.png)", markdown(untuned.price_table(found)), *judged])

    def tasks(self) -> str:
        """What came of the worked tasks, their table and claims."""
        if self.own_tasks is None:
            return "Not measured yet."
        found = worked_tasks.recorded(self.own_tasks)
        claims = claims_table({worked_tasks.NAME: worked_tasks.judge_tasks(found)}, ("asked", "found"))
        return "\n\n".join([worked_tasks.summary(found), *map(markdown, (worked_tasks.tasks_table(found), claims))])

    def sheets(self) -> Iterable[Sheet]:
        """The pictures of the page."""
        for name, (file, _) in PICTURES.items():
            if charts := self._charts(name):
                rows = math.ceil(len(charts) / MOST_COLUMNS)
                yield Sheet(file, "", charts, columns=math.ceil(len(charts) / rows))

    def _charts(self, name: str) -> Sequence[Chart]:
        if name == UNTUNED:
            return untuned.price_charts(self.prices())
        found = self.results[name] if name in PICTURES else {}
        return self.studies[name].charts(found, MINI) if found else ()


def write_page(root: Path = Path()) -> None:
    """Rebuild the page and its pictures from the records alone."""
    evidence = read_page(root / FOLDER)
    (root / PAGE).write_text(page(evidence, (root / FOLDER / TEMPLATE).read_text("utf-8")), encoding="utf-8")
    draw(evidence, root / ASSETS)


def page(evidence: EvidencePage, template: str) -> str:
    """The page: a template whose names in braces are studies, and a few numbers more."""
    lines = [line for records in {id(one): one for one in evidence.records.values()}.values() for line in records.lines]
    values = {name: evidence.section(name) for name in TEXTS}
    values |= {
        UNTUNED: evidence.untuned(),
        "step-time": markdown(family.time_table(evidence.step_time)) if evidence.step_time else "",
        worked_tasks.NAME: evidence.tasks(),
        "conclusion": conclusion(evidence),
        "runs": str(len(lines)),
    }
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template


def draw(evidence: EvidencePage, folder: Path) -> None:
    """Write the pictures."""
    from muonsw.lab.report.static import write_sheet  # nothing else here needs what draws

    for sheet in evidence.sheets():
        arms = dict.fromkeys((*RULES, *(curve.arm for chart in sheet.charts for curve in chart.curves)))
        for path in write_sheet(sheet, [LegendEntry(arm, arm) for arm in arms], folder):
            if path.suffix == ".svg":
                path.unlink()
