"""The charts of a report, from the columns of runs: losses, norms, alignment, learning rate, decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from muonsw.lab.report.sections import Arm, Axis, Chart, Curve
from muonsw.lab.runs import Points, Run, name_arms, unique_names
from muonsw.lab.runs.curves import extremes, median_curve, running_mean

TOTAL_POINTS, MOST, LEAST = 240_000, 1500, 100
PREDICTED_RUNS = 8  # runs whose recursion is replayed step by step
SMOOTHED = 0.02  # share of the records that one point of a smoothed curve averages
BEGINNING = 0.1  # share of the updates whose losses may leave the chart at the top
THINNED = "Thinned by keeping the ends and the extremes of each bin: every point is a value of the run."


class Charts:
    """Builds the charts of a set of runs, all with the same arms and names."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = list(runs)
        self.labels = unique_names(run.name for run in self.runs)
        self.arm_of = name_arms(self.runs)
        self.arms = _arms(self.runs, self.arm_of)
        self._points = int(np.clip(TOTAL_POINTS / (8 * max(1, len(self.runs))), LEAST, MOST))

    def all(self) -> list[Chart]:
        """Every chart for which something was recorded."""
        losses, norms = [self.validation(), self.training()], [self.norm(), self.predicted()]
        updates = [self.alignment(), self.relative_update(), self.learning_rate(), self.decay()]
        return [chart for chart in (*losses, *norms, *updates) if chart.curves]

    def validation(self) -> Chart:
        """Loss on held-out text."""
        curves = self.curves(lambda run: run.losses)
        middle = "Thick: the median over the runs of an arm." if any(arm.runs > 1 for arm in self.arms) else ""
        note = f"Loss on held-out text after so many updates. {middle}".strip()
        return Chart("validation-loss", "Validation loss", curves, y=loss_axis(curves, self.runs), note=note)

    def training(self) -> Chart:
        """Loss of each batch."""
        curves = self.curves(lambda run: run.training_losses, smooth=True)
        note = (
            f"Thin: loss of each batch before its update. {THINNED} Thick: the median over the runs of an "
            f"arm, averaged over {100 * SMOOTHED:g} % of the records at a time."
        )
        return Chart("training-loss", "Training loss", curves, y=loss_axis(curves, self.runs), note=note)

    def norm(self) -> Chart:
        """Size of the weights that decay."""
        curves = self.curves(lambda run: run.norms)
        note = "Root mean square over all entries of the weights that decay, before each recorded update."
        return Chart("weight-norm", "Weight norm", curves, y=Axis("weight RMS"), note=note)

    def predicted(self) -> Chart:
        """The norm beside what the recursion makes of the measured updates."""
        curves: list[Curve] = []
        shown = self._representatives()
        for place in shown:
            run, label, arm = self.runs[place], self.labels[place], self.arm_of[place]
            predicted = run.predicted_norms
            if len(predicted[0]):
                curves += [Curve(label, arm, *self._thin(run.norms))]
                curves += [Curve(label, arm, *self._thin(predicted), line="dashed")]
        some = (
            ""
            if len(shown) == len(self.runs)
            else f" The first run of each arm, {len(shown)} of {len(self.runs)} runs."
        )
        note = (
            "Solid: observed. Dashed: the norm recursion replayed from the first observed norm alone, with the "
            f"measured update size, decay and alignment.{some}"
        )
        title, key = "Predicted and observed norm", (("solid", "observed"), ("dashed", "predicted"))
        return Chart("predicted-norm", title, curves, y=Axis("weight RMS"), note=note, key=key)

    def alignment(self) -> Chart:
        """The cosine that decides whether updates push the norm outward."""
        curves = self.curves(lambda run: run.recorded("alignment_update"))
        note = (
            "Cosine between the weights that decay and their update, pooled over all entries; negative grows the norm."
        )
        return Chart("alignment", "Alignment", curves, y=Axis("cosine of weight and update"), note=note)

    def relative_update(self) -> Chart:
        """How far one update moves the weights."""
        curves = self.curves(lambda run: run.recorded("relative_update"))
        note = "Root mean square of the update over that of the weights that decay."
        axis = Axis("update RMS / weight RMS", log=10)
        return Chart("relative-update", "Relative update", curves, y=axis, note=note)

    def learning_rate(self) -> Chart:
        """The schedule as it was run."""
        curves = self.curves(_learning_rates)
        note = "Base learning rate of each update."
        return Chart("learning-rate", "Learning rate", curves, y=Axis("η"), note=note)

    def decay(self) -> Chart:
        """The factor by which weights were shrunk."""
        curves = self.curves(lambda run: run.recorded("decay"))
        note = "Share φ by which an update shrinks the weights that decay: W ← (1 \N{MINUS SIGN} φ) W \N{MINUS SIGN} u."
        return Chart("decay", "Decay", curves, y=Axis("φ", "share per update"), note=note)

    def curves(self, measure: Callable[[Run], Points], *, smooth: bool = False) -> list[Curve]:
        """A curve for each run that has the measure, and a middle for each arm with several.

        Args:
            measure: Steps and values of a run.
            smooth: Whether the middle is a running mean, which an arm with a single run then has too.
        """
        measured = [measure(run) for run in self.runs]
        curves = [
            Curve(label, arm, *self._thin(points))
            for label, arm, points in zip(self.labels, self.arm_of, measured, strict=True)
            if len(points[0])
        ]
        for arm in self.arms:
            parts = [p for p, name in zip(measured, self.arm_of, strict=True) if name == arm.name and len(p[0])]
            if len(parts) > 1 or (smooth and parts):
                steps, middle = median_curve(parts)
                points = steps, running_mean(middle, SMOOTHED) if smooth else middle
                curves.append(Curve("median" if len(parts) > 1 else "mean", arm.name, *self._thin(points), middle=True))
        return curves

    def _thin(self, points: Points) -> tuple[list[float], list[float]]:
        steps, values = points
        kept = extremes(values, self._points)
        return steps[kept].tolist(), values[kept].tolist()

    def _representatives(self) -> list[int]:
        """Which runs stand for their arms where a figure cannot show all: the first of each."""
        if len(self.runs) <= PREDICTED_RUNS:
            return list(range(len(self.runs)))
        return [self.arm_of.index(arm.name) for arm in self.arms][:PREDICTED_RUNS]


def loss_axis(curves: Sequence[Curve], runs: Sequence[Run]) -> Axis:
    """An axis for losses on which each run is seen from the first tenth of its updates on.

    The fall before that may be ten times as high as everything after it, and would flatten the rest.
    """
    # The loss of somebody's own loop may have any unit.
    unit = "nats per token" if runs and all(run.config for run in runs) else ""
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


def _learning_rates(run: Run) -> Points:
    logged = run.train.known("lr")
    return logged if len(logged[0]) else run.recorded("lr")


def _arms(runs: Sequence[Run], names: Sequence[str]) -> list[Arm]:
    rules: Mapping[str, str] = {name: run.rule for run, name in reversed(list(zip(runs, names, strict=True)))}
    counts = {name: list(names).count(name) for name in names}
    return [Arm(name, rules[name], count) for name, count in counts.items()]
