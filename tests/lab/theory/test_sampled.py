"""Lines through windows of a sampled curve against least squares, and values in between."""

import math

import numpy as np
import pytest
import torch

from muonsw.lab.theory.sampled import interpolate, window_in_steps, windowed_line


def test_lines_through_windows_are_those_of_least_squares():
    generator = np.random.default_rng(0)
    steps = np.unique(generator.integers(0, 5000, 200))
    values = np.sin(steps / 900) + 0.1 * generator.standard_normal(len(steps))
    values[[3, 50, 51]] = np.nan
    height, slope = windowed_line(torch.from_numpy(steps), torch.from_numpy(values), 600.0)
    for place, step in enumerate(steps):
        near = (np.abs(steps - step) <= 300) & np.isfinite(values)
        if np.isnan(values[place]):
            assert math.isnan(float(slope[place]))
            continue
        k, c = np.polyfit(steps[near] - step, values[near], 1)
        assert float(slope[place]) == pytest.approx(k, rel=1e-8, abs=1e-12)
        assert float(height[place]) == pytest.approx(c, rel=1e-8, abs=1e-10)


def test_a_window_holds_a_tenth_of_the_run_or_five_samples():
    assert window_in_steps(torch.arange(1, 1002, 10)) == 100.0
    assert window_in_steps(torch.arange(0, 500, 100)) == 400.0
    assert window_in_steps(torch.tensor([7])) == 0.0


def test_values_in_between_lie_on_straight_lines():
    values = interpolate(torch.tensor([0, 4]), torch.tensor([1.0, 3.0]), torch.tensor([0, 1, 4]))
    assert values.tolist() == [1.0, 1.5, 3.0]
    assert interpolate(torch.tensor([7]), torch.tensor([2.0]), torch.tensor([7, 8])).tolist() == [2.0, 2.0]
