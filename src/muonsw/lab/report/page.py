"""`muonsw report`: verdict, tables and curves on one interactive page that loads nothing, and the curves as pictures.

`page.html` is the template; it escapes whatever is not ours. Charts become plotly figures here, and `page.js` draws
them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypedDict, Unpack

from jinja2 import Environment, StrictUndefined
from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from muonsw.lab.config import flatten
from muonsw.lab.console import MISSING, Cell, Column, Table, change_text, loss_text, norm_text, say
from muonsw.lab.errors import UsageError, needed
from muonsw.lab.files import prepare_folder, require_writable, write_atomically
from muonsw.lab.report.charts import (
    FONT_SIZE,
    GRID,
    MUTED,
    SANS,
    TEXT,
    ArmStyle,
    Axis,
    Chart,
    Charts,
    Curve,
    Document,
    LegendEntry,
    Section,
    Sheet,
    anchor,
    arm_styles,
)
from muonsw.lab.runs import Run, differences, load_runs, runs_below
from muonsw.lab.stats import Claims, any_failed, claims_table
from muonsw.lab.train.checkpoint import CONFIG
from muonsw.text import counted

PAGE = "report.html"  # where comparisons and studies write theirs
MARK = '<meta name="generator" content="muonsw">'  # a page replaces only pages that have it
HEAD_BYTES = 4096
DIGITS = 6  # significant digits of a value on the page
SHORT = 28  # characters up to which the text of a cell is not broken
MOST_COLUMNS = 4  # of the table about models and machines


@dataclass(frozen=True)
class Report:
    """Write one self-contained interactive page about runs, and its figures as PNG and SVG beside it.

    A run that is still in progress is shown as far as it has got.
    """

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = ()
    """Run folders, folders that hold run folders, such as those of `muonsw compare`, or files of JSON lines that
    `muonsw.Telemetry` wrote."""

    out: Annotated[Path, arg(aliases=("-o",), metavar="FILE")] = Path("report.html")
    """The page; its figures go into a folder of the same name beside it."""

    title: str = ""
    """Heading of the page; made from the runs' names unless given."""

    no_images: FlagCreatePairsOff[bool] = False
    """Write the page alone, without PNG and SVG."""

    def run(self) -> int:
        if not self.runs:
            raise UsageError("missing run: muonsw report RUN [RUN ...] -o report.html")
        check_target(self.out, images=not self.no_images)
        found: list[Path] = []
        for path in self.runs:  # a folder that is not a run stands for the runs inside it or its `runs`
            single = path.is_file() or (path / CONFIG).is_file()
            found += [path] if single else runs_below(path) or [path]
        loaded = load_runs(dict.fromkeys(found))
        title = self.title or (f"Run {loaded[0].name}" if len(loaded) == 1 else f"{len(loaded)} runs")
        written = write_report(self.out, title, loaded, images=not self.no_images)
        charts = counted((len(written) - 1) // 2, "chart")
        images = f", and {charts} as PNG and SVG in {written[1].parent}" if written[1:] else ""
        say(Console(), f"wrote {written[0]}{images}")
        return 0


class Content(TypedDict, total=False):
    """What a report may have besides its runs."""

    verdict: str  # the sentences on top; unless given, how many runs there are and how they ended
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
    """
    target = Path(path)
    check_target(target, images=images)
    document = build_report(title, runs, **content)
    prepare_folder(target.parent)
    written = [write_page(target, document)]
    if images:
        from muonsw.lab.report.figures import write_sheet  # matplotlib takes a second to import

        prepare_folder(folder := target.with_suffix(""))
        for section in document.sections:
            if isinstance(section, Chart):
                written += write_sheet(Sheet(section.name, "", [section], columns=1), document.arms, folder)
    return written


def check_target(path: Path, *, images: bool) -> None:
    """Refuse before the work a page, or with `images` figures, that cannot be written there."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"the report {path} must end in .html")
    if path.is_dir():
        raise UsageError(f"the report {path} is a folder; name a file such as {path / PAGE}")
    if path.is_file() and MARK.encode() not in path.read_bytes()[:HEAD_BYTES]:
        raise UsageError(f"{path} was not written by muonsw: delete it, or choose another name")
    folder = path.with_suffix("")
    if images and ((os.path.lexists(folder) and not folder.is_dir()) or (folder / CONFIG).exists()):
        raise UsageError(
            f"figures would go into {folder}, which is something else: choose another name, or --no-images"
        )
    require_writable(path.parent)


def build_report(title: str, runs: Sequence[Run], **content: Unpack[Content]) -> Document:
    """The same report as data."""
    charts, claims, figures = Charts(runs), content.get("claims") or {}, content.get("figures", ())
    sections: list[Section] = [*content.get("tables", ()), *figures, *charts.all(), *content.get("details", ())]
    if runs:
        sections += [runs_table(charts), *differences_table(charts), *origin_table(charts)]
    if claims:
        sections.append(claims_table(claims))
    verdict = content.get("verdict") or (summary(charts) if runs else "")
    names = dict.fromkeys(curve.arm for chart in figures for curve in chart.curves)
    further = [LegendEntry(name, name) for name in names if name not in charts.arm_of]
    failed = bool(claims) and any_failed(claims)
    return Document(title, sections, verdict, failed, [*charts.arms, *further])


def summary(charts: Charts) -> str:
    several = len(charts.runs) > 1
    text = f"{len(charts.runs)} runs in {counted(len(charts.arms), 'arm')}" if several else charts.labels[0]
    if running := sum(run.in_progress for run in charts.runs):
        text += f", {running} not complete" if several else ", not complete"
    for what, measure, shown in (("validation loss", "final_loss", loss_text), ("weight RMS", "final_norm", norm_text)):
        found: dict[str, list[float]] = {}
        for arm, run in zip(charts.arm_of, charts.runs, strict=True):
            if math.isfinite(value := getattr(run, measure)):
                found.setdefault(arm, []).append(value)
        if found:
            middle = "median " if any(arm.runs > 1 for arm in charts.arms) else ""
            medians = sorted((median(values), arm) for arm, values in found.items())
            return f"{text}; {middle}final {what}: {', '.join(f'{shown(value)} ({arm})' for value, arm in medians)}."
    return f"{text}."


def runs_table(charts: Charts) -> Table:
    numbers = ("final loss", "best loss", "weight RMS", "change since largest", "steps", "seconds")
    columns = [Column("run"), Column("arm"), *(Column(name, number=True) for name in numbers), Column("state")]
    rows = []
    for label, arm, run in zip(charts.labels, charts.arm_of, charts.runs, strict=True):
        lost, diverged = run.lost_losses, bool((run.result or {}).get("diverged"))
        state = "diverged" if diverged else "complete"
        if not run.complete:
            state = f"{run.steps:,} of {run.planned_steps:,} steps" if run.in_progress else counted(run.steps, "step")
        rows.append(
            (
                *(label, arm, loss_text(run.final_loss), loss_text(run.best_loss)),
                *(norm_text(run.final_norm), change_text(run.norm_change), run.steps or None),
                round(run.seconds, 1) if math.isfinite(run.seconds) else None,
                Cell(
                    state,
                    f"{counted(lost, 'loss', 'losses')} not finite" if lost else "",
                    tone="fails" if diverged or (lost and run.complete) else "",
                ),
            )
        )
    nats = all(run.unit for run in charts.runs)
    note = (
        f"Losses: {'validation cross-entropy in nats per token' if nats else 'on validation batches'}. Weight RMS: of "
        "the weights that decay, at the last sample."
    )
    return Table("runs", "Runs", columns, rows, note)


def differences_table(charts: Charts) -> list[Table]:
    """The settings that are not the same in all runs; no table where all agree."""
    found = differences([run.settings for run in charts.runs])
    rows = [
        (label, *(_setting(values[place]) for values in found.values())) for place, label in enumerate(charts.labels)
    ]
    return [Table("differences", "What differs between the runs", ("run", *found), rows, folded=True)] if found else []


def origin_table(charts: Charts) -> list[Table]:
    """What was trained and on which machine; runs with the same facts share a column, no table where none says so."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for label, run in zip(charts.labels, charts.runs, strict=True):
        # The command differs between runs on one machine.
        facts = flatten({key: value for key, value in run.environment.items() if key != "command"})
        if facts:
            groups.setdefault(json.dumps(facts, sort_keys=True, default=str), (facts, []))[1].append(label)
    shown = list(groups.values())[:MOST_COLUMNS]
    if not shown:
        return []
    keys = dict.fromkeys(key for facts, _ in shown for key in facts)
    rows = [(key, *(_setting(facts.get(key)) for facts, _ in shown)) for key in keys]
    hidden = len(groups) - len(shown)
    note = f"Not shown: {counted(hidden, 'further combination')}." if hidden else ""
    several = [f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else labels[0] for _, labels in shown]
    headings = several if len(groups) > 1 else ["all runs"]
    return [Table("origin", "Model, data and machine", ("", *headings), rows, note, folded=True)]


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return MISSING if value is None else json.dumps(value, default=str, ensure_ascii=False)


# The page.


def write_page(path: Path, document: Document) -> Path:
    """Write a document as one HTML file that works offline."""
    return write_atomically(path, page(document))


def page(document: Document) -> str:
    # Plotly is imported here, so that everything else of a report works where it is not installed.
    library = str(needed("plotly.offline", "an interactive page needs", "lab").get_plotlyjs())
    code, charts = _resource("page.js"), [section for section in document.sections if isinstance(section, Chart)]
    names = dict.fromkeys(curve.arm for chart in charts for curve in chart.curves)
    arms = list(document.arms) or [LegendEntry(name) for name in names]
    styles = arm_styles(arms)
    data = {
        "figures": [_figure(chart, styles) for chart in charts],
        "arms": [{"name": arm.name, "runs": arm.runs, **styles[arm.name]._asdict()} for arm in arms],
    }
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, code))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["anchor"] = anchor
    groups = groupby(document.sections, lambda section: isinstance(section, Chart))
    return environment.from_string(_resource("page.html")).render(
        document=document,
        groups=[(are_charts, list(sections)) for are_charts, sections in groups],
        contents=dict(
            ("figures", "Curves") if isinstance(one, Chart) else (anchor(one.name), one.title)
            for one in document.sections
        ),
        short=SHORT,
        mark=MARK,
        policy=f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:",
        style=_resource("page.css"),
        # A name could otherwise end the script element.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        library=library,
        code=code,
    )


def _resource(name: str) -> str:
    return files("muonsw.lab.report").joinpath(name).read_text(encoding="utf-8")


def _figure(chart: Chart, styles: Mapping[str, ArmStyle]) -> dict[str, Any]:
    middles = {curve.arm for curve in chart.curves if curve.middle}
    curves = sorted(chart.curves, key=lambda curve: curve.middle)  # thick lines above thin ones
    levels = [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level.y, "y1": level.y,
            "line": {"color": MUTED, "width": 1.4, "dash": "dash" if level.label else "solid"},
            "label": {"text": html.escape(level.label), "textposition": "end", "font": {"size": 11}},
        }
        for level in chart.levels
    ]  # fmt: skip
    layout = {
        "xaxis": _axis(chart.x, chart.x.title),
        "yaxis": _axis(chart.y, ""),  # its title stands above the chart
        "shapes": levels,
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 8, "r": 26, "t": 14, "b": 8},
        "font": {"family": ", ".join(SANS), "size": FONT_SIZE + 1, "color": TEXT},
    }
    traces = [_trace(curve, styles[curve.arm], curve.arm in middles, chart.points) for curve in curves]
    return {"name": anchor(chart.name), "data": traces, "layout": layout}


def _trace(curve: Curve, style: ArmStyle, has_middle: bool, points: bool) -> dict[str, Any]:
    """A curve as plotly's trace; `meta` tells the legend which arm it belongs to."""
    line: dict[str, Any] = {"color": style.colour, "width": 1.7, "dash": style.dash}
    if curve.middle:
        line["width"] = 2.6
    elif curve.dashed:
        line["dash"] = "dash"
    elif has_middle:
        line |= {"width": 0.9, "dash": "solid"}
    label, arm = html.escape(curve.label), html.escape(curve.arm)  # plotly reads a few tags in its texts
    predicted = " predicted" if curve.dashed else ""
    return {
        "x": [_number(value) for value in curve.x],
        "y": [_number(value) for value in curve.y],
        "mode": "lines+markers" if points else "lines",
        "line": line,
        "opacity": 0.4 if has_middle and not (curve.middle or curve.dashed) else 1.0,
        "meta": curve.arm,
        "name": arm,
        "hovertemplate": f"<b>{label}</b>{predicted}<br>%{{x:,}} · %{{y:.5g}}<extra>{arm}</extra>",
    }


def _axis(axis: Axis, title: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "log" if axis.log else "linear",
        "title": {"text": html.escape(title), "standoff": 6, "font": {"size": 13}},
        "automargin": True,
        "exponentformat": "power",
        "nticks": 4 if axis.log else 7,  # more would label every digit between two powers of ten
        "gridcolor": GRID,
        "linecolor": MUTED,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
    }
    if axis.limits and not (axis.log and axis.limits[0] <= 0):
        found["range"] = [math.log10(limit) if axis.log else limit for limit in axis.limits]
    return found


def _number(value: float) -> float | int | None:
    """A number in as few characters as its digits need; steps stay whole."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")
