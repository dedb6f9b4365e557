"""Decay rules, the translation of lambda between them, and the rates and steps that they act on."""

import copy
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw import DECAY_RULES, SGDSW, MuonSW, NonFiniteGradientWarning, convert_weight_decay, decay_factor
from muonsw.decay import decay_factors
from tests.common.problems import clones, matrices, phi_of, run

RULES = ["constant", "scaled", "squared", "independent", "fixed"]
OF_THE_RUN = ["cosine", "log_time"]
positive = st.floats(1e-6, 10)


@given(lam=positive, peak=positive, fraction=st.floats(1e-3, 1), step=st.integers(1, 100), gradient=st.floats(1e-6, 10))
def test_each_rule_is_the_references(lam, peak, fraction, step, gradient):
    eta = fraction * peak
    for rule in DECAY_RULES:
        expected = phi_of(rule, lam, eta, peak, step, [gradient**2] * step, steps=100)
        actual = decay_factor(rule, lam, eta, peak, step=step, steps=100, gradient=gradient)
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_without_learning_rate_peak_or_gradient_or_after_the_run_nothing_decays():
    for rule, entry in DECAY_RULES.items():
        assert decay_factor(rule, 0.1, 0.0, 0.02, step=3, steps=10, gradient=0.5) == 0.0
        for peak in (0.0, None) if entry.uses_peak else ():
            assert decay_factor(rule, 0.1, 0.01, peak, step=1) == 0.0
            assert decay_factors(rule, 0.1, [0.01, 0.02], peak) == [0.0, 0.0]
    assert decay_factor("gradient_norm", 0.1, 0.01, 0.02, gradient=0.0) == 0.0
    for step in (11, 12, 50):
        assert decay_factor("cosine", 0.1, 0.01, 0.02, step=step, steps=10) == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decay_factor("log_time", 0.1, 0.01, 0.02), "'log_time' depends on step"),
        (lambda: decay_factor("gradient_norm", 0.1, 0.01, 0.02), "'gradient_norm' depends on gradient"),
        (lambda: decay_factors("gradient_norm", 0.1, [0.01], 0.02), "gradients of the run"),
        (lambda: convert_weight_decay(0.1, "constant", "log_time", 0.02), "'log_time' .*; pass schedule="),
        (lambda: convert_weight_decay(0.1, "constant", "scaled", 0.0), "peak_lr must be above zero"),
        (lambda: convert_weight_decay(0.1, "constant", "scaled", 0.01, schedule=[0.02]), r"0\.02, above peak_lr=0\.01"),
        (lambda: convert_weight_decay(0.1, "constant", "none", 0.01), "removes nothing"),
    ],
)
def test_missing_and_impossible_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(value=positive, peak=positive, rules=st.tuples(st.sampled_from([*RULES, "none"]), st.sampled_from(RULES)))
def test_conversion_keeps_the_decay_at_the_peak(value, peak, rules):
    source, target = rules
    converted = convert_weight_decay(value, source, target, peak)
    assert decay_factor(target, converted, peak, peak) == pytest.approx(decay_factor(source, value, peak, peak))


@given(
    value=positive,
    peak=positive,
    rules=st.tuples(st.sampled_from(RULES + OF_THE_RUN), st.sampled_from(RULES + OF_THE_RUN)),
    fractions=st.lists(st.floats(0.01, 1), min_size=1, max_size=30),
)
def test_conversion_keeps_the_total_over_a_schedule(value, peak, rules, fractions):
    source, target = rules
    etas = [f * peak for f in fractions]
    converted = convert_weight_decay(value, source, target, peak, schedule=iter(etas))
    total = sum(decay_factors(source, value, etas, peak))
    assert sum(decay_factors(target, converted, etas, peak)) == pytest.approx(total)


@pytest.mark.parametrize("rule", ["cosine", "log_time"])
def test_a_rule_chosen_on_resume_continues_the_step_count(rule):
    """Steps count under every rule, skipped ones too, so a new rule has the right position."""
    (param,), (other,) = matrices((4, 6)), matrices((4, 6))
    optimizer = SGDSW([param], lr=0.05, weight_decay=0.3, decay="none")
    run(optimizer, [param], 19)
    param.grad[0, 0] = torch.inf
    with pytest.warns(NonFiniteGradientWarning, match="skipped"):
        optimizer.step()
    resumed = SGDSW([other], lr=0.05, weight_decay=0.3, total_steps=30)
    resumed.load_state_dict(optimizer.state_dict())
    resumed.param_groups[0]["decay"] = rule
    was, other.grad = other.detach().clone(), torch.zeros_like(other)
    resumed.step()
    phi = decay_factors(rule, 0.3, [0.05] * 30, 0.05)[20]
    torch.testing.assert_close(other.detach(), (1 - phi) * was, rtol=1e-6, atol=0)


def test_a_rule_that_ends_with_the_run_needs_total_steps():
    params = matrices((4, 6))
    with pytest.raises(ValueError, match="decay='cosine' depends on the length of the run; pass total_steps"):
        MuonSW(params, decay="cosine")
    run(MuonSW(params, decay="cosine", weight_decay=0.0), params, 1)  # nothing decays, so no rule asks
    with pytest.raises(ValueError, match="total_steps=0: must be a whole number of at least 1"):
        MuonSW(params, decay="cosine", total_steps=0)


def test_an_added_group_continues_the_step_count():
    params = matrices((4, 6), (6, 6))
    optimizer = MuonSW(params[:1], lr=0.05, decay="cosine", total_steps=30)
    run(optimizer, params[:1], 7)
    optimizer.add_param_group({"params": params[1:]})
    run(optimizer, params, 1, start=7)
    assert [group["step_count"] for group in optimizer.param_groups] == [8, 8]


def test_a_saved_state_does_not_change_with_later_steps():
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, decay="gradient_norm")
    run(optimizer, params, 2)
    saved = optimizer.state_dict()
    expected = copy.deepcopy(saved["param_groups"])
    resumed = clones(params)
    other = MuonSW(resumed, lr=0.05, decay="gradient_norm")
    other.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    run(other, resumed, 2, start=2)
    run(optimizer, params, 2, start=2)
    assert saved["param_groups"] == expected


@pytest.mark.parametrize("value", [torch.tensor(torch.nan), -0.1, None, "fast", torch.tensor([0.1, 0.1])], ids=repr)
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_an_invalid_rate_or_lambda_set_later_is_refused_with_nothing_changed(key, value):
    (param,) = matrices((4, 4))
    optimizer = MuonSW([param], lr=0.1, weight_decay=0.5)
    run(optimizer, [param], 1)
    before = param.detach().clone()
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=re.escape(f"of param group 0 is {value!r}; it must be a finite number")):
        optimizer.step()
    assert torch.equal(param, before)


def test_a_rate_may_be_below_zero_by_rounding():
    """The step is taken, with the sign of the rate; minus one percent of the peak is refused."""
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
