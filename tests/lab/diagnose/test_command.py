"""`muonsw diagnose`: what it writes and prints, and how it says no."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from muonsw.lab.base.errors import UsageError
from muonsw.lab.commands.diagnose import Diagnose
from muonsw.lab.diagnose import figures
from muonsw.lab.diagnose.diagnosis import as_data, diagnose, print_diagnosis
from muonsw.lab.diagnose.figures import FIGURES, draw, legend
from muonsw.lab.report.theme import LIGHT, arm_styles
from muonsw.lab.runs import load_run
from tests.lab.diagnose.runs import make_run, simulate

SHORT = {"lam": 2.0, "steps": 1000, "every": 10, "layers": 1}
FEW = {"lam": 2.0, "steps": 60, "every": 10, "warmup": 10}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Both rules diagnosed together: the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("diagnose")
    runs = tuple(make_run(folder / rule, rule=rule, **SHORT) for rule in ("constant", "scaled"))
    assert Diagnose(runs=runs, out=folder / "out").run() == 0
    return folder


@pytest.fixture
def one_figure(monkeypatch):
    """Draw what depends on most, and leave the rest to the test that draws all."""
    monkeypatch.setattr(figures, "FIGURES", {"alignment-and-prediction": figures.alignment_and_prediction})


def test_every_figure_is_written_twice(written):
    for name in FIGURES:
        png, svg = (written / "out" / f"{name}.{suffix}" for suffix in ("png", "svg"))
        assert png.read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in svg.read_bytes()[:1000]
    assert not [path for path in (written / "out").iterdir() if path.name.startswith(".")]


def test_the_numbers_are_those_of_the_run(written):
    data = json.loads((written / "out" / "diagnose.json").read_text(encoding="utf-8"))
    assert [run["rule"] for run in data["runs"]] == ["constant", "scaled"]
    for run in data["runs"]:
        rows = simulate(rule=run["rule"], lam=2.0, steps=1000)[::10]
        assert run["series"]["step"] == [row["step"] for row in rows]
        assert run["series"]["weight_rms"] == pytest.approx([row["r"] for row in rows])
        assert run["tracking"]["predicted"][-1] == pytest.approx(rows[-1]["r"], rel=0.02)
        assert run["norm"]["last_norm"] == rows[-1]["r"]
        assert run["norm"]["lambda"] == pytest.approx(2.0)
        assert run["norm"]["relaxations"] == pytest.approx(
            2.0 * sum(row["phi"] for row in simulate(rule=run["rule"], lam=2.0, steps=1000)[:991]), rel=1e-3
        )
        assert set(run["roles"]) == {"experts", "hidden"}
        assert set(run["layers"]) == {"0"}
        assert run["late_fits"]["origin"]["k"] > 0
        assert {"rule", "severity", "scope", "text", "numbers", "also"} == set(run["findings"][0])


@pytest.mark.usefixtures("one_figure")
def test_one_run_is_written_beside_it_and_printed_plainly(tmp_path, capsys):
    run = make_run(tmp_path / "$走", rule="constant", **FEW)
    assert Diagnose(runs=(run,)).run() == 0
    printed = capsys.readouterr().out
    assert (run / "diagnose" / "diagnose.json").exists()
    assert f"wrote {run / 'diagnose'}: diagnose.json and 1 figure as" in printed
    assert "$走 (constant)" in printed
    assert "Only 6 telemetry samples" in " ".join(printed.split())
    assert "role:experts" in printed
    assert "\x1b" not in printed
    assert all(f"{sign}: " in printed for sign in ("norm", "r*", "φ", "2Σφ")), "a table has a legend"


def test_a_terminal_gets_the_same_numbers_in_a_table(tmp_path):
    diagnosis = diagnose(load_run(make_run(tmp_path / "run[1]", rule="constant", **SHORT)))
    buffer = io.StringIO()
    print_diagnosis(Console(file=buffer, force_terminal=True, width=200), [diagnosis])
    for text in ("run[1]", "lost", "decayed", f"{diagnosis.history.last('weight_rms'):.3g}"):
        assert text in buffer.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_number_is_cut_in_a_narrow_terminal(written, width, verbose):
    diagnoses = [diagnose(load_run(written / rule)) for rule in ("constant", "scaled")]
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=True, width=width, color_system=None)
    print_diagnosis(console, diagnoses, verbose=verbose)
    text = buffer.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for diagnosis in diagnoses:
        assert f" {diagnosis.history.last('weight_rms'):.3g} " in text
    assert (("memory" in text.split("Late")[0]) and "Not shown" not in text) == verbose or width == 120


@pytest.mark.usefixtures("one_figure")
def test_the_lines_of_a_users_own_loop_are_diagnosed(written, tmp_path, capsys):
    """Without a run folder: the rule comes from the recorded decay, momentum from the command line."""
    file = tmp_path / "telemetry.jsonl"
    lines = (written / "constant" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"telemetry"' in line), encoding="utf-8")
    assert Diagnose(runs=(file,), momentum=0.95).run() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "telemetry (constant)" in printed
    assert "not complete" not in printed
    found = {}
    for place, path in (("file", tmp_path / "telemetry-diagnose"), ("folder", written / "out")):
        run = json.loads((path / "diagnose.json").read_text(encoding="utf-8"))["runs"][0]
        found[place] = [(finding["rule"], finding["text"]) for finding in run["findings"]]
    assert found["file"] == found["folder"]
    assert "at least 0 and below 1" in refused(file, momentum=1.0)


def test_a_scope_can_be_chosen(tmp_path):
    def change(role, record):
        return record | {"weight_rms": 2.0 * record["weight_rms"]} if role == "experts" else record

    run = load_run(make_run(tmp_path / "run", change=change, **FEW))
    whole, experts = (as_data(diagnose(run, scope=scope)) for scope in ("decayed", "role:experts"))
    assert experts["norm"]["last_norm"] == pytest.approx(2.0 * whole["norm"]["last_norm"])
    assert all(finding["scope"] == "role:experts" for finding in experts["findings"])


def test_a_run_in_progress_is_read_as_far_as_it_has_got(tmp_path):
    folder = make_run(tmp_path / "run", complete=False, **SHORT)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    half = len(lines) // 2
    (folder / "metrics.jsonl").write_text("".join(lines[:half]) + lines[half][:20], encoding="utf-8")
    diagnosis = diagnose(load_run(folder))
    assert 0 < len(diagnosis.history.steps) < 100
    finding = next(finding for finding in diagnosis.findings if finding.rule == "unfinished")
    assert "of 1,000" in finding.text


def test_numbers_that_are_missing_or_null_do_not_stop_it(tmp_path):
    def change(_role, record):
        gone = record["lr"] < 0.01
        return record | {"alignment_update": None if gone else record["alignment_update"], "defect": None}

    run = load_run(make_run(tmp_path / "run", change=change, **SHORT))
    data = as_data(diagnose(run))
    assert json.dumps(data, allow_nan=False)
    assert data["series"]["alignment_update"][-1] is None
    assert data["samples"] < len(data["series"]["step"])
    # Nothing is left of the late alignment, nor of the defect.
    drawn = draw([diagnose(run)], tmp_path, ["orthogonality", "late-alignment", "alignment-and-prediction", "tracking"])
    assert [path.name for path in drawn[::2]] == ["alignment-and-prediction.png", "tracking.png"]
    assert all(path.exists() for path in drawn)


def test_telemetry_of_the_norm_alone_is_drawn(tmp_path):
    run = make_run(tmp_path / "run", change=lambda _, r: {"weight_rms": r["weight_rms"]}, evals=False, **FEW)
    assert Diagnose(runs=(run,), out=tmp_path / "out").run() == 0
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {"loss-and-norm", "roles"}


def test_runs_have_the_colour_of_their_rule_and_a_name_that_tells_them_apart(tmp_path):
    rules = ("constant", "scaled", "constant", "squared")
    runs = [load_run(make_run(tmp_path / str(n), rule=rule, **FEW)) for n, rule in enumerate(rules)]
    diagnoses = [diagnose(run) for run in runs]
    both = legend(diagnoses[:2])
    assert [style.colour for style in arm_styles([arm.rule for arm in both])] == [LIGHT.constant, LIGHT.scaled]
    assert "constant" in both[0].name
    four = legend(diagnoses)
    styles = arm_styles([arm.rule for arm in four])
    assert [style.colour for style in styles] == [LIGHT.constant, LIGHT.scaled, *LIGHT.extra[:2]]
    assert {style.dash for style in styles} == {"solid"}  # dashes mean something else in these figures
    assert [arm.name for arm in four] == ["0", "1", "2", "3"]


def refused(*runs: Path, **options) -> str:
    with pytest.raises(UsageError) as error:
        Diagnose(runs=runs, **options).run()
    return str(error.value)


def test_what_cannot_be_diagnosed_is_refused_before_anything_is_written(tmp_path):
    run = make_run(tmp_path / "run", **FEW)
    assert "say which run" in refused()
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "no config.json" in refused(tmp_path)
    assert "role:experts, role:hidden" in refused(run, scope="role:unknown")
    assert "--late" in refused(run, late=0.0)
    assert "at most 1, got 1.5" in refused(run, late=1.5)
    silent = make_run(tmp_path / "silent", telemetry=False, **FEW)
    assert "no telemetry at all" in refused(silent)
    (silent / "metrics.jsonl").write_text("", encoding="utf-8")
    (silent / "result.json").unlink()
    assert "no telemetry so far" in refused(silent)
    (silent / "metrics.jsonl").write_text('{"kind": "train"\n{"kind": "train", "step": 1}\n', encoding="utf-8")
    assert "line 1" in refused(silent)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "cannot write" in refused(run, out=tmp_path / "file" / "out")
    assert not (run / "diagnose").exists()


@pytest.mark.usefixtures("one_figure")
def test_a_zero_start_and_a_single_sample_are_harmless(tmp_path):
    def change(_role, record):
        first = math.isclose(record["lr"], 0.002)
        return record | ({"weight_rms": 0.0, "alignment_update": None, "relative_update": None} if first else {})

    run = load_run(make_run(tmp_path / "run", change=change, **FEW))
    data = as_data(diagnose(run))
    assert data["series"]["weight_rms"][0] == 0.0
    assert data["samples"] == 5
    single = load_run(make_run(tmp_path / "single", every=1000, **{k: v for k, v in FEW.items() if k != "every"}))
    assert as_data(diagnose(single))["samples"] == 1
    assert Diagnose(runs=(run.path, single.path), out=tmp_path / "out").run() == 0


@pytest.mark.usefixtures("one_figure")
def test_decay_that_no_training_can_have_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", change=lambda _, record: record | {"decay": -record["decay"]}, **FEW)
    assert Diagnose(runs=(run,), out=tmp_path / "out").run() == 0
    assert as_data(diagnose(load_run(run)))["samples"] == 0


@pytest.mark.parametrize("foreign", ["diagnose.json", "tracking.svg"])
def test_a_diagnosis_takes_the_place_of_nothing_that_it_did_not_write(written, tmp_path, foreign):
    (tmp_path / foreign).write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match=rf"{foreign} was not written by muonsw: delete it"):
        Diagnose(runs=(written / "scaled",), out=tmp_path).run()
    assert [path.name for path in tmp_path.iterdir()] == [foreign]
    assert (tmp_path / foreign).read_text(encoding="utf-8") == '{"mine": 1}'


@pytest.mark.usefixtures("one_figure")
def test_a_diagnosis_takes_the_place_of_an_earlier_one(written):
    before = (written / "out" / "diagnose.json").read_bytes()
    assert Diagnose(runs=(written / "constant", written / "scaled"), out=written / "out").run() == 0
    assert (written / "out" / "diagnose.json").read_bytes() == before
