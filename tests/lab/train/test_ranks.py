"""One run on several ranks: the same data, the same losses, the same records, and checkpoints that any number reads."""

import functools
import json
import math
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from muonsw.lab.train import checkpoint, loop
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.state import Training
from tests.lab.train.ranks import NEEDED, at_step, on_ranks, run, run_well
from tests.lab.train.small_runs import losses, small_run

pytestmark = NEEDED

# In float64, where another order of summation changes the 16th digit; a few steps amplify that.
CLOSE = 1e-9
STEPS = 6
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def config(**settings):
    chosen = {"steps": STEPS, "batch": 8, "eval_every": 2, "checkpoint_every": 2, "keep": 9}
    return small_run(**{**chosen, **settings}, optimizer={"ns_dtype": "float64"})


def in_float64(_rank=0):
    torch.set_default_dtype(torch.float64)


def train_in_float64(*arguments):
    in_float64()
    try:
        train(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def one_process(accumulation=1):
    """The run on one process, without torch.distributed."""
    folder = Path(tempfile.mkdtemp()) / "one"
    train_in_float64(config(accumulation=accumulation), folder)
    return folder


def weights(folder, step=STEPS):
    return checkpoint.load(folder / "checkpoints" / f"step-{step:08d}").tensors


def numbers(record):
    """Every number of a record by its place in it."""
    if isinstance(record, list):
        record = dict(enumerate(record))
    if isinstance(record, dict):
        return {f"{key}.{place}": value for key, inner in record.items() for place, value in numbers(inner).items()}
    return {"": record} if isinstance(record, float) else {}


def assert_same_numbers(folder, reference):
    """Compare the records and tensors of two runs, up to rounding relative to each tensor's largest element."""
    ours, theirs = losses(folder), losses(reference)
    assert [(r["kind"], r["step"]) for r in ours] == [(r["kind"], r["step"]) for r in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert numbers(mine) == pytest.approx(numbers(other), rel=1e3 * CLOSE, abs=CLOSE), mine["step"]
    found, expected = weights(folder), weights(reference)
    for part in ("model", "optimizer"):
        assert found[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            distance = (found[part][name] - tensor).abs().max()
            assert distance <= CLOSE * tensor.abs().max().clamp(min=1e-3), (name, distance)


SLOW = [
    (1, 1, {"strategy": "ddp"}),
    (8, 1, {"strategy": "fsdp"}),  # more ranks than experts: some hold none
]


@pytest.mark.parametrize(
    ("ranks", "accumulation", "how"),
    [
        pytest.param(2, 2, {"strategy": "ddp"}, id="ddp-2"),
        pytest.param(2, 2, {"strategy": "fsdp"}, id="fsdp-2"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_run_on_several_ranks_is_the_run_of_one_process(ranks, accumulation, how, tmp_path):
    """Data order, losses, load balance over the batch, clipping, telemetry, evaluation, weights and state."""
    chosen = on_ranks(config(accumulation=accumulation), **how)
    ended = run_well(ranks, chosen, tmp_path / "run", in_float64)
    assert_same_numbers(tmp_path / "run", one_process(accumulation))
    assert [rank.text for rank in ended[1:]] == [""] * (ranks - 1), "only the first rank speaks"
    assert json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))["ranks"] == ranks


def stop_after(step):
    """Ask one rank alone to stop: all of them must stop after the same step."""
    stop = at_step(step, 1, lambda _training: os.kill(os.getpid(), signal.SIGTERM))

    def before(rank):
        in_float64()
        stop(rank)

    return before


def test_a_run_resumes_with_another_number_of_ranks_and_strategy(tmp_path):
    """Four ranks of one kind, stopped by a signal to one of them; then two of another; then one process."""
    folder = tmp_path / "run"
    ended = run(4, on_ranks(config(), strategy="fsdp"), folder, stop_after(3))
    assert [rank.code for rank in ended] == [128 + signal.SIGTERM] * 4, ended
    assert "stopped after 3 of 6 steps, saved" in ended[0].text
    ended = run(2, on_ranks(config(), strategy="ddp"), folder, stop_after(5))
    assert "resuming after step 3" in ended[0].text
    assert "stopped after 5 of 6 steps, saved" in ended[0].text
    notes = []
    train_in_float64(config(), folder, Watch(note=notes.append))
    assert "resuming after step 5" in notes[0]
    assert_same_numbers(folder, one_process())


def counting(strategy, log):
    """Write a byte for each bucket or layer whose gradients this rank sends."""

    def count():
        with log.open("a", encoding="utf-8") as file:
            file.write(".")

    def before(rank):
        if rank:
            return
        init, scatter = Training.__init__, getattr(dist, SCATTER)

        def make(self, *args, **kwargs):
            init(self, *args, **kwargs)
            if strategy == "ddp":
                self.placed.forward.register_comm_hook(None, reduced)

        def reduced(_state, bucket):
            count()
            return allreduce_hook(None, bucket)

        def scattered(*args, **kwargs):
            count()
            return scatter(*args, **kwargs)

        Training.__init__ = make
        setattr(dist, SCATTER, scattered)

    return before


@pytest.mark.parametrize(("strategy", "sent"), [("ddp", 4 + 1), pytest.param("fsdp", 4 * 3, marks=pytest.mark.slow)])
def test_gradients_are_sent_once_per_step_despite_micro_batches(strategy, sent, tmp_path):
    """DDP: one bucket per step, and one before the first; FSDP: two layers and the parameters outside them."""
    log, chosen = tmp_path / "log", on_ranks(small_run(steps=4, batch=8, accumulation=4), strategy=strategy)
    run_well(2, chosen, tmp_path / "run", counting(strategy, log))
    assert len(log.read_text(encoding="utf-8")) == sent


def test_ranks_and_a_single_process_share_a_folder_one_after_the_other(tmp_path):
    ended = []
    watch = Watch(started=lambda _training: ended.extend(run(2, on_ranks(small_run(steps=2)), tmp_path)))
    train(small_run(steps=2), tmp_path, watch)
    assert [rank.code for rank in ended] == [2, 2], "the folder is in use"
    assert "another process is training in" in ended[0].text
    assert "ranks" not in json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    train(on_ranks(small_run(steps=2), strategy="fsdp"), tmp_path)  # not refused as another run


def test_ranks_refuse_once_before_anything_is_trained(tmp_path):
    ended = run(2, on_ranks(small_run(batch=4, accumulation=4)), tmp_path / "run")
    assert [rank.code for rank in ended] == [2, 2], ended
    assert "batch=4 does not split" in ended[0].text
    assert ended[0].text.count("muonsw:") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_all_ranks_save_when_the_clock_of_one_expires(tmp_path):
    def before(rank):
        in_float64()
        loop.SAVING_INTERVALS = 0 if rank == 1 else math.inf

    run_well(2, on_ranks(config(checkpoint_seconds=1e-9), strategy="ddp"), tmp_path / "run", before)
    saved = {checkpoint.step_of(path) for path in checkpoint.newest_first(tmp_path / "run" / "checkpoints")}
    assert saved == set(range(1, STEPS + 1))
    assert_same_numbers(tmp_path / "run", one_process())
