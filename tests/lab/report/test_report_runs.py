"""The report of runs: one page that needs nothing, pictures beside it, tables that say what happened."""

import base64
import hashlib
import json
import math
import os
import re
import shutil
import time

import numpy as np
import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.storage import ABANDONED_SECONDS
from muonsw.lab.base.tables import Table
from muonsw.lab.claims.claim import Claim, Criterion
from muonsw.lab.commands.report import Report, find_runs
from muonsw.lab.report.charts import BEGINNING, Charts, loss_axis
from muonsw.lab.report.own import is_own, require_own, require_own_folder
from muonsw.lab.report.page import page
from muonsw.lab.report.report import build_report, summary, write_report
from muonsw.lab.report.sections import Axis, Chart, Curve, Document, LegendEntry
from muonsw.lab.report.static import write_chart
from muonsw.lab.report.theme import DARK, LIGHT, arm_styles
from muonsw.lab.runs import load_runs
from muonsw.lab.runs.curves import extremes, median_curve, running_mean
from muonsw.lab.studies.own_loop import own_run
from tests.faults.killing import killed_at_size
from tests.lab.report.made_runs import Recipe, write_run
from tests.lab.report.test_report import contrast, parse

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1> \"'&λ 日本 $x^2$ <b>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    recipes = {
        "constant-0": Recipe("constant", 0, 400), "constant-1": Recipe("constant", 1, 400),
        "scaled-0": Recipe("scaled", 0, 400), "scaled-1": Recipe("scaled", 1, 400, complete=False),
    }  # fmt: skip
    return load_runs(write_run(root / name, recipe) for name, recipe in recipes.items())


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report") / "report.html", "A report", runs)


def data_of(text):
    tags = parse(text)
    return json.loads(next(script for attrs, script in tags.scripts if attrs.get("type") == "application/json"))


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
    assert len(text) < 6_500_000


def test_ids_are_unique_and_tables_have_headings(written):
    tags = parse(written[0].read_text(encoding="utf-8"))
    ids = [attrs["id"] for _, attrs in tags.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {attrs["href"][1:] for _, attrs in tags.found if "href" in attrs}
    assert targets <= set(ids)
    names = [tag for tag, _ in tags.found]
    assert names.count("table") == names.count("caption") == names.count("thead") == 4
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in tags.found if tag == "th")
    assert all(attrs.get("type") == "button" for tag, attrs in tags.found if tag == "button")


def test_every_point_of_a_curve_is_a_value_of_its_run(runs, written):
    data = data_of(written[0].read_text(encoding="utf-8"))
    charts = {chart["name"]: chart for chart in data["charts"]}
    by_label = {data["labels"][curve["label"]]: curve for curve in charts["weight-norm"]["curves"]}
    for run in runs:
        recorded = dict(zip(*(column.tolist() for column in run.norms), strict=True))
        curve = by_label[run.name]
        assert curve["y"] == [pytest.approx(recorded[step], rel=1e-5) for step in curve["x"]]
    (middle,) = (c for c in charts["validation-loss"]["curves"] if c.get("middle") and c["arm"] == 0)
    pairs = np.stack([run.evals["loss"] for run in runs[:2]])
    np.testing.assert_allclose(middle["y"], np.median(pairs, axis=0), rtol=1e-5)


def test_the_prediction_follows_a_norm_that_obeys_the_recursion(runs):
    steps, predicted = runs[0].predicted_norms
    observed = runs[0].norms[1]
    assert steps[-1] == 400
    # Alignment and size are sampled at every tenth step, between which they are interpolated.
    np.testing.assert_allclose(predicted, observed, rtol=0.05)
    assert predicted[0] == observed[0]


def test_the_median_keeps_steps_that_all_have():
    steps, middle = median_curve(
        [
            (np.array([1, 2, 3]), np.array([1.0, 2, 3])),
            (np.array([2, 3]), np.array([4.0, 5])),
            (np.array([2, 3]), np.array([9.0, 0])),
        ]
    )
    assert (steps.tolist(), middle.tolist()) == ([2, 3], [4.0, 3.0])


@pytest.mark.parametrize("count", [0, 1, 2, 49, 100, 1001])
def test_the_running_mean_is_that_of_each_window(count):
    values = np.random.default_rng(count).standard_normal(count)
    for share in (0.02, 0.1, 1.0):
        half = int(share * count / 2)
        expected = [values[max(0, at - half) : at + half + 1].mean() for at in range(count)]
        np.testing.assert_allclose(running_mean(values, share), np.array(expected), rtol=1e-12, atol=1e-12)


def test_a_spike_is_forgotten_by_the_running_mean():
    values = np.where(np.arange(1000) == 5, 1e20, 2.0)
    assert running_mean(values, 0.02)[100:].tolist() == [2.0] * 900


@pytest.mark.parametrize("count", [0, 1, 5, 99, 100, 101, 4096, 10_001])
def test_thinning_keeps_ends_and_extremes(count):
    values = np.random.default_rng(count).standard_normal(count)
    kept = extremes(values, 100)
    assert len(kept) <= 100
    assert (np.diff(kept) > 0).all()
    if count:
        assert {0, count - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())
    if count <= 100:
        assert len(kept) == count
    else:
        width = -(-count // 49)
        for start in range(0, count, width):
            part, inside = values[start : start + width], kept[(kept >= start) & (kept < start + width)]
            assert values[inside].min() == part.min()
            assert values[inside].max() == part.max()


def test_tables_say_how_runs_ended(runs):
    document = build_report("x", runs)
    tables = {section.name: section for section in document.sections if isinstance(section, Table)}
    assert list(tables) == ["runs", "differences", "commands", "environment"]
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
    command = tables["commands"].rows[0][1].text
    assert command == f"muonsw train --config {runs[0].path / 'config.json'} --out {runs[0].path}-again"
    assert ("torch", "2.13.0") in [tuple(row) for row in tables["environment"].rows]


def test_the_sentence_on_top_judges_nothing(runs):
    text = summary(Charts(runs))
    assert text.startswith("4 runs in 2 arms, 1 not complete; median final validation loss: ")
    for arm in ((0, 1), (2, 3)):  # with as many digits as the table
        assert f"{np.median([runs[place].final_loss for place in arm]):.4f} (" in text
    assert build_report("x", runs, verdict="Mine.").verdict == "Mine."


def test_claims_come_before_everything_and_failed_ones_first(runs):
    claims = {"one": [claim("good", 1.01)], "two": [claim("bad", 2.0)]}
    extra = Table("statistics", "Statistics", ("a", "b"), [("x", 1.5)])
    document = build_report("x", runs, claims=claims, tables=[extra])
    assert [section.name for section in document.sections][:3] == ["claims", "statistics", "validation-loss"]
    assert document.failed
    assert [row[3].text for row in document.sections[0].rows] == ["fails", "holds"]
    assert [column.title for column in document.sections[0].headings()] == ["claim", "paper", "ours", "verdict"]
    assert not build_report("x", runs, claims={"one": claims["one"]}).failed


def test_a_report_without_runs_shows_what_it_is_given(tmp_path):
    curve = Curve("sweep", "scaled", [0.1, 0.2], [3.0, float("nan")])
    chart = Chart("sweep", "Loss over λ", [curve], x=Axis("λ", log=10), y=Axis("loss", "nats"), points=True)
    paths = write_report(tmp_path / "r.html", "Sweep", [], figures=[chart], verdict="Done.")
    assert [path.name for path in paths] == ["r.html", "sweep.png", "sweep.svg"]
    data = data_of(paths[0].read_text(encoding="utf-8"))
    assert data["charts"][0]["curves"][0]["y"] == [3, None]
    assert data["arms"][0]["colours"] == {"light": LIGHT.scaled, "dark": DARK.scaled}


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="2 values for 1 columns"):
        page(Document("x", [Table("t", "T", ("a",), [(1, 2)])]))


def test_hostile_names_stay_text(runs, tmp_path):
    name = HOSTILE.replace("/", "|")
    recipe = Recipe(steps=40, arm=HOSTILE, extra={"note": HOSTILE, HOSTILE: 1})
    evil = load_runs([write_run(tmp_path / name, recipe)])
    bad = {HOSTILE: [Claim(*[HOSTILE] * 4, 1.0, 2.0, Criterion.ABSOLUTE, 0.0, HOSTILE)]}
    table = Table(HOSTILE, HOSTILE, (HOSTILE,), [(HOSTILE,)], note=HOSTILE)
    document = build_report(HOSTILE, [*runs, *evil], verdict=HOSTILE, claims=bad, tables=[table])
    tags = parse(page(document))
    assert not {"img", "b"} & {tag for tag, _ in tags.found}
    assert len(tags.scripts) == 3
    assert HOSTILE in [arm["name"] for arm in data_of(page(document))["arms"]]
    chart = next(section for section in document.sections if isinstance(section, Chart))
    assert all(path.stat().st_size for path in write_chart(chart, document.arms, tmp_path))


def test_rules_fix_hues_and_arms_of_one_rule_differ():
    rules = ["constant", "scaled", "scaled", "none", "squared", "scaled"]
    for palette in (LIGHT, DARK):
        styles = arm_styles(rules, palette)
        assert [style.colour for style in styles[:2]] == [palette.constant, palette.scaled]
        assert len(set(styles)) == len(rules)
        assert all(contrast(style.colour, palette.background) >= 2.5 for style in styles)


def test_arms_of_one_name_share_an_entry(runs):
    assert Charts(runs).arms == [LegendEntry("constant", "constant", 2), LegendEntry("scaled", "scaled", 2)]


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


def test_many_runs_stay_a_page_of_bounded_size(runs):
    many = [runs[0]] * 200
    text = page(build_report("many", many))
    assert len(text.encode()) < 15_000_000
    assert all(len(curve["x"]) <= 160 for chart in data_of(text)["charts"] for curve in chart["curves"])


@pytest.mark.parametrize("steps", [12, 150, 4000])
def test_only_the_first_updates_of_a_run_may_be_out_of_sight(steps):
    x = list(range(0, steps + 1, max(1, steps // 12)))
    curve = Curve("run", "arm", x, [3.0 + 7.0 * math.exp(-10.0 * step / steps) for step in x])
    low, high = loss_axis([curve], []).limits
    every = np.arange(steps + 1)
    seen = np.interp(every, curve.x, curve.y)
    hidden = every[(seen < low) | (seen > high)]
    assert hidden.size
    assert hidden.max() <= BEGINNING * steps


def test_a_loss_that_does_not_fall_at_first_is_shown_whole():
    assert loss_axis([], []).limits is None
    assert loss_axis([Curve("run", "arm", [0, 50, 100], [3.0, 4.0, 2.0])], []).limits is None


def test_every_chart_says_what_its_axes_show(runs):
    for chart in Charts(runs).all():
        assert chart.x.title
        assert chart.y.title
        assert chart.note
        assert ("loss" in chart.name) == (chart.y.unit == "nats per token")


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


def test_what_a_killed_report_left_is_gone_after_one_that_comes_later(runs, tmp_path):
    """Soon after, it may be of a process that still writes, on another machine say, whatever its number is here."""
    path = tmp_path / "report.html"
    assert killed_at_size(1000, lambda: write_report(path, "A report", runs, images=False))
    (left,) = tmp_path.iterdir()
    write_report(path, "A report", runs, images=False)
    assert set(tmp_path.iterdir()) == {path, left}
    hours_ago = time.time() - 2 * ABANDONED_SECONDS
    os.utime(left, (hours_ago, hours_ago))
    write_report(path, "A report", runs, images=False)
    assert set(tmp_path.iterdir()) == {path}


def test_a_metric_of_any_name_has_a_picture_of_its_own(tmp_path):
    metrics = ("val/acc", "val-acc", "../up", "a" * 300, "")
    run = own_run({step: dict.fromkeys(("loss", *metrics), 1.0 / step) for step in (1, 2, 3)}, "a", 0)
    written = write_report(tmp_path / "report.html", "A report", [run])
    pictures = {path for path in written if path.name.startswith("metric-") and path.suffix == ".png"}
    assert len(pictures) == len(metrics)
    assert pictures == set((tmp_path / "report").glob("metric-*.png"))


def test_what_a_report_wrote_may_be_written_again(written):
    assert all(map(is_own, written))
    require_own(written)
    require_own_folder(written[0].with_suffix(""))


@pytest.mark.parametrize("foreign", ["report.html", "report/notes.txt", "report/validation-loss.png", "report"])
def test_a_report_takes_the_place_of_nothing_that_it_did_not_write(runs, tmp_path, foreign):
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text("of another program", encoding="utf-8")
    with pytest.raises(UsageError, match=rf"{tmp_path / foreign}|report, which holds .* choose another name"):
        write_report(tmp_path / "report.html", "A report", runs)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / foreign]
    assert (tmp_path / foreign).read_text(encoding="utf-8") == "of another program"


def test_figures_do_not_go_into_the_folder_of_a_run(runs):
    """`muonsw report runs/a -o runs/a.html` would put them among its checkpoints."""
    folder = runs[0].path
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError, match=rf"figures would go into {folder}, which holds config.json .* --no-images"):
        write_report(folder.with_name(f"{folder.name}.html"), "A report", runs)
    assert sorted(folder.rglob("*")) == before
    assert not folder.with_name(f"{folder.name}.html").exists()
