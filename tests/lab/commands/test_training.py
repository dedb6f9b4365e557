"""`muonsw compare`, `train` and `task`: from a text or a task to a verdict, and what is refused before any training."""

import html
import inspect
import json
import math
import re
import sys
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import pytest
import torch

import muonsw.lab
from muonsw.lab.advise import more_decay
from muonsw.lab.cli import main
from muonsw.lab.compare import decay_factors
from muonsw.lab.runs import load_run
from muonsw.lab.stats import t_interval
from muonsw.lab.studies import records
from tests.faults.commands import refused
from tests.lab.small_tasks import task_file
from tests.lab.texts import markov_texts
from tests.lab.train.ranks import write_config
from tests.lab.train.small_runs import losses, small_run, tokens

LAB = Path(muonsw.lab.__file__).parent
MOST_FILES = 28
SHORT = ["--steps", "2", "--seeds", "2", "--workers", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Run commands in a temporary folder, where they create `out/data`."""
    monkeypatch.chdir(tmp_path)


def write_notes(path, seed=0):
    path.write_text("\n\n".join(islice(markov_texts(seed), 120)), encoding="utf-8")


# Text.


def test_a_text_file_becomes_a_verdict(tmp_path, capsys):
    write_notes(tmp_path / "my notes.txt")
    assert main(["compare", "--text", "my notes.txt", *SHORT]) == 0
    (folder,) = (tmp_path / "out/data").iterdir()
    lines = capsys.readouterr().out.splitlines()
    # The verdict, two tables, and where the files are.
    difference, arms = lines.index("Paired difference"), lines.index("Arms")
    assert "over 2 seeds" in lines[difference - 2]
    assert [line.split()[0] for line in lines[arms + 1 : arms + 4]] == ["arm", "constant", "scaled"]
    assert lines[-1] == "wrote outcome.json, report.html to out/compare"
    page = (tmp_path / "out/compare/report.html").read_text(encoding="utf-8")
    assert "<title>my notes.txt: 2 steps of " in page
    # The same text is prepared once, another one in a folder of its own.
    train = ["train", "--text", "my notes.txt", "--steps", "1", "--batch", "4"]
    assert main(train) == 0
    assert [folder] == list((tmp_path / "out/data").iterdir())
    write_notes(tmp_path / "my notes.txt", seed=1)
    assert main([*train, "--out", "other"]) == 0
    assert len(list((tmp_path / "out/data").iterdir())) == 2


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("compare", ["--text", "notes.txt", "--seeds", "0"], "--seeds must be at least 1"),
        ("compare", ["--text", "notes.txt", "--arms", "scaled"], "at least two different arms"),
        ("compare", ["--text", "notes.txt", "--arms", "constant", "squared", "--control"], "needs a scaled arm"),
        ("compare", ["--text", "notes.txt", "--weight-decay", "600", "--tune-lambda"], "1.2 times the weight"),
        ("compare", ["--text", "notes.txt", "--weight-decay", "0", "--control"], "give --weight-decay above zero"),
        ("compare", ["--weight-decay", "1", "--arms", "scaled", "constant,lr=3"], "3 times the weight"),
        ("compare", ["--text", "notes.txt", "--precision", "fp8"], "precision"),
        ("compare", ["--text", "notes.txt", "--telemetry-every", "-1"], "telemetry_every=-1"),
        ("compare", ["--data", "notes.txt", "--preset", "w257"], "unknown preset 'w257'"),
        ("train", ["--data", "notes.txt"], "--text notes.txt"),
        ("compare", ["--data", "nowhere"], "`muonsw data prepare nowhere`"),
        ("train", ["--data", "nowhere", "--text", "notes.txt"], "give --text or --data, not both"),
        ("compare", ["--text", "absent.txt"], "no file matches absent.txt"),
        ("train", ["--text", "empty.txt"], "gave no document"),
        ("compare", ["--out", "mine"], "report.html was not written by muonsw"),
        ("train", ["--task", "none.py"], "there is no task file none.py"),
        ("compare", ["--task", "small_task.py", "--data", "d"], "give --task or --data, not both"),
        ("train", ["--task.a", "1"], "needs --task FILE"),
        ("train", ["--device", "meta"], "device 'meta' cannot be used here"),
        ("compare", ["--task", "small_task.py", "--task.depth", "6"], "unknown option 'depth'"),
    ],
)
def test_a_mistake_is_explained_before_anything_is_written(command, options, message, tmp_path):
    write_notes(tmp_path / "notes.txt")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.html").write_text("of another program", encoding="utf-8")
    task_file(tmp_path)
    assert message in refused(command, *options)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "mine/runs").exists()


def test_without_a_lambda_the_formula_gives_one(monkeypatch, capsys):
    calls = []

    def conduct(base, *_, epochs, **__):
        calls.append((base, epochs))
        raise ZeroDivisionError

    monkeypatch.setattr("muonsw.lab.commands.training.conduct", conduct)

    def run(*options):
        with pytest.raises(ZeroDivisionError):
            main(["compare", "--data", tokens(), "--seeds", "1", "--workers", "1", "--device", "cpu", *options])
        return *calls[-1], capsys.readouterr().out

    base, epochs, printed = run()
    assert math.fsum(decay_factors(base, base.optimizer)) == pytest.approx(more_decay("scaled", epochs), rel=0.05)
    assert f"lambda {base.optimizer.weight_decay:g}, " in printed
    slow, *_ = run("--arms", "scaled,lr=0.01", "constant,lr=0.01")
    assert slow.optimizer.weight_decay == pytest.approx(2 * base.optimizer.weight_decay, rel=0.05)
    assert run("--weight-decay", "5")[0].optimizer.weight_decay == 5.0
    assert run("--steps", "4")[0].optimizer.weight_decay == 1.0, "no lambda acts in four steps: the preset's stays"


def test_a_whole_comparison_runs_functions_of_few_files():
    """Someone who follows a comparison through the code reads this many files of the lab."""
    sources = set()

    def note(frame, event, _):
        # Class bodies run when a module is imported.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            sources.add(frame.f_code.co_filename)

    options = ["--seeds", "2", "--steps", "2", "--workers", "1", "--device", "cpu", "--control"]
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        assert main(["compare", "--data", tokens(), *options]) == 0
    finally:
        sys.setprofile(before)
    entered = {path.relative_to(LAB).as_posix() for path in map(Path, sources) if path.is_relative_to(LAB)}
    assert {"cli.py", "compare.py", "train/loop.py", "report.py"} <= entered
    assert len(entered) <= MOST_FILES, sorted(entered)


# Train.


def test_a_config_file_gives_the_run_that_wrote_it(tmp_path):
    assert main(["train", "--config", str(write_config(small_run(steps=3))), "--out", "first"]) == 0
    assert main(["train", "--config", "first/config.json", "--out", "second"]) == 0
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    assert "/nowhere.json does not exist" in refused("train", "--config", "/nowhere.json")
    both = refused("train", "--config", "first/config.json", "--out", "third", "--weight-decay", "0.3")
    assert "--weight-decay does not go with --config" in both


def test_a_diverging_run_exits_with_one(capsys):
    path = write_config(small_run(steps=200, diverged=0.5, optimizer={"lr": 3.0, "weight_decay": 0.0}))
    assert main(["train", "--config", str(path), "--out", "run"]) == 1
    assert "lower the learning rate" in capsys.readouterr().err


# Tasks.


def test_a_new_file_is_checked_and_never_written_over(tmp_path, capsys):
    assert main(["task", "new", "mine/a.py"]) == 0
    assert main(["task", "check", "mine/a.py", "--task.width", "16", "--steps", "20"]) == 0
    printed = capsys.readouterr().out
    assert "note:" not in printed
    assert re.search(r"hidden +muon +scaled 2 +0\.005 +4 +1,792", printed)  # 64 x 16 and three of 16 x 16
    assert not (tmp_path / "out").exists()
    assert "mine/a.py already exists" in refused("task", "new", "mine/a.py")


def test_a_comparison_has_metrics_in_its_table_verdict_numbers_and_page(tmp_path, capsys):
    path = task_file(tmp_path)
    options = ["--seeds", "2", "--weight-decay", "0.5", "--record", "records/tasks.jsonl", "--steps", "6"]
    assert main(["compare", "--task", str(path), *options, "--workers", "1"]) == 0
    assert " accuracy " in capsys.readouterr().out
    outcome = json.loads((tmp_path / "out/compare/outcome.json").read_text(encoding="utf-8"))
    runs = {
        arm: [load_run(tmp_path / f"out/compare/runs/{arm}-seed{seed}") for seed in (0, 1)]
        for arm in ("constant", "scaled")
    }
    ends = {arm: [run.evals["accuracy"][-1] for run in arm_runs] for arm, arm_runs in runs.items()}
    assert [arm["metrics"]["accuracy"] for arm in outcome["arms"]] == list(ends.values())
    gaps = [a - b for a, b in zip(ends["scaled"], ends["constant"], strict=True)]
    measured = next(each for each in outcome["differences"] if each["measure"] == "accuracy")
    assert measured["values"] == gaps
    interval = t_interval(torch.tensor(gaps, dtype=torch.float64))
    assert measured["interval"]["low"] == pytest.approx(interval.low)
    page = html.unescape((tmp_path / "out/compare/report.html").read_text(encoding="utf-8").split("<script")[0])
    assert "<title>small_task.py: 6 steps of 12 samples</title>" in page
    assert "nats per token" not in page
    # The table of runs says the same without their folders.
    rows = records.read(tmp_path / "records/tasks.jsonl")
    for arm, arm_runs in runs.items():
        recorded = [row for row in rows if row["arm"] == arm]
        assert [row["final_loss"] for row in recorded] == [run.final_loss for run in arm_runs]
        assert [row["final.accuracy"] for row in recorded] == pytest.approx(ends[arm], abs=2e-5)
    assert {(row["torch"], row["task"], row["weight_decay"]) for row in rows} == {(version("torch"), str(path), 0.5)}


def test_the_routing_shown_is_that_of_the_first_arm(tmp_path, capsys):
    arms = ["constant,algorithm=adamw", "scaled,algorithm=adamw"]
    assert main(["compare", "--task", str(task_file(tmp_path)), "--arms", *arms, *SHORT]) == 0
    printed = capsys.readouterr().out
    routing = printed[printed.index("group  role") : printed.index("state:")]
    assert "adamw" in routing
    assert "muon" not in routing


def test_settings_of_the_file_hold_unless_the_command_line_has_others(tmp_path):
    path = task_file(tmp_path, more="SETTINGS = {'steps': 5, 'lr': 0.01, 'shape': 'constant', 'betas': [0.8, 0.9]}\n")
    options = ["--lr", "0.02", "--precision", "bfloat16", "--accumulation", "2", "--strategy", "fsdp"]
    options += ["--arm", "normuon/constant,adam_lr=0.005"]
    assert main(["train", "--task", str(path), *options]) == 0
    settings = json.loads((tmp_path / "out/train/small_task/config.json").read_text(encoding="utf-8"))
    assert (settings["steps"], settings["optimizer"]["lr"], settings["schedule"]["shape"]) == (5, 0.02, "constant")
    assert (settings["precision"], settings["accumulation"], settings["batch"]) == ("bfloat16", 2, 12)
    assert settings["parallel"]["strategy"] == "fsdp"
    chosen = {"preset": "normuon", "decay": "constant", "adam_lr": 0.005}
    assert {name: settings["optimizer"][name] for name in chosen} == chosen
    assert main(["train", "--task", str(path), "--lr", "0.02", "--accumulation", "2", "--precision", "float32"]) == 2


def test_wrong_settings_of_a_task_are_refused_first(tmp_path):
    wrong = {"{'stepz': 3}": "'stepz' (did you mean", "{'lr': 'x'}": "lr='x' must be of type float", "3": "is int 3"}
    for settings, message in wrong.items():
        task_file(tmp_path, more=f"SETTINGS = {settings}\n")
        assert message in refused("train", "--task", "small_task.py")
        assert not (tmp_path / "out").exists()


def test_export_refuses_a_task(tmp_path):
    assert main(["train", "--task", str(task_file(tmp_path)), "--steps", "2"]) == 0
    assert "out/train/small_task/check" in refused("export", "out/train/small_task")
    assert main(["report", "out/train/small_task"]) == main(["diagnose", "out/train/small_task"]) == 0
