"""A report of runs: one interactive page that works offline, and each of its figures as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muonsw.lab.errors import UsageError
from muonsw.lab.report.charts import Charts
from muonsw.lab.report.page import write_page
from muonsw.lab.report.run_tables import (
    commands_table,
    differences_table,
    environment_table,
    medians,
    runs_table,
)
from muonsw.lab.report.sections import Arm, Chart, Claims, Document, Section, Table, any_failed, claims_table
from muonsw.lab.report.static import write_chart
from muonsw.lab.runs import Run
from muonsw.lab.storage import prepare_folder


def write_report(
    path: str | Path,
    title: str,
    runs: Sequence[Run],
    *,
    verdict: str = "",
    claims: Claims | None = None,
    tables: Sequence[Table] = (),
    figures: Sequence[Chart] = (),
    images: bool = True,
) -> list[Path]:
    """Write the page, and its figures into a folder beside it that is named after it.

    Args:
        path: The page, ending in `.html`.
        title: Its heading.
        runs: What is shown; none for a page of claims, tables and figures alone.
        verdict: The sentence on top; says how many runs there are and how they ended unless given.
        claims: Claims by who makes them; those that failed are shown first.
        tables: Shown after the claims, before the figures.
        figures: Shown before the figures of the runs; their curves name arms as `muonsw.lab.runs.name_arms` does.
        images: Whether PNG and SVG are written too.

    Returns:
        What was written, the page first.

    Raises:
        UsageError: If the page cannot be written there.
    """
    target = Path(path)
    check_target(target)
    document = build_report(title, runs, verdict=verdict, claims=claims, tables=tables, figures=figures)
    written = [write_page(target, document)]
    if images:
        folder = target.with_suffix("")
        prepare_folder(folder)
        for section in document.sections:
            if isinstance(section, Chart):
                written += write_chart(section, document.arms, folder)
    return written


def build_report(
    title: str,
    runs: Sequence[Run],
    *,
    verdict: str = "",
    claims: Claims | None = None,
    tables: Sequence[Table] = (),
    figures: Sequence[Chart] = (),
) -> Document:
    """The same report as data."""
    charts = Charts(runs)
    sections: list[Section] = [claims_table(claims)] if claims else []
    sections += [*tables, *figures, *charts.all()]
    if runs:
        about = (runs_table(charts), differences_table(charts), commands_table(charts), environment_table(charts))
        sections += [table for table in about if table is not None]
    return Document(
        title,
        sections,
        verdict=verdict or (summary(charts) if runs else ""),
        failed=any_failed(claims or {}),
        arms=[*charts.arms, *_further_arms(charts.arms, figures)],
    )


def check_target(path: Path) -> None:
    """Find out before the work whether a page can be written there.

    Raises:
        UsageError: If it cannot.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"the report {path} must end in .html")
    if path.is_dir():
        raise UsageError(f"the report {path} is a folder; name a file such as {path / 'report.html'}")
    prepare_folder(path.parent)


def summary(charts: Charts) -> str:
    """What there is, in one sentence that judges nothing."""
    count, arms = len(charts.runs), len(charts.arms)
    text = f"{_count(count, 'run')} in {_count(arms, 'arm')}" if count > 1 else charts.labels[0]
    running = sum(not run.complete for run in charts.runs)
    if running:
        text += f", {running} not complete"
    losses = sorted(medians(charts).items(), key=lambda item: item[1])
    if not losses:
        return f"{text}."
    middle = "median final validation loss" if any(arm.runs > 1 for arm in charts.arms) else "final validation loss"
    shown = ", ".join(f"{loss:.4g} ({arm})" for arm, loss in losses[:5])
    more = f" and {len(losses) - 5} more" if len(losses) > 5 else ""
    return f"{text}; {middle}: {shown}{more}."


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _further_arms(arms: Sequence[Arm], figures: Sequence[Chart]) -> list[Arm]:
    known = {arm.name for arm in arms}
    names = dict.fromkeys(curve.arm for chart in figures for curve in chart.curves)
    return [Arm(name, name) for name in names if name not in known]
