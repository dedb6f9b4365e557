"""Charts of runs: every point is a value of its run, and only the first updates may leave the picture."""

import math

import numpy as np
import pytest

from muonsw.lab.report.charts import BEGINNING, Charts, loss_axis
from muonsw.lab.report.sections import Curve, LegendEntry


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


def test_the_prediction_follows_a_norm_that_obeys_the_recursion(runs):
    steps, predicted = runs[0].predicted_norms
    observed = runs[0].norms[1]
    assert steps[-1] == 400
    # Alignment and size are sampled at every tenth step, between which they are interpolated.
    np.testing.assert_allclose(predicted, observed, rtol=0.05)
    assert predicted[0] == observed[0]


def test_arms_of_one_name_share_an_entry(runs):
    assert Charts(runs).arms == [LegendEntry("constant", "constant", 2), LegendEntry("scaled", "scaled", 2)]


@pytest.mark.parametrize("steps", [12, 150, 4000])
def test_only_the_first_updates_of_a_run_may_be_out_of_sight(steps):
    x = list(range(0, steps + 1, max(1, steps // 12)))
    curve = Curve("run", "arm", x, [3.0 + 7.0 * math.exp(-10.0 * step / steps) for step in x])
    low, high = loss_axis([curve], []).limits
    every = np.arange(steps + 1)
    seen = np.interp(every, curve.x, curve.y)
    hidden = every[(seen < low) | (seen > high)]
    assert hidden.size
    assert hidden.max() <= BEGINNING * steps


def test_a_loss_that_does_not_fall_at_first_is_shown_whole():
    assert loss_axis([], []).limits is None
    assert loss_axis([Curve("run", "arm", [0, 50, 100], [3.0, 4.0, 2.0])], []).limits is None


def test_every_chart_says_what_its_axes_show(runs):
    for chart in Charts(runs).all():
        assert chart.x.title
        assert chart.y.title
        assert chart.note
        assert ("loss" in chart.name) == (chart.y.unit == "nats per token")
