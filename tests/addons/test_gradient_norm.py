"""Decay by the size of gradients: the average that it divides by, and the steps that count."""

import pytest
import torch

from muonsw import MuonSW
from muonsw.reference import Decay
from tests.common.problems import WITH_REFERENCE, cosine, follow, matrices, run, set_gradients, step_with_nan


@pytest.mark.parametrize("algorithm", WITH_REFERENCE)
def test_it_matches_the_reference(algorithm):
    build, reference_of = WITH_REFERENCE[algorithm]
    (param,) = matrices((5, 7), dtype=torch.float64)
    beta2 = 0.999 if algorithm == "adamw" else 0.95
    reference = reference_of(param.detach(), Decay("gradient_norm", 0.3, 0.05, beta2=beta2))
    optimizer = build([param], lr=0.05, weight_decay=0.3, decay="gradient_norm")
    assert follow(optimizer, [param], [reference], 30, cosine(0.05, 30)) < 1e-9


@pytest.mark.usefixtures("known_by")
def test_skipped_steps_and_steps_at_rate_zero_leave_the_average():
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=0.01, decay="gradient_norm")
    run(optimizer, params, 1, schedule=lambda _: 0.0)
    assert optimizer.param_groups[0]["gradient_average"] == [0.0, 0.0]
    run(optimizer, params, 2, schedule=lambda _: 0.05)
    before = optimizer.param_groups[0]["gradient_average"]
    assert before[0] > 0
    step_with_nan(optimizer, params, 2)
    assert optimizer.skipped_steps == 1
    assert optimizer.param_groups[0]["gradient_average"] == before


def test_a_step_that_raises_leaves_no_gradient_in_the_average():
    params = matrices((4, 6))
    set_gradients(params, 0)
    optimizer = MuonSW(params, lr=0.05, weight_decay=1e3, decay="gradient_norm")
    with pytest.raises(ValueError, match="times the weight in one step"):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.step()
    mean = float(params[0].grad.square().mean())
    assert optimizer.param_groups[0]["gradient_average"] == pytest.approx([0.05 * mean, 0.05])
