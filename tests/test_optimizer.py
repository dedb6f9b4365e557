"""The summary of the last step: what was orthogonalized, moved and decayed."""

import json
from dataclasses import asdict

import pytest
import torch

from muonsw import MuonSW, Telemetry
from tests.common.problems import matrices, run


def optimizer_of_many_kinds():
    plain, fused, experts, conv, vector, unused = matrices((6, 4), (9, 4), (5, 4, 4), (3, 2, 2, 2), (7,), (4, 4))
    groups = [
        {"params": [plain, unused], "role": "hidden"},
        {"params": [fused], "split_sizes": (3, 3, 3)},
        {"params": [experts], "matrix": "stack"},
        {"params": [conv], "matrix": "flatten"},
        {"params": [vector], "algorithm": "adamw", "weight_decay": 0.0},
    ]
    return MuonSW(groups, lr=0.1, weight_decay=0.5), [plain, fused, experts, conv, vector]


def test_it_counts_what_the_step_orthogonalized_and_moved():
    optimizer, params = optimizer_of_many_kinds()
    optimizer.param_groups[0]["lr"] = 0.05
    run(optimizer, params, 1)
    summary = optimizer.summary()
    assert [group.matrices for group in summary.groups] == [1, 3, 5, 1, 0]
    assert summary.matrices == 10
    assert summary.parameters == {"muon": 24 + 36 + 80 + 24, "adamw": 7}
    assert [group.decay for group in summary.groups] == pytest.approx([0.5 * 0.05**2 / 0.1, 0.05, 0.05, 0.05, 0.0])
    assert [group.peak_lr for group in summary.groups] == [0.1, 0.1, 0.1, 0.1, None]
    assert "10 matrices orthogonalized; moved 164 parameters by muon, 7 parameters by adamw" in str(summary)
    json.dumps(asdict(summary), allow_nan=False)
    assert [group.rule for group in summary.groups] == ["scaled"] * 4 + ["none"]


@pytest.mark.usefixtures("known_by")
@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
def test_nothing_has_moved_before_the_first_step_and_after_a_skipped_step():
    optimizer, params = optimizer_of_many_kinds()
    before = optimizer.summary()
    assert before.parameters == {"muon": 0, "adamw": 0}
    assert [group.decay for group in before.groups] == [0.0] * 5
    run(optimizer, params[1:], 1)  # a group without a gradient is not decayed
    assert not optimizer.summary().skipped
    assert [group.decay for group in optimizer.summary().groups] == pytest.approx([0.0, 0.05, 0.05, 0.05, 0.0])
    params[1].grad[0, 0] = torch.nan
    optimizer.step()
    summary = optimizer.summary()
    assert (summary.skipped, summary.skipped_steps, summary.matrices) == (True, 1, 0)
    assert [group.decay for group in summary.groups] == [0.0] * 5
    assert [group.lr for group in summary.groups] == [0.1] * 5
    assert "the last step was skipped" in str(summary)


def test_telemetry_records_the_summary_with_the_rates_of_the_last_step():
    optimizer, params = optimizer_of_many_kinds()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    telemetry = Telemetry(optimizer, every=1)
    run(optimizer, params, 2, scheduler=scheduler)
    groups = telemetry.last["groups"]
    assert [group["matrices"] for group in groups] == [1, 3, 5, 1, 0]
    assert [group["highest_lr"] for group in groups] == [0.1] * 5
    assert optimizer.summary().groups[0].lr == groups[0]["lr"] == pytest.approx(0.05)  # the next rate is 0.025
