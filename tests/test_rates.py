"""Rates that are no numbers, and what decay rules know of a run: saved, loaded and counted."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from muonsw import SGDSW, MuonSW, NonFiniteGradientWarning
from muonsw.decay import decay_factors
from tests.common.problems import assert_same, clones, matrices, run, set_gradients

OF_THE_RUN = {
    "cosine": {"total_steps": 30},
    "log_time": {},
    "gradient_norm": {},
}
rules = pytest.mark.parametrize("rule", OF_THE_RUN)


@pytest.mark.parametrize("rule", ["cosine", "log_time"])
def test_skipped_steps_count(rule):
    """A scheduler moves on after a skipped step, and so does the rule."""
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=0.3, decay=rule, **OF_THE_RUN[rule])
    run(optimizer, params, 2)
    set_gradients(params, 2)
    params[0].grad[0, 0] = torch.inf
    with pytest.warns(NonFiniteGradientWarning, match="skipped"):
        optimizer.step()
    assert optimizer.param_groups[0]["step_count"] == 3


def test_the_length_must_be_known_where_a_rule_ends_with_the_run():
    params = matrices((4, 6))
    with pytest.raises(ValueError, match="decay='cosine' ends with the run; pass total_steps"):
        MuonSW(params, decay="cosine")
    run(MuonSW(params, decay="cosine", weight_decay=0.0), params, 1)  # nothing decays, so no rule asks
    optimizer = MuonSW(params)
    optimizer.param_groups[0]["decay"] = "cosine"
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="ends with the run"):
        optimizer.step()
    with pytest.raises(ValueError, match="total_steps=0: must be a whole number of at least 1"):
        MuonSW(params, decay="cosine", total_steps=0)


def test_a_scheduler_and_the_step_go_together():
    """Over a run with warmup, decay alone takes what the factors of the schedule say."""
    params = [nn.Parameter(torch.ones(3, 3, dtype=torch.float64))]
    optimizer = SGDSW(params, lr=0.05, weight_decay=0.9, decay="log_time")
    scheduler = LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 5))
    kept = 1.0
    for phi in decay_factors("log_time", 0.9, [0.05 * min(1.0, (t + 1) / 5) for t in range(12)], 0.05):
        kept *= 1 - phi
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(params[0].detach(), torch.full((3, 3), kept, dtype=torch.float64))


def test_a_group_that_joins_counts_on():
    params = matrices((4, 6), (6, 6))
    optimizer = MuonSW(params[:1], lr=0.05, decay="cosine", total_steps=30)
    run(optimizer, params[:1], 7)
    optimizer.add_param_group({"params": params[1:]})
    assert optimizer.param_groups[1]["step_count"] == 7
    run(optimizer, params, 1, start=7)
    assert [group["step_count"] for group in optimizer.param_groups] == [8, 8]


@pytest.mark.parametrize("rule", ["cosine", "log_time"])
@pytest.mark.parametrize("before", ["scaled", "none"])
def test_a_rule_that_is_chosen_on_resume_knows_the_step(before, rule):
    """Steps count under every rule, so that changing `decay` is as if the run had had the new rule's position."""
    (param,), (other,) = matrices((4, 6)), matrices((4, 6))
    optimizer = SGDSW([param], lr=0.05, weight_decay=0.3, decay=before, **OF_THE_RUN[rule])
    run(optimizer, [param], 20)
    resumed = SGDSW([other], lr=0.05, weight_decay=0.3, **OF_THE_RUN[rule])
    resumed.load_state_dict(optimizer.state_dict())
    resumed.param_groups[0]["decay"] = rule
    was, other.grad = other.detach().clone(), torch.zeros_like(other)
    resumed.step()
    phi = decay_factors(rule, 0.3, [0.05] * 30, 0.05)[20]
    torch.testing.assert_close(other.detach(), (1 - phi) * was, rtol=1e-6, atol=0)


@rules
def test_a_saved_state_holds_the_same_kinds_before_and_after_the_first_step(rule):
    """A checkpoint may be read into a state that has not been stepped; and no step changes what was saved."""
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=0.3, decay=rule, **OF_THE_RUN[rule])
    before = optimizer.state_dict()["param_groups"][0]
    run(optimizer, params, 2)
    after = optimizer.state_dict()["param_groups"][0]
    for key in ("step_count", "gradient_average"):
        assert type(before.get(key)) is type(after.get(key)), key
    expected = copy.deepcopy(after)
    resumed = clones(params)
    other = MuonSW(resumed, lr=0.05, weight_decay=0.3, decay=rule, **OF_THE_RUN[rule])
    other.load_state_dict({"state": {}, "param_groups": [after]})
    run(other, resumed, 2, start=2)
    run(optimizer, params, 2, start=2)
    assert after["step_count"] == expected["step_count"] == 2
    assert after.get("gradient_average") == expected.get("gradient_average")
    assert ("gradient_average" in after) == (rule == "gradient_norm")


BAD_NUMBERS = [torch.nan, torch.inf, -0.1, torch.tensor(torch.nan), torch.tensor(-0.1)]
NO_NUMBERS = [None, "fast", [0.1], torch.tensor([0.1, 0.1]), torch.tensor(0.1 + 1j)]


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", value) for value in BAD_NUMBERS + NO_NUMBERS] + [("weight_decay", value) for value in BAD_NUMBERS],
    ids=repr,
)
def test_a_rate_or_lambda_that_goes_wrong_later_is_refused_with_nothing_changed(key, value):
    (param,) = matrices((4, 4))
    optimizer = MuonSW([param], lr=0.1, weight_decay=0.5)
    run(optimizer, [param], 1)
    before = param.detach().clone()
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=re.escape(f"of param group 0 is {value!r}; it must be a finite number")):
        optimizer.step()
    assert torch.equal(param, before)


def test_a_rate_may_pass_zero_by_roundings():
    """The step is taken, with the sign of the rate; a hundredth of the peak below zero is refused."""
    (param,) = matrices((4, 4), dtype=torch.float64)
    optimizer = SGDSW([param], lr=0.1, weight_decay=0.5)
    run(optimizer, [param], 1)
    param.grad, before = torch.ones_like(param), param.detach().clone()
    optimizer.param_groups[0]["lr"] = -1e-8
    optimizer.step()
    torch.testing.assert_close(param.detach(), before + 1e-8, rtol=0, atol=1e-11)
    optimizer.param_groups[0]["lr"] = -1e-3
    with pytest.raises(ValueError, match="must be a finite number of at least 0"):
        optimizer.step()


def test_a_rate_and_a_lambda_of_shape_one_are_numbers():
    (plain,), (held,) = matrices((4, 4)), matrices((4, 4))
    one = torch.ones(1, dtype=torch.float64)
    run(SGDSW([plain], lr=0.1, weight_decay=0.5), [plain], 1)
    run(SGDSW([held], lr=0.1 * one, weight_decay=0.5 * one), [held], 1)
    assert_same([held], [plain])
