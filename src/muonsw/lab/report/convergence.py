"""The convergence figure: where each rule's loss goes on the two quadratics, for many starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muonsw.lab.claims.claim import Evidence, Series
from muonsw.lab.report.page import write_page
from muonsw.lab.report.sections import Document, Figure, any_failed, claims_table
from muonsw.lab.report.static import write_panels
from muonsw.lab.report.traces import panel_figure

TITLE = "Constant decay stops at its bound, scaled decay does not"
NOTE = (
    "Learning rate η₀/(1 + t), starts W₀ ~ N(0, 0.02²). The loss is divided by its mean initial value. Dashed: the "
    "analytic lower bound for constant decay. Thin lines are single starts, the thick line is their median. Steps "
    "are thinned on a logarithmic scale, extremes kept; every point is a value of the run."
)


@dataclass(frozen=True)
class Panel:
    """One quadratic: the curves of both rules and what the axes say.

    Attributes:
        title: What is shown.
        series: Constant decay first, with its bound as `level`.
    """

    title: str
    series: Sequence[Series]


def panels(outcomes: Mapping[str, Evidence]) -> list[Panel]:
    """Collect the panels for which there are curves."""
    wanted = {
        "scalar-figure": "SGD on ½a(w \N{MINUS SIGN} c)²",
        "matrix-figure": "Muon on ½‖W \N{MINUS SIGN} A‖²",
    }
    found = []
    for name, title in wanted.items():
        if name in outcomes and outcomes[name].series:
            series = outcomes[name].series
            found.append(Panel(f"{title}, {len(series[0].values)} starts", series))
    return found


def draw(outcomes: Mapping[str, Evidence], folder: Path) -> list[Path]:
    """Write the figure as PNG, SVG and interactive page; nothing where no curves were run."""
    shown = panels(outcomes)
    if not shown:
        return []
    parts = [(panel.title, panel.series) for panel in shown]
    paths = write_panels(parts, TITLE, folder / "convergence")
    claims = {name: outcome.claims for name, outcome in outcomes.items()}
    figure = Figure("convergence", NOTE, panel_figure(parts))
    table = claims_table(claims, headings=("predicted", "measured"))
    document = Document(TITLE, [figure, table], failed=any_failed(claims))
    return [*paths, write_page(folder / "convergence.html", document)]
