"""Singular values of weights, as linear algebra knows them."""

import math

import pytest
import torch

from muonsw import MuonSW, Telemetry
from muonsw.telemetry.spectrum import condition_numbers
from tests.common.problems import matrices, set_gradients
from tests.telemetry.float64_telemetry import Step


@pytest.mark.parametrize("build", [MuonSW, torch.optim.AdamW])
def test_spectral_norms_and_condition_numbers(build):
    params = matrices((40, 24), (30, 30), (24, 64))
    optimizer = build(params, lr=0.02)
    telemetry = Telemetry(optimizer, every=1, spectral_norm=True, condition=True)
    for number in range(2):
        set_gradients(params, number)
        step = Step(optimizer, params)
    for values, weight in zip(telemetry.last["parameters"].values(), step.before, strict=True):
        # four iterations after AdamW's move of a fifth of the weights leave 1e-5; condition numbers are float64's
        assert values["spectral_norm"] == pytest.approx(torch.linalg.matrix_norm(weight, ord=2).item(), rel=1e-4)
        assert values["condition"] == pytest.approx(torch.linalg.cond(weight).item(), rel=1e-7)
    norms = [torch.linalg.matrix_norm(weight, ord=2).item() for weight in step.before]
    assert telemetry.last["all"]["spectral_norm"] == pytest.approx(sum(norms) / 3, rel=1e-4)


def test_a_singular_weight_has_no_condition_number():
    """Rounding makes the least eigenvalue of its Gram matrix a little more than zero, or less."""
    singular = torch.randn(20, 8, 5, dtype=torch.float64) @ torch.randn(20, 5, 6, dtype=torch.float64)
    assert not condition_numbers([singular]).isfinite().any()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_weights_that_have_diverged_have_no_spectrum(value):
    """The run goes on, other weights keep theirs, and so do these once they are finite again."""
    params = matrices((8, 6), (6, 6))
    optimizer = torch.optim.SGD(params, lr=1e-6)
    telemetry = Telemetry(optimizer, every=1, spectral_norm=True, condition=True)
    good = params[0].detach().clone()
    for weight in (good, torch.full_like(good, value), good):
        set_gradients(params, 0)
        params[0].data.copy_(weight)
        optimizer.step()
    before, bad, after = (record["parameters"] for record in telemetry.records)
    first, second = before
    assert bad[first]["spectral_norm"] is None
    assert bad[first]["condition"] is None
    for key in ("spectral_norm", "condition"):
        assert after[first][key] == pytest.approx(before[first][key], rel=1e-2)
        assert bad[second][key] == pytest.approx(before[second][key], rel=1e-2)


def test_spectral_norms_of_stacks_and_splits_and_none_of_vectors():
    params = matrices((3, 8, 6), (5,))
    groups = [{"params": params[:1], "matrix": "stack", "split_sizes": (2, 6)}]
    optimizer = MuonSW([*groups, {"params": params[1:], "algorithm": "adamw"}], lr=0.02)
    telemetry = Telemetry(optimizer, every=1, spectral_norm=True)
    set_gradients(params, 0)
    step = Step(optimizer, params)
    parts = [part for expert in step.before[0] for part in expert.split((2, 6))]
    expected = sum(torch.linalg.matrix_norm(part, ord=2).item() for part in parts) / 6
    assert telemetry.last["parameters"]["parameter 0 of group 0"]["spectral_norm"] == pytest.approx(expected, rel=1e-4)
    assert "spectral_norm" not in telemetry.last["parameters"]["parameter 0 of group 1"]
