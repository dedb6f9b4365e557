"""Telemetry on a CUDA device. Run by `make test-gpu`."""

import pytest
import torch
from torch import nn

from muonsw import ALGORITHMS, MuonSW, Telemetry, machine
from tests.common.cuda import feed, no_waiting, on_gpu
from tests.common.problems import assert_same
from tests.telemetry.float64_telemetry import Step, assert_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]


SHAPES = [(64, 64), (32, 96), (4, 48, 32)]


def ours(params, algorithm="muon", **options):
    groups = [{"params": params[:2]}, {"params": params[2:], "matrix": "stack", "role": "experts"}]
    groups = [{**group, "algorithm": algorithm, "momentum": 0.9} for group in groups]
    return MuonSW(groups, lr=0.02, weight_decay=0.3, **options)


def torchs(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.3)


@pytest.mark.parametrize("build", [ours, torchs])
def test_the_host_never_waits_between_samples(build):
    params = on_gpu(*SHAPES)
    optimizer = build(params)
    telemetry = Telemetry(optimizer, every=5)
    feed(params, 0)
    optimizer.step()
    with no_waiting():
        for _ in range(3):
            optimizer.step()
    optimizer.step()
    with no_waiting():
        optimizer.step()
    assert [record["step"] for record in telemetry.records] == [1, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_and_weights_on_the_device(algorithm, dtype):
    def trained(every):
        params = on_gpu(*SHAPES, dtype=dtype)
        optimizer = ours(params, algorithm)
        telemetry = Telemetry(optimizer, every=every)
        for number in range(4):
            feed(params, number)
            step = Step(optimizer, params)
        return params, telemetry.last, step

    params, record, step = trained(2)
    assert_same(params, trained(1000)[0])
    if dtype == torch.float32:
        assert_values(record["all"], step.expected([0.006] * 3), rel=1e-4)
    updates = {"alignment_gradient_mean": step.grads, "alignment_momentum_mean": step.momenta}
    for name, others in updates.items():
        assert record["all"][name] == pytest.approx(step.mean_cosine(others), abs=1e-5)


@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
def test_an_update_that_the_device_skips_is_reported():
    params = on_gpu(*SHAPES)
    optimizer = ours(params)
    telemetry = Telemetry(optimizer, every=1)
    for number in range(3):
        feed(params, number)
        if number == 1:
            params[0].grad[0, 0] = float("nan")
        optimizer.step()
    assert [record["was_skipped"] for record in telemetry.records] == [False, True, False]
    assert [record["skipped"] for record in telemetry.records] == [0, 1, 1]
    assert telemetry.records[1]["all"]["update_rms"] is None
    assert telemetry.records[1]["all"]["weight_rms"] == telemetry.records[2]["all"]["weight_rms"]


def test_replays_of_a_graph_are_counted_by_hand():
    params = on_gpu(*SHAPES)
    optimizer = torch.optim.AdamW(params, lr=0.02, weight_decay=0.3, capturable=True)
    telemetry = Telemetry(optimizer, every=4)
    feed(params, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert telemetry.step == 1  # a capture is no update
    for number in range(1, 9):
        feed(params, number)
        if telemetry.due:
            step = Step(optimizer, params)
        else:
            graph.replay()
            telemetry.step += 1
    assert [record["step"] for record in telemetry.records] == [1, 4, 8]
    assert telemetry.step == 9
    assert_values(telemetry.last["all"], step.expected([0.006] * 3), rel=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sampled_step_holds_one_copy_of_all_weights(algorithm):
    chunk, weights = 8 * 2**20, 32 * 4 * 2**20
    params = [nn.Parameter(0.02 * torch.randn(1024, 1024, device="cuda")) for _ in range(32)]
    group = {"params": params, "algorithm": algorithm, "momentum": 0.9}
    optimizer = MuonSW([group], lr=0.02, chunk_bytes=chunk)
    telemetry = Telemetry(optimizer, every=2)

    def extra():
        feed(params, 0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        return torch.cuda.max_memory_allocated() - before

    with pytest.warns(UserWarning, match="found no gradient"):
        optimizer.step()  # makes no state
    extra()
    unsampled, sampled = extra(), extra()
    assert telemetry.last["step"] == 4
    assert sampled - unsampled < weights + 2 * chunk  # a copy of the weights, and at most two chunks to measure with
