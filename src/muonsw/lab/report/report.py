"""A report of runs: one interactive page that works offline, its tables, and each of its charts as PNG and SVG."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, Unpack

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.settings import flatten
from muonsw.lab.base.storage import prepare_folder, require_writable
from muonsw.lab.base.tables import MISSING, Cell, Column, Table, change_text, loss_text, norm_text
from muonsw.lab.claims.table import Claims, any_failed, claims_table
from muonsw.lab.report.charts import Charts
from muonsw.lab.report.own import require_own, require_own_folder
from muonsw.lab.report.page import write_page
from muonsw.lab.report.sections import Chart, Document, LegendEntry, Section
from muonsw.lab.report.static import write_chart
from muonsw.lab.runs import Run, differences
from muonsw.text import counted

TRAINED = "trained"
# Of what a run says about its environment: the first differs between runs on one machine, the second has its own table.
NOT_OF_THE_MACHINE = ("command", TRAINED)
MANY = 12  # rows from which a table that few will read starts closed


class Content(TypedDict, total=False):
    """What a report may have besides its runs."""

    verdict: str  # the sentence on top; says how many runs there are and how they ended unless given
    claims: Claims | None  # by who makes them; those that failed are shown first
    tables: Sequence[Table]  # shown after the claims, before the charts
    figures: Sequence[Chart]  # shown before the charts of the runs; their curves name arms as `name_arms` does


def write_report(
    path: str | Path, title: str, runs: Sequence[Run], *, images: bool = True, **content: Unpack[Content]
) -> list[Path]:
    """Write the page, and its charts as PNG and SVG into a folder beside it that is named after it.

    Args:
        path: The page, ending in `.html`.
        title: Its heading.
        runs: What is shown; none for a page of claims, tables and charts alone.
        images: Whether PNG and SVG are written too.
        content: What else there is to show.

    Returns:
        What was written, the page first.

    Raises:
        UsageError: If the page cannot be written there.
    """
    target = Path(path)
    check_target(target, images=images)
    document = build_report(title, runs, **content)
    prepare_folder(target.parent)
    written = [write_page(target, document)]
    if images:
        prepare_folder(folder := target.with_suffix(""))
        charts = [section for section in document.sections if isinstance(section, Chart)]
        written += [path for chart in charts for path in write_chart(chart, document.arms, folder)]
    return written


def build_report(title: str, runs: Sequence[Run], **content: Unpack[Content]) -> Document:
    """The same report as data."""
    charts, claims, figures = Charts(runs), content.get("claims") or {}, content.get("figures", ())
    sections: list[Section] = [claims_table(claims)] if claims else []
    trained = trained_table(charts)
    sections += [*content.get("tables", ()), *([trained] if trained else []), *figures, *charts.all()]
    if runs:
        about = (runs_table(charts), differences_table(charts), commands_table(charts), environment_table(charts))
        sections += [table for table in about if table is not None]
    verdict = content.get("verdict") or (summary(charts) if runs else "")
    names = dict.fromkeys(curve.arm for chart in figures for curve in chart.curves)
    further = [LegendEntry(name, name) for name in names if name not in charts.arm_of]
    return Document(title, sections, verdict, any_failed(claims), [*charts.arms, *further])


def check_target(path: Path, *, images: bool) -> None:
    """Find out before the work whether a page, and with `images` its figures, can be written there.

    Raises:
        UsageError: If they cannot, or something is there that no report has written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"the report {path} must end in .html")
    if path.is_dir():
        raise UsageError(f"the report {path} is a folder; name a file such as {path / 'report.html'}")
    require_own([path])
    if images:
        require_own_folder(path.with_suffix(""))
    require_writable(path.parent)


def summary(charts: Charts) -> str:
    """What there is, in one sentence that judges nothing."""
    runs, arms = len(charts.runs), len(charts.arms)
    text = f"{counted(runs, 'run')} in {counted(arms, 'arm')}" if runs > 1 else charts.labels[0]
    running = sum(run.in_progress for run in charts.runs)
    if running:
        text += f", {running} not complete" if runs > 1 else ", not complete"
    losses, norms = _medians(charts, "final_loss"), _medians(charts, "final_norm")
    what, values, digits = ("validation loss", losses, loss_text) if losses else ("weight RMS", norms, norm_text)
    if not values:
        return f"{text}."
    middle = f"median final {what}" if any(arm.runs > 1 for arm in charts.arms) else f"final {what}"
    shown = ", ".join(f"{digits(value)} ({arm})" for arm, value in list(values.items())[:5])
    more = f" and {len(values) - 5} more" if len(values) > 5 else ""
    return f"{text}; {middle}: {shown}{more}."


def runs_table(charts: Charts) -> Table:
    """One row for each run: losses, norms, tokens, time."""
    columns = (
        "run",
        "arm",
        Column("final loss", number=True),
        Column("best loss", number=True, rank=2),
        Column("at step", number=True, rank=2),
        Column("weight RMS", number=True),
        Column("change since largest", number=True),
        Column("steps", number=True, rank=3),
        Column("tokens", number=True, rank=3),
        Column("seconds", number=True, rank=3),
        "state",
    )
    rows = [
        (
            *(label, arm, loss_text(run.final_loss), loss_text(run.best_loss), run.best_step),
            *(norm_text(run.final_norm), change_text(run.norm_change), run.steps or None),
            int(run.tokens) if math.isfinite(run.tokens) else None,
            round(run.seconds, 1) if math.isfinite(run.seconds) else None,
            _state(run),
        )
        for label, arm, run in zip(charts.labels, charts.arm_of, charts.runs, strict=True)
    ]
    nats = all(run.unit for run in charts.runs)
    note = (
        f"Losses are {'validation cross-entropy in nats per token' if nats else 'those of validation batches'}. The "
        "weight RMS is the last one recorded of the weights that decay, and its change is against the largest."
    )
    return Table("runs", "Runs", columns, rows, note)


def _state(run: Run) -> Cell:
    lost = run.lost_losses
    note = f"{counted(lost, 'loss', 'losses')} not finite" if lost else ""
    if run.complete:
        word = "diverged" if (run.result or {}).get("diverged") else "complete"
        return Cell(word, note, tone="fails" if lost or word == "diverged" else "")
    planned = run.planned_steps
    return Cell(
        f"{run.steps:,} of {counted(planned, 'step')}" if planned is not None else counted(run.steps, "step"), note
    )


def differences_table(charts: Charts) -> Table | None:
    """The settings that are not the same in all runs; None where all agree."""
    found = differences([run.settings for run in charts.runs])
    if not found:
        return None
    rows = [
        (label, *(_setting(values[place]) for values in found.values())) for place, label in enumerate(charts.labels)
    ]
    note = "Only settings in which the runs differ."
    return Table("differences", "What differs between the runs", ("run", *found), rows, note)


def commands_table(charts: Charts) -> Table | None:
    """The command line that runs each configuration again; None where no run has one."""
    rows = [
        (label, Cell(f"muonsw train --config {_quoted(run.path / 'config.json')} --out {_again(run.path)}", code=True))
        for label, run in zip(charts.labels, charts.runs, strict=True)
        if "optimizer" in run.settings
    ]
    return Table("commands", "Run them again", ("run", "command"), rows, folded=len(rows) > MANY) if rows else None


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _again(path: Path) -> str:
    """A folder beside the run's own, in which the same command would find it complete."""
    return _quoted(path.with_name(f"{path.name}-again"))


def trained_table(charts: Charts) -> Table | None:
    """What was trained: model, parameters by role, data, updates, seeds, machine; None where no run says so."""
    groups: dict[str, tuple[dict[str, str], list[Run]]] = {}
    for run in charts.runs:
        if facts := _trained(run):
            groups.setdefault(json.dumps(facts), (facts, []))[1].append(run)
    shown = list(groups.values())[:4]
    if not shown:
        return None
    keys = dict.fromkeys(key for facts, _ in shown for key in facts)
    seeds = ("seeds", *(", ".join(map(str, sorted({run.seed for run in runs}))) for _, runs in shown))
    rows = [(key, *(facts.get(key) for facts, _ in shown)) for key in keys]
    headings = [runs[0].name if len(shown) > 1 else "all runs" for _, runs in shown]
    return Table("trained", "What was trained", ("", *headings), [*rows, seeds], folded=len(rows) > 2 * MANY)


def _trained(run: Run) -> dict[str, str]:
    found = run.environment.get(TRAINED)
    if not isinstance(found, dict):
        return {}
    sizes = {role: size for role, size in (found.get("parameters") or {}).items() if isinstance(size, int)}
    device, torch = (run.environment.get(key, "unknown") for key in ("device", "torch"))
    return {
        "model": f"{found.get('model')}, {sum(sizes.values()):,} parameters",
        **{f"parameters: {role}": f"{size:,}" for role, size in sizes.items()},
        "data": str(found.get("data")),
        "updates": f"{run.planned_steps:,}" if run.planned_steps else MISSING,
        "machine": f"{device}, {run.environment.get('cpu_cores', '?')} CPU cores, torch {torch}",
    }


def environment_table(charts: Charts) -> Table | None:
    """On what the runs were made; runs with the same environment share a column."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for label, run in zip(charts.labels, charts.runs, strict=True):
        flat = flatten({key: value for key, value in run.environment.items() if key not in NOT_OF_THE_MACHINE})
        if flat:
            groups.setdefault(json.dumps(flat, sort_keys=True, default=str), (flat, []))[1].append(label)
    if not groups:
        return None
    shown = list(groups.values())[:6]
    keys = dict.fromkeys(key for flat, _ in shown for key in flat)
    headings = [_covered(labels, len(charts.runs)) for _, labels in shown]
    rows = [(key, *(_setting(flat.get(key)) for flat, _ in shown)) for key in keys]
    hidden = len(groups) - len(shown)
    note = f"Not shown: {counted(hidden, 'further environment')}." if hidden else ""
    return Table("environment", "Environment", ("", *headings), rows, note, folded=True)


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    return MISSING if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _covered(labels: Sequence[str], count: int) -> str:
    if len(labels) == count:
        return "all runs" if count > 1 else labels[0]
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"


def _medians(charts: Charts, measure: str) -> dict[str, float]:
    """The median over the runs of each arm that has the measure, the smallest first."""
    found: dict[str, list[float]] = {}
    for arm, run in zip(charts.arm_of, charts.runs, strict=True):
        if math.isfinite(value := getattr(run, measure)):
            found.setdefault(arm, []).append(value)
    medians = {arm: median(values) for arm, values in found.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))
