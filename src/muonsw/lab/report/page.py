"""A document as one self-contained interactive page, light and dark, which asks the network for nothing.

`page.html` is the template; it escapes whatever is not ours to write. Charts become data that `page.js` hands to
plotly, in the colours of the reader's theme.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from muonsw.lab.base.errors import needed
from muonsw.lab.report.own import PAGE_MARK, write_own
from muonsw.lab.report.sections import Chart, Curve, Document, LegendEntry
from muonsw.lab.report.theme import PALETTES, arm_styles, plotly_style

DIGITS = 6  # significant digits of a value on the page
SHORT = 28  # characters up to which the text of a cell is not broken


def write_page(path: Path, document: Document) -> Path:
    """Write a document as one HTML file that works offline."""
    return write_own(path, page(document))


def page(document: Document) -> str:
    """The document as text."""
    # Plotly is imported here, so that everything else of a report works where it is not installed.
    library = str(needed("plotly.offline", "an interactive page needs", "lab").get_plotlyjs())
    code, charts = _resource("page.js"), [section for section in document.sections if isinstance(section, Chart)]
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, code))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    data = json.dumps(_data(document, charts), allow_nan=False, separators=(",", ":"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["anchor"] = anchor
    return environment.from_string(_resource("page.html")).render(
        document=document,
        groups=[(is_chart, list(group)) for is_chart, group in groupby(document.sections, _is_chart)],
        contents=_contents(document),
        short=SHORT,
        mark=PAGE_MARK,
        policy=f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:",
        style=_resource("page.css"),
        data=data.replace("<", "\\u003c"),  # which could end the script element
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


def _contents(document: Document) -> dict[str, str]:
    """Titles by anchor; all charts together are one entry."""
    titles = [("figures", "Figures") if _is_chart(one) else (anchor(one.name), one.title) for one in document.sections]
    return dict(titles)


def _data(document: Document, charts: list[Chart]) -> dict[str, Any]:
    curves = [curve for chart in charts for curve in chart.curves]
    arms = list(document.arms) or [LegendEntry(name) for name in dict.fromkeys(curve.arm for curve in curves)]
    places = {arm.name: place for place, arm in enumerate(arms)}
    labels = {label: place for place, label in enumerate(dict.fromkeys(curve.label for curve in curves))}
    styles = {name: arm_styles([arm.rule for arm in arms], palette) for name, palette in PALETTES.items()}
    return {
        "charts": [_chart_data(chart, places, labels) for chart in charts],
        "arms": [
            {
                "name": arm.name,
                "runs": arm.runs,
                "colours": {name: style[place].colour for name, style in styles.items()},
                "dash": styles["light"][place].dash,
            }
            for place, arm in enumerate(arms)
        ],
        "labels": list(labels),
        "themes": {name: {"colours": palette._asdict(), **plotly_style(palette)} for name, palette in PALETTES.items()},
    }


def _chart_data(chart: Chart, arms: Mapping[str, int], labels: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": anchor(chart.name),
        "x": {"title": chart.x.title, "log": bool(chart.x.log)},
        "y": {"title": chart.y.title, "log": bool(chart.y.log), "window": chart.y.limits},
        "points": chart.points,
        "curves": [_curve_data(curve, arms[curve.arm], labels[curve.label]) for curve in chart.curves],
        "levels": [asdict(level) for level in chart.levels],
        "bands": [asdict(band) for band in chart.bands],
        "marks": [{"x": mark.x, "arm": arms[mark.arm]} for mark in chart.marks],
    }


def _curve_data(curve: Curve, arm: int, label: int) -> dict[str, Any]:
    looks = {name: getattr(curve, name) for name in ("line", "middle", "neutral") if getattr(curve, name)}
    x = [_number(value) for value in curve.x]
    return {"arm": arm, "label": label, "x": x, "y": [_number(value) for value in curve.y], **looks}


def _number(value: float) -> float | int | None:
    """A number in as few characters as its digits need; steps stay whole."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def _resource(name: str) -> str:
    return files("muonsw.lab.report").joinpath(name).read_text(encoding="utf-8")
