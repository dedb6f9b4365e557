"""The report of runs: the verdict first, pictures beside the page, tables that say what happened."""

import shutil

import numpy as np
import pytest

from muonsw.lab.claims.claim import Claim, Criterion
from muonsw.lab.commands.report import Report, find_runs
from muonsw.lab.console import Table
from muonsw.lab.errors import UsageError
from muonsw.lab.report.charts import Charts
from muonsw.lab.report.page import page
from muonsw.lab.report.report import build_report, summary, write_report
from muonsw.lab.report.sections import Axis, Chart, Curve, LegendEntry
from muonsw.lab.report.static import write_chart
from muonsw.lab.report.theme import LIGHT
from muonsw.lab.runs import load_runs
from muonsw.lab.studies.own_loop import own_run
from tests.lab.report.pages import data_of


def claim(name, measured):
    return Claim(name, f"statement {name}", "Table 1", "nothing", 1.0, measured, Criterion.RELATIVE, 0.1, "chosen")


def test_page_and_pictures_are_written(written):
    stems = ["validation-loss", "training-loss", "weight-norm", "predicted-norm", "alignment", "relative-update"]
    names = [f"{stem}.{end}" for stem in [*stems, "learning-rate", "decay"] for end in ("png", "svg")]
    assert [path.name for path in written] == ["report.html", *names]
    for path in written[1:]:
        assert path.parent == written[0].with_suffix("")
        assert path.read_bytes().startswith(b"\x89PNG") or b"<svg" in path.read_bytes()[:1000]


def test_equal_runs_give_equal_files(runs, written, tmp_path):
    document = build_report("A report", runs)
    assert page(document) == written[0].read_text(encoding="utf-8")
    for chart in document.sections[:2]:
        for path in write_chart(chart, document.arms, tmp_path):
            assert path.read_bytes() == (written[1].parent / path.name).read_bytes(), path.name


def test_tables_say_how_runs_ended(runs):
    document = build_report("x", runs)
    tables = {section.name: section for section in document.sections if isinstance(section, Table)}
    assert list(tables) == ["runs", "differences", "origin"]
    rows = {row[0]: row for row in tables["runs"].rows}
    headings = [column.title for column in tables["runs"].headings()]
    first = dict(zip(headings, rows["constant-0"], strict=True))
    losses = runs[0].evals["loss"]
    assert first["final loss"] == f"{losses[-1]:.4f}"
    assert first["best loss"] == f"{losses.min():.4f}"
    norms = runs[0].norms[1]
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
    assert data["arms"][0]["colour"] == LIGHT.scaled


def test_the_command_writes_and_refuses(runs, tmp_path, capsys):
    root = runs[0].path.parent
    assert find_runs((root, runs[0].path)) == sorted(run.path for run in runs)
    comparison = tmp_path / "comparison"
    shutil.copytree(root, comparison / "runs")
    assert find_runs((comparison,)) == sorted(comparison / "runs" / run.path.name for run in runs)
    out = tmp_path / "deep" / "page.html"
    assert Report((runs[0].path,), out=out, no_images=True).run() == 0
    assert f"wrote {out}" in capsys.readouterr().out.replace("\n", "")
    assert "Run constant-0" in out.read_text(encoding="utf-8")
    assert not out.with_suffix("").exists()
    for bad, message in (((), "say which runs"), ((tmp_path / "none",), "none is not a run")):
        with pytest.raises(UsageError, match=message):
            Report(bad, out=out).run()
    with pytest.raises(UsageError, match=r"must end in \.html"):
        Report((runs[0].path,), out=tmp_path / "page.txt").run()


def test_the_lines_of_a_users_own_loop_make_a_report(runs, tmp_path, capsys):
    file = tmp_path / "telemetry.jsonl"
    lines = (runs[0].path / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"telemetry"' in line), encoding="utf-8")
    assert Report((file,), out=tmp_path / "page.html", no_images=True).run() == 0
    assert "wrote" in capsys.readouterr().out
    document = build_report("x", load_runs([file]))
    assert [section.name for section in document.sections] == [
        "weight-norm", "predicted-norm", "alignment", "relative-update", "learning-rate", "decay", "runs",
    ]  # fmt: skip
    assert document.verdict == f"telemetry; final weight RMS: {runs[0].final_norm:#.3g} (constant)."
    assert document.arms == [LegendEntry("constant", "constant", 1)]


def test_a_metric_of_any_name_has_a_picture_of_its_own(tmp_path):
    metrics = ("val/acc", "val-acc", "../up", "a" * 300, "")
    run = own_run({step: dict.fromkeys(("loss", *metrics), 1.0 / step) for step in (1, 2, 3)}, "a", 0)
    written = write_report(tmp_path / "report.html", "A report", [run])
    pictures = {path for path in written if path.name.startswith("metric-") and path.suffix == ".png"}
    assert len(pictures) == len(metrics)
    assert pictures == set((tmp_path / "report").glob("metric-*.png"))
