"""Decay rules and the translation of lambda between them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw import DECAY_RULES, convert_weight_decay, decay_factor

RULES = ["constant", "scaled", "squared", "independent"]
positive = st.floats(1e-6, 10)


@given(lam=positive, peak=positive, fraction=st.floats(1e-3, 1))
def test_each_rule_is_its_formula(lam, peak, fraction):
    eta = fraction * peak
    expected = {
        "constant": lam * eta,
        "scaled": lam * eta**2 / peak,
        "squared": lam * eta**2,
        "independent": lam * eta / peak,
        "none": 0.0,
    }
    assert set(expected) == set(DECAY_RULES)
    for rule, phi in expected.items():
        assert decay_factor(rule, lam, eta, peak) == pytest.approx(phi, rel=1e-12)


def test_rules_work_on_tensors():
    eta = torch.tensor(0.01, dtype=torch.float64)
    for rule in RULES:
        assert float(decay_factor(rule, 0.1, eta, 0.02)) == pytest.approx(decay_factor(rule, 0.1, 0.01, 0.02))


def test_peak_zero_or_unknown_means_no_decay_where_the_peak_divides():
    for peak in (0.0, None):
        assert decay_factor("scaled", 0.1, 0.0, peak) == 0.0
        assert decay_factor("independent", 0.1, 0.0, peak) == 0.0


@given(value=positive, peak=positive, rules=st.tuples(st.sampled_from(RULES), st.sampled_from(RULES)))
def test_conversion_keeps_the_decay_at_the_peak(value, peak, rules):
    source, target = rules
    converted = convert_weight_decay(value, source, target, peak)
    assert decay_factor(target, converted, peak, peak) == pytest.approx(decay_factor(source, value, peak, peak))


@given(
    value=positive,
    peak=positive,
    rules=st.tuples(st.sampled_from(RULES), st.sampled_from(RULES)),
    fractions=st.lists(st.floats(0.01, 1), min_size=1, max_size=30),
)
def test_conversion_keeps_the_total_over_a_schedule(value, peak, rules, fractions):
    source, target = rules
    etas = [f * peak for f in fractions]
    converted = convert_weight_decay(value, source, target, peak, schedule=iter(etas))
    total = sum(decay_factor(source, value, eta, peak) for eta in etas)
    assert sum(decay_factor(target, converted, eta, peak) for eta in etas) == pytest.approx(total)


def test_scaled_applies_about_three_quarters_of_constants_total_under_cosine_to_a_tenth():
    steps = 10_000
    etas = [0.1 + 0.9 * (1 + math.cos(math.pi * t / steps)) / 2 for t in range(steps)]
    # mean(f^2)/mean(f) of f = .55 + .45 cos: (.55^2 + .45^2/2)/.55
    expected = (0.55**2 + 0.45**2 / 2) / 0.55
    assert 1 / convert_weight_decay(1.0, "constant", "scaled", 1.0, schedule=etas) == pytest.approx(expected, rel=1e-3)


def test_conversion_refuses_what_has_no_answer():
    with pytest.raises(ValueError, match="peak_lr must be above zero"):
        convert_weight_decay(0.1, "constant", "scaled", 0.0)
    with pytest.raises(ValueError, match=r"the schedule reaches 0\.02, above peak_lr=0\.01"):
        convert_weight_decay(0.1, "constant", "scaled", 0.01, schedule=[0.02])
    with pytest.raises(ValueError, match="takes nothing away"):
        convert_weight_decay(0.1, "constant", "none", 0.01)
    with pytest.raises(ValueError, match=r"unknown decay rule 'scale' \(did you mean 'scaled'\?\)"):
        convert_weight_decay(0.1, "scale", "constant", 0.01)
    assert convert_weight_decay(0.1, "none", "constant", 0.01) == 0.0
