"""The page: verdict first, nothing from the network, every point a mean of its run, and names as text."""

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import plotly.graph_objects
import pytest

from muonsw.lab.charts import HUES, Axis, Chart, Curve
from muonsw.lab.console import Column, Table
from muonsw.lab.errors import UsageError
from muonsw.lab.report import (
    BEGINNING,
    Report,
    run_charts,
    runs_table,
    without_beginning,
    write_report,
)
from muonsw.lab.runs import load_runs
from muonsw.lab.stats import Claim, Criterion
from tests.lab.made_runs import make_run, telemetry_lines

LAST = ("scaled", 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return load_runs(
        make_run(
            root / f"{rule}-{seed}", rule=rule, seed=seed, arm=rule, steps=400,
            until=191 if (rule, seed) == LAST else None,
        )
        for rule in ("constant", "scaled")
        for seed in (0, 1)
    )  # fmt: skip


@pytest.fixture(scope="module")
def text(runs, tmp_path_factory):
    page = write_report(tmp_path_factory.mktemp("report") / "report.html", "A report", runs)
    return page.read_text(encoding="utf-8")


def scripts_of(text):
    """The attributes and the content of every script."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)


def elements_of(text):
    """The name and the attributes of every element."""
    markup = re.sub(r"(<(script|style)[^>]*>).*?</\2>", r"\1", text, flags=re.DOTALL)
    for tag, attributes in re.findall(r"<([a-z]\w*)([^>]*)>", markup):
        yield tag, dict(re.findall(r'([\w-]+)(?:="([^"]*)")?', attributes))


def data_of(text):
    return json.loads(next(script for attributes, script in scripts_of(text) if "application/json" in attributes))


# Charts.


def test_every_point_of_a_curve_is_a_value_of_its_run(runs):
    charts = {chart.name: chart for chart in run_charts(runs)}
    by_label = {curve.label: curve for curve in charts["weight-norm"].curves}
    for run in runs:
        recorded = dict(zip(*(column.tolist() for column in run.norms), strict=True))
        curve = by_label[run.name]
        assert curve.y == [recorded[step] for step in curve.x]
    (middle,) = (curve for curve in charts["validation-loss"].curves if curve.middle and curve.arm == "constant")
    pairs = np.stack([run.evals["loss"] for run in runs[:2]])
    np.testing.assert_allclose(middle.y, np.median(pairs, axis=0), rtol=1e-12)


def test_only_the_first_tenth_of_a_run_may_be_cut_off():
    steps = np.arange(0, 4001, 333)
    losses = 3.0 + 7.0 * np.exp(-10.0 * steps / 4000)
    chart = Chart("loss", "Loss", [Curve("run", "arm", steps.tolist(), losses.tolist())])
    low, high = without_beginning(chart).y.limits
    hidden = steps[(losses < low) | (losses > high)]
    assert hidden.size
    assert hidden.max() <= BEGINNING * 4000
    few = replace(chart, curves=[Curve("run", "arm", [0, 10], [7.0, 5.0])])
    assert without_beginning(few).y.limits[1] > 6.8, "the line itself stays visible"


# Tables and order.


def test_tables_say_how_runs_ended(runs):
    table = runs_table(runs)
    rows = {row[0]: row for row in table.rows}
    first = dict(zip((column.title for column in table.columns), rows["constant-0"], strict=True))
    losses, norms = runs[0].evals["loss"], runs[0].norms[1]
    assert first["final loss"] == f"{losses[-1]:.4f}"
    assert first["best loss"] == f"{losses.min():.4f}"
    assert first["weight RMS"] == f"{norms[-1]:#.3g}"
    assert rows["scaled-1"][-3].text == "191 of 400 steps"
    assert [column.title for column in table.columns[-2:]] == ["optimizer.decay", "seed"]
    assert rows["scaled-1"][-2:] == ("scaled", "1")


def test_settings_have_no_more_digits_than_other_values(tmp_path):
    lambdas = {"constant": 1.0, "control": 0.7276352080000001}
    made = (make_run(tmp_path / arm, arm=arm, optimizer={"weight_decay": lam}) for arm, lam in lambdas.items())
    assert [row[-1] for row in runs_table(load_runs(made)).rows] == ["1", "0.727635"]


def test_the_verdict_comes_first_then_the_difference_then_the_curves_and_claims_last(runs, tmp_path):
    claims = {
        name: [Claim(name, name, "Table 1", "", 1.0, measured, Criterion.RELATIVE, 0.1, "chosen")]
        for name, measured in (("good", 1.01), ("bad", 2.0))
    }
    pairs, arms = (Table(name, name, [Column("a"), Column("b")], [("x", 1.5)]) for name in ("pairs", "arms"))
    content = {"verdict": "Mine.", "claims": claims, "tables": [pairs, arms]}
    text = write_report(tmp_path / "report.html", "<script>", runs, **content).read_text(encoding="utf-8")
    assert len(scripts_of(text)) == 3, "a title is text"
    ids = [attrs.get("id") for tag, attrs in elements_of(text) if tag == "section"]
    assert ids == ["pairs", "figures", "arms", "runs", "claims"]
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


def test_a_telemetry_file_makes_a_report_and_a_run_without_an_arm_is_one(runs, tmp_path):
    files = [tmp_path / name / "telemetry.jsonl" for name in "ab"]
    for file, run in zip(files, runs[::2], strict=True):
        file.parent.mkdir()
        file.write_text(telemetry_lines(run.path), encoding="utf-8")
    assert Report(tuple(files), out=tmp_path / "page.html").run() == 0
    data = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [figure["name"] for figure in data["figures"]] == ["weight-norm", "decay"]
    assert {arm["name"]: arm["colour"] for arm in data["arms"]} == dict(
        zip(map(str, files), HUES.values(), strict=True)
    )


# The command.


def test_the_command_writes_a_page_but_not_over_a_foreign_file(runs, tmp_path, capsys):
    root = runs[0].path.parent
    comparison, out = tmp_path / "comparison", tmp_path / "deep" / "page.html"
    shutil.copytree(root, comparison / "runs")
    for paths in ((root, runs[0].path), (comparison,)):  # a folder of runs, one of them twice; one with `runs`
        assert Report(paths, out=out).run() == 0
        assert f"<title>{len(runs)} runs</title>" in out.read_text(encoding="utf-8")
    assert f"wrote {out}" in capsys.readouterr().out.replace("\n", "")
    foreign = tmp_path / "mine.html"
    foreign.write_text("of another program", encoding="utf-8")
    for paths, page, message in (
        ((), out, "missing run"),
        ((tmp_path / "none",), out, "none is not a run"),
        ((runs[0].path,), tmp_path / "page.txt", r"must end in \.html"),
        ((runs[0].path,), foreign, "was not written by muonsw"),
    ):
        with pytest.raises(UsageError, match=message):
            Report(paths, out=page).run()
    assert foreign.read_text(encoding="utf-8") == "of another program"


# The page.


def test_the_page_asks_for_nothing_and_admits_only_its_scripts(text):
    for tag, attrs in elements_of(text):
        assert tag not in ("link", "iframe", "img", "base", "object", "form"), tag
        assert not any(name in attrs for name in ("src", "action", "data", "style")), (tag, attrs)
        assert attrs.get("href", "#").startswith("#")
        assert not any(name.startswith("on") for name in attrs)
    policy = next(attrs["content"] for tag, attrs in elements_of(text) if tag == "meta" and "http-equiv" in attrs)
    code = [script for attributes, script in scripts_of(text) if "application/json" not in attributes]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in code]
    assert re.findall(r"sha256-([^']+)", policy) == hashes
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"https?:", text.replace(max(code, key=len), ""))
    # Without a list of its own the page has plotly's buttons, one of which uploads the chart.
    assert "modeBarButtons: [[" in code[-1]
    assert "Cloud" not in code[-1]


def test_plotly_accepts_every_figure(text):
    """It raises for a property that it does not know."""
    figures = data_of(text)["figures"]
    drawn = [plotly.graph_objects.Figure(figure["data"], figure["layout"]) for figure in figures]
    assert [len(figure.data) for figure in drawn] == [len(figure["data"]) for figure in figures] != []
