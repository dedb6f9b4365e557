"""A run on a CUDA device: replayed steps equal eager ones, and a run resumes. Run by `make test-gpu`."""

import signal
import subprocess
import sys
import time

import pytest

from muonsw import machine
from muonsw.lab.train.loop import train
from muonsw.lab.train.state import WARM_CALLS, Training, with_fingerprint
from muonsw.presets import PRESETS
from tests.lab.test_end_to_end import finished, torchrun
from tests.lab.train.ranks import on_ranks, training, write_config
from tests.lab.train.small_runs import losses, small_run, stop_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]


def run(folder, graphs, **settings):
    config = small_run(steps=24, device="cuda", compile="off", graphs=graphs, precision="float32", **settings)
    train(config, folder)
    return {(r["kind"], r["step"]): r for r in losses(folder)}


def test_replayed_gradients_are_those_of_eager_updates(tmp_path):
    """Evaluations and telemetry included; kernels that add in no fixed order leave rounding differences."""
    plain, replayed = run(tmp_path / "plain", "off"), run(tmp_path / "replayed", "on")
    assert plain.keys() == replayed.keys()
    for key, record in plain.items():
        if "loss" in record:
            assert replayed[key]["loss"] == pytest.approx(record["loss"], rel=2e-3), key
    sample = ("telemetry", 24)
    assert replayed[sample]["decayed"]["decay"] == pytest.approx(plain[sample]["decayed"]["decay"], rel=1e-5)
    assert replayed[sample]["all"]["weight_rms"] == pytest.approx(plain[sample]["all"]["weight_rms"], rel=1e-3)


def test_a_graph_follows_the_schedule_and_the_batches():
    training = Training(with_fingerprint(small_run(steps=24, device="cuda", compile="off", graphs="on")))
    seen = []
    for batches, _ in zip(training.batches(), range(WARM_CALLS + 6), strict=False):
        lr = training.optimizer.param_groups[0]["lr"]
        losses, norm, _ = training.update(batches)
        seen.append((float(losses.total), float(norm)))
        assert training.optimizer.summary().groups[0].lr == lr
    assert training.replayed_gradients._graph is not None
    assert len(set(seen)) == len(seen), "every replay sees another batch"


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_member_of_the_family_trains_with_replayed_gradients(preset):
    config = small_run(steps=WARM_CALLS + 6, device="cuda", compile="off", optimizer={"preset": preset})
    training = Training(with_fingerprint(config))
    losses_seen = [float(training.update(batches).losses.total) for batches in training.batches()]
    assert losses_seen[-1] < losses_seen[0]
    assert training.replayed_gradients._graph is not None


def test_an_update_that_cannot_be_captured_stays_eager():
    """Waiting for the device spoils a capture; the run continues."""
    training = Training(with_fingerprint(small_run(steps=24, device="cuda", compile="off", graphs="on")))

    def wait(*_):
        training.model.embedding.weight.sum().item()

    training.module.register_forward_pre_hook(wait)
    with pytest.warns(RuntimeWarning, match="not replayed"):
        losses_seen = [float(training.update(batches).losses.total) for batches in training.batches()]
    assert losses_seen[-1] < losses_seen[0]


def test_a_run_with_graphs_resumes_after_a_stop(tmp_path):
    whole = run(tmp_path / "whole", "on")
    config = small_run(steps=24, device="cuda", compile="off", graphs="on", precision="float32")
    stop_at(16, config, tmp_path / "stopped")
    train(config, tmp_path / "stopped")
    resumed = {(r["kind"], r["step"]): r for r in losses(tmp_path / "stopped")}
    assert resumed.keys() == whole.keys()
    assert resumed["eval", 24]["loss"] == pytest.approx(whole["eval", 24]["loss"], rel=2e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("compiling", ["off", "on"])
def test_one_rank_with_nccl_is_the_plain_run_and_resumes(strategy, compiling, tmp_path):
    """Through torchrun, stopped in the middle by a signal; compiled or not, with the collectives of several ranks."""
    settings = {"steps": 12, "device": "cuda", "compile": compiling, "graphs": "off", "precision": "float32"}
    chosen = write_config(on_ranks(small_run(**settings), strategy=strategy, timeout=300.0))
    plain, ranks = tmp_path / "plain", tmp_path / "ranks"
    subprocess.run([sys.executable, "-m", "muonsw", *training(chosen, plain)], check=True)
    launcher = torchrun("tests.lab.train.faulty_trainer", "slow", *training(chosen, ranks), ranks=1)
    while not (ranks / "metrics.jsonl").exists() or len(losses(ranks)) < 3:
        assert launcher.poll() is None, launcher.stdout.read()
        time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    _, output = finished(launcher)
    assert "steps, saved; rerun the same command" in output
    code, output = finished(torchrun("muonsw", *training(chosen, ranks), ranks=1))
    assert code == 0, output
    assert "resuming after step" in output
    ours, theirs = ({(r["kind"], r["step"]): r for r in losses(folder)} for folder in (ranks, plain))
    assert ours.keys() == theirs.keys()
    for key, record in theirs.items():
        if "loss" in record:
            assert ours[key]["loss"] == pytest.approx(record["loss"], rel=2e-3), key
