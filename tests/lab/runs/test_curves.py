"""Curves of several runs: medians, running means, and thinning that keeps extremes."""

import numpy as np
import pytest

from muonsw.lab.runs.curves import extremes, median_curve, running_mean


def test_the_median_keeps_steps_that_all_have():
    steps, middle = median_curve(
        [
            (np.array([1, 2, 3]), np.array([1.0, 2, 3])),
            (np.array([2, 3]), np.array([4.0, 5])),
            (np.array([2, 3]), np.array([9.0, 0])),
        ]
    )
    assert (steps.tolist(), middle.tolist()) == ([2, 3], [4.0, 3.0])


@pytest.mark.parametrize("count", [0, 1, 2, 49, 100, 1001])
def test_the_running_mean_is_that_of_each_window(count):
    values = np.random.default_rng(count).standard_normal(count)
    for share in (0.02, 0.1, 1.0):
        half = int(share * count / 2)
        expected = [values[max(0, at - half) : at + half + 1].mean() for at in range(count)]
        np.testing.assert_allclose(running_mean(values, share), np.array(expected), rtol=1e-12, atol=1e-12)


def test_a_spike_is_forgotten_by_the_running_mean():
    values = np.where(np.arange(1000) == 5, 1e20, 2.0)
    assert running_mean(values, 0.02)[100:].tolist() == [2.0] * 900


@pytest.mark.parametrize("count", [0, 1, 5, 99, 100, 101, 4096, 10_001])
def test_thinning_keeps_ends_and_extremes(count):
    values = np.random.default_rng(count).standard_normal(count)
    kept = extremes(values, 100)
    assert len(kept) <= 100
    assert (np.diff(kept) > 0).all()
    if count:
        assert {0, count - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())
    if count <= 100:
        assert len(kept) == count
    else:
        width = -(-count // 49)
        for start in range(0, count, width):
            part, inside = values[start : start + width], kept[(kept >= start) & (kept < start + width)]
            assert values[inside].min() == part.min()
            assert values[inside].max() == part.max()
