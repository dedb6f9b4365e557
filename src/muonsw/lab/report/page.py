"""A self-contained interactive page: figures, claims, light and dark; it asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from muonsw.lab.experiments.claims import Claim, failed_first, verdict
from muonsw.lab.files import write_atomically
from muonsw.lab.report.terminal import measured_text, predicted_text
from muonsw.lab.report.theme import PALETTES, plotly_axis, plotly_layout


@dataclass(frozen=True)
class Figure:
    """A figure of a page.

    Attributes:
        name: Its id on the page.
        note: A caption, as plain text.
        plot: Plotly data and layout. A trace's `meta` names the colour of the theme that it gets.
    """

    name: str
    note: str
    plot: dict[str, Any]


def write_page(path: Path, title: str, figures: Sequence[Figure], claims: Mapping[str, Sequence[Claim]]) -> Path:
    """Write figures and a table of claims as one HTML file that works offline."""
    return write_atomically(path, page(title, figures, claims))


def page(title: str, figures: Sequence[Figure], claims: Mapping[str, Sequence[Claim]]) -> str:
    """The page as text; everything that is not ours to write is escaped."""
    library, code = get_plotlyjs(), _resource("page.js")
    themes = {
        name: {"colours": palette.as_data(), "layout": plotly_layout(palette), "axis": plotly_axis(palette)}
        for name, palette in PALETTES.items()
    }
    data = {"figures": [{"name": figure.name, **figure.plot} for figure in figures], "themes": themes}
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(code)}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    # In an attribute the quotes of the policy are data; "<" inside JSON could end the script element.
    parts = {
        "POLICY": html.escape(policy, quote=True).replace("&#x27;", "'"),
        "TITLE": html.escape(title),
        "STYLE": _resource("page.css"),
        "FIGURES": "\n".join(_figure(figure) for figure in figures),
        "CLAIMS": _claims(claims),
        "DATA": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "LIBRARY": library,
        "CODE": code,
    }
    pieces = _resource("page.html").split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _figure(figure: Figure) -> str:
    note = html.escape(figure.note)
    name = html.escape(figure.name, quote=True)
    plot = f'<div id="{name}" class="plot" role="group" aria-label="{note}"></div>'
    return f"<figure>{plot}<figcaption>{note}</figcaption></figure>"


def _claims(claims: Mapping[str, Sequence[Claim]]) -> str:
    owners = {id(claim): name for name, those in claims.items() for claim in those}
    ordered = failed_first(claim for those in claims.values() for claim in those)
    return "\n".join(_row(owners[id(claim)], claim) for claim in ordered)


def _row(owner: str, claim: Claim) -> str:
    details = f"{claim.reference}. Assumes {claim.hypothesis}. Tolerance {claim.tolerance:.2g}: {claim.because}."
    if claim.interval is not None:
        details += f" Interval: {claim.interval.method}."
    if claim.limits:
        details += f" {claim.limits[0].upper()}{claim.limits[1:]}."
    cells = (predicted_text(claim), measured_text(claim))
    numbers = "".join(f"<td class='number'>{html.escape(cell)}</td>" for cell in cells)
    word = verdict(claim.holds)
    small = html.escape(f"{owner}/{claim.id} · {details}")
    text = f"{html.escape(claim.statement)}<small>{small}</small>"
    return f"<tr><td>{text}</td>{numbers}<td class='{word}'>{word}</td></tr>"


def _resource(name: str) -> str:
    return files("muonsw.lab.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
