"""Telemetry beside `torch.compile(optimizer.step)`."""

import pytest
import torch

from muonsw import MuonSW, Telemetry
from tests.common.problems import assert_same, matrices, set_gradients
from tests.telemetry.float64_telemetry import Step, assert_values


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def ours(params):
    return MuonSW(params, lr=0.02, weight_decay=0.3, ns_dtype="float32", ns_steps=1)


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
        taken = Step(optimizer, params, step)
    return params, telemetry, taken


@pytest.mark.slow
def test_a_compiled_step_of_torchs_is_only_watched():
    params, telemetry, step = trained(torchs, "aot_eager", every=3)
    assert [record["step"] for record in telemetry.records] == [1, 3, 6]
    assert_values(telemetry.last["all"], step.expected([0.006] * 2))
    assert_same(params, trained(torchs, "aot_eager")[0])


def test_a_compiled_step_of_ours_is_measured():
    params, telemetry, step = trained(ours, "eager", every=4, steps=8)
    assert [record["step"] for record in telemetry.records] == [1, 4, 8]
    assert_values(telemetry.last["all"], step.expected([0.006] * 2))
    assert_same(params, trained(ours, "eager", steps=8)[0])
