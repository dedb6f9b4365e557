"""Comparisons: paired, the same whatever the number of processes, resumable, and no bolder than their numbers."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

from muonsw.lab.claims.claim import Interval
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.cli import main
from muonsw.lab.errors import UsageError
from muonsw.lab.runs import load_run
from muonsw.lab.studies.compare.arms import Arm, decay_factors, jobs, parse_arm, same_total
from muonsw.lab.studies.compare.claims import effects
from muonsw.lab.studies.compare.conduct import Bench, write_outcome
from muonsw.lab.studies.compare.display import displaying
from muonsw.lab.studies.compare.outcome import ArmOutcome, Outcome, PairOutcome, compare, first_crossing, steps_to_match
from muonsw.lab.studies.compare.pool import Audience, run_all
from muonsw.lab.studies.compare.tune import sweep_table, tune
from muonsw.lab.studies.compare.verdict import verdict
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig
from tests.lab.train.small import losses, small_run, tokens

ARMS = [Arm(rule, OptimizerConfig(decay=rule, weight_decay=1.0)) for rule in ("constant", "scaled")]


@pytest.fixture(scope="module")
def conducted(tmp_path_factory):
    """Two arms with three seeds, two runs at a time."""
    folder = tmp_path_factory.mktemp("comparison")
    bench = Bench(folder, Console(quiet=True), workers=2)
    return folder, bench.run(small_run(), ARMS, range(3))


def test_the_number_of_processes_changes_nothing(conducted, tmp_path):
    folder, _ = conducted
    todo = jobs(small_run(), ARMS, [1], tmp_path)
    run_all(todo, workers=1)
    for job in todo:
        assert losses(job.folder) == losses(folder / "runs" / job.folder.name)


def test_arms_share_weights_and_batches_and_differ_in_decay_alone(conducted):
    _, runs = conducted
    for constant, scaled in zip(runs["constant"], runs["scaled"], strict=True):
        # the rules are the same at the peak, and the first update of a warmup decays by next to nothing
        assert constant.evals["loss"][0] == scaled.evals["loss"][0]
        assert constant.train["cross_entropy"][0] == scaled.train["cross_entropy"][0]
        assert constant.train["loss"][-1] != scaled.train["loss"][-1]
    for one, other in pairwise(runs["constant"]):
        assert one.evals["loss"][0] != other.evals["loss"][0]


def test_a_comparison_is_paired_by_seed(conducted):
    _, runs = conducted
    outcome = compare(runs)
    (pair,) = outcome.pairs
    finals = {name: [run.result["final_loss"] for run in those] for name, those in runs.items()}
    by_hand = [b - a for a, b in zip(finals["constant"], finals["scaled"], strict=True)]
    assert pair.differences == pytest.approx(by_hand, abs=1e-15)
    assert pair.mean == pytest.approx(sum(by_hand) / 3, abs=1e-15)
    assert pair.interval == t_interval(torch.tensor(by_hand, dtype=torch.float64))


def test_a_finished_comparison_is_not_run_again(conducted):
    folder, _ = conducted
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    Bench(folder, Console(quiet=True), workers=2).run(small_run(), ARMS, range(3))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == before


def test_a_finished_run_with_other_settings_is_not_taken_for_this_one(conducted):
    folder, _ = conducted
    other = [ARMS[0], Arm("scaled", replace(ARMS[1].optimizer, weight_decay=0.5))]
    with pytest.raises(UsageError, match=r"optimizer\.weight_decay: 1\.0 there, 0\.5 now"):
        Bench(folder, Console(quiet=True), workers=2).run(small_run(), other, range(3))


def test_the_outcome_is_written_with_its_verdict_and_claims(conducted):
    folder, runs = conducted
    _, sentence, claims, paths = write_outcome(folder, "a title", runs)
    data = json.loads((folder / "outcome.json").read_text())
    assert data["verdict"] == sentence
    assert [claim["id"] for claim in data["claims"]] == ["loss", "norm"] == [claim.id for claim in claims]
    assert folder / "report.html" in paths
    assert "scaled" in (folder / "report.html").read_text()


def test_a_run_that_fails_is_named(tmp_path):
    wild = Arm("scaled", OptimizerConfig(lr=50.0, weight_decay=0.0))
    with pytest.raises(UsageError, match=r"scaled, seed 0: the loss of update"):
        run_all(jobs(small_run(steps=60, diverged=1.0), [ARMS[0], wild], [0], tmp_path), workers=2)


def test_a_process_that_is_killed_is_reported_and_the_others_are_saved(tmp_path):
    """As the system does when memory runs out: no handler runs, and no message says so."""
    killed = []

    def kill(name, record):
        if not killed and record["kind"] == "train" and record["step"] > 5 and name.startswith("scaled"):
            killed.append(max(multiprocessing.active_children(), key=lambda child: child.name))
            os.kill(killed[0].pid, signal.SIGKILL)

    todo = jobs(small_run(steps=4000, checkpoint_every=4000, eval_every=4000), ARMS, [0], tmp_path)
    with pytest.raises(UsageError, match="died without a word"):
        run_all(todo, workers=2, audience=Audience(record=kill))
    saved = [job.name for job in todo if list((job.folder / "checkpoints").glob("step-*"))]
    assert len(saved) == 1
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_comparison_saves_all_its_runs(tmp_path, number):
    command = [sys.executable, "-m", "muonsw.lab.cli", "compare", "--data", tokens(), "--seeds", "1", "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [tmp_path / "runs" / f"{rule}-seed0" / "metrics.jsonl" for rule in ("constant", "scaled")]
    while not all(file.exists() and '"train"' in file.read_text() for file in files):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert "all runs saved" in errors
    for file in files:
        assert list((file.parent / "checkpoints").iterdir()), "a run was not saved"


@pytest.mark.parametrize("terminal", [True, False])
def test_all_runs_are_shown_while_they_train(terminal):
    """A live table in a terminal, one line for each end elsewhere."""
    shown = StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120)
    todo = jobs(small_run(steps=100), ARMS, [0], Path("nowhere"))
    with displaying(console, todo, workers=2) as audience:
        for step in (1, 50):
            audience.record("scaled, seed 0", {"kind": "train", "step": step, "loss": 3.25})
        audience.record("scaled, seed 0", {"kind": "telemetry", "step": 50, "decayed": {"weight_rms": 0.125}})
        audience.record("scaled, seed 0", {"kind": "eval", "step": 50, "loss": 3.5})
        audience.finished("constant, seed 0")
        audience.note("scaled, seed 0", "going on after update 4")
    text = shown.getvalue()
    assert "constant, seed 0" in text
    assert "going on after update 4" in text
    if terminal:
        assert all(part in text for part in ("50/100", "3.2500", "3.5000", "0.1250", "1 of 2 runs complete"))


def test_total_decay_of_the_control_is_that_of_the_scaled_arm():
    config = small_run(steps=2000)
    control = same_total(config, ARMS[1])
    scaled, constant = (math.fsum(decay_factors(config, arm)) for arm in (ARMS[1].optimizer, control.optimizer))
    assert constant == pytest.approx(scaled, rel=1e-12)
    flat = replace(config, schedule=ScheduleConfig(warmup_steps=0))
    # half a cosine from 1 to 0.1 has mean 0.55 and mean square 0.55^2 + 0.45^2/2
    assert same_total(flat, ARMS[1]).optimizer.weight_decay == pytest.approx((0.55**2 + 0.45**2 / 2) / 0.55, rel=2e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scalled", "starts with a decay rule"),
        ("scaled,weight_decay", "setting=value"),
        ("scaled,weight=1", "settings algorithm, lr"),
        ("scaled,lr=fast", "lr must be a number"),
        ("scaled,algorithm=adam", "must be one of muon, adamw"),
    ],
)
def test_a_wrong_arm_is_explained(text, message):
    with pytest.raises(UsageError, match=message):
        parse_arm(text, OptimizerConfig())


def test_steps_to_match_interpolates_between_evaluations(tmp_path):
    def run(name, evaluations):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        records = [{"kind": "eval", "step": step, "loss": loss} for step, loss in evaluations]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return load_run(folder)

    baseline = run("baseline", [(0, 5.0), (50, 3.0), (100, 3.2)])
    assert steps_to_match(baseline, run("faster", [(0, 5.0), (20, 4.0), (40, 2.0)])) == pytest.approx(30 / 50)
    assert steps_to_match(baseline, run("never", [(0, 5.0), (100, 3.1)])) is None
    assert first_crossing([0, 10], [2.0, 1.0], 2.5) == 0.0


def test_lambda_is_tuned_on_a_seed_of_its_own_and_beyond_the_edge_of_the_grid(tmp_path):
    bench = Bench(tmp_path, Console(quiet=True), workers=1)
    found = tune(bench, small_run(steps=4), ARMS, seed=7, factors=(0.5, 1.0, 2.0))
    for tuned in found:
        tried = sorted(tuned.losses)
        assert {0.5, 1.0, 2.0} <= set(tried)
        assert all(larger == pytest.approx(2 * smaller) for smaller, larger in pairwise(tried))
        best = tuned.arm.optimizer.weight_decay
        assert tuned.losses[best] == min(tuned.losses.values())
        assert tuned.at_edge == (best in (tried[0], tried[-1]))
        assert len(tried) == 6 or not tuned.at_edge, "the search stops at an edge only after three extensions"
    assert all(path.name.endswith("seed7") for path in (tmp_path / "runs").iterdir())
    table = sweep_table(found)
    marked = [cell.text for row in table.rows for cell in row[1:] if cell is not None and cell.tone]
    assert sorted(marked) == sorted(f"{min(tuned.losses.values()):.4f}" for tuned in found)
    assert ("edge" in table.note) == any(tuned.at_edge for tuned in found)


def arm(name, rule, **values):
    seeds = (0, 1, 2)
    numbers = {"final": (3.0,) * 3, "best": (3.0,) * 3, "norm": (0.1,) * 3, "norm_change": (-0.5,) * 3}
    rest = {
        "relative_update": (0.05,) * 3,
        "relaxation": 10.0,
        "total_decay": 5.0,
        "phi_peak": 0.02,
        "memory_ratio": 0.4,
    }
    return ArmOutcome(name, rule, 1.0, seeds, **{**numbers, **rest, **values})


def pair(differences, match=(0.8, 0.8, 0.8)):
    interval = t_interval(torch.tensor(differences, dtype=torch.float64))
    mean = sum(differences) / len(differences)
    return PairOutcome("constant", "scaled", (0, 1, 2), differences, mean, interval, match, Interval(0.7, 0.9, "95% t"))


def test_the_verdict_follows_the_interval():
    both = (arm("constant", "constant"), arm("scaled", "scaled", norm=(0.2,) * 3, norm_change=(-0.1,) * 3))
    clear = verdict(Outcome(both, (pair((-0.10, -0.11, -0.09)),)))
    assert "'scaled' ended lower than 'constant' over 3 seeds" in clear
    assert "after 80% of its updates" in clear
    worse = verdict(Outcome(both, (pair((0.10, 0.11, 0.09)),)))
    assert "'scaled' ended higher" in worse
    assert "80%" not in worse
    unsure = verdict(Outcome(both, (pair((-0.10, 0.11, -0.09)),)))
    assert "do not differ beyond chance" in unsure
    assert all("--tune-lambda" in text for text in (clear, worse, unsure))
    assert "--tune-lambda" not in verdict(Outcome(both, (pair((-0.10, -0.11, -0.09)),)), tuned=True)


def test_the_verdict_says_when_decay_cannot_matter():
    both = (arm("constant", "constant", total_decay=0.1), arm("scaled", "scaled", total_decay=0.07))
    assert "hardly acts" in verdict(Outcome(both, (pair((-0.1, 0.1, 0.0)),)))


def test_claims_hold_only_when_the_whole_interval_is_on_their_side():
    both = (
        arm("constant", "constant", norm_change=(-0.6, -0.5, -0.55)),
        arm("scaled", "scaled", norm_change=(-0.1,) * 3),
    )
    assert [claim.holds for claim in effects(Outcome(both, (pair((-0.10, -0.11, -0.09)),)))] == [True, True]
    assert [claim.holds for claim in effects(Outcome(both, (pair((-0.10, 0.2, -0.09)),)))] == [False, True]
    assert effects(Outcome(tuple(reversed(both)), ())) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--arms", "scaled"], "at least two different arms"),
        (["--arms", "constant", "squared", "--control", "total"], "needs a scaled arm"),
        (["--preset", "w3"], "unknown preset 'w3'"),
        (["--data", "/nowhere"], "holds no prepared data"),
        (["--workers", "0"], "--workers must be at least 1"),
    ],
)
def test_a_wrong_option_is_explained_before_any_training(options, message, tmp_path, capsys):
    given = [] if "--data" in options else ["--data", tokens()]
    assert main(["compare", "--out", str(tmp_path / "out"), *given, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()
