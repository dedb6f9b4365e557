"""A task of the user's own on the command line: from a new file to a verdict."""

import html
import json
import re
import shlex
from importlib.metadata import version

import pytest
import torch

from muonsw.lab.cli import main
from muonsw.lab.runs import load_run
from muonsw.lab.stats import t_interval
from muonsw.lab.studies import records
from tests.lab.small_tasks import LOSS, task_file

SHORT = ["--steps", "6", "--workers", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_new_file_is_checked_and_never_written_over(tmp_path, capsys):
    assert main(["task", "new", "mine/a.py"]) == 0
    assert main(["task", "check", "mine/a.py", "--task.width", "16", "--steps", "20"]) == 0
    printed = capsys.readouterr().out
    assert "batches of 128x8x8 float32, 128 int64; loss 2." in printed
    assert "note:" not in printed
    assert re.search(r"hidden +muon +scaled 2 +0\.005 +4 +1,792", printed)  # 64 x 16 and three of 16 x 16
    assert re.search(r"Total decay is [\d.]+ \(scaled\) and [\d.]+ \(constant\)", printed)
    assert re.search(r"20 steps, 2 arms, 3 seeds: about \d+ (seconds?|minutes?) here", printed)
    assert not (tmp_path / "out").exists()
    assert main(["task", "check", "mine/a.py", "--steps", "1", "--seeds", "1"]) == 0
    (step,) = re.findall(
        r"^1 step, 2 arms, 1 seed: about \d+ seconds? here \(([\d.]+) ms a step", capsys.readouterr().out, re.M
    )
    assert float(step) > 0
    assert main(["task", "check", "mine/a.py", "--seeds", "0"]) == 2
    assert "--seeds must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # the file is named once
        main(["task", "check", "mine/a.py", "--task", "other.py"])
    assert main(["task", "new", "mine/a.py"]) == 2
    assert "mine/a.py exists already" in capsys.readouterr().err


NAN_AT_FOUR = """
def batches(split, seed):
    def number(i):
        x = torch.randn(12, 4)
        return x * (float("nan") if split == "train" and i == 4 else 1.0), x[:, :3].argmax(1)
    return number
"""


@pytest.mark.filterwarnings("ignore::muonsw.nonfinite.NonFiniteGradientWarning")
def test_a_check_that_diverges_says_so_without_a_checkpoint_that_is_gone(tmp_path, capsys):
    assert main(["task", "check", str(task_file(tmp_path, batches=NAN_AT_FOUR)), "--steps", "6"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("muonsw: the loss of step 5 is nan; lower the learning rate")
    assert error.count("\n") == 1
    assert "checkpoint" not in error


def test_a_check_that_is_stopped_promises_nothing_to_go_on_from(tmp_path, capsys):
    stop = LOSS.replace("    return", "    COUNT.append(1)\n    if len(COUNT) == 9:\n        stop()\n    return")
    more = "import os, signal\nCOUNT = []\ndef stop():\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    path = task_file(tmp_path, loss=stop, more=more)
    assert main(["task", "check", str(path), "--steps", "6"]) == 143
    assert capsys.readouterr().err == "muonsw: stopped; a check keeps nothing\n"


def test_a_command_that_is_suggested_can_be_pasted(capsys):
    for said in (["task", "new", "my task.py"], ["train", "--task", "no task.py"], ["data", "info", "no tokens"]):
        main(said)
        printed = "".join(capsys.readouterr())
        suggested = re.findall(r"`muonsw ([^`]*\.py[^`]*|data prepare [^`]*)`", printed)
        assert suggested
        assert all(said[-1] in shlex.split(one) for one in suggested), printed


def test_a_comparison_has_metrics_in_its_table_verdict_numbers_and_page(tmp_path, capsys):
    path = task_file(tmp_path)
    words = ["--seeds", "2", "--weight-decay", "0.5", "--record", "records/tasks.jsonl"]
    assert main(["compare", "--task", str(path), *words, *SHORT]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "constant and scaled, 2 seeds each: 6 steps of 12 samples" in printed
    assert re.search(r"Difference of accuracy: [+-][\d.]+, (not )?significant", printed)
    assert "nats," not in printed.split("hardly matters")[-1]
    found = json.loads((tmp_path / "out/compare/outcome.json").read_text(encoding="utf-8"))
    runs = {
        arm: [load_run(tmp_path / f"out/compare/runs/{arm}-seed{seed}") for seed in (0, 1)]
        for arm in ("constant", "scaled")
    }
    ends = {arm: [run.evals["accuracy"][-1] for run in those] for arm, those in runs.items()}
    assert [arm["metrics"]["accuracy"] for arm in found["arms"]] == list(ends.values())
    gaps = [a - b for a, b in zip(ends["scaled"], ends["constant"], strict=True)]
    measured = found["pairs"][0]["metrics"]["accuracy"]
    assert measured["differences"] == gaps
    interval = t_interval(torch.tensor(gaps, dtype=torch.float64))
    assert measured["interval"]["low"] == pytest.approx(interval.low)
    page = html.unescape((tmp_path / "out/compare/report.html").read_text(encoding="utf-8").split("<script")[0])
    for words in ("Model, data and machine", "Sequential", "hidden (muon, decayed)", "72 samples of small_task.py"):
        assert words in page
    assert "nats per token" not in page
    assert (tmp_path / "out/compare/report/metric-accuracy.png").exists()
    assert found["claims"] == []
    # The table of runs says the same without their folders.
    rows = records.read(tmp_path / "records/tasks.jsonl")
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in runs}
    for arm, those in runs.items():
        assert [row["final_loss"] for row in by_arm[arm]] == [run.final_loss for run in those]
        assert [row["final.accuracy"] for row in by_arm[arm]] == pytest.approx(ends[arm], abs=2e-5)
    assert {(row["torch"], row["task"], row["weight_decay"]) for row in rows} == {(version("torch"), str(path), 0.5)}


def test_settings_of_the_file_hold_unless_the_command_line_has_others(tmp_path):
    path = task_file(tmp_path, more="SETTINGS = {'steps': 5, 'lr': 0.01, 'shape': 'constant', 'betas': [0.8, 0.9]}\n")
    words = ["--lr", "0.02", "--precision", "bfloat16", "--accumulation", "2", "--strategy", "fsdp"]
    assert main(["train", "--task", str(path), *words]) == 0
    settings = json.loads((tmp_path / "out/train/small_task/config.json").read_text(encoding="utf-8"))
    assert (settings["steps"], settings["optimizer"]["lr"], settings["schedule"]["shape"]) == (5, 0.02, "constant")
    assert (settings["precision"], settings["accumulation"], settings["batch"]) == ("bfloat16", 2, 12)
    assert settings["parallel"]["strategy"] == "fsdp"
    assert main(["train", "--task", str(path), "--lr", "0.02", "--accumulation", "2", "--precision", "float32"]) == 2


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (["--task", "none.py"], "", "there is no task file none.py"),
        (
            ["--task", __file__ + ".txt"],
            "",
            ".txt is no task: give a Python file, which ends in .py, or a dotted module",
        ),
        (["--task", "no.such.module"], "", "no.such.module cannot be imported: ModuleNotFoundError"),
        (["--task", "small_task.py", "--data", "d"], "", "give --task or --data, not both"),
        (["--task", "small_task.py", "--preset", "mini"], "", "give --task or --preset, not both"),
        (["--task-options", "a=1"], "", "--task-options needs a task"),
        (["--task", "small_task.py", "--task.depth", "6"], "", "small_task.py: unknown option 'depth'"),
        (["--task", "small_task.py"], "SETTINGS = {'stepz': 3}\n", "unknown setting in SETTINGS 'stepz' (did you mean"),
        (["--task", "small_task.py"], "SETTINGS = {'lr': 'x'}\n", "small_task.py: lr='x' must be of type float"),
        (["--task", "small_task.py"], "SETTINGS = {'steps': 'x'}\n", "small_task.py: steps='x' must be of type int"),
        (["--task", "small_task.py"], "SETTINGS = 3\n", "SETTINGS is int 3; make it a dict"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_cannot_be_trained_is_refused_before_anything_is_written(command, words, more, message, tmp_path, capsys):
    task_file(tmp_path, more=more)
    assert main([command, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_for_decoders_alone_says_so(tmp_path, capsys):
    assert main(["train", "--task", str(task_file(tmp_path)), "--steps", "2"]) == 0
    for command in ("export", "sample"):
        assert main([command, "out/train/small_task"]) == 2
        assert (
            "trained small_task.py, whose weights by name are in out/train/small_task/check" in capsys.readouterr().err
        )
    assert main(["report", "out/train/small_task"]) == main(["diagnose", "out/train/small_task"]) == 0
    again = ["train", "--config", "out/train/small_task/config.json", "--out", "again"]
    assert main(again) == 0
    one, other = (load_run(tmp_path / name).losses[1].tolist() for name in ("out/train/small_task", "again"))
    assert one == other
