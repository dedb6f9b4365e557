"""What the polynomial schedules do to singular values, as scalar functions."""

import pytest
import torch

from muonsw.orthogonalize import (
    COEFFICIENT_SETS,
    NS5,
    POLAR_EXPRESS,
    singular_value_map,
)

newton_schulz_schedule = COEFFICIENT_SETS["newton_schulz"].schedule
polar_express_schedule = COEFFICIENT_SETS["polar_express"].schedule


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


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_segments_are_the_schedule_cut(name, steps):
    segments = COEFFICIENT_SETS[name].segments(steps)
    assert all(segments)
    assert tuple(polynomial for segment in segments for polynomial in segment) == COEFFICIENT_SETS[name].schedule(steps)
