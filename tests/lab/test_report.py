"""The page: verdict first, nothing from the network, every point a mean of its run, and names as text."""

import base64
import hashlib
import html
import json
import math
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import plotly.graph_objects
import pytest

from muonsw.lab.charts import HUES, Axis, Chart, Curve, LegendEntry, Level
from muonsw.lab.console import Table
from muonsw.lab.errors import UsageError
from muonsw.lab.report import (
    BEGINNING,
    Group,
    Report,
    differences_table,
    loss_axis,
    median_curve,
    origin_table,
    run_charts,
    runs_table,
    summary,
    thinned,
    write_report,
)
from muonsw.lab.runs import load_runs
from muonsw.lab.stats import Claim, Criterion
from tests.lab.made_runs import HOSTILE, Recipe, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    recipes = {
        "constant-0": Recipe("constant", 0, 400), "constant-1": Recipe("constant", 1, 400),
        "scaled-0": Recipe("scaled", 0, 400), "scaled-1": Recipe("scaled", 1, 400, complete=False),
    }  # fmt: skip
    return load_runs(write_run(root / name, recipe) for name, recipe in recipes.items())


@pytest.fixture(scope="module")
def text(runs, tmp_path_factory):
    page = write_report(tmp_path_factory.mktemp("report") / "report.html", "A report", runs)
    return page.read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Collects elements, and the text of scripts by their place."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, _tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            attrs, before = self.scripts[-1]
            self.scripts[-1] = (attrs, before + data)


def data_of(text):
    return json.loads(next(script for attrs, script in Tags(text).scripts if attrs.get("type") == "application/json"))


# Charts.


def test_every_point_of_a_curve_is_a_value_of_its_run(runs):
    charts = {chart.name: chart for chart in run_charts(Group(runs))}
    by_label = {curve.label: curve for curve in charts["weight-norm"].curves}
    for run in runs:
        recorded = dict(zip(*(column.tolist() for column in run.norms), strict=True))
        curve = by_label[run.name]
        assert curve.y == [recorded[step] for step in curve.x]
    (middle,) = (curve for curve in charts["validation-loss"].curves if curve.middle and curve.arm == "constant")
    pairs = np.stack([run.evals["loss"] for run in runs[:2]])
    np.testing.assert_allclose(middle.y, np.median(pairs, axis=0), rtol=1e-12)
    for chart in charts.values():
        assert chart.x.title
        assert chart.y.title
        assert chart.note
        assert ("loss" in chart.name) == (chart.y.unit == "nats per token")


@pytest.mark.parametrize("steps", [12, 4000])
def test_only_the_first_steps_of_a_run_may_be_out_of_sight(steps):
    x = list(range(0, steps + 1, max(1, steps // 12)))
    curve = Curve("run", "arm", x, [3.0 + 7.0 * math.exp(-10.0 * step / steps) for step in x])
    low, high = loss_axis([curve], []).limits
    every = np.arange(steps + 1)
    seen = np.interp(every, curve.x, curve.y)
    hidden = every[(seen < low) | (seen > high)]
    assert hidden.size
    assert hidden.max() <= BEGINNING * steps
    assert loss_axis([], []).limits is None
    assert loss_axis([Curve("run", "arm", [0, 50, 100], [3.0, 4.0, 2.0])], []).limits is None


def test_the_median_keeps_steps_that_all_have():
    curves = {(1, 2, 3): [1.0, 2, 3], (2, 3): [4.0, 5], (2, 3, 9): [9.0, 0, 1]}
    steps, middle = median_curve([(np.array(at), np.array(values)) for at, values in curves.items()])
    assert (steps.tolist(), middle.tolist()) == ([2, 3], [4.0, 3.0])


@pytest.mark.parametrize("count", [1, 100, 101, 10_001])
def test_thinning_averages_and_keeps_the_end(count):
    steps, values = np.arange(count), np.random.default_rng(count).standard_normal(count)
    places, means = thinned((steps, values), 100)
    assert len(places) <= 100
    assert places[-1] == count - 1
    edges = [0, *(places + 1)]
    expected = [values[start:end].mean() for start, end in pairwise(edges)]
    np.testing.assert_allclose(means, expected, rtol=1e-12)


# Tables and order.


def test_tables_say_how_runs_ended(runs):
    group = Group(runs)
    table = runs_table(group)
    rows = {row[0]: row for row in table.rows}
    first = dict(zip((column.title for column in table.headings()), rows["constant-0"], strict=True))
    losses, norms = runs[0].evals["loss"], runs[0].norms[1]
    assert first["final loss"] == f"{losses[-1]:.4f}"
    assert first["best loss"] == f"{losses.min():.4f}"
    assert first["weight RMS"] == f"{norms[-1]:#.3g}"
    change = float(first["change since largest"].removesuffix("%"))
    assert change == pytest.approx(100 * (norms[-1] / norms.max() - 1), abs=0.5)
    assert rows["scaled-1"][-1].text == "200 of 400 steps"
    (differences,), (origin,) = differences_table(group), origin_table(group)
    assert differences.columns == ("run", "optimizer.decay", "seed")
    assert ("torch", "2.13.0") in [tuple(row) for row in origin.rows]
    sentence = summary(group)
    assert sentence.startswith("4 runs in 2 arms, 1 not complete; median final validation loss: ")
    for arm in ((0, 1), (2, 3)):  # with as many digits as the table
        assert f"{np.median([runs[place].final_loss for place in arm]):.4f} (" in sentence


def test_the_verdict_comes_first_then_the_difference_then_the_curves_and_claims_last(runs, tmp_path):
    claims = {
        name: [Claim(name, name, "Table 1", "", 1.0, measured, Criterion.RELATIVE, 0.1, "chosen")]
        for name, measured in (("good", 1.01), ("bad", 2.0))
    }
    pairs, arms = (Table(name, name, ("a", "b"), [("x", 1.5)]) for name in ("pairs", "arms"))
    content = {"verdict": "Mine.", "claims": claims, "tables": [pairs], "details": [arms]}
    text = write_report(tmp_path / "report.html", "x", runs, **content).read_text(encoding="utf-8")
    ids = [attrs.get("id") for tag, attrs in Tags(text).elements if tag in ("section", "details")]
    assert ids == ["pairs", "figures", "arms", "runs", "differences", "origin", "claims"]
    assert text.index('<p class="verdict fails">Mine.') < text.index('id="pairs"')
    rows = [row for row in re.findall(r"<tr>.*?</tr>", text, re.DOTALL) if "statement" in row or "Table 1" in row]
    assert ["fails" in row for row in rows] == [True, False]


def test_a_report_without_runs_shows_what_it_is_given(tmp_path):
    curve = Curve("sweep", "scaled", [0.1, 0.2], [3.0, float("nan")])
    chart = Chart("sweep", "Loss over λ", [curve], x=Axis("λ", log=10), y=Axis("loss", "nats"), points=True)
    page = write_report(tmp_path / "r.html", "Sweep", [], figures=[chart], verdict="Done.")
    data = data_of(page.read_text(encoding="utf-8"))
    assert data["figures"][0]["data"][0]["y"] == [3, None]
    assert data["arms"][0]["colour"] == HUES["scaled"]


def test_the_lines_of_a_users_own_loop_make_a_report(runs, tmp_path):
    file = tmp_path / "telemetry.jsonl"
    lines = (runs[0].path / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"telemetry"' in line), encoding="utf-8")
    group = Group(load_runs([file]))
    assert [chart.name for chart in run_charts(group)] == [
        "weight-norm", "alignment", "relative-update", "learning-rate", "decay"
    ]  # fmt: skip
    assert summary(group) == f"telemetry; final weight RMS: {runs[0].final_norm:#.3g} (constant)."
    assert group.arms == [LegendEntry("constant", "constant", 1)]


# The command.


def test_the_command_writes_and_refuses(runs, tmp_path, capsys):
    root = runs[0].path.parent
    comparison, out = tmp_path / "comparison", tmp_path / "deep" / "page.html"
    shutil.copytree(root, comparison / "runs")
    for paths in ((root, runs[0].path), (comparison,)):  # a folder of runs, one of them twice; one with `runs`
        assert Report(paths, out=out).run() == 0
        assert f"<title>{len(runs)} runs</title>" in out.read_text(encoding="utf-8")
    assert Report((runs[0].path,), out=out).run() == 0
    assert f"wrote {out}" in capsys.readouterr().out.replace("\n", "")
    assert "Run constant-0" in out.read_text(encoding="utf-8")
    for bad, message in (((), "missing run"), ((tmp_path / "none",), "none is not a run")):
        with pytest.raises(UsageError, match=message):
            Report(bad, out=out).run()
    with pytest.raises(UsageError, match=r"must end in \.html"):
        Report((runs[0].path,), out=tmp_path / "page.txt").run()
    foreign = tmp_path / "mine.html"
    foreign.write_text("of another program", encoding="utf-8")
    with pytest.raises(UsageError, match="was not written by muonsw"):
        Report((runs[0].path,), out=foreign).run()
    assert foreign.read_text(encoding="utf-8") == "of another program"


# The page.


def test_the_page_asks_for_nothing_and_admits_only_its_scripts(text):
    tags = Tags(text)
    for tag, attrs in tags.elements:
        assert tag not in ("link", "iframe", "img", "base", "object", "form"), tag
        assert not any(name in attrs for name in ("src", "action", "data", "style")), (tag, attrs)
        assert attrs.get("href", "#").startswith("#")
        assert not any(name.startswith("on") for name in attrs)
    policy = next(attrs["content"] for tag, attrs in tags.elements if tag == "meta" and "http-equiv" in attrs)
    code = [script for attrs, script in tags.scripts if attrs.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in code]
    assert re.findall(r"sha256-([^']+)", policy) == hashes
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"https?:", text.replace(max(code, key=len), ""))
    # Without a list of its own the page has plotly's buttons, one of which uploads the chart.
    assert "modeBarButtons: [[" in code[-1]
    assert "Cloud" not in code[-1]


def test_ids_are_unique_and_tables_have_headings(text):
    elements = Tags(text).elements
    ids = [attrs["id"] for _, attrs in elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"][1:] for _, attrs in elements if "href" in attrs} <= set(ids)
    names = [tag for tag, _ in elements]
    assert names.count("table") == names.count("caption") == names.count("thead") == 3
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in elements if tag == "th")


def test_plotly_accepts_every_figure(text):
    """It raises for a property that it does not know."""
    figures = data_of(text)["figures"]
    drawn = [plotly.graph_objects.Figure(figure["data"], figure["layout"]) for figure in figures]
    assert [len(figure.data) for figure in drawn] == [len(figure["data"]) for figure in figures] != []


def test_hostile_names_stay_text(runs, tmp_path):
    recipe = Recipe(steps=40, arm=HOSTILE, extra={"note": HOSTILE, HOSTILE: 1})
    evil = load_runs([write_run(tmp_path / HOSTILE.replace("/", "|"), recipe)])
    bad = {HOSTILE: [Claim(*[HOSTILE] * 4, 1.0, 2.0, Criterion.ABSOLUTE, 0.0, HOSTILE)]}
    table = Table(HOSTILE, HOSTILE, (HOSTILE,), [(HOSTILE,)], note=HOSTILE)
    figure = Chart("plot", HOSTILE, [Curve(HOSTILE, HOSTILE, [1], [1])], note=HOSTILE, levels=[Level(1.0, HOSTILE)])
    content = {"verdict": HOSTILE, "claims": bad, "tables": [table], "figures": [figure]}
    text = write_report(tmp_path / "out.html", HOSTILE, [*runs, *evil], **content).read_text(encoding="utf-8")
    tags = Tags(text)
    assert not {"img", "b"} & {tag for tag, _ in tags.elements}
    assert len(tags.scripts) == 3
    assert HOSTILE in html.unescape(text)
    assert HOSTILE in [arm["name"] for arm in data_of(text)["arms"]]
