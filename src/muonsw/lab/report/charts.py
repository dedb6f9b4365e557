"""The charts of a report, from the columns of runs: losses, norms, alignment, learning rate, decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from muonsw.lab.report.page import anchor
from muonsw.lab.report.sections import Axis, Chart, Curve, LegendEntry
from muonsw.lab.runs import Points, Run, name_arms, unique_names
from muonsw.lab.runs.curves import extremes, median_curve, running_mean

TOTAL_POINTS, MOST, LEAST = 240_000, 1500, 100
PREDICTED_RUNS = 8  # runs whose recursion is replayed step by step
SMOOTHED = 0.02  # share of the records that one point of a smoothed curve averages
LONGEST_NAME = 100  # characters of a metric in the name of its picture
BEGINNING = 0.1  # share of the updates whose losses may leave the chart at the top


class Panel(NamedTuple):
    """A chart of one measure."""

    name: str
    title: str
    measure: Callable[[Run], Points]
    y: Axis
    note: str


def _learning_rates(run: Run) -> Points:
    logged = run.train.known("lr")
    return logged if len(logged[0]) else run.recorded("lr")


def _metric(run: Run, name: str) -> Points:
    return run.evals.known(name)


LOSS = Axis("loss")
PANELS = (
    Panel("validation-loss", "Validation loss", lambda run: run.losses, LOSS,
          "Loss on what is held out, after so many updates."),
    Panel("training-loss", "Training loss", lambda run: run.training_losses, LOSS,
          "Thin: loss of each batch before its update. Thinned by keeping the ends and the extremes of each bin: every "
          "point is a value of the run. Thick: the median over the runs of an arm, averaged over "
          f"{100 * SMOOTHED:g}% of the records at a time."),
    Panel("weight-norm", "Weight norm", lambda run: run.norms, Axis("weight RMS"),
          "Root mean square over all entries of the weights that decay, before each recorded update."),
    Panel("predicted-norm", "Predicted and observed norm", lambda run: run.predicted_norms, Axis("weight RMS"),
          "Solid: observed. Dashed: the norm recursion replayed from the first observed norm alone, with the measured "
          "update size, decay and alignment."),
    Panel("alignment", "Alignment", lambda run: run.recorded("alignment_update"), Axis("cosine of weight and update"),
          "Cosine between the weights that decay and their update, pooled over all entries; negative grows the norm."),
    Panel("relative-update", "Relative update", lambda run: run.recorded("relative_update"),
          Axis("update RMS / weight RMS", log=10),
          "Root mean square of the update over that of the weights that decay."),
    Panel("learning-rate", "Learning rate", _learning_rates, Axis("η"), "Base learning rate of each update."),
    Panel("decay", "Decay", lambda run: run.recorded("decay"), Axis("φ", "share per update"),
          "Share φ by which an update shrinks the weights that decay: W ← (1 \N{MINUS SIGN} φ) W \N{MINUS SIGN} u."),
)  # fmt: skip


class Charts:
    """Builds the charts of a set of runs, all with the same arms and names."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = list(runs)
        self.labels = unique_names(run.name for run in self.runs)
        self.arm_of = name_arms(self.runs)
        first = dict(reversed(list(zip(self.arm_of, self.runs, strict=True))))
        self.arms = [LegendEntry(arm, first[arm].rule, count) for arm, count in Counter(self.arm_of).items()]
        self._points = int(np.clip(TOTAL_POINTS / (8 * max(1, len(self.runs))), LEAST, MOST))

    def all(self) -> list[Chart]:
        """Every chart for which something was recorded."""
        first, *others = PANELS
        return [chart for chart in map(self.chart, (first, *self._metrics(), *others)) if chart.curves]

    def _metrics(self) -> list[Panel]:
        """A panel for each metric that evaluations recorded besides the loss."""
        names = dict.fromkeys(name for run in self.runs for name in run.metrics)
        note = (
            "On what is held out, after so many updates. Thick: the median over the runs of an arm, where it has some."
        )
        files = unique_names(f"metric-{anchor(name)[:LONGEST_NAME]}" for name in names)  # such as val/accuracy
        return [
            Panel(file, name, partial(_metric, name=name), Axis(name), note)
            for file, name in zip(files, names, strict=True)
        ]

    def chart(self, panel: Panel) -> Chart:
        """One panel of all runs; the predicted norm, which takes long, of a few."""
        if panel.name == "predicted-norm":
            return self._predicted(panel)
        curves, note = self.curves(panel.measure, smooth=panel.name == "training-loss"), panel.note
        if panel.name == "validation-loss" and any(arm.runs > 1 for arm in self.arms):
            note += " Thick: the median over the runs of an arm."
        axis = loss_axis(curves, self.runs) if panel.y is LOSS else panel.y
        return Chart(panel.name, panel.title, curves, y=axis, note=note)

    def curves(self, measure: Callable[[Run], Points], *, smooth: bool = False) -> list[Curve]:
        """A curve for each run that has the measure, and a middle for each arm with several.

        With `smooth` the middle is a running mean, which an arm with a single run then has too.
        """
        measured = [measure(run) for run in self.runs]
        shown = [each for each in zip(self.labels, self.arm_of, measured, strict=True) if len(each[2][0])]
        curves = [Curve(label, arm, *self._thin(points)) for label, arm, points in shown]
        for entry in self.arms:
            parts = [points for _, arm, points in shown if arm == entry.name]
            if len(parts) > 1 or (smooth and parts):
                steps, middle = median_curve(parts)
                if not len(steps):  # the runs have none in common
                    continue
                points = self._thin((steps, running_mean(middle, SMOOTHED) if smooth else middle))
                curves.append(Curve("median" if len(parts) > 1 else "mean", entry.name, *points, middle=True))
        return curves

    def _predicted(self, panel: Panel) -> Chart:
        """The norm beside what the recursion makes of the measured updates, for the first runs of the arms."""
        shown, note, curves = list(range(len(self.runs))), panel.note, []
        if len(shown) > PREDICTED_RUNS:
            shown = [self.arm_of.index(arm.name) for arm in self.arms][:PREDICTED_RUNS]
            note += f" The first run of each arm, {len(shown)} of {len(self.runs)} runs."
        for place in shown:
            run, label, arm = self.runs[place], self.labels[place], self.arm_of[place]
            predicted = panel.measure(run)
            if len(predicted[0]):
                curves.append(Curve(label, arm, *self._thin(run.norms)))
                curves.append(Curve(label, arm, *self._thin(predicted), dashed=True))
        key = (("solid", "observed"), ("dashed", "predicted"))
        return Chart(panel.name, panel.title, curves, y=panel.y, note=note, key=key)

    def _thin(self, points: Points) -> tuple[list[float], list[float]]:
        steps, values = points
        kept = extremes(values, self._points)
        return steps[kept].tolist(), values[kept].tolist()


def loss_axis(curves: Sequence[Curve], runs: Sequence[Run]) -> Axis:
    """An axis for losses on which each run is seen from the first tenth of its updates on.

    The fall before that may be ten times as high as everything after it, and would flatten the rest.
    """
    # The loss of a user's own task or loop may have any unit.
    unit = "nats per token" if runs and all(run.unit for run in runs) else ""
    late: list[float] = []
    for curve in curves:
        begin = BEGINNING * curve.x[-1]
        late += [y for x, y in zip(curve.x, curve.y, strict=True) if x >= begin]
        late.append(float(np.interp(begin, curve.x, curve.y)))
    if not late or max(late) >= max(y for curve in curves for y in curve.y):
        return Axis("loss", unit)
    low, high = min(late), max(late)
    margin = 0.04 * (high - low) or 0.01
    return Axis("loss", unit, limits=(low - margin, high + margin))
