"""What members of slots and algorithms of their own promise alike: compiled, measured, in the caller's loop."""

import pytest
import torch

from muonsw import MuonSW, Telemetry
from tests.common.problems import assert_same, matrices, run, set_gradients
from tests.family import algorithms, members

RULES = {**members.OPTIONS, **{f"algorithm={name}": own for name, own in algorithms.OPTIONS.items()}}
every_rule = pytest.mark.parametrize("name", RULES)
# Tracing takes seconds: one in a hurry.
QUICK = ("normuon",)


def build(name, params):
    return MuonSW([{"params": params, **RULES[name]}], lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RULES]
)
def test_compiled_steps_are_the_same(name):
    eager, compiled = matrices((4, 4), (6, 6)), matrices((4, 4), (6, 6))
    one, two = build(name, eager), build(name, compiled)
    step = torch.compile(two.step, backend="aot_eager")
    for number in range(4):
        set_gradients(eager, number)
        set_gradients(compiled, number)
        one.step()
        step()
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_rule
def test_telemetry_changes_no_weight(name):
    plain, measured = matrices((4, 6), (6, 6)), matrices((4, 6), (6, 6))
    optimizer = build(name, measured)
    telemetry = Telemetry(optimizer, every=2)
    run(build(name, plain), plain, 4)
    run(optimizer, measured, 4)
    assert_same(plain, measured)
    assert telemetry.last["all"]["update_rms"] > 0


@every_rule
def test_gradients_are_the_callers(name):
    params = matrices((4, 6), (6, 6))
    optimizer = build(name, params)
    for step in range(3):
        set_gradients(params, step)
        before = [param.grad.clone() for param in params]
        optimizer.step()
        assert_same([param.grad for param in params], before)
