"""What the polynomial schedules do to singular values, as scalar functions."""

import pytest
import torch

from muonsw.orthogonalize import (
    NS5,
    POLAR_EXPRESS,
    newton_schulz_schedule,
    polar_express_schedule,
    singular_value_map,
)

# Relative singular values from 1.5e-3 up, dense enough that the extremes are found to 1e-6.
SIGMA = torch.logspace(-2.8239, 0, 200_001, dtype=torch.float64)


@pytest.mark.parametrize(
    ("schedule", "low", "high"),
    [
        (newton_schulz_schedule(5), 0.6798, 1.2025),
        (newton_schulz_schedule(8), 0.6818, 1.1344),
        (polar_express_schedule(5), 0.8702, 1.1236),
        (polar_express_schedule(6), 0.9974, 1.0012),
        (polar_express_schedule(8), 1 - 1e-13, 1 + 1e-13),
        (polar_express_schedule(12), 1 - 1e-13, 1 + 1e-13),
    ],
)
def test_documented_interval_is_reached_and_tight(schedule, low, high):
    values = singular_value_map(schedule)(SIGMA)
    assert low <= values.min()
    assert values.max() <= high
    assert values.min() - low < 2e-4
    assert high - values.max() < 2e-4


@pytest.mark.parametrize(
    ("schedule", "slope"),
    [
        (newton_schulz_schedule(5), 484.9),
        (polar_express_schedule(5), 966.6),
        (polar_express_schedule(8), 6300.4),
    ],
)
def test_slope_at_zero(schedule, slope):
    assert singular_value_map(schedule)(1e-12) / 1e-12 == pytest.approx(slope, abs=0.05)


@pytest.mark.parametrize("schedule_of", [newton_schulz_schedule, polar_express_schedule])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 8, 20])
def test_whole_range_stays_bounded_and_odd(schedule_of, steps):
    sigma = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    apply = singular_value_map(schedule_of(steps))
    values = apply(sigma)
    assert torch.equal(apply(-sigma), -values)
    assert values[0] == 0
    assert (values[1:] > 0).all()
    assert values.max() < 2.0


@pytest.mark.parametrize("steps", [5, 8, 20])
def test_polar_express_forgives_rounding_past_the_end_of_its_interval(steps):
    overshoot = torch.linspace(1, 1.02, 2001, dtype=torch.float64)
    assert singular_value_map(polar_express_schedule(steps))(overshoot).abs().max() < 1.2
    unsafe = singular_value_map((POLAR_EXPRESS * 3)[:steps])(overshoot)
    assert not bool((unsafe.abs() < 1.5).all())


@pytest.mark.parametrize("steps", [1, 4, 7, 8, 9, 30])
def test_schedule_has_one_polynomial_per_step(steps):
    assert newton_schulz_schedule(steps) == (NS5,) * steps
    schedule = polar_express_schedule(steps)
    assert len(schedule) == steps
    assert schedule == polar_express_schedule(40)[:steps]
    assert all(polynomial == (1.875, -1.25, 0.375) for polynomial in schedule[7:])


def test_published_safety_factor():
    first, second = polar_express_schedule(2)
    a, b, c = POLAR_EXPRESS[1]
    assert second == pytest.approx((a / 1.01, b / 1.01**3, c / 1.01**5), rel=1e-14)
    a, b, c = POLAR_EXPRESS[0]
    assert first == pytest.approx((a / 1.01**2, b / 1.01**6, c / 1.01**10), rel=1e-14)


def test_map_agrees_on_floats_and_tensors():
    apply = singular_value_map(polar_express_schedule(5))
    assert isinstance(apply(0.25), float)
    assert apply(torch.tensor(0.25, dtype=torch.float64)).item() == pytest.approx(apply(0.25), rel=1e-15)
