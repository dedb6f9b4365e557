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
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from rich.console import Console
from tyro.conf import Positional, arg

from muonsw.lab.charts import FONT_SIZE, GRID, MUTED, SANS, TEXT, ArmStyle, Axis, Chart, Curve, arm_styles
from muonsw.lab.config import flatten
from muonsw.lab.console import MISSING, Cell, Column, Table, decimals, norm_text, say
from muonsw.lab.errors import UsageError, needed
from muonsw.lab.files import prepare_folder, require_writable, write_atomically
from muonsw.lab.options import unset
from muonsw.lab.runs import Points, Run, load_runs, runs_below
from muonsw.lab.stats import Claims, any_failed, claims_table
from muonsw.lab.train.checkpoint import CONFIG

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

    def run(self) -> int:
        if not self.runs:
            raise UsageError("missing run: muonsw report RUN [RUN ...] -o report.html")
        folders: list[Path] = []
        for path in self.runs:  # a folder that is not a run stands for the runs in it or in its `runs`
            single = path.is_file() or (path / CONFIG).is_file()
            folders += [path] if single else runs_below(path) or [path]
        loaded = load_runs(dict.fromkeys(folders))
        title = f"Run {loaded[0].name}" if len(loaded) == 1 else f"{len(loaded)} runs"
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
    claims: Claims | None = None,
) -> Path:
    """Write one HTML file that works offline, and return its path.

    The verdict comes first, then the first table, figures, charts of the runs, the other tables, runs and claims.
    """
    check_target(path)
    # Imported here, because everything else in a report works without plotly.
    library = str(needed("plotly.offline", "an interactive page needs", "lab").get_plotlyjs())
    # A run without an arm is an arm by itself.
    runs = [run if run.arm else run.named(str(run.path)) for run in runs]
    rules: dict[str, str] = {}
    for run in runs:
        rules.setdefault(run.arm, run.rule)
    for curve in chain(*(chart.curves for chart in figures)):
        rules.setdefault(curve.arm, curve.arm)
    styles, counts, code = arm_styles(rules), Counter(run.arm for run in runs), _resource("report.js")
    charts, below = [*figures, *run_charts(runs)], [*tables[1:]]
    if runs:
        below.append(runs_table(runs))
    if claims:
        below.append(claims_table(claims))
    data = {
        "figures": [_figure(chart, styles) for chart in charts],
        "arms": [{"name": arm, "runs": counts[arm], **style._asdict()} for arm, style in styles.items()],
    }
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, code))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["anchor"] = anchor
    text = environment.from_string(_resource("report.html")).render(
        title=title,
        verdict=verdict,
        failed=any_failed(claims or {}),
        above=tables[:1],
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


# ---- The charts of runs

POINTS, MOST, LEAST = 30_000, 1500, 100  # points of a chart, and of one of its curves
SMOOTH = 100  # points of a training loss: each is the mean over a hundredth of the run
BEGINNING = 0.1  # initial share of the run whose losses may be cut off
EVALUATED = "On held-out data. Thick: the median over the runs of an arm, if it has several."


def run_charts(runs: Sequence[Run]) -> list[Chart]:
    """Make every chart with data: a curve per run, and the median of arms with several runs."""
    points = int(np.clip(POINTS / max(1, len(runs)), LEAST, MOST))

    def chart(name: str, measure: Callable[[Run], Points], title: str, y: Axis, note: str, most: int = points) -> Chart:
        shown = [(run, thinned(values, most)) for run in runs if len((values := measure(run))[0])]
        curves = [_curve(run.name, run.arm, values) for run, values in shown]
        for arm in dict.fromkeys(run.arm for run in runs):
            parts = [values for run, values in shown if run.arm == arm]
            if len(parts) > 1 and len((middle := median_curve(parts))[0]):
                curves.append(_curve("median", arm, middle, middle=True))
        return Chart(name, title, curves, y=y, note=note)

    # The loss of a user's own task or loop may have any unit.
    loss = Axis("loss", "nats per token" if runs and all(run.unit for run in runs) else "")
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    smoothed = f"Means over 1/{SMOOTH} of the records. Thick: the median over the runs of an arm."
    rms = "Root mean square over all elements of the weights that decay, before each recorded step."
    share = "Share φ by which a step shrinks the weights that decay."
    charts = [
        without_beginning(chart("validation-loss", lambda run: run.losses, "Validation loss", loss, EVALUATED)),
        *(chart(f"metric-{name}", partial(_metric, name), name, Axis(name), EVALUATED) for name in metrics),
        without_beginning(
            chart("training-loss", lambda run: run.training_losses, "Training loss", loss, smoothed, SMOOTH)
        ),
        chart("weight-norm", lambda run: run.norms, "Weight norm", Axis("weight RMS"), rms),
        chart("decay", lambda run: run.recorded("decay"), "Decay", Axis("φ", "share per step"), share),
    ]
    return [chart for chart in charts if chart.curves]


def _metric(name: str, run: Run) -> Points:
    return run.evals.known(name)


def _curve(label: str, arm: str, points: Points, *, middle: bool = False) -> Curve:
    return Curve(label, arm, points[0].tolist(), points[1].tolist(), middle=middle)


def anchor(name: str) -> str:
    """Turn a name into an id for the page.

    Examples:
        >>> anchor('weight norm"')
        'weight-norm-'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def without_beginning(chart: Chart) -> Chart:
    """Scale the axis to the losses after the first tenth of each run.

    The initial fall may be ten times as high as everything after it and would flatten the rest.
    """
    late: list[float] = []
    for curve in chart.curves:
        begin = BEGINNING * curve.x[-1]
        late += [y for x, y in zip(curve.x, curve.y, strict=True) if x >= begin]
        late.append(float(np.interp(begin, curve.x, curve.y)))  # there may be few evaluations
    if not late or max(late) >= max(y for curve in chart.curves for y in curve.y):
        return chart
    margin = 0.04 * (max(late) - min(late)) or 0.01
    return replace(chart, y=replace(chart.y, limits=(min(late) - margin, max(late) + margin)))


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


def runs_table(runs: Sequence[Run]) -> Table:
    """Show how each run ended, and the settings that differ between runs."""
    settings = [flatten(run.settings) for run in runs]
    values = {
        key: [_shown(flat.get(key, MISSING)) for flat in settings] for key in sorted({*chain(*settings)} - {"arm"})
    }
    differing = {key: those for key, those in values.items() if len(set(those)) > 1}
    numbers = ("final loss", "best loss", "weight RMS", "seconds")
    columns = [Column("run"), Column("arm"), *(Column(name, number=True) for name in numbers), Column("state")]
    rows = []
    for number, run in enumerate(runs):
        state = Cell("complete")
        if run.diverged is not None:
            state = Cell(f"diverged at step {run.diverged:,}", tone="fails")
        elif not run.complete:
            state = Cell(f"{run.steps:,} of {run.planned_steps:,} steps" if run.in_progress else f"{run.steps:,} steps")
        measured = decimals(run.final_loss), decimals(run.best_loss), norm_text(run.final_norm)
        seconds = round(run.seconds, 1) if math.isfinite(run.seconds) else None
        rows.append((run.name, run.arm, *measured, seconds, state, *(those[number] for those in differing.values())))
    note = "Weight RMS: of the weights that decay, at the last sample."
    return Table("runs", "Runs", [*columns, *map(Column, differing)], rows, note)


def _shown(setting: Any) -> str:
    return f"{setting:.{DIGITS}g}" if isinstance(setting, float) else str(setting)


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
    elif has_middle:
        line |= {"width": 0.9, "dash": "solid"}
    label, arm = html.escape(curve.label), html.escape(curve.arm)  # plotly interprets some tags
    return {
        "x": [_number(value) for value in curve.x],
        "y": [_number(value) for value in curve.y],
        "mode": "lines+markers" if points else "lines",
        "line": line,
        "opacity": 0.4 if has_middle and not curve.middle else 1.0,
        "meta": curve.arm,
        "name": arm,
        "hovertemplate": f"<b>{label}</b><br>%{{x:,}} · %{{y:.5g}}<extra>{arm}</extra>",
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
    if axis.limits:
        settings["range"] = [math.log10(limit) if axis.log else limit for limit in axis.limits]
    return settings


def _number(value: float) -> float | int | None:
    """Round a number to keep the page small; integers stay exact."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")
