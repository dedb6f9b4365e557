"""A document as one self-contained interactive page, light and dark, which asks the network for nothing.

Tables become HTML here, and whatever is not ours to write is escaped. Charts become data that `page.js` hands
to plotly, in the colours of the reader's theme.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from muonsw.lab.errors import UsageError
from muonsw.lab.report.own import PAGE_MARK, write_own
from muonsw.lab.report.sections import Arm, Chart, Curve, Document
from muonsw.lab.report.theme import PALETTES, arm_styles, plotly_axis, plotly_layout
from muonsw.lab.tables import Cell, Column, Table

DIGITS = 6  # significant digits of a value on the page
SHORT = 28  # characters up to which the text of a cell is not broken


def write_page(path: Path, document: Document) -> Path:
    """Write a document as one HTML file that works offline."""
    return write_own(path, page(document))


def page(document: Document) -> str:
    """The document as text; everything that is not ours to write is escaped."""
    library, code = _library(), _resource("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(code)}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    # In an attribute the quotes of the policy are data; "<" inside JSON could end the script element.
    parts = {
        "MARK": PAGE_MARK,
        "POLICY": escape(policy).replace("&#x27;", "'"),
        "TITLE": escape(document.title),
        "STYLE": _resource("page.css"),
        "BODY": _body(document),
        "DATA": json.dumps(_data(document), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "LIBRARY": library,
        "CODE": code,
    }
    pieces = _resource("page.html").split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def escape(text: str) -> str:
    """Text for an element or a quoted attribute."""
    return html.escape(text, quote=True)


def _body(document: Document) -> str:
    """Everything between the page's heading and its scripts."""
    parts = [_verdict(document), _contents(document)]
    for are_charts, group in groupby(document.sections, key=lambda section: isinstance(section, Chart)):
        shown = [_chart(section) if isinstance(section, Chart) else _table(section) for section in group]
        # Charts that follow each other share a grid and a legend.
        parts += [_charts(shown)] if are_charts else shown
    return "\n".join(part for part in parts if part)


def anchor(name: str) -> str:
    """A name as an id on the page.

    Examples:
        >>> anchor('weight norm"')
        'weight-norm-'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def _verdict(document: Document) -> str:
    if not document.verdict:
        return ""
    tone = " fails" if document.failed else ""
    return f'<p class="verdict{tone}">{escape(document.verdict)}</p>'


def _contents(document: Document) -> str:
    titles: dict[str, str] = {}
    for section in document.sections:
        if isinstance(section, Chart):
            titles.setdefault("figures", "Figures")
        else:
            titles[anchor(section.name)] = section.title
    if len(titles) < 2:
        return ""
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in titles.items())
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _charts(figures: list[str]) -> str:
    grid = "\n".join(['<div class="grid">', *figures, "</div>"])
    parts = ("<h2>Figures</h2>", '<div class="legend"></div>', grid)
    return f'<section id="figures">{"".join(parts)}</section>'


def _chart(chart: Chart) -> str:
    name, title = anchor(chart.name), escape(chart.title)
    shown = chart.y.unit or chart.y.label
    unit = f'<span class="unit">{escape(shown)}</span>' if shown else ""
    tools = "".join(
        f'<button type="button" data-tool="{tool}" data-figure="{name}" aria-pressed="false">{text}</button>'
        for tool, text in _tools(chart)
    )
    head = f'<div class="head"><h3 id="{name}-title">{title}{unit}</h3><div class="tools">{tools}</div></div>'
    plot = f'<div id="{name}" class="plot" role="group" aria-labelledby="{name}-title"></div>'
    caption = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    return f'<figure class="chart">{head}{plot}{caption}</figure>'


def _tools(chart: Chart) -> list[tuple[str, str]]:
    tools = [("log", "log"), ("wide", "wide")]
    return [("all", "all"), *tools] if chart.y.limits else tools


def _table(table: Table) -> str:
    columns, title = table.headings(), escape(table.title)
    head = "".join(_element("th", "columnheader", column, escape(column.title), scope="col") for column in columns)
    rows = "\n".join(_row(columns, cells) for cells in table.cells())
    # Rows with notes are read one below the other where the page is narrow; roles keep them a table for readers.
    kind = ' class="stacked"' if any(isinstance(cell, Cell) and cell.note for row in table.rows for cell in row) else ""
    inner = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table role="table"{kind}><caption class="unseen">{title}</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>\n'
        f'<tbody role="rowgroup">\n{rows}\n</tbody></table></div><p class="more" hidden></p>'
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    if table.folded:
        return f'<details id="{anchor(table.name)}"><summary><h2>{title}</h2></summary>{inner}{note}</details>'
    return f'<section id="{anchor(table.name)}"><h2>{title}</h2>{inner}{note}</section>'


def _row(columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    pairs = enumerate(zip(columns, cells, strict=True))
    return f'<tr role="row">{"".join(_cell(column, cell, first=place == 0) for place, (column, cell) in pairs)}</tr>'


def _cell(column: Column, cell: Cell, *, first: bool) -> str:
    text = escape(cell.text)
    if cell.code:
        text = f"<code>{text}</code>"
    if cell.note:
        text += f"<small>{escape(cell.note)}</small>"
    looks = (cell.tone, "" if len(cell.text) > SHORT else "short")
    if first:
        return _element("th", "rowheader", column, text, *looks, scope="row")
    return _element("td", "cell", column, text, *looks, label=column.title)


def _element(tag: str, role: str, column: Column, text: str, *looks: str, scope: str = "", label: str = "") -> str:
    names = " ".join(anchor(name) for name in ("number" if column.number else "", *looks) if name)
    attributes = {"role": role, "scope": scope, "class": names, "data-label": label}
    shown = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value)
    return f"<{tag}{shown}>{text}</{tag}>"


def _data(document: Document) -> dict[str, Any]:
    charts = [section for section in document.sections if isinstance(section, Chart)]
    arms = list(document.arms) or [Arm(name) for name in _arm_names(charts)]
    labels = list(dict.fromkeys(curve.label for chart in charts for curve in chart.curves))
    places = ({arm.name: place for place, arm in enumerate(arms)}, {label: place for place, label in enumerate(labels)})
    return {
        "charts": [_chart_data(chart, *places) for chart in charts],
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


def _chart_data(chart: Chart, arms: dict[str, int], labels: dict[str, int]) -> dict[str, Any]:
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
