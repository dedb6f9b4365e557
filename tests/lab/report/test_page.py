"""The page: it asks the network for nothing, runs only its own scripts, and shows names as text."""

import base64
import hashlib
import re

import plotly.graph_objects
import pytest

from muonsw.lab.claims.claim import Claim, Criterion
from muonsw.lab.console import Table
from muonsw.lab.report.page import page
from muonsw.lab.report.report import build_report
from muonsw.lab.report.sections import Chart, Curve, Document, Level
from muonsw.lab.report.static import write_chart
from muonsw.lab.runs import load_runs
from tests.lab.report.made_runs import Recipe, write_run
from tests.lab.report.pages import HOSTILE, data_of, parse


def test_the_page_asks_for_nothing_and_admits_only_its_scripts(written):
    text = written[0].read_text(encoding="utf-8")
    tags = parse(text)
    for tag, attrs in tags.found:
        assert tag not in ("link", "iframe", "img", "base", "object", "form"), tag
        assert not any(name in attrs for name in ("src", "action", "data", "style")), (tag, attrs)
        assert attrs.get("href", "#").startswith("#")
        assert not any(name.startswith("on") for name in attrs)
    policy = next(attrs["content"] for tag, attrs in tags.found if tag == "meta" and "http-equiv" in attrs)
    code = [script for attrs, script in tags.scripts if attrs.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in code]
    assert re.findall(r"sha256-([^']+)", policy) == hashes
    assert policy.startswith("default-src 'none'")
    ours = text.replace(max(code, key=len), "")
    assert not re.search(r"https?:", ours)
    # Without a list of its own the page has plotly's buttons, one of which uploads the chart.
    assert "modeBarButtons: [[" in code[-1]
    assert "Cloud" not in code[-1]
    assert len(text) < 6_500_000


def test_ids_are_unique_and_tables_have_headings(written):
    tags = parse(written[0].read_text(encoding="utf-8"))
    ids = [attrs["id"] for _, attrs in tags.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {attrs["href"][1:] for _, attrs in tags.found if "href" in attrs}
    assert targets <= set(ids)
    names = [tag for tag, _ in tags.found]
    assert names.count("table") == names.count("caption") == names.count("thead") == 3
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in tags.found if tag == "th")
    assert all(attrs.get("type") == "button" for tag, attrs in tags.found if tag == "button")


def test_plotly_accepts_every_figure(written):
    """It raises for a property that it does not know."""
    figures = data_of(written[0].read_text(encoding="utf-8"))["figures"]
    drawn = [plotly.graph_objects.Figure(figure["data"], figure["layout"]) for figure in figures]
    assert drawn
    assert [len(figure.data) for figure in drawn] == [len(figure["data"]) for figure in figures]


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="2 values for 1 columns"):
        page(Document("x", [Table("t", "T", ("a",), [(1, 2)])]))


def test_hostile_names_stay_text(runs, tmp_path):
    name = HOSTILE.replace("/", "|")
    recipe = Recipe(steps=40, arm=HOSTILE, extra={"note": HOSTILE, HOSTILE: 1})
    evil = load_runs([write_run(tmp_path / name, recipe)])
    bad = {HOSTILE: [Claim(*[HOSTILE] * 4, 1.0, 2.0, Criterion.ABSOLUTE, 0.0, HOSTILE)]}
    table = Table(HOSTILE, HOSTILE, (HOSTILE,), [(HOSTILE,)], note=HOSTILE)
    figure = Chart("plot", HOSTILE, [Curve(HOSTILE, HOSTILE, [1], [1])], note=HOSTILE, levels=[Level(1.0, HOSTILE)])
    document = build_report(HOSTILE, [*runs, *evil], verdict=HOSTILE, claims=bad, tables=[table], figures=[figure])
    tags = parse(page(document))
    assert not {"img", "b"} & {tag for tag, _ in tags.found}
    assert len(tags.scripts) == 3
    assert HOSTILE in [arm["name"] for arm in data_of(page(document))["arms"]]
    chart = next(section for section in document.sections if isinstance(section, Chart))
    assert all(path.stat().st_size for path in write_chart(chart, document.arms, tmp_path))


def test_many_runs_stay_a_page_of_bounded_size(runs):
    many = [runs[0]] * 200
    text = page(build_report("many", many))
    assert len(text.encode()) < 15_000_000
    assert all(len(trace["x"]) <= 160 for figure in data_of(text)["figures"] for trace in figure["data"])
