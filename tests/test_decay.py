"""Decay rules and the translation of lambda between them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonsw import DECAY_RULES, convert_weight_decay, decay_factor
from muonsw.decay import decay_factors
from tests.common.problems import formulas

RULES = ["constant", "scaled", "squared", "independent", "fixed"]
OF_THE_RUN = ["cosine", "log_time"]
positive = st.floats(1e-6, 10)


@given(lam=positive, peak=positive, fraction=st.floats(1e-3, 1), step=st.integers(1, 100), gradient=st.floats(1e-6, 10))
def test_each_rule_is_its_formula(lam, peak, fraction, step, gradient):
    eta = fraction * peak
    expected = formulas(lam, eta, peak, step=step, steps=100, gradient=gradient)
    assert set(expected) == set(DECAY_RULES)
    for rule, phi in expected.items():
        found = decay_factor(rule, lam, eta, peak, step=step, steps=100, gradient=gradient)
        assert found == pytest.approx(phi, rel=1e-12, abs=1e-300)


def test_cosine_decay_stays_at_zero_after_the_run():
    for step in (11, 12, 50):
        phi = decay_factor("cosine", 0.1, 0.01, 0.02, step=step, steps=10)
        assert phi == pytest.approx(0.0, abs=1e-10)


def test_without_learning_rate_or_gradient_nothing_decays():
    for rule in DECAY_RULES:
        assert decay_factor(rule, 0.1, 0.0, 0.02, step=3, steps=10, gradient=0.5) == 0.0
    assert decay_factor("gradient_norm", 0.1, 0.01, 0.02, gradient=0.0) == 0.0


def test_a_rule_says_what_it_must_know():
    with pytest.raises(ValueError, match="'log_time' depends on step"):
        decay_factor("log_time", 0.1, 0.01, 0.02)
    with pytest.raises(ValueError, match="'cosine' ends with the run"):
        decay_factor("cosine", 0.1, 0.01, 0.02, step=1)
    with pytest.raises(ValueError, match="'gradient_norm' depends on gradient"):
        decay_factor("gradient_norm", 0.1, 0.01, 0.02)
    with pytest.raises(ValueError, match="gradients of the run, which no schedule knows"):
        decay_factors("gradient_norm", 0.1, [0.01], 0.02)
    with pytest.raises(ValueError, match="'log_time' follows the step; pass schedule="):
        convert_weight_decay(0.1, "constant", "log_time", 0.02)


def test_peak_zero_or_unknown_means_no_decay_where_the_peak_divides():
    for peak in (0.0, None):
        for rule in ("scaled", "independent", "log_time"):
            assert decay_factor(rule, 0.1, 0.01, peak, step=1) == 0.0
            assert decay_factors(rule, 0.1, [0.01, 0.02], peak) == [0.0, 0.0]


@given(value=positive, peak=positive, rules=st.tuples(st.sampled_from(RULES), st.sampled_from(RULES)))
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
