"""The terms of the bounds of Theorem 3.3 and its lemmas; `test_theory.py` compares them with runs."""

import math

import pytest

from muonsw.lab.theory.muon import descent_bound, noise_floor, tracking_error_bounds, tracking_error_limit


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"f_drop": 3.0}, 3.0),
        ({"r": 4, "errors": [2.0, 4.0]}, 2 * 2 * (0.5 * 2 + 0.25 * 4) + 4e-9 * 0.3125),
        ({"q": 2.0, "grad_zero": 0.5, "bound": 14.0}, 14 * 0.3125),
        ({"L": 5.0, "r": 2}, 10 * 0.3125),
        ({"q": 2.0, "L": 3.0, "bound": 10.0}, (600 + 3) * 0.3125 + 3 * 4 * 100 * (0.5**4 + 0.25**4)),
    ],
)
def test_each_term_of_the_descent_bound(setting, expected):
    zero = {"errors": [0.0, 0.0], "f_drop": 0.0, "q": 0.0, "grad_zero": 0.0, "L": 1e-9, "r": 1, "bound": 0.0}
    assert descent_bound([0.5, 0.25], **zero | setting) == pytest.approx(expected, abs=1e-6)


def test_the_noise_floor_follows_from_the_limit_of_the_error():
    limit = tracking_error_limit(sigma=1.2, beta=0.9, B=4)
    assert limit == pytest.approx(0.1 * 1.44 / 4)
    assert noise_floor(sigma=1.2, beta=0.9, r=2, B=4) == pytest.approx(2 * math.sqrt(2 * limit))


def test_the_tracking_bound_step_by_step():
    setting = {"sigma": 0.0, "beta": 0.5, "B": 1, "L": 1.0, "r": 1, "q": 0.0, "bound": 1.0}
    assert tracking_error_bounds([0.5, 0.25, 0.25], grad_start=2.0, **setting) == [1.0, 0.75, 0.4375]
