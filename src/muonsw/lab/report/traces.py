"""Figures for the page: the same panels as plotly data, without colours, which the page fills in by theme."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from muonsw.lab.claims.claim import Series
from muonsw.lab.report.theme import RULE_HTML

PanelData = tuple[str, Sequence[Series]]
GAP = 0.1


def panel_figure(parts: Sequence[PanelData]) -> dict[str, Any]:
    """Plotly data and layout for panels of loss over steps side by side."""
    data = [trace for number, (_, series) in enumerate(parts) for trace in _traces(series, number)]
    layout: dict[str, Any] = {
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.2, "x": 0.0},
        "annotations": [_heading(heading, number, len(parts)) for number, (heading, _) in enumerate(parts)],
    }
    for number in range(len(parts)):
        suffix = _suffix(number)
        layout[f"xaxis{suffix}"] = _axis("1 + step t", _domain(number, len(parts)), anchor=f"y{suffix}")
        label = "loss / mean initial loss" if number == 0 else ""
        layout[f"yaxis{suffix}"] = _axis(label, [0.0, 1.0], anchor=f"x{suffix}")
    return {"data": data, "layout": layout}


def _traces(series: Sequence[Series], number: int) -> list[dict[str, Any]]:
    traces = []
    for curves in series:
        shared = {
            "type": "scatter",
            "mode": "lines",
            "xaxis": f"x{_suffix(number)}",
            "yaxis": f"y{_suffix(number)}",
            "legendgroup": curves.rule,
            "meta": curves.rule,
        }
        traces += [_starts(curves, shared), _median(curves, shared, shown=number == 0)]
        if curves.level is not None:
            traces.append(_bound(curves, shared, shown=number == 0))
    return traces


def _starts(curves: Series, shared: dict[str, Any]) -> dict[str, Any]:
    """All starts as one trace, broken between them, so that hundreds of lines stay one object."""
    x: list[float | None] = []
    y: list[float | None] = []
    which: list[int | None] = []
    for number, values in enumerate(curves.values):
        x += [*curves.steps, None]
        y += [*(float(f"{value:.5g}") for value in values), None]
        which += [*[number] * len(values), None]
    hover = f"{RULE_HTML[curves.rule]}, start %{{customdata}}<br>1 + t = %{{x}}, loss %{{y:.3e}}<extra></extra>"
    style = {"line": {"width": 0.7}, "opacity": 0.3, "showlegend": False}
    return {**shared, **style, "x": x, "y": y, "customdata": which, "hovertemplate": hover, "connectgaps": False}


def _median(curves: Series, shared: dict[str, Any], *, shown: bool) -> dict[str, Any]:
    name = RULE_HTML[curves.rule]
    y = [float(f"{median(column):.5g}") for column in zip(*curves.values, strict=True)]
    hover = f"{name}, median<br>1 + t = %{{x}}, loss %{{y:.3e}}<extra></extra>"
    return {
        **shared,
        "x": list(curves.steps),
        "y": y,
        "name": name,
        "line": {"width": 2.4},
        "showlegend": shown,
        "hovertemplate": hover,
    }


def _bound(curves: Series, shared: dict[str, Any], *, shown: bool) -> dict[str, Any]:
    name = "lower bound for constant"
    return {
        **shared,
        "x": [curves.steps[0], curves.steps[-1]],
        "y": [curves.level, curves.level],
        "name": name,
        "legendgroup": "bound",
        "meta": "bound",
        "line": {"width": 1.6, "dash": "dash"},
        "showlegend": shown,
        "hovertemplate": f"{name}<br>%{{y:.3e}}<extra></extra>",
    }


def _axis(title: str, domain: list[float], *, anchor: str) -> dict[str, Any]:
    return {
        "type": "log",
        "title": {"text": title},
        "domain": domain,
        "anchor": anchor,
        "exponentformat": "power",
        "dtick": 1,
    }


def _domain(number: int, count: int) -> list[float]:
    width = (1.0 - GAP * (count - 1)) / count
    return [number * (width + GAP), number * (width + GAP) + width]


def _heading(text: str, number: int, count: int) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return {**place, "x": _domain(number, count)[0], "y": 1.02, "text": f"<b>{text}</b>"}


def _suffix(number: int) -> str:
    return "" if number == 0 else str(number + 1)
