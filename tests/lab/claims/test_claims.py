"""When a claim holds, in which order claims are shown, and the statistics behind intervals."""

import json
import math

import pytest
import torch

from muonsw.lab.claims.claim import Claim, Comparison, Interval, failed_first
from muonsw.lab.claims.statistics import log_log_slope, student_t_cdf, student_t_quantile, t_interval
from muonsw.lab.storage import plain


def claim(comparison, predicted, measured, tolerance=0.0, interval=None):
    return Claim("id", "statement", "ref", "hyp", predicted, measured, comparison, tolerance, "why", interval)


@pytest.mark.parametrize(
    ("comparison", "predicted", "measured", "tolerance", "holds"),
    [
        (Comparison.RELATIVE, 10.0, 10.5, 0.05, True),
        (Comparison.RELATIVE, -10.0, -10.6, 0.05, False),
        (Comparison.RELATIVE, 0.0, 1e-300, 0.5, False),
        (Comparison.ABSOLUTE, 0.0, 1e-3, 1e-3, True),
        (Comparison.ABSOLUTE, 0.0, 2e-3, 1e-3, False),
        (Comparison.AT_MOST, 2.0, 1.0, 0.0, True),
        (Comparison.AT_MOST, 2.0, 2.02, 0.01, True),
        (Comparison.AT_MOST, 2.0, 2.03, 0.01, False),
        (Comparison.AT_MOST, -2.0, -2.0, 0.0, True),
        (Comparison.AT_MOST, -2.0, -1.9, 0.01, False),
        (Comparison.AT_MOST, 0.0, 1e-9, 1e-8, True),
        (Comparison.AT_LEAST, 2.0, 1.99, 0.01, True),
        (Comparison.AT_LEAST, 2.0, 1.97, 0.01, False),
        (Comparison.AT_LEAST, -2.0, -2.1, 0.01, False),
    ],
)
def test_verdicts(comparison, predicted, measured, tolerance, holds):
    assert claim(comparison, predicted, measured, tolerance).holds is holds


@pytest.mark.parametrize("comparison", Comparison)
def test_what_is_not_a_number_never_holds(comparison):
    assert not claim(comparison, 1.0, math.nan, 10.0).holds


def test_bounds_on_means_are_held_against_the_worse_end_of_the_interval():
    interval = Interval(0.8, 1.2, "t")
    assert not claim(Comparison.AT_MOST, 1.1, 1.0, interval=interval).holds
    assert not claim(Comparison.AT_LEAST, 0.9, 1.0, interval=interval).holds
    assert claim(Comparison.INSIDE, 1.1, 1.0, interval=interval).holds
    assert not claim(Comparison.INSIDE, 1.3, 1.0, interval=interval).holds
    assert not claim(Comparison.INSIDE, 1.0, 1.0).holds


def test_failures_come_first_and_the_rest_keeps_its_order():
    good, bad = claim(Comparison.ABSOLUTE, 0.0, 0.0), claim(Comparison.ABSOLUTE, 0.0, 1.0)
    assert failed_first([good, bad, good]) == [bad, good, good]


def test_a_claim_is_plain_data():
    data = claim(Comparison.AT_MOST, 1.0, math.inf, interval=Interval(0.0, math.nan, "t")).as_data()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["verdict"] == "fails"
    assert data["measured"] is None
    assert data["comparison"] == "at most"
    assert plain((1, [2.0, {"a": None}])) == [1, [2.0, {"a": None}]]


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    # From tables of Student's t.
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 3, 3.18245), (0.995, 19, 2.86093), (0.975, 400, 1.96591)],
)
def test_t_quantiles_agree_with_tables(probability, freedom, value):
    assert student_t_quantile(probability, freedom) == pytest.approx(value, rel=1e-5)
    assert student_t_cdf(-value, freedom) == pytest.approx(1.0 - probability, rel=1e-4)


def test_t_intervals_cover_as_often_as_they_say():
    samples = torch.randn(2000, 5, dtype=torch.float64)
    covered = sum(0.0 in t_interval(row) for row in samples) / 2000
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_an_interval_needs_two_samples_and_a_quantile_a_probability():
    with pytest.raises(ValueError, match="at least two"):
        t_interval(torch.zeros(1))
    with pytest.raises(ValueError, match="quantile"):
        student_t_quantile(0.3, 4)


def test_slopes_of_several_curves():
    x = torch.tensor([1.0, 3.0, 10.0, 40.0], dtype=torch.float64)
    slopes = log_log_slope(x, torch.stack([x**-1.5, 7.0 * x**2]))
    assert torch.allclose(slopes, torch.tensor([-1.5, 2.0], dtype=torch.float64))
    assert torch.allclose(log_log_slope(x.tolist(), x**-1.5), slopes[0])
