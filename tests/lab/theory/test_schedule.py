"""Schedules: closed forms, joints, torch schedulers, and the errors of wrong settings."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR

from muonsw.lab.theory.schedule import (
    MOST_STEPS,
    lr_scheduler,
    peak_lr_for_horizon,
    sampled,
    warmup_cosine,
    warmup_stable_decay,
    warmup_steps_for_horizon,
)
from muonsw.lab.train.config import ScheduleConfig

ROUNDING = 4 * torch.finfo(torch.float64).eps


def sgd():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": peak} for peak in (0.02, 0.005)]
    return torch.optim.SGD(groups, lr=1.0)


@given(total=st.integers(2, 500), warmup=st.integers(0, 498), final=st.floats(0, 1))
def test_cosine_rises_to_the_peak_falls_to_the_end_and_stays(total, warmup, final):
    warmup = min(warmup, total - 1)
    settings = {"total_steps": total, "warmup_steps": warmup, "final_fraction": final}
    values = [warmup_cosine(t, **settings) for t in range(total + 3)]
    top = max(warmup - 1, 0)
    assert values[top] == 1.0
    assert values[total - 1 :] == [final] * 4
    assert values[:warmup] == [(t + 1) / warmup for t in range(warmup)]
    assert all(a >= b - ROUNDING for a, b in pairwise(values[top:]))


@given(total=st.integers(2, 500), fraction=st.floats(0.01, 1), final=st.floats(0, 1))
def test_wsd_holds_the_peak_and_decays_only_at_the_end(total, fraction, final):
    values = [
        warmup_stable_decay(t, total_steps=total, decay_fraction=fraction, final_fraction=final)
        for t in range(total + 3)
    ]
    decaying = min(max(1, round(fraction * total)), total - 1)
    assert set(values[: total - decaying]) == {1.0}
    assert values[total - 1 :] == [final] * 4
    falls = [a - b for a, b in pairwise(values[total - decaying - 1 : total])]
    assert falls == pytest.approx([(1 - final) / decaying] * decaying, abs=ROUNDING)


def test_without_warmup_it_equals_torchs_cosine_annealing():
    ours = lr_scheduler(sgd(), warmup_cosine, total_steps=101, final_fraction=0.0)
    expected = CosineAnnealingLR(sgd(), T_max=100)
    for _ in range(101):
        # torch computes each rate from the one before, so a hundred rounding errors add up.
        assert ours.get_last_lr() == pytest.approx(expected.get_last_lr(), rel=100 * ROUNDING, abs=1e-15)
        for scheduler in (ours, expected):
            scheduler.optimizer.step()
            scheduler.step()


@pytest.mark.parametrize(
    ("schedule", "settings", "named"),
    [
        (warmup_cosine, {"total_steps": 10, "warmup_steps": 10}, "warmup_steps=10 .*total_steps=10"),
        (warmup_cosine, {"total_steps": 10, "final_fraction": 1.1}, "final_fraction"),
        (warmup_stable_decay, {"total_steps": 10, "warmup_steps": 6, "decay_fraction": 0.5}, "do not fit"),
    ],
)
def test_wrong_settings_are_refused_at_once_and_leave_the_optimizer_alone(schedule, settings, named):
    optimizer = sgd()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=named):
        lr_scheduler(optimizer, schedule, **settings)
    assert optimizer.state_dict() == before


def test_the_horizon_rule_is_a_cube_root_capped_at_the_tuned_peak():
    assert peak_lr_for_horizon(27 * 700, base_lr=0.3, base_steps=700) == pytest.approx(0.1, rel=ROUNDING)
    assert {peak_lr_for_horizon(steps) for steps in (1, 600, 4999, 5000)} == {0.02}
    printed = {35_000: 1.05e-2, 110_000: 7.1e-3, 223_000: 5.6e-3, 376_000: 4.7e-3}  # the paper's horizons
    assert {steps: float(f"{peak_lr_for_horizon(steps):.2e}") for steps in printed} == pytest.approx(printed, rel=0.01)


def test_warmup_length_is_a_hundredth_within_its_limits():
    expected = {1: 0, 9: 0, 600: 60, 9_999: 999, 10_000: 1000, 35_000: 1000, 110_000: 1100, 376_000: 3760}
    assert {steps: warmup_steps_for_horizon(steps) for steps in expected} == expected


@pytest.mark.parametrize("shape", ["cosine", "wsd", "constant"])
def test_sums_over_sampled_steps_agree_with_sums_over_all(shape):
    steps = 3 * MOST_STEPS + 1
    multiple = ScheduleConfig(shape).multiple(steps)
    samples = sampled(multiple, steps)
    assert len(samples) == MOST_STEPS
    for power in (1, 2):
        exact = math.fsum(multiple(step) ** power for step in range(steps)) / steps
        assert math.fsum(value**power for value in samples) / len(samples) == pytest.approx(exact, rel=1e-4)
    few = ScheduleConfig(shape, warmup_steps=10).multiple(100)
    assert sampled(few, 100) == [few(step) for step in range(100)]
