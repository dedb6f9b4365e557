"""A report of runs: the verdict, tables and curves on one page that works offline; the curves also as PNG and SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, Unpack

from muonsw.lab.claims.table import Claims, any_failed, claims_table
from muonsw.lab.config import flatten
from muonsw.lab.console import MISSING, Cell, Column, Table, change_text, loss_text, norm_text
from muonsw.lab.errors import UsageError
from muonsw.lab.files import prepare_folder, require_writable
from muonsw.lab.report.charts import Charts
from muonsw.lab.report.own import require_own, require_own_folder
from muonsw.lab.report.page import write_page
from muonsw.lab.report.sections import Chart, Document, LegendEntry, Section
from muonsw.lab.report.static import write_chart
from muonsw.lab.runs import Run, differences
from muonsw.text import counted

MOST_COLUMNS = 4  # of the table about models and machines


class Content(TypedDict, total=False):
    """What a report may have besides its runs."""

    verdict: str  # the sentence on top; says how many runs there are and how they ended unless given
    claims: Claims | None  # by who makes them; shown last, those that failed first
    tables: Sequence[Table]  # shown before the charts
    details: Sequence[Table]  # shown after them
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
    sections: list[Section] = [*content.get("tables", ()), *figures, *charts.all(), *content.get("details", ())]
    if runs:
        about = (runs_table(charts), differences_table(charts), origin_table(charts))
        sections += [table for table in about if table is not None]
    if claims:
        sections.append(claims_table(claims))
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
    """Say what there is in one sentence that judges nothing."""
    runs, arms = len(charts.runs), len(charts.arms)
    text = f"{counted(runs, 'run')} in {counted(arms, 'arm')}" if runs > 1 else charts.labels[0]
    running = sum(run.in_progress for run in charts.runs)
    if running:
        text += f", {running} not complete" if runs > 1 else ", not complete"
    for what, measure, digits in (
        ("validation loss", "final_loss", loss_text),
        ("weight RMS", "final_norm", norm_text),
    ):
        found: dict[str, list[float]] = {}
        for arm, run in zip(charts.arm_of, charts.runs, strict=True):
            if math.isfinite(value := getattr(run, measure)):
                found.setdefault(arm, []).append(value)
        if found:
            middle = f"median final {what}" if any(arm.runs > 1 for arm in charts.arms) else f"final {what}"
            medians = sorted((median(values), arm) for arm, values in found.items())
            shown = ", ".join(f"{digits(value)} ({arm})" for value, arm in medians[:5])
            return f"{text}; {middle}: {shown}{f' and {len(medians) - 5} more' if len(medians) > 5 else ''}."
    return f"{text}."


def runs_table(charts: Charts) -> Table:
    """One row for each run: losses, norms, time."""
    numbers = ("final loss", "best loss", "weight RMS", "change since largest", "steps", "seconds")
    columns = [Column("run"), Column("arm"), *(Column(name, number=True) for name in numbers), Column("state")]
    rows = [
        (
            *(label, arm, loss_text(run.final_loss), loss_text(run.best_loss)),
            *(norm_text(run.final_norm), change_text(run.norm_change), run.steps or None),
            round(run.seconds, 1) if math.isfinite(run.seconds) else None,
            _state(run),
        )
        for label, arm, run in zip(charts.labels, charts.arm_of, charts.runs, strict=True)
    ]
    nats = all(run.unit for run in charts.runs)
    note = (
        f"Losses: {'validation cross-entropy in nats per token' if nats else 'on validation batches'}. Weight RMS: of "
        "the weights that decay, at the last sample."
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
    rows = [
        (label, *(_setting(values[place]) for values in found.values())) for place, label in enumerate(charts.labels)
    ]
    return Table("differences", "What differs between the runs", ("run", *found), rows, folded=True) if found else None


def origin_table(charts: Charts) -> Table | None:
    """What was trained and on which machine; runs with the same facts share a column, None where no run says so."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for label, run in zip(charts.labels, charts.runs, strict=True):
        # The command differs between runs on one machine.
        facts = flatten({key: value for key, value in run.environment.items() if key != "command"})
        if facts:
            groups.setdefault(json.dumps(facts, sort_keys=True, default=str), (facts, []))[1].append(label)
    shown = list(groups.values())[:MOST_COLUMNS]
    if not shown:
        return None
    rows = [
        (key, *(_setting(facts.get(key)) for facts, _ in shown))
        for key in dict.fromkeys(key for one, _ in shown for key in one)
    ]
    hidden = len(groups) - len(shown)
    note = f"Not shown: {counted(hidden, 'further combination')}." if hidden else ""
    headings = ["all runs"] if len(groups) == 1 else [_covered(labels) for _, labels in shown]
    return Table("origin", "Model, data and machine", ("", *headings), rows, note, folded=True)


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return MISSING if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _covered(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
