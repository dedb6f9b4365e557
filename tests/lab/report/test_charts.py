"""Charts of runs: every point is a value of its run, and only the first steps may leave the picture."""

import math

import numpy as np
import pytest

from muonsw.lab.report.charts import (
    BEGINNING,
    FURTHER,
    HUES,
    Charts,
    Curve,
    LegendEntry,
    arm_styles,
    extremes,
    loss_axis,
    median_curve,
    smoothed,
)


def test_every_point_of_a_curve_is_a_value_of_its_run(runs):
    charts = {chart.name: chart for chart in Charts(runs).all()}
    by_label = {curve.label: curve for curve in charts["weight-norm"].curves}
    for run in runs:
        recorded = dict(zip(*(column.tolist() for column in run.norms), strict=True))
        curve = by_label[run.name]
        assert curve.y == [recorded[step] for step in curve.x]
    (middle,) = (curve for curve in charts["validation-loss"].curves if curve.middle and curve.arm == "constant")
    pairs = np.stack([run.evals["loss"] for run in runs[:2]])
    np.testing.assert_allclose(middle.y, np.median(pairs, axis=0), rtol=1e-12)
    for chart in charts.values():
        assert chart.x.title
        assert chart.y.title
        assert chart.note
        assert ("loss" in chart.name) == (chart.y.unit == "nats per token")


def test_the_prediction_follows_a_norm_that_obeys_the_recursion(runs):
    steps, predicted = runs[0].predicted_norms
    observed = runs[0].norms[1]
    assert steps[-1] == 400
    # Alignment and size are sampled at every tenth step, between which they are interpolated.
    np.testing.assert_allclose(predicted, observed, rtol=0.05)
    assert predicted[0] == observed[0]


@pytest.mark.parametrize("steps", [12, 4000])
def test_only_the_first_steps_of_a_run_may_be_out_of_sight(steps):
    x = list(range(0, steps + 1, max(1, steps // 12)))
    curve = Curve("run", "arm", x, [3.0 + 7.0 * math.exp(-10.0 * step / steps) for step in x])
    low, high = loss_axis([curve], []).limits
    every = np.arange(steps + 1)
    seen = np.interp(every, curve.x, curve.y)
    hidden = every[(seen < low) | (seen > high)]
    assert hidden.size
    assert hidden.max() <= BEGINNING * steps
    assert loss_axis([], []).limits is None
    assert loss_axis([Curve("run", "arm", [0, 50, 100], [3.0, 4.0, 2.0])], []).limits is None


def test_the_median_keeps_steps_that_all_have():
    curves = {(1, 2, 3): [1.0, 2, 3], (2, 3): [4.0, 5], (2, 3, 9): [9.0, 0, 1]}
    steps, middle = median_curve([(np.array(at), np.array(values)) for at, values in curves.items()])
    assert (steps.tolist(), middle.tolist()) == ([2, 3], [4.0, 3.0])


@pytest.mark.parametrize("count", [1, 49, 1001])
def test_a_smoothed_curve_has_the_means_of_its_windows_and_forgets_a_spike(count):
    values, half = np.random.default_rng(count).standard_normal(count), int(0.1 * count / 2)
    steps, means = smoothed((np.arange(count), values), 0.1, most=200)
    assert len(steps) == min(count, 200)
    expected = [values[max(0, at - half) : at + half + 1].mean() for at in steps]
    np.testing.assert_allclose(means, expected, rtol=1e-12)
    spike = np.where(np.arange(1000) == 5, 1e20, 2.0)
    assert smoothed((np.arange(1000), spike), 0.02, most=1000)[1][100:].tolist() == [2.0] * 900


@pytest.mark.parametrize("count", [0, 1, 100, 101, 10_001])
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


def test_rules_fix_hues_and_arms_of_one_rule_differ():
    rules = ["constant", "scaled", "scaled", "none", "squared", "scaled"]
    styles = list(arm_styles([LegendEntry(str(place), rule) for place, rule in enumerate(rules)]).values())
    assert [style.colour for style in styles[:2]] == list(HUES.values())
    assert [style.colour for style in styles[3:5]] == list(FURTHER[:2])
    assert len(set(styles)) == len(styles)
