"""Training studies as the command runs them: dry runs, errors, runs that diverge, exit codes, records."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.cli import main
from muonsw.lab.plan import cost
from muonsw.lab.runs import records
from muonsw.lab.studies.catalogue import STUDIES
from muonsw.lab.studies.main_table import all_rows
from muonsw.lab.studies.scales import GPT2_VOCAB, SCALES, find_data
from muonsw.lab.studies.study import conduct
from tests.lab.studies.small_comparisons import WILD, by_settings, tiny_scale
from tests.lab.train.small_runs import tokens


@pytest.mark.parametrize(("name", "scale"), [("regret", "mini"), ("width-transfer", "paper"), ("recipes", "cpu")])
def test_a_dry_run_prints_the_cost_and_trains_nothing(name, scale, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--scale", scale, "--dry-run", "--tflops", "7"]) == 0
    text, study = capsys.readouterr().out, STUDIES[name].at(SCALES[scale])
    assert study.how_scaled in " ".join(text.split())
    assert "7 TFLOP/s" in text
    total = next(line for line in text.splitlines() if line.startswith("all, shared runs once"))
    assert f" {cost(study.runs()).runs} " in total
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["main-table", "--scale", "paper"], "needs --data DIR with GPT-2 tokens"),
        (["main-table", "--seeds", "0"], "--seeds must be at least 1"),
        (["main-table", "--workers", "0"], "--workers must be at least 1"),
        (["main-table", "--tflops", "0", "--dry-run"], "--tflops must be above zero"),
        (["main-tabel"], "did you mean 'main-table'"),
        (["main-table/width-7"], "has no part 'width-7'"),
        ([], "missing study name"),
    ],
)
def test_usage_errors(arguments, message, tmp_path, capsys):
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "study")]) == 2
    assert message in capsys.readouterr().err


def test_paper_scale_refuses_other_tokens():
    assert SCALES["paper"].vocab == GPT2_VOCAB
    with pytest.raises(UsageError, match="needs GPT-2 tokens"):
        find_data(SCALES["paper"], Path(tokens()))
    assert find_data(SCALES["cpu"], Path(tokens())) == Path(tokens())


def test_the_command_runs_a_tiny_study_records_it_and_its_exit_code_tells_a_failed_claim(tmp_path, monkeypatch, capsys):
    # A grid of one rate has its best at an edge: that claim cannot hold.
    monkeypatch.setattr("muonsw.lab.commands.reproduce.SCALES", {"cpu": tiny_scale(rates=(0.01,))})
    arguments = ["--out", str(tmp_path / "h"), "--workers", "1", "--device", "cpu", "--data", tokens()]
    assert main(["reproduce", "horizon-transfer", *arguments, "--record", str(tmp_path / "runs.jsonl")]) == 1
    data = json.loads((tmp_path / "h" / "claims.json").read_text(encoding="utf-8"))
    assert data["claims_failed"] >= 2
    assert data["claims"][0]["verdict"] == "fails"
    assert len(list((tmp_path / "runs-cpu").iterdir())) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "Final loss by learning rate" in printed
    assert "claims FAILED" in printed
    assert f"added 2 runs to {tmp_path / 'runs.jsonl'}" in printed
    rows = records.read(tmp_path / "runs.jsonl")
    assert [(row["study"], row["steps"], row["algorithm"]) for row in rows] == [
        ("horizon-transfer", 5, "adamw"),
        ("horizon-transfer", 10, "adamw"),
    ]
    losses = [loss for one in data["comparisons"] for arm in one["arms"] for loss in arm["final"]]
    assert [row["final_loss"] for row in rows] == losses


def test_recipes_need_no_data_at_any_scale(tmp_path, capsys):
    assert main(["reproduce", "recipes", "--scale", "paper", "--out", str(tmp_path / "r")]) == 0
    assert "All 14 claims hold" in capsys.readouterr().out
    assert not (tmp_path / "runs-paper").exists()


@pytest.mark.slow
def test_an_arm_that_diverges_takes_its_claims_with_it_and_a_sweep_counts_it_as_worst(tmp_path):
    scale = tiny_scale(rates=(0.01, 0.02, 9.0), seeds=1)
    scale = replace(scale, sweep=replace(scale.sweep, diverged=1.0))
    report = conduct(STUDIES["width-transfer"].at(scale), by_settings(tmp_path / "runs"), tmp_path, images=False)
    assert "'adamw, lr 9' diverged at update" in report.sentence
    assert [row[-1].text for row in report.tables[0].rows][-1] == "diverged"
    wild = replace(STUDIES["main-table"], comparisons=lambda scale: [with_wild(one) for one in all_rows(scale)[:1]])
    scale = tiny_scale(seeds=1)
    scale = replace(scale, rows={width: replace(run, diverged=1.0) for width, run in scale.rows.items()})
    report = conduct(wild.at(scale), by_settings(tmp_path / "runs"), tmp_path, images=False)
    assert report.all_claims == []
    assert report.sentence.startswith("No claim is made. 'scaled' diverged at update")


def with_wild(one):
    return replace(one, arms=tuple(replace(WILD, name="scaled") if arm.name == "scaled" else arm for arm in one.arms))
