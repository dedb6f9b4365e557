"""Sections as HTML; whatever is not ours to write is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from itertools import groupby

from muonsw.lab.report.sections import Cell, Chart, Column, Document, Figure, Section, Table, Text, Value, show

SHORT = 28  # characters up to which the text of a cell is not broken


def escape(text: str) -> str:
    """Text for an element or a quoted attribute."""
    return html.escape(text, quote=True)


def body(document: Document) -> str:
    """Everything between the page's heading and its scripts."""
    parts = [_verdict(document), _contents(document)]
    for are_charts, group in groupby(document.sections, key=lambda section: isinstance(section, Chart)):
        shown = [_section(section) for section in group]
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


def _section(section: Section) -> str:
    match section:
        case Table():
            return _table(section)
        case Text():
            return _text(section)
        case Figure():
            return _figure(section)
        case Chart():
            return _chart(section)


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
        elif not isinstance(section, Figure):
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
    unit = f'<span class="unit">{escape(chart.y_label)}</span>' if chart.y_label else ""
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
    return [("all", "all"), *tools] if chart.window else tools


def _figure(figure: Figure) -> str:
    note, name = escape(figure.note), anchor(figure.name)
    plot = f'<div id="{name}" class="plot fixed" role="group" aria-label="{note}"></div>'
    return f'<figure class="panels">{plot}<figcaption>{note}</figcaption></figure>'


def _text(text: Text) -> str:
    paragraphs = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in text.paragraphs)
    return f'<section id="{anchor(text.name)}"><h2>{escape(text.title)}</h2>{paragraphs}</section>'


def _table(table: Table) -> str:
    columns = table.headings()
    head = "".join(_element("th", "columnheader", column, escape(column.title), scope="col") for column in columns)
    rows = "\n".join(_row(columns, row) for row in table.rows)
    # Rows with notes are read one below the other where the page is narrow; roles keep them a table for readers.
    kind = ' class="stacked"' if any(isinstance(cell, Cell) and cell.note for row in table.rows for cell in row) else ""
    inner = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table role="table"{kind}><caption class="unseen">{escape(table.title)}</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>\n'
        f'<tbody role="rowgroup">\n{rows}\n</tbody></table></div>'
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    heading = f"<h2>{escape(table.title)}</h2>"
    if table.folded:
        return f'<details id="{anchor(table.name)}"><summary>{heading}</summary>{inner}{note}</details>'
    return f'<section id="{anchor(table.name)}">{heading}{inner}{note}</section>'


def _row(columns: list[Column], row: Sequence[Value | Cell]) -> str:
    if len(row) != len(columns):
        raise ValueError(f"a row has {len(row)} values for {len(columns)} columns: {row!r}")
    cells = enumerate(zip(columns, row, strict=True))
    shown = "".join(_cell(column, cell, first=place == 0) for place, (column, cell) in cells)
    return f'<tr role="row">{shown}</tr>'


def _cell(column: Column, value: Value | Cell, *, first: bool) -> str:
    cell = value if isinstance(value, Cell) else Cell(show(value, column.digits))
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
