"""The norm: the recursion against matrices, its steady state, and measured histories against closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory import norm
from muonsw.lab.theory.hypotheses import HypothesisError
from muonsw.lab.theory.norm import (
    NormHistory,
    predict_norms,
    smooth_targets,
    steady_state_norm,
    target_norms,
    tracking_end,
)

EPS = torch.finfo(torch.float64).eps


def settled(**numbers):
    return float(steady_state_norm(**{name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}))


@given(s=st.floats(1e-5, 1e-2), phi=st.floats(1e-8, 1e-2), a=st.floats(-0.7, 0.7))
def test_the_steady_state_is_the_fixed_point_for_either_sign(s, phi, a):
    r_star = settled(s=s, phi=phi, a=a)
    # The recursion without products of phi with phi or s.
    assert math.sqrt((1 - 2 * phi) * r_star**2 - 2 * s * a * r_star + s**2) == pytest.approx(r_star, rel=1e-12)


def test_a_strong_inward_push_does_not_cancel():
    s, phi, a = 1e-3, 1e-20, 0.5
    assert settled(s=s, phi=phi, a=a) == pytest.approx(s / (2 * a), rel=4 * EPS)
    assert s / (2 * phi) * (-a + math.sqrt(a * a + 2 * phi)) == 0.0  # the textbook root


@pytest.mark.parametrize("eta", [4.8e-3, 4.8e-8])
def test_scaled_limit_holds_at_every_rate_and_constant_one_only_at_zero(eta):
    lam, eta_max, k, a0 = 0.1, 4.8e-3, 20.8, 7.4e-3
    scaled = settled(s=0.2 * eta, phi=lam * eta**2 / eta_max, a=-k * eta)
    # The paper's two limits, for an alignment of -k eta and one that tends to -a0.
    assert scaled == pytest.approx(0.2 * eta_max / (2 * lam) * (k + math.sqrt(k**2 + 2 * lam / eta_max)), rel=1e-12)
    constant, limit = settled(s=0.2 * eta, phi=lam * eta, a=-a0 - 40.5 * eta), 0.2 * a0 / lam
    assert constant > limit
    # To first order sqrt(a^2 + 2 lambda eta) adds lambda eta / a, and the slope of the fit 40.5 eta.
    excess = (40.5 * eta + lam * eta / (2 * a0)) / a0
    assert eta > 1e-6 or constant == pytest.approx(limit * (1 + excess), rel=1e-7)


# Histories.


def history_of(rows, every=1):
    chosen = rows[::every]
    columns = {key: [row[key] for row in chosen] for key in ("r", "s", "phi", "a")}
    return NormHistory.of([row["step"] for row in chosen], **columns)


def cosine(t, steps):
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * t / steps))


def recursion(coefficients, start):
    """The norm itself, in float64, without any of the functions under test."""
    r, rows = start, []
    for step, (s, phi, a) in enumerate(coefficients, start=1):
        rows.append({"step": step, "r": r, "s": s, "phi": phi, "a": a})
        r = math.sqrt((1 - phi) ** 2 * r**2 - 2 * (1 - phi) * s * a * r + s**2)
    return rows


@pytest.mark.parametrize("every", [1, 100])
def test_prediction_from_samples_follows_a_smooth_run(every):
    steps = 4001
    coefficients = [(2e-3 * cosine(t, steps), 5e-3 * cosine(t, steps), -0.1 * cosine(t, steps)) for t in range(steps)]
    history = history_of(recursion(coefficients, start=0.05), every)
    predicted = predict_norms(history)
    # A line between samples misses a curve by k^2 f''/8; relative to the curve at its lowest, 0.1 of the peak, that
    # is (pi k/T)^2 * 0.45/(8 * 0.1), and the norm is at most linear in each of three coefficients.
    # With every step sampled only rounding is left: each step adds a few units in the last place.
    bound = 3 * (math.pi * every / steps) ** 2 * 0.45 / 0.8 + 1e-12 if every > 1 else steps * 1e-14
    assert predicted.tolist() == pytest.approx(history.r.tolist(), rel=bound)


@pytest.mark.parametrize("ratio", [0.05, 0.2])
def test_the_lag_behind_an_exponential_target_is_exact(ratio):
    phi = 0.01
    rate = 2.0 * phi * ratio  # of ln r*, which a norm follows in 1/(2 phi) steps
    history = history_of(recursion([(0.01 * math.exp(-rate * t), phi, 0.0) for t in range(2000)], start=0.07), 5)
    # x = r^2/r*^2 obeys x exp(-2 rate) = (1 - phi)^2 x + 2 phi, whose fixed point is the lag.
    lag = 0.5 * math.log(2.0 * phi / (math.exp(-2.0 * rate) - (1.0 - phi) ** 2))
    assert math.log(history.r[-1] / smooth_targets(history)[-1]) == pytest.approx(lag, abs=1e-9)
    assert lag == pytest.approx(ratio, abs=2.0 * ratio**2 + phi)
    assert math.isinf(tracking_end(history)) == (lag < norm.LAG)


def test_a_norm_that_cannot_reach_a_target_that_stands_still_has_stopped_following():
    """As at the end of a cosine, when decay is too slow."""
    sizes = [0.01 * math.exp(-0.002 * min(max(t - 500, 0), 300)) for t in range(1300)]
    decays = [1e-2 if t < 500 else 5e-5 for t in range(1300)]
    coefficients = [(s * (phi / 1e-2) ** 0.5, phi, 0.0) for s, phi in zip(sizes, decays, strict=True)]
    assert 500 <= tracking_end(history_of(recursion(coefficients, 0.0707), 2)) <= 800


def test_steps_without_decay_or_update_have_no_target():
    history = NormHistory.of([1, 2, 3], r=[0.1] * 3, s=[0.0, 0.01, 0.01], phi=[0.01, 0.0, 0.01], a=[0.0] * 3)
    assert torch.isnan(target_norms(history)).tolist() == [True, True, False]
    assert len(predict_norms(history)) == 3
    assert math.isinf(tracking_end(NormHistory.of([7], r=[0.1], s=[0.01], phi=[0.01], a=[0.0])))


def test_an_invalid_history_is_refused():
    good = {"r": [0.1, 0.1], "s": [0.01, 0.01], "phi": [0.01, 0.01], "a": [0.0, 0.0]}
    for steps, change, hypothesis in (([2, 2], {}, "steps increase"), ([1, 2], {"a": [0.0, math.nan]}, "a is finite")):
        with pytest.raises(HypothesisError, match=hypothesis):
            NormHistory.of(steps, **good | change)


def test_lines_through_windows_are_those_of_least_squares():
    generator = np.random.default_rng(0)
    steps = np.unique(generator.integers(0, 5000, 200))
    values = np.sin(steps / 900) + 0.1 * generator.standard_normal(len(steps))
    values[[3, 50, 51]] = np.nan
    height = norm.windowed_line(torch.from_numpy(steps), torch.from_numpy(values), 600.0)
    for place, step in enumerate(steps):
        near = (np.abs(steps - step) <= 300) & np.isfinite(values)
        if np.isnan(values[place]):
            assert math.isnan(float(height[place]))
            continue
        _, c = np.polyfit(steps[near] - step, values[near], 1)
        assert float(height[place]) == pytest.approx(c, rel=1e-8, abs=1e-10)
