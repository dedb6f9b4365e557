"""The figures of a report, from the columns of runs: losses, norms, alignment, learning rate, decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.report.downsample import extremes
from muonsw.lab.report.sections import Arm, Chart, Curve
from muonsw.lab.runs import Run, name_arms, unique_names
from muonsw.theory.tracking import NormHistory, predict_norms

Points = tuple[NDArray[np.int64], NDArray[np.float64]]
Measure = Callable[[Run], Points]
TOTAL_POINTS, MOST, LEAST = 240_000, 1500, 100
PREDICTED_RUNS = 8  # runs whose recursion is replayed step by step
SMOOTHED = 0.02  # share of the records that one point of a smoothed curve averages
SCOPES = ("decayed", "all")
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
        charts = (self.validation(), self.training(), self.norm(), self.predicted(), self.alignment())
        return [
            chart for chart in (*charts, self.relative_update(), self.learning_rate(), self.decay()) if chart.curves
        ]

    def validation(self) -> Chart:
        """Loss on held-out text."""
        curves = self.curves(lambda run: run.evals.known("loss"))
        note = f"Cross-entropy on held-out text after so many updates. {self._middle_note()}".strip()
        window = _late_window(curves)
        return Chart("validation-loss", "Validation loss", curves, y_label="nats per token", note=note, window=window)

    def training(self) -> Chart:
        """Loss of each batch."""
        curves = self.curves(_training_loss, smooth=True)
        note = (
            f"Thin: cross-entropy of each batch before its update. {THINNED} Thick: the median over the runs of an "
            f"arm, averaged over {100 * SMOOTHED:g} % of the records at a time."
        )
        window = _late_window(curves)
        return Chart("training-loss", "Training loss", curves, y_label="nats per token", note=note, window=window)

    def norm(self) -> Chart:
        """Size of the weights that decay."""
        curves = self.curves(lambda run: telemetry(run, "weight_rms"))
        note = "Root mean square over all entries of the weights that decay, before each recorded update."
        return Chart("weight-norm", "Weight norm", curves, y_label="weight RMS", note=note)

    def predicted(self) -> Chart:
        """The norm beside what the recursion makes of the measured updates."""
        curves: list[Curve] = []
        for place in self._representatives():
            pair = (weight_norm(self.runs[place]), predicted_norm(self.runs[place]))
            if len(pair[1][0]):
                label, arm = self.labels[place], self.arm_of[place]
                curves += [
                    Curve(label, arm, *self._thin(points), dashed=dashed)
                    for points, dashed in zip(pair, (False, True), strict=True)
                ]
        note = (
            "Solid: observed. Dashed: the norm recursion replayed from the first observed norm alone, with the "
            f"measured update size, decay and alignment.{self._some_note()}"
        )
        title = "Predicted and observed norm"
        return Chart("predicted-norm", title, curves, y_label="weight RMS", note=note)

    def alignment(self) -> Chart:
        """The cosine that decides whether updates push the norm outward."""
        curves = self.curves(lambda run: telemetry(run, "alignment_update"))
        note = (
            "Cosine between the weights that decay and their update, pooled over all entries; negative grows the norm."
        )
        return Chart("alignment", "Alignment", curves, y_label="cosine of weight and update", note=note)

    def relative_update(self) -> Chart:
        """How far one update moves the weights."""
        curves = self.curves(lambda run: telemetry(run, "relative_update"))
        note = "Root mean square of the update over that of the weights that decay."
        title = "Relative update"
        return Chart("relative-update", title, curves, y_label="update RMS / weight RMS", note=note, log_y=True)

    def learning_rate(self) -> Chart:
        """The schedule as it was run."""
        curves = self.curves(lambda run: run.train.known("lr"))
        return Chart("learning-rate", "Learning rate", curves, y_label="η", note="Base learning rate of each update.")

    def decay(self) -> Chart:
        """The factor by which weights were shrunk."""
        curves = self.curves(lambda run: telemetry(run, "decay"))
        note = "Share φ by which an update shrinks the weights that decay: W ← (1 \N{MINUS SIGN} φ) W \N{MINUS SIGN} u."
        return Chart("decay", "Decay", curves, y_label="φ", note=note)

    def curves(self, measure: Measure, *, smooth: bool = False) -> list[Curve]:
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

    def _some_note(self) -> str:
        shown = self._representatives()
        return (
            ""
            if len(shown) == len(self.runs)
            else f" The first run of each arm, {len(shown)} of {len(self.runs)} runs."
        )

    def _middle_note(self) -> str:
        return "Thick: the median over the runs of an arm." if any(arm.runs > 1 for arm in self.arms) else ""


def telemetry(run: Run, key: str) -> Points:
    """Steps and values of what was recorded of the weights that decay, or of all where none do."""
    for scope in SCOPES:
        points = run.telemetry.scope(scope).known(key)
        if len(points[0]):
            return points
    return np.empty(0, np.int64), np.empty(0)


def weight_norm(run: Run) -> Points:
    """Root mean square of the weights that decay."""
    return telemetry(run, "weight_rms")


def predicted_norm(run: Run) -> Points:
    """The norm that the recursion gives from the first one and the measured updates; empty where not recorded."""
    keys = {"r": "weight_rms", "s": "update_rms", "phi": "decay", "a": "alignment_update"}
    for scope in SCOPES:
        columns = run.telemetry.scope(scope)
        if not all(key in columns for key in keys.values()):
            continue
        known = np.isfinite(np.stack([columns[key] for key in keys.values()])).all(0)
        if known.sum() > 1:
            measured = {symbol: columns[key][known].tolist() for symbol, key in keys.items()}
            steps = columns.step[known]
            return steps, predict_norms(NormHistory.of(steps.tolist(), **measured)).numpy()
    return np.empty(0, np.int64), np.empty(0)


def median_curve(parts: Sequence[Points]) -> Points:
    """The median over curves at the steps that all of them have.

    Examples:
        >>> one, two = np.array([1, 2, 3]), np.array([2, 3, 4])
        >>> steps, middle = median_curve([(one, np.array([9.0, 1.0, 1.0])), (two, np.array([2.0, 4.0, 9.0]))])
        >>> steps.tolist(), middle.tolist()
        ([2, 3], [1.5, 2.5])
    """
    steps = parts[0][0]
    for other, _ in parts[1:]:
        if not np.array_equal(steps, other):
            steps = np.intersect1d(steps, other, assume_unique=True)
    rows = [values if len(at) == len(steps) else values[np.isin(at, steps)] for at, values in parts]
    return steps, np.median(np.stack(rows), axis=0)


def running_mean(values: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """The mean over a centred window of that share of the values; windows are cut off at the ends.

    Examples:
        >>> running_mean(np.array([0.0, 3.0, 0.0, 3.0]), share=0.75).tolist()
        [1.5, 1.0, 2.0, 1.5]
    """
    half = int(share * len(values) / 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    return np.asarray((sums[high] - sums[low]) / (high - low))


def _training_loss(run: Run) -> Points:
    steps, values = run.train.known("cross_entropy")
    return (steps, values) if len(steps) else run.train.known("loss")


def _arms(runs: Sequence[Run], names: Sequence[str]) -> list[Arm]:
    rules: Mapping[str, str] = {name: run.rule for run, name in reversed(list(zip(runs, names, strict=True)))}
    counts = {name: list(names).count(name) for name in names}
    return [Arm(name, rules[name], count) for name, count in counts.items()]


def _late_window(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """A range that shows the curves after their first fifth, where the fall of the beginning hides nothing."""
    late = [y for curve in curves for x, y in zip(curve.x, curve.y, strict=True) if x >= 0.2 * curve.x[-1]]
    if not late or max(late) >= max(y for curve in curves for y in curve.y):
        return None
    low, high = min(late), max(late)
    margin = 0.04 * (high - low) or 0.01
    return low - margin, high + margin
