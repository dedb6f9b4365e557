"""Driving the decay of optimizers that are not ours."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, OneCycleLR

from muonsw import AdamWSW, MuonSW, PeakLRError, PeakLRWarning, Telemetry, drive_weight_decay
from tests.common.problems import clones, matrices, run

RULES = ["constant", "scaled", "squared", "independent", "none"]
LAMBDA = {"squared": 0.5, "independent": 0.002}


@pytest.mark.parametrize("rule", RULES)
def test_a_driven_adamw_is_ours(rule):
    ours, theirs = matrices((4, 6), (5,)), matrices((4, 6), (5,))
    lam = LAMBDA.get(rule, 0.3)
    mine = AdamWSW(ours, lr=0.01, weight_decay=lam, decay=rule)
    driven = torch.optim.AdamW(theirs, lr=0.01, weight_decay=lam, betas=(0.9, 0.95))
    drive_weight_decay(driven, rule)
    for optimizer, params in ((mine, ours), (driven, theirs)):
        run(
            optimizer,
            params,
            40,
            scheduler=OneCycleLR(optimizer, max_lr=0.05, total_steps=41, cycle_momentum=False),
        )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_driven_muon_is_ours():
    ours = matrices((4, 6), (6, 6))
    theirs = clones(ours)
    mine = MuonSW(ours, lr=0.05, weight_decay=0.3, ns_dtype="bfloat16")
    driven = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    drive_weight_decay(driven)
    for optimizer, params in ((mine, ours), (driven, theirs)):
        run(optimizer, params, 40, scheduler=CosineAnnealingLR(optimizer, 40))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


def test_lambda_and_peak_survive_a_save_and_load():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    drive_weight_decay(optimizer)
    run(optimizer, params, 5, scheduler=CosineAnnealingLR(optimizer, 10))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["weight_decay"] != 0.3
    resumed = clones(params)
    other = torch.optim.AdamW(resumed, lr=0.003, weight_decay=0.3)
    drive_weight_decay(other)
    other.load_state_dict(saved)
    run(optimizer, params, 1, start=5)
    run(other, resumed, 1, start=5)
    assert torch.equal(params[0], resumed[0])


def test_the_peak_is_checked():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    drive_weight_decay(optimizer)
    scheduler = CyclicLR(optimizer, base_lr=0.1, max_lr=0.4, step_size_up=3, cycle_momentum=False)
    run(optimizer, params, 1, scheduler=scheduler)
    with pytest.raises(PeakLRError, match="above its peak"):
        run(optimizer, params, 1)


def test_a_group_added_later_is_driven_too():
    first, second = matrices((4, 4), (4, 4))
    optimizer = torch.optim.AdamW([first], lr=0.1, weight_decay=0.3)
    drive_weight_decay(optimizer)
    optimizer.add_param_group({"params": [second], "weight_decay": 0.7, "lr": 0.2})
    optimizer.param_groups[1]["lr"] = 0.1
    run(optimizer, [first, second], 1)
    assert optimizer.param_groups[1]["base_weight_decay"] == 0.7


def test_removing_the_driver_gives_lambda_back():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    keys = set(optimizer.param_groups[0])
    driver = drive_weight_decay(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    run(optimizer, params, 1)
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.15)
    driver.remove()
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert set(optimizer.param_groups[0]) == keys


def test_removing_the_driver_right_after_adding_a_group():
    first, second = matrices((4, 4), (4, 4))
    optimizer = torch.optim.AdamW([first], lr=0.1, weight_decay=0.3)
    driver = drive_weight_decay(optimizer)
    optimizer.add_param_group({"params": [second], "weight_decay": 0.7})
    driver.remove()
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "SGD adds its decay to the gradient"),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1), "Adam adds its decay to the gradient"),
        (torch.optim.LBFGS, "has no weight_decay"),
        (lambda p: MuonSW(p, lr=0.1), "is one of ours; pass decay= to it"),
    ],
)
def test_optimizers_that_cannot_be_driven(make, message):
    with pytest.raises(ValueError, match=message):
        drive_weight_decay(make([nn.Parameter(torch.ones(4, 4))]))


def test_a_state_that_was_not_driven_leaves_the_peak_where_it_was():
    """Its learning rate may be any of the schedule; taken for the peak it would make decay many times too strong."""
    plain_params = matrices((4, 4))
    plain = torch.optim.AdamW(plain_params, lr=0.1, weight_decay=0.3)
    run(plain, plain_params, 2)
    plain.param_groups[0]["lr"] = 0.01  # a hand-written schedule leaves no record
    params = clones(plain_params)
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.7)
    drive_weight_decay(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    run(optimizer, params, 1, start=2)
    group = optimizer.param_groups[0]
    assert group["base_weight_decay"] == 0.3
    assert group["resolved_peak_lr"] == 0.1
    assert group["weight_decay"] == pytest.approx(0.3 * 0.01 / 0.1)


def test_layer_decay_is_part_of_the_peak_of_a_driven_optimizer():
    first, second = matrices((4, 4), (4, 4))
    groups = [{"params": [first], "lr_scale": 1.0}, {"params": [second], "lr_scale": 0.25}]
    optimizer = torch.optim.AdamW(groups, lr=0.2, weight_decay=0.3)
    drive_weight_decay(optimizer)
    for multiple in (0.5, 1.0, 0.2):
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.2
            group["lr"] = 0.2 * multiple * group["lr_scale"]  # as timm's schedulers do it
        run(optimizer, [first, second], 1)
        assert [g["weight_decay"] for g in optimizer.param_groups] == pytest.approx([0.3 * multiple] * 2)


def test_a_schedule_that_never_comes_near_its_peak_is_told_of_once():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=1.0, weight_decay=0.3)
    drive_weight_decay(optimizer)
    noam = LambdaLR(optimizer, lambda t: 0.01 * min((t + 1) / 4, ((t + 1) / 4) ** -0.5))
    with pytest.warns(PeakLRWarning, match=r"turned down at 0\.01 without coming near its peak 1") as told:
        run(optimizer, params, 10, scheduler=noam)
    assert len(told) == 1


class Wrapped(torch.optim.Optimizer):
    """What Accelerate hands out: an optimizer that keeps the real one under `optimizer`."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_unwrapped():
    optimizer = torch.optim.AdamW(matrices((4, 4)), lr=0.1, weight_decay=0.3)
    assert drive_weight_decay(Wrapped(optimizer)).optimizer is optimizer
    assert Telemetry(Wrapped(optimizer)).optimizer is optimizer
