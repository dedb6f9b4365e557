"""What a run promises: the right gradients, the same bits after any interruption, nothing lost."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import torch

from muonsw.lab.errors import Diverged, UsageError
from muonsw.lab.train import checkpoint, loop
from muonsw.lab.train.loop import Watch, torch_threads, train
from muonsw.lab.train.state import Training, with_fingerprint
from tests.lab.texts import markov_texts
from tests.lab.train.ranks import training, write_config
from tests.lab.train.small_runs import (
    StoppedError,
    assert_same_run,
    losses,
    small_run,
    stop_at,
    uninterrupted,
    wait_for_records,
    weights,
)


def entropy_without_context():
    """The loss of a model that knows how often each character occurs, but not what follows it.

    The chain's own entropy is 0.84 nats lower. An evaluation over 8 windows of 32 tokens strays by about 0.06 nats, so
    a model that has learned the transitions ends far below this line, whatever the machine's rounding.
    """
    counts = Counter("".join(islice(markov_texts(seed=0), 60)))
    return -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())


def test_a_run_learns_and_reports_it(tmp_path):
    config = small_run(steps=120, eval_every=60, checkpoint_every=120, telemetry_every=0)
    result = train(config, tmp_path)
    evaluations = [record for record in losses(tmp_path) if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [0, 60, 120]
    assert result["final_loss"] < entropy_without_context() < evaluations[0]["loss"]
    assert result["best_loss"] == min(record["loss"] for record in evaluations)
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == result
    train(small_run(steps=5, telemetry_every=4), tmp_path / "short")
    sampled = [record["step"] for record in losses(tmp_path / "short") if record["kind"] == "telemetry"]
    assert sampled == [1, 4, 5], "the first and the last step are always sampled"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_finishes_the_step_and_saves(tmp_path, number, code):
    config = small_run(steps=4000, checkpoint_every=4000, eval_every=4000)
    run, pipes = tmp_path / "run", {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "muonsw", *training(write_config(config), run)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **pipes)
    wait_for_records(process, run, 3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "rerun the same command to resume" in errors
    saved = checkpoint.newest_first(run / "checkpoints")[0]
    last = max(record["step"] for record in losses(run))
    assert checkpoint.load(saved).step == last


@pytest.mark.parametrize("settings", [{"checkpoint_seconds": 1e-9}, {"checkpoint_every": 5}])
def test_saving_more_often_changes_no_result(tmp_path, monkeypatch, settings):
    """Save after every step, triggered by the clock, or after steps that are not evaluated."""
    monkeypatch.setattr(loop, "SAVING_INTERVALS", 0)
    train(small_run(keep=12, **settings), tmp_path)
    saved = {checkpoint.step_of(path) for path in checkpoint.newest_first(tmp_path / "checkpoints")}
    assert saved == ({5, 10, 12} if "checkpoint_every" in settings else set(range(1, 13)))
    assert_same_run(uninterrupted(), tmp_path, 12)
    train(small_run(), tmp_path)  # a resumed run may change these settings


@pytest.mark.parametrize(
    "optimizer", [{"lr": 100.0}, {"decay": "log_time", "weight_decay": 200.0}], ids=["peak", "begin"]
)
def test_a_decay_that_is_too_strong_anywhere_is_refused_before_a_folder_is_made(optimizer, tmp_path):
    with pytest.raises(UsageError, match=r"learning rate of .* with weight_decay=.* times the weight"):
        train(small_run(optimizer=optimizer), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_checkpoint(tmp_path):
    def poison(training):
        saved = training.forward

        def forward(inputs, targets):
            values = saved(inputs, targets)
            return values._replace(total=values.total * (math.nan if training.step == 6 else 1.0))

        training.forward = forward

    with pytest.raises(Diverged, match=r"loss of step 7 is nan; .*last good checkpoint is .*step-00000004"):
        train(small_run(), tmp_path, Watch(started=poison))
    saved = checkpoint.load(tmp_path / "checkpoints" / "step-00000004")
    assert all(value.isfinite().all() for value in saved.tensors["model"].values())


def with_gradients(broken):
    """Make the gradients infinite, though the loss is finite, in the steps for which `broken` holds."""

    def break_them(training):
        weight = next(training.model.parameters())
        weight.register_hook(lambda gradient: gradient * (math.inf if broken(training.step + 1) else 1.0))

    return Watch(started=break_them)


@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
def test_skipped_steps_are_counted_over_a_resume_and_too_many_in_a_row_stop_the_run(tmp_path):
    def stop(record):
        if record["step"] == 6:
            raise StoppedError

    sometimes, config = with_gradients(lambda step: step % 4), small_run(skipped=4)
    with pytest.raises(StoppedError):
        train(config, tmp_path / "sometimes", replace(sometimes, record=stop))
    assert train(config, tmp_path / "sometimes", sometimes)["skipped"] == 9
    with pytest.raises(Diverged, match=r"4 steps in a row, up to step 9, .*step-00000008"):
        train(config, tmp_path / "stops", with_gradients(lambda step: step == 2 or step >= 6))


def test_a_run_without_a_checkpoint_keeps_its_records_from_another_config(tmp_path):
    config = small_run(steps=4, checkpoint_every=4)
    stop_at(1, config, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(UsageError, match=r"(?s)other settings; .*seed: 0 there, 1 now"):
        train(replace(config, seed=1), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_resumed_run_has_the_number_of_threads_that_it_began_with(tmp_path):
    with torch_threads(2):
        stop_at(4, small_run(threads=0), tmp_path)
    used = []
    train(small_run(threads=0), tmp_path, Watch(record=lambda _record: used.append(torch.get_num_threads())))
    assert set(used) == {2}
    assert torch.get_num_threads() == 1


def test_accumulation_equals_one_large_batch():
    """Except for the router's loss, which balances each micro-batch."""
    grads = []
    for accumulation in (1, 2, 4):
        run = Training(with_fingerprint(small_run(accumulation=accumulation, model={"balance_coef": 0.0})))
        run.model.double()
        losses = run.forward_backward(next(iter(run.batches())))
        grads.append([losses.total, *(p.grad for p in run.model.parameters())])
    for split in grads[1:]:
        torch.testing.assert_close(split, grads[0], rtol=1e-9, atol=1e-14)


def test_the_schedule_is_that_of_the_paper(tmp_path):
    train(small_run(steps=40, telemetry_every=1, eval_every=40, checkpoint_every=40), tmp_path)
    rates = [record["lr"] for record in losses(tmp_path) if record["kind"] == "train"]
    assert rates[:4] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    assert max(rates) == 0.02
    assert rates[-1] == pytest.approx(0.002)
    samples = [record for record in losses(tmp_path) if record["kind"] == "telemetry"]
    assert [record["step"] for record in samples] == list(range(1, 41))
    for rate, sample in zip(rates, samples, strict=True):
        assert sample["decayed"]["decay"] == pytest.approx(0.1 * rate**2 / 0.02)


OTHER_RULES = {
    "cosine": {"decay": "cosine"},
    "gradient_norm": {"decay": "gradient_norm", "weight_decay": 1e-4},
    "hyperball": {"norm": "hyperball"},
    "adamc": {"unnormalized": "constant", "algorithm": "adamw"},
}


@pytest.mark.parametrize("optimizer", OTHER_RULES.values(), ids=OTHER_RULES)
def test_rules_that_follow_the_run_resume_where_it_stopped(optimizer, tmp_path):
    """Through a checkpoint, in which groups are plain data; with weights in bfloat16, and on a part of the text."""
    dtype = "float32" if "norm" in optimizer else "bfloat16"  # norm rules refuse bfloat16
    config = small_run(optimizer=optimizer, weights=dtype, steps=6, checkpoint_every=3)
    config = replace(config, data=replace(config.data, train_windows=12))
    train(config, tmp_path / "whole")
    stop_at(3, config, tmp_path / "stopped")
    train(config, tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", 6)
    assert {value.dtype for value in weights(tmp_path / "whole", 6).values()} == {getattr(torch, dtype)}
