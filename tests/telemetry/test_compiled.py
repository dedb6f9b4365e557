"""Telemetry beside `torch.compile(optimizer.step)`."""

from collections import Counter

import pytest
import torch

from muonsw import MuonSW, Telemetry
from tests.common.problems import assert_same, matrices, set_gradients
from tests.telemetry.float64_telemetry import Step, assert_values


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def ours(params):
    return MuonSW(params, lr=torch.tensor(0.02), weight_decay=0.3, ns_dtype="float32", ns_steps=1)


def torchs(params):
    return torch.optim.AdamW(params, lr=torch.tensor(0.02), weight_decay=0.3)


def trained(build, backend, every=None, steps=6):
    """Train with a compiled step; give parameters, the records, and the last step in full."""
    params = matrices((8, 8), (8, 8))
    optimizer = build(params)
    telemetry = Telemetry(optimizer, every=every) if every else None
    step = torch.compile(optimizer.step, backend=backend)
    for number in range(steps):
        set_gradients(params, number)
        # telemetry samples the first step, which creates the state; without it, that must not be compiled either
        first_of_ours = number == 0 and build is ours
        taken = Step(optimizer, params, optimizer.step if first_of_ours else step)
    return params, telemetry, taken


@pytest.mark.slow
def test_a_compiled_step_of_torchs_is_only_watched():
    params, telemetry, step = trained(torchs, "aot_eager", every=3)
    assert [record["step"] for record in telemetry.records] == [1, 3, 6]
    assert_values(telemetry.last["all"], step.expected([0.006] * 2))
    assert_same(params, trained(torchs, "aot_eager")[0])


def counted(build, every):
    """What is compiled for eight updates, and how often each graph runs; with telemetry and the last step in full."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    runs = Counter()

    def backend(graph, _):
        def call(*args):
            runs[id(graph)] += 1
            return graph.forward(*args)

        return call

    _, telemetry, step = trained(build, backend, every, steps=8)
    stats = torch._dynamo.utils.counters["stats"]
    return (stats["unique_graphs"], stats["calls_captured"]), set(runs.values()), telemetry, step


@pytest.mark.parametrize(("build", "compiled"), [(ours, 5), (torchs, 8)])
def test_sampled_updates_of_ours_run_uncompiled_and_nothing_more_is_compiled(build, compiled):
    """Of eight updates three are sampled, the first of which makes the state of ours."""
    graphs, runs, telemetry, step = counted(build, every=4)
    assert [record["step"] for record in telemetry.records] == [1, 4, 8]
    assert_values(telemetry.last["all"], step.expected([0.006] * 2))
    without, every, *_ = counted(build, None)
    assert graphs == without
    assert (max(runs), max(every)) == (compiled, 7 if build is ours else 8)
    assert build is torchs or len(runs) == 1


@pytest.mark.slow
def test_values_beside_an_inductor_step():
    """Needs a C++ compiler, and a minute."""
    _, telemetry, step = trained(ours, "inductor", every=3)
    assert [record["step"] for record in telemetry.records] == [1, 3, 6]
    assert_values(telemetry.last["all"], step.expected([0.006] * 2))
