"""`muonsw report`: verdict, tables and curves on one interactive page that loads nothing from the network.

`report.html` is the template and escapes all text. Charts become plotly figures here; `report.js` draws them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined
from rich.console import Console
from tyro.conf import Positional, arg

from muonsw.lab.charts import (
    FONT_SIZE,
    GRID,
    MUTED,
    SANS,
    TEXT,
    ArmStyle,
    Axis,
    Chart,
    Curve,
    LegendEntry,
    arm_styles,
)
from muonsw.lab.config import flatten
from muonsw.lab.console import MISSING, Cell, Column, Table, change_text, decimals, norm_text, say
from muonsw.lab.errors import UsageError, needed
from muonsw.lab.files import prepare_folder, require_writable, write_atomically
from muonsw.lab.options import unset
from muonsw.lab.runs import Points, Run, load_runs, runs_below, unique_names
from muonsw.lab.stats import Claims, any_failed, claims_table
from muonsw.lab.train.checkpoint import CONFIG
from muonsw.text import counted

PAGE = "report.html"  # where comparisons and studies write theirs
MARK = '<meta name="generator" content="muonsw">'  # only pages with this mark are overwritten
HEAD_BYTES = 4096
DIGITS = 6  # significant digits of a value on the page
SHORT = 28  # cells of up to this many characters are not wrapped


@dataclass(frozen=True)
class Report:
    """Write one self-contained interactive page about runs.

    A run in progress is shown up to its last record.
    """

    runs: Annotated[tuple[Path, ...], Positional, unset(metavar="RUN...")] = ()
    """Run folders, folders of runs (such as out/compare), or JSONL files that `muonsw.Telemetry` wrote."""

    out: Annotated[Path, arg(aliases=("-o",), metavar="FILE")] = Path("report.html")
    """HTML file to write."""

    title: Annotated[str, unset()] = ""
    """Title of the page. Default: the run's name, or the number of runs."""

    def run(self) -> int:
        if not self.runs:
            raise UsageError("missing run: muonsw report RUN [RUN ...] -o report.html")
        folders: list[Path] = []
        for path in self.runs:  # a folder that is not a run stands for the runs in it or in its `runs`
            single = path.is_file() or (path / CONFIG).is_file()
            folders += [path] if single else runs_below(path) or [path]
        loaded = load_runs(dict.fromkeys(folders))
        title = self.title or (f"Run {loaded[0].name}" if len(loaded) == 1 else f"{len(loaded)} runs")
        say(Console(), f"wrote {write_report(self.out, title, loaded)}")
        return 0


def check_target(path: Path) -> None:
    """Refuse a path that the page cannot be written to, before any work."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"the report {path} must end in .html")
    if path.is_dir():
        raise UsageError(f"the report {path} is a folder; name a file such as {path / PAGE}")
    if path.is_file() and MARK.encode() not in path.read_bytes()[:HEAD_BYTES]:
        raise UsageError(f"{path} was not written by muonsw: delete it, or choose another name")
    require_writable(path.parent)


def write_report(
    path: Path,
    title: str,
    runs: Sequence[Run],
    *,
    verdict: str = "",
    tables: Sequence[Table] = (),
    figures: Sequence[Chart] = (),
    details: Sequence[Table] = (),
    claims: Claims | None = None,
) -> Path:
    """Write one HTML file that works offline, and return its path.

    It shows the verdict (by default a summary of the runs), tables, figures, charts of the runs, details, tables of
    the runs, and claims, failed ones first.
    """
    check_target(path)
    # Imported here, because everything else in a report works without plotly.
    library = str(needed("plotly.offline", "an interactive page needs", "lab").get_plotlyjs())
    group = Group(runs)
    charts, below = [*figures, *run_charts(group)], [*details]
    if runs:
        below += [runs_table(group), *differences_table(group), *origin_table(group)]
    if claims:
        below.append(claims_table(claims))
    names = dict.fromkeys(curve.arm for chart in figures for curve in chart.curves)
    arms = [*group.arms, *(LegendEntry(name, name) for name in names if name not in group.arm_of)]
    styles, code = arm_styles(arms), _resource("report.js")
    data = {
        "figures": [_figure(chart, styles) for chart in charts],
        "arms": [{"name": arm.name, "runs": arm.runs, **styles[arm.name]._asdict()} for arm in arms],
    }
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, code))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["anchor"] = anchor
    text = environment.from_string(_resource("report.html")).render(
        title=title,
        verdict=verdict or (summary(group) if runs else ""),
        failed=any_failed(claims or {}),
        above=tables,
        charts=charts,
        below=below,
        short=SHORT,
        mark=MARK,
        policy=f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:",
        style=_resource("report.css"),
        # Otherwise a name could close the script element.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        library=library,
        code=code,
    )
    prepare_folder(path.parent)
    return write_atomically(path, text)


def _resource(name: str) -> str:
    return files("muonsw.lab").joinpath(name).read_text(encoding="utf-8")


class Group:
    """Runs shown together, with their names and arms; a run without an arm is an arm by itself."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = list(runs)
        self.labels = unique_names(run.name for run in self.runs)
        self.arm_of = [run.arm or label for run, label in zip(self.runs, self.labels, strict=True)]
        first = dict(reversed(list(zip(self.arm_of, self.runs, strict=True))))
        self.arms = [LegendEntry(arm, first[arm].rule, count) for arm, count in Counter(self.arm_of).items()]


# ---- The charts of runs

TOTAL_POINTS, MOST, LEAST = 240_000, 1500, 100  # points of a page, and of one curve
SMOOTH = 100  # points of a training loss: each is the mean over a hundredth of the run
BEGINNING = 0.1  # initial share of the run whose losses may be cut off


class Panel(NamedTuple):
    """A chart of one measure."""

    name: str
    title: str
    measure: Callable[[Run], Points]
    y: Axis
    note: str


LOSS = Axis("loss")
TRAINED = "training-loss"
EVALUATED = "On held-out data. Thick: the median over the runs of an arm, if it has several."
PANELS = (
    Panel("validation-loss", "Validation loss", lambda run: run.losses, LOSS, EVALUATED),
    Panel(TRAINED, "Training loss", lambda run: run.training_losses, LOSS,
          f"Means over 1/{SMOOTH} of the records. Thick: the median over the runs of an arm."),
    Panel("weight-norm", "Weight norm", lambda run: run.norms, Axis("weight RMS"),
          "Root mean square over all elements of the weights that decay, before each recorded step."),
    Panel("alignment", "Alignment", lambda run: run.recorded("alignment_update"), Axis("cosine of weight and update"),
          "Cosine between the weights that decay and their update, pooled over all elements; negative grows the norm."),
    Panel("relative-update", "Relative update", lambda run: run.recorded("relative_update"),
          Axis("update RMS / weight RMS", log=10),
          "Root mean square of the update over that of the weights that decay."),
    Panel("learning-rate", "Learning rate",
          lambda run: logged if len((logged := run.train.known("lr"))[0]) else run.recorded("lr"),
          Axis("η"), "Base learning rate of each step."),
    Panel("decay", "Decay", lambda run: run.recorded("decay"), Axis("φ", "share per step"),
          "Share φ by which a step shrinks the weights that decay: W ← (1 \N{MINUS SIGN} φ) W \N{MINUS SIGN} u."),
)  # fmt: skip


def run_charts(group: Group) -> list[Chart]:
    """Make every chart with data: a curve per run, and the median of arms with several runs."""

    def metric(name: str, run: Run) -> Points:
        return run.evals.known(name)

    names = dict.fromkeys(name for run in group.runs for name in run.metrics)
    metrics = [Panel(f"metric-{name}", name, partial(metric, name), Axis(name), EVALUATED) for name in names]
    points = int(np.clip(TOTAL_POINTS / (8 * max(1, len(group.runs))), LEAST, MOST))
    charts = []
    for panel in (PANELS[0], *metrics, *PANELS[1:]):
        most = SMOOTH if panel.name == TRAINED else points
        measured = zip(group.labels, group.arm_of, map(panel.measure, group.runs), strict=True)
        shown = [(label, arm, thinned(values, most)) for label, arm, values in measured if len(values[0])]
        curves = [_curve(label, arm, values) for label, arm, values in shown]
        for entry in group.arms:
            parts = [values for _, arm, values in shown if arm == entry.name]
            if len(parts) > 1 and len((middle := median_curve(parts))[0]):
                curves.append(_curve("median", entry.name, middle, middle=True))
        axis = loss_axis(curves, group.runs) if panel.y is LOSS else panel.y
        charts.append(Chart(panel.name, panel.title, curves, y=axis, note=panel.note))
    return [chart for chart in charts if chart.curves]


def _curve(label: str, arm: str, points: Points, *, middle: bool = False) -> Curve:
    return Curve(label, arm, points[0].tolist(), points[1].tolist(), middle=middle)


def anchor(name: str) -> str:
    """Turn a name into an id for the page.

    Examples:
        >>> anchor('weight norm"')
        'weight-norm-'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def loss_axis(curves: Sequence[Curve], runs: Sequence[Run]) -> Axis:
    """Scale the axis to the losses after the first tenth of each run.

    The initial fall may be ten times as high as everything after it and would flatten the rest.
    """
    # The loss of a user's own task or loop may have any unit.
    unit = "nats per token" if runs and all(run.unit for run in runs) else ""
    late: list[float] = []
    for curve in curves:
        begin = BEGINNING * curve.x[-1]
        late += [y for x, y in zip(curve.x, curve.y, strict=True) if x >= begin]
        late.append(float(np.interp(begin, curve.x, curve.y)))
    if not late or max(late) >= max(y for curve in curves for y in curve.y):
        return Axis("loss", unit)
    low, high = min(late), max(late)
    margin = 0.04 * (high - low) or 0.01
    return Axis("loss", unit, limits=(low - margin, high + margin))


def median_curve(parts: Sequence[Points]) -> Points:
    """Take the median over curves at their common steps.

    Examples:
        >>> one, two = np.array([1, 2, 3]), np.array([2, 3, 4])
        >>> steps, middle = median_curve([(one, np.array([9.0, 1.0, 1.0])), (two, np.array([2.0, 4.0, 9.0]))])
        >>> steps.tolist(), middle.tolist()
        ([2, 3], [1.5, 2.5])
    """
    steps = parts[0][0]
    for other, _ in parts[1:]:
        steps = np.intersect1d(steps, other, assume_unique=True)
    return steps, np.median(np.stack([values[np.isin(at, steps)] for at, values in parts]), axis=0)


def thinned(points: Points, most: int) -> Points:
    """Reduce to at most `most` points: means over equally many steps, placed at the last one.

    Examples:
        >>> steps, means = thinned((np.arange(1, 6), np.array([5.0, 4.0, 9.0, 3.0, 1.0])), most=3)
        >>> steps.tolist(), means.tolist()
        ([2, 4, 5], [4.5, 6.0, 1.0])
    """
    steps, values = points
    starts = np.arange(0, len(steps), -(-len(steps) // most))
    ends = np.append(starts[1:], len(steps))
    return steps[ends - 1], np.add.reduceat(values, starts) / (ends - starts)


# ---- The tables of runs


def summary(group: Group) -> str:
    """Count the runs, and give the final loss of each arm."""
    several = len(group.runs) > 1
    text = f"{len(group.runs)} runs in {counted(len(group.arms), 'arm')}" if several else group.labels[0]
    if running := sum(run.in_progress for run in group.runs):
        text += f", {running} not complete" if several else ", not complete"
    losses: dict[str, list[float]] = {}
    for arm, run in zip(group.arm_of, group.runs, strict=True):
        if math.isfinite(run.final_loss):
            losses.setdefault(arm, []).append(run.final_loss)
    if losses:
        middle = "median " if any(arm.runs > 1 for arm in group.arms) else ""
        medians = sorted((median(values), arm) for arm, values in losses.items())
        text += f"; {middle}final validation loss: {', '.join(f'{decimals(value)} ({arm})' for value, arm in medians)}"
    return f"{text}."


def runs_table(group: Group) -> Table:
    numbers = ("final loss", "best loss", "weight RMS", "change since largest", "steps", "seconds")
    columns = [Column("run"), Column("arm"), *(Column(name, number=True) for name in numbers), Column("state")]
    rows = []
    for label, arm, run in zip(group.labels, group.arm_of, group.runs, strict=True):
        missing, diverged = int((~np.isfinite(run.train.get("loss", 0.0))).sum()), run.diverged is not None
        state = "diverged" if diverged else "complete"
        if not run.complete:
            state = f"{run.steps:,} of {run.planned_steps:,} steps" if run.in_progress else counted(run.steps, "step")
        note = f"{counted(missing, 'loss', 'losses')} not finite" if missing else ""
        tone = "fails" if diverged or (missing and run.complete) else ""
        losses = decimals(run.final_loss), decimals(run.best_loss)
        norms = norm_text(run.final_norm), change_text(run.norm_change)
        seconds = round(run.seconds, 1) if math.isfinite(run.seconds) else None
        rows.append((label, arm, *losses, *norms, run.steps or None, seconds, Cell(state, note, tone)))
    nats = all(run.unit for run in group.runs)
    note = (
        f"Losses: {'validation cross-entropy in nats per token' if nats else 'on validation batches'}. Weight RMS: of "
        "the weights that decay, at the last sample."
    )
    return Table("runs", "Runs", columns, rows, note)


def differences_table(group: Group) -> list[Table]:
    """Show the settings that differ between runs; no table if none do."""
    flat = [flatten(run.settings) for run in group.runs]
    columns = {key: [_setting(settings.get(key)) for settings in flat] for key in sorted({*chain(*flat)})}
    columns = {key: values for key, values in columns.items() if len(set(values)) > 1}
    rows = list(zip(group.labels, *columns.values(), strict=True))
    table = Table("differences", "What differs between the runs", ("run", *columns), rows, folded=True)
    return [table] if columns else []


def origin_table(group: Group) -> list[Table]:
    """Show model, data and machine; equal runs share a column. No table if nothing is recorded."""
    labels_of: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for label, run in zip(group.labels, group.runs, strict=True):
        # The command differs between runs on the same machine.
        facts = flatten({key: value for key, value in run.environment.items() if key != "command"})
        if facts:
            labels_of.setdefault(tuple((key, _setting(value)) for key, value in facts.items()), []).append(label)
    columns = [dict(facts) for facts in labels_of]
    rows = [(key, *(column.get(key) for column in columns)) for key in dict.fromkeys(chain(*columns))]
    headings = [f"{first} and {len(more)} more" if more else first for first, *more in labels_of.values()]
    headings = ["", *(headings if len(headings) > 1 else ["all runs"])]
    return [Table("origin", "Model, data and machine", headings, rows, folded=True)] if rows else []


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return MISSING if value is None else json.dumps(value, default=str, ensure_ascii=False)


# ---- Figures for plotly


def _figure(chart: Chart, styles: Mapping[str, ArmStyle]) -> dict[str, Any]:
    middles = {curve.arm for curve in chart.curves if curve.middle}
    curves = sorted(chart.curves, key=lambda curve: curve.middle)  # thick lines are drawn last
    layout = {
        "xaxis": _axis(chart.x, chart.x.title),
        "yaxis": _axis(chart.y, ""),  # its title stands above the chart
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 8, "r": 26, "t": 14, "b": 8},
        "font": {"family": ", ".join(SANS), "size": FONT_SIZE + 1, "color": TEXT},
    }
    traces = [_trace(curve, styles[curve.arm], curve.arm in middles, chart.points) for curve in curves]
    return {"name": anchor(chart.name), "data": traces, "layout": layout}


def _trace(curve: Curve, style: ArmStyle, has_middle: bool, points: bool) -> dict[str, Any]:
    """Turn a curve into a plotly trace; `meta` links it to its arm in the legend."""
    line: dict[str, Any] = {"color": style.colour, "width": 1.7, "dash": style.dash}
    if curve.middle:
        line["width"] = 2.6
    elif curve.dashed:
        line["dash"] = "dash"
    elif has_middle:
        line |= {"width": 0.9, "dash": "solid"}
    label, arm = html.escape(curve.label), html.escape(curve.arm)  # plotly interprets some tags
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
    settings: dict[str, Any] = {
        "type": "log" if axis.log else "linear",
        "title": {"text": html.escape(title), "standoff": 6, "font": {"size": 13}},
        "automargin": True,
        "exponentformat": "power",
        "nticks": 4 if axis.log else 7,  # more would label digits between powers of ten
        "gridcolor": GRID,
        "linecolor": MUTED,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
    }
    if axis.limits and not (axis.log and axis.limits[0] <= 0):
        settings["range"] = [math.log10(limit) if axis.log else limit for limit in axis.limits]
    return settings


def _number(value: float) -> float | int | None:
    """Round a number to keep the page small; integers stay exact."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")
