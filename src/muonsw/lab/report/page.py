"""A self-contained interactive page: figures, tables, light and dark; it asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from muonsw.lab.errors import UsageError
from muonsw.lab.report.markup import anchor, body, escape
from muonsw.lab.report.sections import Arm, Chart, Curve, Document, Figure
from muonsw.lab.report.theme import PALETTES, arm_styles, plotly_axis, plotly_layout
from muonsw.lab.storage import write_atomically

DIGITS = 6  # significant digits of a value on the page


def write_page(path: Path, document: Document) -> Path:
    """Write a document as one HTML file that works offline."""
    return write_atomically(path, page(document))


def page(document: Document) -> str:
    """The document as text; everything that is not ours to write is escaped."""
    library, code = _library(), _resource("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(code)}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    # In an attribute the quotes of the policy are data; "<" inside JSON could end the script element.
    parts = {
        "POLICY": escape(policy).replace("&#x27;", "'"),
        "TITLE": escape(document.title),
        "STYLE": _resource("page.css"),
        "BODY": body(document),
        "DATA": json.dumps(_data(document), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "LIBRARY": library,
        "CODE": code,
    }
    pieces = _resource("page.html").split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _data(document: Document) -> dict[str, Any]:
    charts = [section for section in document.sections if isinstance(section, Chart)]
    figures = [section for section in document.sections if isinstance(section, Figure)]
    arms = list(document.arms) or [Arm(name) for name in _arm_names(charts)]
    labels = list(dict.fromkeys(curve.label for chart in charts for curve in chart.curves))
    places = ({arm.name: place for place, arm in enumerate(arms)}, {label: place for place, label in enumerate(labels)})
    return {
        "figures": [{"name": anchor(figure.name), **figure.plot} for figure in figures],
        "charts": [_chart(chart, *places) for chart in charts],
        "arms": [{"name": arm.name, "runs": arm.runs, **style} for arm, style in zip(arms, _looks(arms), strict=True)],
        "labels": labels,
        "themes": {
            name: {"colours": palette.as_data(), "layout": plotly_layout(palette), "axis": plotly_axis(palette)}
            for name, palette in PALETTES.items()
        },
    }


def _looks(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    styles = {name: arm_styles([arm.rule for arm in arms], palette) for name, palette in PALETTES.items()}
    return [
        {"colours": {name: style[place].colour for name, style in styles.items()}, "dash": styles["light"][place].dash}
        for place in range(len(arms))
    ]


def _arm_names(charts: Sequence[Chart]) -> list[str]:
    return list(dict.fromkeys(curve.arm for chart in charts for curve in chart.curves))


def _chart(chart: Chart, arms: dict[str, int], labels: dict[str, int]) -> dict[str, Any]:
    return {
        "name": anchor(chart.name),
        "x": {"title": chart.x_label, "log": chart.log_x},
        "y": {"title": chart.y_label, "log": chart.log_y, "window": chart.window},
        "points": chart.points,
        "curves": [_curve(curve, arms[curve.arm], labels[curve.label]) for curve in chart.curves],
    }


def _curve(curve: Curve, arm: int, label: int) -> dict[str, Any]:
    flags = {name: True for name in ("dashed", "middle") if getattr(curve, name)}
    x = [_number(value) for value in curve.x]
    return {"arm": arm, "label": label, "x": x, "y": [_number(value) for value in curve.y], **flags}


def _number(value: float) -> float | int | None:
    """A number in as few characters as its digits need; steps stay whole."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def _library() -> str:
    """Plotly's script. It is imported here, so that everything else of a report works where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise UsageError("an interactive page needs plotly; install it with: pip install 'muonsw[lab]'") from error
    return str(get_plotlyjs())


def _resource(name: str) -> str:
    return files("muonsw.lab.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
