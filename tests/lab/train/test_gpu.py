"""A run on a CUDA device: replayed steps equal eager ones, and a run resumes. Run by `make test-gpu`."""

import signal
import subprocess
import sys

import pytest

from muonsw import machine
from muonsw.lab.train.loop import train
from muonsw.lab.train.state import WARM_CALLS, Training, with_fingerprint
from muonsw.presets import PRESETS
from tests.lab.test_end_to_end import finished, torchrun
from tests.lab.train.ranks import on_ranks, training, write_config
from tests.lab.train.small_runs import losses, small_run, stop_at, wait_for_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]


def on_gpu(**settings):
    return small_run(**{"steps": 24, "device": "cuda", "compile": "off", **settings})


def by_step(folder):
    return {(record["kind"], record["step"]): record for record in losses(folder)}


def assert_same_losses(folder, reference):
    """Up to rounding: kernels add in no fixed order."""
    ours, theirs = by_step(folder), by_step(reference)
    assert ours.keys() == theirs.keys()
    for key, record in theirs.items():
        if "loss" in record:
            assert ours[key]["loss"] == pytest.approx(record["loss"], rel=2e-3), key


def test_replayed_gradients_are_those_of_eager_updates(tmp_path):
    """Evaluations and telemetry included."""
    for graphs in ("off", "on"):
        train(on_gpu(graphs=graphs, precision="float32"), tmp_path / graphs)
    assert_same_losses(tmp_path / "on", tmp_path / "off")
    replayed, plain = (by_step(tmp_path / graphs)["telemetry", 24] for graphs in ("on", "off"))
    assert replayed["decayed"]["decay"] == pytest.approx(plain["decayed"]["decay"], rel=1e-5)
    assert replayed["all"]["weight_rms"] == pytest.approx(plain["all"]["weight_rms"], rel=1e-3)


def test_a_graph_follows_the_schedule_and_the_batches():
    training = Training(with_fingerprint(on_gpu(graphs="on")))
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
    training = Training(with_fingerprint(on_gpu(steps=WARM_CALLS + 6, optimizer={"preset": preset})))
    losses_seen = [float(training.update(batches).losses.total) for batches in training.batches()]
    assert losses_seen[-1] < losses_seen[0]
    assert training.replayed_gradients._graph is not None


def test_an_update_that_cannot_be_captured_stays_eager():
    """Waiting for the device spoils a capture; the run continues."""
    training = Training(with_fingerprint(on_gpu(graphs="on")))

    def wait(*_):
        training.model.embedding.weight.sum().item()

    training.module.register_forward_pre_hook(wait)
    with pytest.warns(RuntimeWarning, match="not replayed"):
        losses_seen = [float(training.update(batches).losses.total) for batches in training.batches()]
    assert losses_seen[-1] < losses_seen[0]


def test_a_run_with_graphs_resumes_after_a_stop(tmp_path):
    config = on_gpu(graphs="on", precision="float32")
    train(config, tmp_path / "whole")
    stop_at(16, config, tmp_path / "stopped")
    train(config, tmp_path / "stopped")
    assert_same_losses(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("compiling", ["off", "on"])
def test_one_rank_with_nccl_is_the_plain_run_and_resumes(strategy, compiling, tmp_path):
    """Through torchrun, stopped in the middle by a signal; compiled or not, with the collectives of several ranks."""
    config = on_gpu(steps=12, compile=compiling, graphs="off", precision="float32")
    chosen = write_config(on_ranks(config, strategy=strategy, timeout=300.0))
    plain, ranks = tmp_path / "plain", tmp_path / "ranks"
    subprocess.run([sys.executable, "-m", "muonsw", *training(chosen, plain)], check=True)
    launcher = torchrun("tests.lab.train.faulty_trainer", "slow", *training(chosen, ranks), ranks=1)
    wait_for_records(launcher, ranks, 3)  # then everything is compiled
    launcher.send_signal(signal.SIGTERM)
    _, output = finished(launcher)
    assert "steps, saved; rerun the same command" in output
    code, output = finished(torchrun("muonsw", *training(chosen, ranks), ranks=1))
    assert code == 0, output
    assert "resuming after step" in output
    assert_same_losses(ranks, plain)
