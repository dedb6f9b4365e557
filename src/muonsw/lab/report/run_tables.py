"""Tables about runs: how they ended, what sets them apart, how to run them again, and on what they ran."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from muonsw.lab.report.charts import Charts, weight_norm
from muonsw.lab.report.sections import MISSING, Cell, Column, Table, Value
from muonsw.lab.runs import Run, differences
from muonsw.lab.settings import flatten


def runs_table(charts: Charts) -> Table:
    """One row for each run: losses, norms, tokens, time."""
    columns = (
        "run",
        "arm",
        Column("final loss", number=True),
        Column("best loss", number=True),
        Column("at step", number=True),
        Column("norm change since peak", number=True),
        Column("steps", number=True),
        Column("tokens", number=True),
        Column("seconds", number=True),
        "state",
    )
    rows = [
        (label, arm, *_outcome(run)) for label, arm, run in zip(charts.labels, charts.arm_of, charts.runs, strict=True)
    ]
    note = (
        "Losses are validation cross-entropy in nats per token. The norm change compares the last recorded weight RMS "
        "with its largest."
    )
    return Table("runs", "Runs", columns, rows, note)


def differences_table(charts: Charts) -> Table | None:
    """The settings that are not the same in all runs; None where all agree."""
    found = differences([run.config for run in charts.runs])
    if not found:
        return None
    rows = [
        (label, *(_setting(values[place]) for values in found.values())) for place, label in enumerate(charts.labels)
    ]
    note = "Only settings in which the runs differ."
    return Table("differences", "What differs between the runs", ("run", *found), rows, note)


def commands_table(charts: Charts) -> Table:
    """The command line that runs each configuration again."""
    rows = [
        (label, Cell(f"muonsw train --config {shlex.quote(str(run.path / 'config.json'))}", code=True))
        for label, run in zip(charts.labels, charts.runs, strict=True)
    ]
    return Table("commands", "Run them again", ("run", "command"), rows, folded=len(rows) > 12)


def environment_table(charts: Charts) -> Table | None:
    """On what the runs were made; runs with the same environment share a column."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for label, run in zip(charts.labels, charts.runs, strict=True):
        flat = {key: value for key, value in flatten(run.environment).items() if key not in OF_ONE_RUN}
        if flat:
            groups.setdefault(json.dumps(flat, sort_keys=True, default=str), (flat, []))[1].append(label)
    if not groups:
        return None
    shown = list(groups.values())[:6]
    keys = dict.fromkeys(key for flat, _ in shown for key in flat)
    headings = [_covered(labels, len(charts.runs)) for _, labels in shown]
    rows = [(key, *(_setting(flat.get(key)) for flat, _ in shown)) for key in keys]
    note = f"{len(groups) - len(shown)} further environments are not shown." if len(groups) > len(shown) else ""
    return Table("environment", "Environment", ("", *headings), rows, note, folded=True)


OF_ONE_RUN = ("command", "command_line", "argv", "started", "time", "pid", "folder", "cwd")


def final_loss(run: Run) -> float | None:
    """The last validation loss: the result's, or the latest evaluation of a run in progress."""
    return _from_result(run, "final_loss", run.evals.known("loss")[1][-1:])


def best_loss(run: Run) -> float | None:
    """The smallest validation loss."""
    values = run.evals.known("loss")[1]
    return _from_result(run, "best_loss", values[values.argmin() :][:1] if len(values) else values)


def norm_change(run: Run) -> float | None:
    """The last recorded norm relative to the largest, minus one; None where none was recorded."""
    _, values = weight_norm(run)
    return float(values[-1] / values.max() - 1.0) if len(values) and values.max() > 0 else None


def _outcome(run: Run) -> tuple[Value | Cell, ...]:
    change = norm_change(run)
    return (
        final_loss(run),
        best_loss(run),
        _best_step(run),
        None if change is None else f"{100 * change:+.1f} %".replace("-", "\N{MINUS SIGN}"),
        _steps(run),
        _last(run, "tokens"),
        _seconds(run),
        _state(run),
    )


def _from_result(run: Run, key: str, otherwise: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    if run.result is not None and isinstance(run.result.get(key), int | float):
        return float(run.result[key])
    return float(otherwise[0]) if len(otherwise) else None


def _best_step(run: Run) -> int | None:
    if run.result is not None and isinstance(run.result.get("best_step"), int):
        return int(run.result["best_step"])
    steps, values = run.evals.known("loss")
    return int(steps[values.argmin()]) if len(values) else None


def _steps(run: Run) -> int | None:
    steps = (run.result or {}).get("steps")
    if isinstance(steps, int):
        return steps
    return int(run.train.step[-1]) if run.train.records else None


def _last(run: Run, key: str) -> int | None:
    value = (run.result or {}).get(key)
    if isinstance(value, int | float):
        return int(value)
    known = run.train.known(key)[1]
    return int(known[-1]) if len(known) else None


def _seconds(run: Run) -> Value:
    value = (run.result or {}).get("seconds")
    return round(float(value), 1) if isinstance(value, int | float) else None


def _state(run: Run) -> Value | Cell:
    lost = int((~np.isfinite(run.train["loss"])).sum()) if "loss" in run.train else 0
    note = f"{lost} losses not finite" if lost else ""
    if run.complete:
        word = "diverged" if (run.result or {}).get("diverged") else "complete"
        return Cell(word, note, tone="fails" if lost or word == "diverged" else "")
    planned = run.config.get("steps")
    done = _steps(run) or 0
    return Cell(f"{done:,} of {planned:,} steps" if isinstance(planned, int) else f"{done:,} steps", note)


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    return MISSING if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _covered(labels: Sequence[str], count: int) -> str:
    if len(labels) == count:
        return "all runs" if count > 1 else labels[0]
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"


def medians(charts: Charts) -> Mapping[str, float]:
    """The median final loss of each arm that has one."""
    found: dict[str, list[float]] = {}
    for arm, run in zip(charts.arm_of, charts.runs, strict=True):
        loss = final_loss(run)
        if loss is not None:
            found.setdefault(arm, []).append(loss)
    return {arm: float(np.median(losses)) for arm, losses in found.items()}
