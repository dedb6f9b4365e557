"""MuonBP: blocks at most steps, whole matrices every few, each scaled by its own shape."""

import copy

import pytest
import torch

from muonsw import MuonSW, Telemetry
from muonsw.nonfinite import NonFiniteGradientWarning
from tests.common.problems import assert_same, clones, matrices, run

PEAK = 0.05


def muonbp(params, period, **options):
    return MuonSW(params, **{"lr": PEAK, "ns_dtype": "float64", "block_period": period, **options})


def test_it_resumes_in_the_middle_of_a_period():
    params = matrices((8, 6), dtype=torch.float64)
    optimizer = muonbp(params, 3, heads=2)
    run(optimizer, params, 4)
    resumed = clones(params)
    other = muonbp(resumed, 3, heads=2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 4, start=4)
    run(other, resumed, 4, start=4)
    assert_same(params, resumed)


def test_a_skipped_step_counts():
    """Only the device may know of it, so the host cannot wait for the answer."""
    params = matrices((8, 6), dtype=torch.float64)
    optimizer = muonbp(params, 2, heads=2)
    run(optimizer, params, 2)
    params[0].grad = torch.full((8, 6), torch.nan, dtype=torch.float64)
    with pytest.warns(NonFiniteGradientWarning):
        optimizer.step()
    assert optimizer.param_groups[0]["update_count"] == 3


def test_telemetry_measures_both_kinds_of_step():
    params = matrices((8, 6), dtype=torch.float64)
    optimizer = muonbp(params, 2, heads=2, scale="none", weight_decay=0.0)
    telemetry = Telemetry(optimizer, every=1)
    rms = []
    for step in range(2):
        run(optimizer, params, 1, start=step)
        rms.append(telemetry.last["all"]["update_rms"])
    # two blocks of 4 x 6 hold 8 singular values near one together, the whole of 8 x 6 only 6
    assert rms[0] / rms[1] == pytest.approx((8 / 6) ** 0.5, rel=0.2)
