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


@pytest.mark.parametrize("build", [ours, torchs])
def test_between_samples_the_same_graphs_run(build):
    """Nothing more is compiled for telemetry, at the first sample or later."""

    def compiled(every):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trained(build, "eager", every, steps=8)
        stats = torch._dynamo.utils.counters["stats"]
        return stats["unique_graphs"], stats["calls_captured"]

    assert compiled(2) == compiled(None)


def test_sampled_updates_of_ours_run_uncompiled_and_values_are_theirs():
    """Of eight updates three are sampled, so that each compiled graph runs five times."""
    runs = Counter()

    def backend(graph, _):
        def call(*args):
            runs[id(graph)] += 1
            return graph.forward(*args)

        return call

    _, telemetry, step = trained(ours, backend, every=4, steps=8)
    assert [record["step"] for record in telemetry.records] == [1, 4, 8]
    assert set(runs.values()) == {5}
    assert_values(telemetry.last["all"], step.expected([0.006] * 2))


@pytest.mark.slow
def test_values_beside_an_inductor_step():
    """Needs a C++ compiler, and a minute."""
    _, telemetry, step = trained(ours, "inductor", every=3)
    assert [record["step"] for record in telemetry.records] == [1, 3, 6]
    assert_values(telemetry.last["all"], step.expected([0.006] * 2))
