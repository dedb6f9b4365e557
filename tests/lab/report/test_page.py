"""The page: verdict first, nothing from the network, names as text, and pictures beside it."""

import base64
import hashlib
import json
import re
import shutil

import numpy as np
import plotly.graph_objects
import pytest

from muonsw.lab.console import Table
from muonsw.lab.errors import UsageError
from muonsw.lab.report.charts import HUES, Axis, Chart, Charts, Curve, Document, LegendEntry, Level
from muonsw.lab.report.page import Report, build_report, page, summary, write_report
from muonsw.lab.runs import load_runs
from muonsw.lab.stats import Claim, Criterion
from tests.lab.report.made_runs import Recipe, write_run
from tests.lab.report.pages import HOSTILE, data_of, parse


def claim(name, measured):
    return Claim(name, f"statement {name}", "Table 1", "nothing", 1.0, measured, Criterion.RELATIVE, 0.1, "chosen")


def test_page_and_pictures_are_written_and_equal_runs_give_equal_files(runs, written, tmp_path):
    stems = ["validation-loss", "training-loss", "weight-norm", "predicted-norm", "alignment", "relative-update"]
    names = [f"{stem}.{end}" for stem in [*stems, "learning-rate", "decay"] for end in ("png", "svg")]
    assert [path.name for path in written] == ["report.html", *names]
    for path in written[1:]:
        assert path.parent == written[0].with_suffix("")
        assert path.read_bytes().startswith(b"\x89PNG") or b"<svg" in path.read_bytes()[:1000]
    for path, before in zip(write_report(tmp_path / "report.html", "A report", runs), written, strict=True):
        assert path.read_bytes() == before.read_bytes(), path.name


def test_tables_say_how_runs_ended(runs):
    document = build_report("x", runs)
    tables = {section.name: section for section in document.sections if isinstance(section, Table)}
    assert list(tables) == ["runs", "differences", "origin"]
    rows = {row[0]: row for row in tables["runs"].rows}
    headings = [column.title for column in tables["runs"].headings()]
    first = dict(zip(headings, rows["constant-0"], strict=True))
    losses, norms = runs[0].evals["loss"], runs[0].norms[1]
    assert first["final loss"] == f"{losses[-1]:.4f}"
    assert first["best loss"] == f"{losses.min():.4f}"
    assert first["weight RMS"] == f"{norms[-1]:#.3g}"
    change = float(first["change since largest"].removesuffix("%"))
    assert change == pytest.approx(100 * (norms[-1] / norms.max() - 1), abs=0.5)
    assert rows["scaled-1"][-1].text == "200 of 400 steps"
    assert tables["differences"].columns == ("run", "optimizer.decay", "seed")
    assert ("torch", "2.13.0") in [tuple(row) for row in tables["origin"].rows]


def test_the_sentence_on_top_judges_nothing(runs):
    text = summary(Charts(runs))
    assert text.startswith("4 runs in 2 arms, 1 not complete; median final validation loss: ")
    for arm in ((0, 1), (2, 3)):  # with as many digits as the table
        assert f"{np.median([runs[place].final_loss for place in arm]):.4f} (" in text
    assert build_report("x", runs, verdict="Mine.").verdict == "Mine."


def test_the_difference_comes_first_then_the_curves_and_claims_last(runs):
    claims = {"one": [claim("good", 1.01)], "two": [claim("bad", 2.0)]}
    pairs, arms = (Table(name, name, ("a", "b"), [("x", 1.5)]) for name in ("pairs", "arms"))
    document = build_report("x", runs, claims=claims, tables=[pairs], details=[arms])
    names = [section.name for section in document.sections]
    assert names[:2] == ["pairs", "validation-loss"]
    assert names[-5:] == ["arms", "runs", "differences", "origin", "claims"]
    assert document.failed
    assert [row[3].text for row in document.sections[-1].rows] == ["fails", "holds"]
    assert not build_report("x", runs, claims={"one": claims["one"]}).failed
    assert "claims" not in [section.name for section in build_report("x", runs).sections]


def test_a_report_without_runs_shows_what_it_is_given(tmp_path):
    curve = Curve("sweep", "scaled", [0.1, 0.2], [3.0, float("nan")])
    chart = Chart("sweep", "Loss over λ", [curve], x=Axis("λ", log=10), y=Axis("loss", "nats"), points=True)
    paths = write_report(tmp_path / "r.html", "Sweep", [], figures=[chart], verdict="Done.")
    assert [path.name for path in paths] == ["r.html", "sweep.png", "sweep.svg"]
    data = data_of(paths[0].read_text(encoding="utf-8"))
    assert data["figures"][0]["data"][0]["y"] == [3, None]
    assert data["arms"][0]["colour"] == HUES["scaled"]


def test_the_command_writes_and_refuses(runs, tmp_path, capsys):
    root = runs[0].path.parent
    comparison, out = tmp_path / "comparison", tmp_path / "deep" / "page.html"
    shutil.copytree(root, comparison / "runs")
    for paths in ((root, runs[0].path), (comparison,)):  # a folder of runs, one of them twice; one with `runs`
        assert Report(paths, out=out, no_images=True).run() == 0
        assert f"<title>{len(runs)} runs</title>" in out.read_text(encoding="utf-8")
    assert Report((runs[0].path,), out=out, no_images=True).run() == 0
    assert f"wrote {out}" in capsys.readouterr().out.replace("\n", "")
    assert "Run constant-0" in out.read_text(encoding="utf-8")
    assert not out.with_suffix("").exists()
    for bad, message in (((), "missing run"), ((tmp_path / "none",), "none is not a run")):
        with pytest.raises(UsageError, match=message):
            Report(bad, out=out).run()
    with pytest.raises(UsageError, match=r"must end in \.html"):
        Report((runs[0].path,), out=tmp_path / "page.txt").run()


def test_a_report_replaces_no_other_page_and_puts_no_figures_into_a_run(runs, tmp_path):
    (tmp_path / "mine.html").write_text("of another program", encoding="utf-8")
    with pytest.raises(UsageError, match="was not written by muonsw"):
        write_report(tmp_path / "mine.html", "A report", runs)
    assert (tmp_path / "mine.html").read_text(encoding="utf-8") == "of another program"
    folder = runs[0].path
    with pytest.raises(UsageError, match=f"figures would go into {folder}"):
        write_report(folder.with_name(f"{folder.name}.html"), "A report", runs)
    assert not folder.with_name(f"{folder.name}.html").exists()


def test_the_lines_of_a_users_own_loop_make_a_report(runs, tmp_path):
    file = tmp_path / "telemetry.jsonl"
    lines = (runs[0].path / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"telemetry"' in line), encoding="utf-8")
    document = build_report("x", load_runs([file]))
    assert [section.name for section in document.sections] == [
        "weight-norm", "predicted-norm", "alignment", "relative-update", "learning-rate", "decay", "runs",
    ]  # fmt: skip
    assert document.verdict == f"telemetry; final weight RMS: {runs[0].final_norm:#.3g} (constant)."
    assert document.arms == [LegendEntry("constant", "constant", 1)]


def test_a_metric_of_any_name_has_a_picture_of_its_own(tmp_path):
    metrics = ("val/acc", "val-acc", "../up", "a" * 300, "")
    lines = [{"kind": "eval", "step": step, **dict.fromkeys(("loss", *metrics), 1.0 / step)} for step in (1, 2, 3)]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    written = write_report(tmp_path / "report.html", "A report", load_runs([tmp_path / "run.jsonl"]))
    pictures = {path for path in written if path.name.startswith("metric-") and path.suffix == ".png"}
    assert len(pictures) == len(metrics)
    assert pictures == set((tmp_path / "report").glob("metric-*.png"))


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
    assert not re.search(r"https?:", text.replace(max(code, key=len), ""))
    # Without a list of its own the page has plotly's buttons, one of which uploads the chart.
    assert "modeBarButtons: [[" in code[-1]
    assert "Cloud" not in code[-1]
    assert len(text) < 6_500_000


def test_ids_are_unique_and_tables_have_headings(written):
    tags = parse(written[0].read_text(encoding="utf-8"))
    ids = [attrs["id"] for _, attrs in tags.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"][1:] for _, attrs in tags.found if "href" in attrs} <= set(ids)
    names = [tag for tag, _ in tags.found]
    assert names.count("table") == names.count("caption") == names.count("thead") == 3
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in tags.found if tag == "th")
    assert all(attrs.get("type") == "button" for tag, attrs in tags.found if tag == "button")


def test_plotly_accepts_every_figure(written):
    """It raises for a property that it does not know."""
    figures = data_of(written[0].read_text(encoding="utf-8"))["figures"]
    drawn = [plotly.graph_objects.Figure(figure["data"], figure["layout"]) for figure in figures]
    assert [len(figure.data) for figure in drawn] == [len(figure["data"]) for figure in figures] != []


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="shorter than argument 1"):
        page(Document("x", [Table("t", "T", ("a",), [(1, 2)])]))


def test_hostile_names_stay_text(runs, tmp_path):
    name = HOSTILE.replace("/", "|")
    recipe = Recipe(steps=40, arm=HOSTILE, extra={"note": HOSTILE, HOSTILE: 1})
    evil = load_runs([write_run(tmp_path / name, recipe)])
    bad = {HOSTILE: [Claim(*[HOSTILE] * 4, 1.0, 2.0, Criterion.ABSOLUTE, 0.0, HOSTILE)]}
    table = Table(HOSTILE, HOSTILE, (HOSTILE,), [(HOSTILE,)], note=HOSTILE)
    figure = Chart("plot", HOSTILE, [Curve(HOSTILE, HOSTILE, [1], [1])], note=HOSTILE, levels=[Level(1.0, HOSTILE)])
    content = {"verdict": HOSTILE, "claims": bad, "tables": [table], "figures": [figure]}
    text = page(build_report(HOSTILE, [*runs, *evil], **content))
    tags = parse(text)
    assert not {"img", "b"} & {tag for tag, _ in tags.found}
    assert len(tags.scripts) == 3
    assert HOSTILE in [arm["name"] for arm in data_of(text)["arms"]]
    assert len(write_report(tmp_path / "out.html", HOSTILE, evil, **content)) > 1


def test_many_runs_stay_a_page_of_bounded_size(runs):
    text = page(build_report("many", [runs[0]] * 200))
    assert len(text.encode()) < 15_000_000
    assert all(len(trace["x"]) <= 160 for figure in data_of(text)["figures"] for trace in figure["data"])
