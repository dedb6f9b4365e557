"""A document as one self-contained interactive page, which asks the network for nothing.

`page.html` is the template; it escapes whatever is not ours to write. Charts become plotly figures here, and `page.js`
draws them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from muonsw.lab.errors import needed
from muonsw.lab.report.own import PAGE_MARK, write_own
from muonsw.lab.report.sections import Axis, Chart, Curve, Document, LegendEntry
from muonsw.lab.report.theme import FONT_SIZE, LIGHT, SANS, ArmStyle, arm_styles

DIGITS = 6  # significant digits of a value on the page
SHORT = 28  # characters up to which the text of a cell is not broken


def write_page(path: Path, document: Document) -> Path:
    """Write a document as one HTML file that works offline."""
    return write_own(path, page(document))


def page(document: Document) -> str:
    """Render the document."""
    # Plotly is imported here, so that everything else of a report works where it is not installed.
    library = str(needed("plotly.offline", "an interactive page needs", "lab").get_plotlyjs())
    code, charts = _resource("page.js"), [section for section in document.sections if isinstance(section, Chart)]
    names = dict.fromkeys(curve.arm for chart in charts for curve in chart.curves)
    arms = list(document.arms) or [LegendEntry(name) for name in names]
    styles = dict(zip((arm.name for arm in arms), arm_styles([arm.rule for arm in arms]), strict=True))
    data = {
        "figures": [_figure(chart, styles) for chart in charts],
        "arms": [{"name": arm.name, "runs": arm.runs, **styles[arm.name]._asdict()} for arm in arms],
    }
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, code))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["anchor"] = anchor
    return environment.from_string(_resource("page.html")).render(
        document=document,
        groups=[(is_chart, list(group)) for is_chart, group in groupby(document.sections, _is_chart)],
        contents=dict(
            ("figures", "Curves") if _is_chart(one) else (anchor(one.name), one.title) for one in document.sections
        ),
        short=SHORT,
        mark=PAGE_MARK,
        policy=f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:",
        style=_resource("page.css"),
        # A name could otherwise end the script element.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        library=library,
        code=code,
    )


def anchor(name: str) -> str:
    """A name as an id on the page.

    Examples:
        >>> anchor('weight norm"')
        'weight-norm-'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def _is_chart(section: object) -> bool:
    return isinstance(section, Chart)


def _figure(chart: Chart, styles: Mapping[str, ArmStyle]) -> dict[str, Any]:
    """A chart as plotly's traces and layout."""
    middles = {curve.arm for curve in chart.curves if curve.middle}
    # Thick lines are drawn above thin ones.
    curves = sorted(chart.curves, key=lambda curve: curve.middle)
    levels = [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level.y, "y1": level.y,
            "line": {"color": LIGHT.muted, "width": 1.4, "dash": "dash" if level.label else "solid"},
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
        "font": {"family": ", ".join(SANS), "size": FONT_SIZE + 1, "color": LIGHT.text},
        "paper_bgcolor": LIGHT.background,
        "plot_bgcolor": LIGHT.background,
    }
    traces = [_trace(curve, styles[curve.arm], curve.arm in middles, chart.points) for curve in curves]
    return {"name": anchor(chart.name), "data": traces, "layout": layout}


def _trace(curve: Curve, style: ArmStyle, has_middle: bool, points: bool) -> dict[str, Any]:
    """A curve as plotly's trace; `meta` tells the legend which arm it belongs to."""
    line: dict[str, Any] = {"color": LIGHT.text if curve.neutral else style.colour, "width": 1.7, "dash": style.dash}
    opacity, mode = 1.0, "lines+markers" if points else "lines"
    if curve.middle:
        line["width"] = 2.6
    elif curve.dashed:
        line["dash"] = "dash"
    elif has_middle:
        line |= {"width": 0.9, "dash": "solid"}
        opacity = 0.4
    label, arm = html.escape(curve.label), html.escape(curve.arm)  # plotly reads a few tags in its texts
    predicted = " predicted" if curve.dashed else ""
    return {
        "x": [_number(value) for value in curve.x],
        "y": [_number(value) for value in curve.y],
        "mode": mode,
        "line": line,
        "opacity": opacity,
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
        "gridcolor": LIGHT.grid,
        "linecolor": LIGHT.muted,
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


def _resource(name: str) -> str:
    return files("muonsw.lab.report").joinpath(name).read_text(encoding="utf-8")
