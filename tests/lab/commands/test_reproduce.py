"""`muonsw reproduce`: what it lists, writes and prints, and its errors."""

import json

import pytest

import muonsw.lab.commands.reproduce  # noqa: F401 (before anything in it is replaced)
from muonsw.lab.cli import main
from muonsw.lab.plan import cost
from muonsw.lab.studies import records
from muonsw.lab.studies.catalogue import STUDIES
from muonsw.lab.studies.figures import draw_convergence
from muonsw.lab.studies.scales import SCALES
from muonsw.lab.studies.study import Study
from tests.faults.commands import refused
from tests.lab.small_experiments import SMALL
from tests.lab.studies.small_comparisons import tiny_scale
from tests.lab.train.small_runs import tokens


def test_a_study_is_run_written_and_printed(tmp_path, monkeypatch, capsys):
    small = tuple(SMALL[name] for name in ("scalar", "scalar-figure", "matrix-figure", "fixed-rate"))
    study = Study("theory", "small", experiments=small, picture=draw_convergence)
    monkeypatch.setattr("muonsw.lab.commands.reproduce.STUDIES", {"theory": study})
    assert main(["reproduce", "theory", "--out", str(tmp_path), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))
    claims = [claim for group in data["claims"].values() for claim in group]
    assert len(claims) > 10
    assert data["seed"] == 0
    assert all(claim["verdict"] == "holds" for claim in claims)
    assert {"muonsw", "python", "torch", "cpu_cores"} <= set(data["environment"])
    assert f"All {len(claims)} claims hold" in printed
    assert all(f"/{claim['id']}" in printed for claim in claims)
    for name in ("claims.json", "convergence.png", "convergence.svg"):
        assert (tmp_path / name).exists()


def test_list_shows_every_experiment(capsys):
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    for study in STUDIES.values():
        assert f"{study.name}: {study.title}" in printed
        assert all(f"{study.name}/{experiment.name}" in printed for experiment in study.experiments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theroy"], "did you mean 'theory'"),
        (["theory/matrx"], "did you mean 'matrix'"),
        ([], "missing study name: one of theory"),
        (["main-table", "--scale", "paper"], "needs --data DIR with GPT-2 tokens"),
        (["theory", "--scale", "mini"], "theory has only one size: leave --scale out"),
        (["main-table", "--scale", "mini"], "make them with `muonsw data prepare DIR --source fineweb --vocab 4096"),
        (["main-table", "--seeds", "0"], "--seeds must be at least 1"),
        (["regret"], "regret has no scale cpu"),
        (["theory", "--cluster", "slurm", "--time", "10"], "theory trains nothing"),
        (["main-table/width-7"], "known: width-64, width-96"),
    ],
)
def test_usage_errors_are_one_line(arguments, message, tmp_path):
    error = refused("reproduce", *arguments, "--out", tmp_path / "study")
    assert message in error
    assert error.count("\n") == 1


def test_an_unwritable_folder_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    assert f"cannot write to the folder {folder}" in refused("reproduce", "theory", "--out", folder)


@pytest.mark.parametrize(("name", "scale"), [("regret", "mini"), ("width-transfer", "paper")])
def test_a_dry_run_prints_the_cost_and_trains_nothing(name, scale, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--scale", scale, "--dry-run", "--workers", "7"]) == 0
    text = capsys.readouterr().out
    assert "7 runs at a time" in text
    total = next(line for line in text.splitlines() if line.startswith("all, shared runs once"))
    assert f" {cost(STUDIES[name].runs(SCALES[scale])).runs} " in total
    assert list(tmp_path.iterdir()) == []


def test_the_command_runs_a_tiny_study_records_it_and_its_exit_code_tells_a_failed_claim(tmp_path, monkeypatch, capsys):
    # The best of two rates is at an edge, so the claim cannot hold.
    monkeypatch.setattr("muonsw.lab.commands.reproduce.SCALES", {"cpu": tiny_scale(rates=(0.01, 0.02), seeds=1)})
    arguments = ["--out", str(tmp_path / "h"), "--workers", "1", "--device", "cpu", "--data", tokens()]
    assert main(["reproduce", "horizon-transfer", *arguments, "--record", str(tmp_path / "runs.jsonl")]) == 1
    data = json.loads((tmp_path / "h" / "claims.json").read_text(encoding="utf-8"))
    assert [claim["verdict"] for claim in data["claims"]["horizon-transfer"]] == ["fails"]
    assert len(list((tmp_path / "runs-cpu").iterdir())) == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert "Each rule at its best" in printed
    assert "Each rule at its best" in (tmp_path / "h" / "report.html").read_text(encoding="utf-8")
    assert "claims FAILED" in printed
    assert f"added 4 runs to {tmp_path / 'runs.jsonl'}" in printed
    rows = records.read(tmp_path / "runs.jsonl")
    assert [(row["study"], row["steps"], row["algorithm"]) for row in rows] == [
        ("horizon-transfer", steps, "adamw") for steps in (5, 5, 10, 10)
    ]
    losses = [loss for comparison in data["comparisons"] for arm in comparison["arms"] for loss in arm["final"]]
    assert [row["final_loss"] for row in rows] == losses
