"""When a claim holds, in which order claims are shown, and the statistics behind intervals."""

import json
import math

import pytest
import torch

from muonsw.lab.stats import (
    Claim,
    Criterion,
    Interval,
    Verdict,
    any_failed,
    claims_table,
    count_verdicts,
    log_log_slope,
    over_seeds,
    student_t_cdf,
    student_t_quantile,
)


def claim(criterion, predicted, measured, tolerance=0.0, interval=None):
    return Claim("id", "statement", "ref", "hyp", predicted, measured, criterion, tolerance, "why", interval)


@pytest.mark.parametrize(
    ("criterion", "predicted", "measured", "tolerance", "holds"),
    [
        (Criterion.RELATIVE, 10.0, 10.5, 0.05, True),
        (Criterion.RELATIVE, -10.0, -10.6, 0.05, False),
        (Criterion.ABSOLUTE, 0.0, 1e-3, 1e-3, True),
        (Criterion.ABSOLUTE, 0.0, 2e-3, 1e-3, False),
        (Criterion.AT_MOST, 2.0, 2.02, 0.01, True),
        (Criterion.AT_MOST, -2.0, -1.9, 0.01, False),
        (Criterion.AT_LEAST, 2.0, 1.99, 0.01, True),
        (Criterion.AT_LEAST, -2.0, -2.1, 0.01, False),
        (Criterion.COVERED, 1.0, 1.0, 0.0, False),
    ],
)
def test_without_an_interval_a_claim_of_agreement_holds_or_fails(criterion, predicted, measured, tolerance, holds):
    judged = claim(criterion, predicted, measured, tolerance)
    assert (judged.holds, judged.fails) == (holds, not holds)
    assert not claim(criterion, 1.0, math.nan, 10.0).holds


@pytest.mark.parametrize(
    ("criterion", "tolerance", "verdicts"),
    [
        (Criterion.AT_MOST, 0.0, {1.3: "holds", 1.1: "undecided", 0.7: "fails"}),
        (Criterion.AT_LEAST, 0.0, {0.7: "holds", 0.9: "undecided", 1.3: "fails"}),
        (Criterion.ABSOLUTE, 0.1, {1.0: "undecided"}),
        (Criterion.ABSOLUTE, 0.5, {2.0: "fails"}),
        (Criterion.RELATIVE, 0.6, {2.0: "holds"}),
        (Criterion.RELATIVE, 0.5, {2.0: "undecided"}),
        (Criterion.ABOVE, 0.0, {0.7: "holds", 1.3: "fails"}),
        (Criterion.ABOVE, 0.2, {0.7: "undecided"}),
        (Criterion.BELOW, 0.0, {1.3: "holds", 1.2: "undecided", 0.7: "fails"}),
        (Criterion.COVERED, 0.0, {1.1: "holds", 1.3: "fails"}),
    ],
)
def test_an_interval_that_spans_the_bound_decides_nothing(criterion, tolerance, verdicts):
    interval = Interval(0.8, 1.2, "t")
    judged = {bound: claim(criterion, bound, 1.0, tolerance, interval).verdict for bound in verdicts}
    assert judged == {bound: Verdict(verdict) for bound, verdict in verdicts.items()}


@pytest.mark.parametrize("criterion", [Criterion.ABOVE, Criterion.BELOW])
def test_an_effect_is_not_there_because_nothing_moved(criterion):
    assert claim(criterion, 0.0, 0.0).verdict is Verdict.UNDECIDED
    assert claim(criterion, 0.0, 0.0, interval=Interval(0.0, 0.0, "t")).verdict is Verdict.UNDECIDED
    small = 0.004 if criterion is Criterion.ABOVE else -0.004
    moved = claim(criterion, 0.0, small, 0.01, Interval(small, small, "t"))
    assert moved.verdict is Verdict.UNDECIDED, "smaller than what counts as movement"


def test_failures_come_first_then_undecided_claims():
    good, bad = claim(Criterion.ABSOLUTE, 0.0, 0.0), claim(Criterion.ABSOLUTE, 0.0, 1.0)
    unsure = claim(Criterion.AT_MOST, 0.0, 0.0, interval=Interval(-1.0, 1.0, "t"))
    rows = claims_table({"a": [good, unsure], "b": [bad]}).rows
    assert [(row[1], row[-1].tone) for row in rows] == [("b/id", "fails"), ("a/id", "undecided"), ("a/id", "holds")]
    assert any_failed({"a": [bad]})
    assert not any_failed({"a": [good, unsure]})
    assert count_verdicts([good, good]).startswith("All 2 claims hold")
    assert count_verdicts([good, unsure]) == "1 of 2 claims are undecided."
    assert count_verdicts([bad, unsure]).startswith("1 of 2 claims FAILED")


def test_seeds_have_a_t_interval_and_one_seed_has_none():
    estimate = over_seeds([1.0, 2.0, 3.0])
    half = 4.30265 / math.sqrt(3)  # the t quantile of two degrees of freedom, times the standard error
    assert (estimate.interval.low, estimate.interval.high) == pytest.approx((2 - half, 2 + half), rel=1e-5)
    assert (over_seeds([0.5]).interval, over_seeds([0.5]).limits) == (None, "one seed gives no error bar")


def test_a_claim_is_plain_data():
    data = claim(Criterion.AT_MOST, 1.0, math.inf, interval=Interval(0.0, math.nan, "t")).as_data()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["verdict"] == "fails"
    assert data["measured"] is None
    assert data["criterion"] == "at most"


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    # From tables of Student's t.
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 3, 3.18245), (0.995, 19, 2.86093), (0.975, 400, 1.96591)],
)
def test_t_quantiles_agree_with_tables(probability, freedom, value):
    assert student_t_quantile(probability, freedom) == pytest.approx(value, rel=1e-5)
    assert student_t_cdf(-value, freedom) == pytest.approx(1.0 - probability, rel=1e-4)


def test_the_slope_of_a_power_is_its_exponent():
    x = torch.tensor([1.0, 3.0, 10.0, 40.0], dtype=torch.float64)
    slopes = log_log_slope(x, torch.stack([x**-1.5, 7.0 * x**2]))
    assert torch.allclose(slopes, torch.tensor([-1.5, 2.0], dtype=torch.float64))
