"""Runs of a training loop that is not ours, compared as ours are: statistics, verdict and page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from muonsw.lab.compare import NUMBERS, verdict, write_numbers
from muonsw.lab.console import plain_text
from muonsw.lab.errors import UsageError
from muonsw.lab.files import prepare_folder, refuse_folder
from muonsw.lab.outcome import Outcome, arms_table, compare, pairs_table
from muonsw.lab.report.page import PAGE, check_target, write_report
from muonsw.lab.runs import Columns, Run, load_run
from muonsw.lab.train.folder import environment

EXPECTED = "expected losses, as a list or by update ({100: 2.5}, or {100: {'loss': 2.5, 'accuracy': 0.4}})"


@dataclass(frozen=True)
class ArmsCompared:
    """What a comparison of own runs found; `print` shows it.

    Attributes:
        verdict: What came out, in a few sentences.
        outcome: Every arm and every pair.
        page: The report.
    """

    verdict: str
    outcome: Outcome
    page: Path

    def __str__(self) -> str:
        tables = (arms_table(self.outcome), pairs_table(self.outcome.pairs))
        return "\n\n".join([self.verdict, *(plain_text(table) for table in tables), f"wrote {self.page}"])


def compare_arms(
    make_run: Callable[[Any, int], Any],
    arms: Iterable[str] | Mapping[str, Any],
    seeds: int | Iterable[int] = 3,
    *,
    folder: str | Path = "out/compare-arms",
    title: str = "Arms compared",
) -> ArmsCompared:
    """Train arms by a function of your own, and say what came out, with a page.

    Runs are paired by seed: `make_run` should begin with the same weights and see the same batches for every arm.

    Args:
        make_run: Called as `make_run(arm, seed)`, trains, and returns validation losses: a list, or a dict by update
            whose values are losses or dicts with `loss` and metrics. With them, as a second value, perhaps the file
            that a `JsonlSink` of `muonsw.Telemetry` wrote.
        arms: Names, which `make_run` is given; or by name what it is given instead. The first is the baseline.
        seeds: How many, or which.
        folder: For the page and the numbers.
        title: Of the page.

    Raises:
        UsageError: If a run returns something else, or fewer than two arms are given.

    Examples:
        >>> import tempfile
        >>> def make_run(lr, seed):
        ...     x = 1.0 + 0.01 * seed
        ...     return {step: x * (1 - lr) ** step for step in (0, 10, 20)}
        >>> found = compare_arms(make_run, {"slow": 0.1, "fast": 0.2}, folder=tempfile.mkdtemp())
        >>> found.verdict.split(" over")[0], found.page.name
        ("'fast' ended lower than 'slow'", 'report.html')
    """
    given = dict(arms) if isinstance(arms, Mapping) else {name: name for name in arms}
    try:
        chosen = [index(seed) for seed in (range(seeds) if isinstance(seeds, int) else seeds)]
    except TypeError as error:
        raise UsageError(f"seeds are whole numbers, or how many of them ({error})") from error
    if len(given) < 2 or not chosen:
        raise UsageError(f"a comparison needs two arms and a seed, not {len(given)} and {len(chosen)}")
    page, numbers = Path(folder) / PAGE, Path(folder) / NUMBERS
    check_target(page, images=False)
    refuse_folder(numbers)
    runs: dict[str, list[Run]] = {name: [] for name in given}
    for seed in chosen:
        for name, arm in given.items():
            runs[name].append(own_run(make_run(arm, seed), name, seed))
    outcome = compare(runs)
    said = verdict(outcome)
    prepare_folder(Path(folder))
    write_numbers(numbers, {"verdict": said, **outcome.as_data()})
    tables = [arms_table(outcome), pairs_table(outcome.pairs)]
    everyone = [run for those in runs.values() for run in those]
    write_report(page, title, everyone, verdict=said, tables=tables, images=False)
    return ArmsCompared(said, outcome, page)


def own_run(found: Any, arm: str, seed: int) -> Run:
    """What a user's function returned, as a run.

    Raises:
        UsageError: If it is no losses.
    """
    losses, telemetry = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    columns = _columns(losses, f"make_run({arm!r}, {seed})")
    tables: dict[str, Any] = {"eval": {"": columns}}
    details, path = None, Path(f"{arm}-seed{seed}")
    if telemetry is not None:
        recorded = load_run(telemetry)
        tables, details, path = {**recorded.tables, **tables}, recorded.details, recorded.path
    last, steps = float(columns["loss"][-1]), int(columns["step"][-1])
    result = {"steps": steps} if math.isfinite(last) else {"steps": steps, "diverged": steps}
    return Run(f"{arm}, seed {seed}", path, {"arm": arm, "seed": seed}, environment(), result, tables, details)


def _columns(losses: Any, call: str) -> Columns:
    """Losses and metrics by update, as columns."""
    if isinstance(losses, Sequence | np.ndarray) and not isinstance(losses, str):
        losses = dict(enumerate(losses, start=1))
    if not isinstance(losses, Mapping) or not losses:
        raise UsageError(f"{call} returned {str(losses)[:40]!r}; {EXPECTED}")
    rows = {step: value if isinstance(value, Mapping) else {"loss": value} for step, value in sorted(losses.items())}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    if "loss" not in names:
        raise UsageError(f"{call} returned {', '.join(names)} without a loss; {EXPECTED}")
    try:
        values = {name: np.array([float(row.get(name, math.nan)) for row in rows.values()]) for name in names}
        return Columns({"step": np.array([float(step) for step in rows]), **values})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{call}: {error}; {EXPECTED}") from error
