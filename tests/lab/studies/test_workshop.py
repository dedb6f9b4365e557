"""The workshop: every run once, the same bits in any number of processes, resumable, and no arm ends the others."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from torch._dynamo.utils import counters

from muonsw.lab.claims.claim import Evidence
from muonsw.lab.errors import Interrupted, UsageError
from muonsw.lab.studies.jobs import Job, compiling_alone
from muonsw.lab.studies.outcome import diverged_at
from muonsw.lab.studies.training import rows
from muonsw.lab.studies.workshop import ByArm, Workshop, describe
from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.train import state
from muonsw.lab.train.config import ScheduleConfig
from muonsw.lab.train.state import Training, with_fingerprint
from tests.lab.small_experiments import SMALL
from tests.lab.studies.small_comparisons import (
    ARMS,
    KEY,
    QUIET,
    WILD,
    by_arm,
    by_settings,
    comparison,
    tiny_run,
    tiny_scale,
)
from tests.lab.train.small_runs import losses, tokens


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}


def test_a_stopped_comparison_saves_all_its_runs_which_are_the_same_in_any_process(tmp_path):
    """Two processes far from their end, stopped by a signal to the parent; then the first updates again in this one."""
    flat = {"schedule": ScheduleConfig(shape="constant", warmup_steps=1), "telemetry_every": 0}
    endless = comparison(seeds=(0,), steps=10**6, eval_every=10**6, checkpoint_every=10**6, **flat)
    folders = [tmp_path / "stopped" / f"{arm.name}-seed0" for arm in ARMS]

    def stop_once_all_have_begun():
        files = [folder / "metrics.jsonl" for folder in folders]
        while not all(file.exists() and '"train"' in file.read_text(encoding="utf-8") for file in files):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_once_all_have_begun, daemon=True).start()
    with pytest.raises(Interrupted, match="all runs saved") as stopped:
        by_arm(tmp_path / "stopped", workers=2).train([endless])
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    by_arm(tmp_path / "here").train([comparison(seeds=(0,), steps=3, **flat)])
    for folder in folders:
        assert list((folder / "checkpoints").iterdir()), "a run was not saved"
        begun, here = (
            [record for record in losses(path / folder.name) if record["kind"] == "train"][:3]
            for path in (tmp_path / "stopped", tmp_path / "here")
        )
        assert begun == here[: len(begun)]


def test_a_run_that_diverges_does_not_end_the_others_and_is_not_tried_again(tmp_path):
    one = comparison((ARMS[0], WILD), seeds=(0, 1), steps=20, diverged=1.0)
    runs = by_arm(tmp_path).train([one])[KEY]
    assert [diverged_at(run) for run in runs["constant"]] == [None, None]
    steps = [diverged_at(run) for run in runs["wild"]]
    assert all(1 <= step <= 20 for step in steps)
    result = json.loads((tmp_path / "wild-seed0" / "result.json").read_text(encoding="utf-8"))
    assert result["diverged"] == steps[0]
    assert "lower the learning rate" in result["reason"]
    before, shown = stamps(tmp_path), StringIO()
    Workshop(Console(file=shown, width=200), 1, ByArm(tmp_path)).train([one])
    assert stamps(tmp_path) == before
    note = "2 of 4 runs diverged earlier; --retry-diverged tries them again"
    assert shown.getvalue().splitlines() == ["2 of 4 runs are complete already", note]
    by_arm(tmp_path, retry_diverged=True).train([one])
    again = stamps(tmp_path)
    assert {path.parent.name for path in before if again[path] != before[path]} == {"wild-seed0", "wild-seed1"}


def test_a_run_that_cannot_start_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"constant, seed 0: .* has a vocabulary of 257 tokens, more than"):
        by_arm(tmp_path).train([comparison(seeds=(0,), steps=2, model={"vocab": 64})])


def test_equal_runs_are_one_job_and_different_data_or_settings_another(tmp_path):
    shop, scale = by_settings(tmp_path), tiny_scale()
    both = [*rows.headline_row(scale), *rows.all_rows(scale)]
    jobs = shop.jobs(both)
    assert len(jobs) == len(shop.jobs(rows.all_rows(scale))) == (3 + 4) * 2
    assert len({job.name for job in jobs.values()}) == len(jobs)
    ready = shop.places.ready(scale.rows[16])
    assert ready.data.path == tokens()
    assert ready.threads == 1
    one = rows.headline_row(scale)[0]
    job, other = (shop.places.job(replace(one, base=base), one.arms[0], 0) for base in (ready, changed(ready)))
    assert job.folder != other.folder
    assert describe(job.config) in job.folder.name


def changed(config):
    return replace(config, eval_every=3)


@pytest.mark.parametrize("terminal", [True, False])
def test_runs_are_shown_while_they_train(terminal, tmp_path):
    shown = StringIO()
    console = Console(file=shown, force_terminal=terminal, width=80)
    one = comparison(seeds=(0,), steps=4)
    Workshop(console, 1, ByArm(tmp_path)).train([one])
    text = shown.getvalue()
    if not terminal:
        assert "constant, seed 0: validation loss" in text
        Workshop(console, 1, ByArm(tmp_path)).train([one])
        assert "2 of 2 runs are complete already" in shown.getvalue()
    else:
        assert "2 of 2 runs complete" in text


@pytest.mark.slow
def test_experiments_do_not_depend_on_the_number_of_processes():
    fixed, scalar = SMALL["fixed-rate"], SMALL["scalar-figure"]
    experiments = [
        replace(fixed, settings=replace(fixed.settings, steps=10, fixed_steps=5)),
        replace(scalar, settings=replace(scalar.settings, steps=50, points=5)),
    ]
    together, alone = (Workshop(QUIET, workers).experiment(experiments, seed=3) for workers in (2, 1))
    assert list(together) == list(alone) == [experiment.name for experiment in experiments]
    assert {name: one.evidence for name, one in together.items()} == {name: one.evidence for name, one in alone.items()}


def test_the_longest_experiment_starts_first():
    order: list[str] = []

    def note(setting, _context):
        order.append(setting)
        return Evidence([])

    experiments = [Experiment(name, "", (), name, note, cost) for name, cost in (("a", 1.0), ("b", 3.0), ("c", 2.0))]
    assert list(Workshop(QUIET, 1).experiment(experiments, seed=0)) == ["a", "b", "c"]
    assert order == ["b", "c", "a"]


@pytest.mark.slow
# the compiler of torch makes an instance of our autograd function, which torch itself warns about
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_runs_of_one_model_in_one_process_share_their_compiled_code(monkeypatch):
    """The compiler sees the model once for all arms and seeds, and again for a model of another shape."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend="eager"))
    graphs = []
    for seed, width in ((0, 16), (1, 16), (2, 16), (0, 32)):
        config = tiny_run(compile="on", seed=seed, steps=1)
        training = Training(with_fingerprint(replace(config, model=replace(config.model, width=width))))
        counters.clear()
        training.forward_backward(next(training.batches()))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:3] == [0, 0]
    assert graphs[0] > 0
    assert graphs[3] > 0


def test_processes_compile_a_model_one_after_the_other(tmp_path, monkeypatch):
    """The second waits until the first has taken an update: its code is then in torch's caches on disk."""
    job = Job("x", tiny_run(compile="on"), tmp_path / "runs" / "x")
    with compiling_alone(job) as compiled:
        (lock,) = (tmp_path / "runs").glob(".compiling-*")
        other = FileLock(lock, thread_local=False)
        assert not acquired(other)
        compiled()
        assert acquired(other)
        other.release()
        compiled()  # every further record says so again
    with compiling_alone(job):  # all others at once
        assert acquired(other)
        other.release()
    for config, compiled_shape in ((tiny_run(compile="off"), None), (job.config, state._shape(job.config))):
        monkeypatch.setattr(state, "_compiled_shape", compiled_shape)
        with compiling_alone(replace(job, config=config, folder=Path("/nowhere/x"))):
            pass  # nothing is compiled, or this process has the code already, so nothing is locked


def acquired(lock):
    try:
        lock.acquire(timeout=0.05)
    except TimeoutError:
        return False
    return True
