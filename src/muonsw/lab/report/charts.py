"""Charts as data, drawn by `report.page` and `report.figures`; their look; and the charts of runs.

Constant decay is blue and scaled decay is vermillion in every figure of the project. The hues are those of Okabe and
Ito, which readers with any common colour blindness can tell apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.console import Table
from muonsw.lab.runs import Points, Run, name_arms, unique_names

TOTAL_POINTS, MOST, LEAST = 240_000, 1500, 100  # points of a page, and of one curve
PREDICTED_RUNS = 8  # runs whose recursion is replayed step by step
SMOOTHED = 0.02  # share of the records that one point of a smoothed curve averages
LONGEST_NAME = 100  # characters of a metric in the name of its picture
BEGINNING = 0.1  # share of the steps whose losses may leave the chart at the top


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    label: str = ""
    unit: str = ""
    log: int = 0  # the base of a logarithmic axis; 0 for a linear one
    limits: tuple[float, float] | None = None  # the range that is shown first
    ticks: Sequence[float] = ()  # where it is labelled; chosen automatically unless given

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit and self.label else self.label or self.unit


@dataclass(frozen=True)
class Curve:
    """A curve over steps, or points over anything."""

    label: str  # which run it is of; shown on hover
    arm: str  # the entry of the legend that it belongs to
    x: Sequence[float]  # ascending
    y: Sequence[float]  # gaps where not finite
    dashed: bool = False  # predicted or published values
    middle: bool = False  # the middle of an arm's runs, drawn thick; the single ones are then drawn thin


@dataclass(frozen=True)
class Level:
    """A horizontal line: a thin one, or a dashed bound with its name."""

    y: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """One panel."""

    name: str  # its id on the page and the stem of its files
    title: str
    curves: Sequence[Curve]  # in the order in which they are drawn
    x: Axis = Axis("step")
    y: Axis = Axis()
    note: str = ""
    points: bool = False  # whether each value is marked
    levels: Sequence[Level] = ()
    key: Sequence[tuple[str, str]] = ()  # what "solid" and "dashed" lines mean, in words


@dataclass(frozen=True)
class Sheet:
    """Several charts on one picture, row by row."""

    name: str  # the stem of its files
    title: str
    charts: Sequence[Chart]
    columns: int = 2


@dataclass(frozen=True)
class LegendEntry:
    """An arm as the legend shows it."""

    name: str
    rule: str = ""  # the decay rule, which fixes its hue; any other word gets one of the further colours
    runs: int = 1  # how many it stands for


Section = Table | Chart


@dataclass(frozen=True)
class Document:
    """A whole page."""

    title: str
    sections: Sequence[Section]
    verdict: str = ""  # the sentences on top
    failed: bool = False  # whether they say that something failed
    arms: Sequence[LegendEntry] = ()


# The look.

FONT_SIZE = 12.0
SANS = ("DejaVu Sans", "Helvetica Neue", "Arial", "sans-serif")
TEXT, MUTED, GRID = "#1B1F24", "#57606A", "#E3E6EA"
HUES = {"constant": "#0072B2", "scaled": "#D55E00"}
FURTHER = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", MUTED)
RULE_NAMES = {"constant": "constant (λη)", "scaled": "scaled (λη²/ηₘₐₓ)"}
# Arms of one rule: how far the hue is moved towards the text, and plotly's word for the dashes of the line.
SHADES = ((0.0, "solid"), (0.45, "dashdot"), (0.2, "dot"), (0.65, "longdashdot"))
MARKERS = "os^vD"  # so that colour is not all there is


class ArmStyle(NamedTuple):
    """How one arm is drawn: its colour, its dashes (plotly's words), its markers (matplotlib's)."""

    colour: str
    dash: str
    marker: str


def arm_styles(arms: Sequence[LegendEntry]) -> dict[str, ArmStyle]:
    """A style for each arm: the rule fixes the hue, further arms of the same rule are shaded and dashed.

    Examples:
        >>> arm_styles([LegendEntry("a", "scaled"), LegendEntry("b", "scaled")])["b"]
        ArmStyle(colour='#814210', dash='dashdot', marker='s')
    """
    rules = [arm.rule for arm in arms]
    others = list(dict.fromkeys(rule for rule in rules if rule not in HUES))
    styles = {}
    for place, (arm, rule) in enumerate(zip(arms, rules, strict=True)):
        hue = HUES[rule] if rule in HUES else FURTHER[others.index(rule) % len(FURTHER)]
        share, dash = SHADES[rules[:place].count(rule) % len(SHADES)]
        parts = [(int(hue[k : k + 2], 16), int(TEXT[k : k + 2], 16)) for k in (1, 3, 5)]
        mixed = "".join(f"{round((1.0 - share) * a + share * b):02X}" for a, b in parts)
        styles[arm.name] = ArmStyle(f"#{mixed}", dash, MARKERS[place % len(MARKERS)])
    return styles


# The charts of runs.


def anchor(name: str) -> str:
    """A name as an id on the page and in the name of a file.

    Examples:
        >>> anchor('weight norm"')
        'weight-norm-'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


class Panel(NamedTuple):
    """A chart of one measure."""

    name: str
    title: str
    measure: Callable[[Run], Points]
    y: Axis
    note: str


LOSS = Axis("loss")
PREDICTED, TRAINED = "predicted-norm", "training-loss"
EVALUATED = "On what is held out. Thick: the median over the runs of an arm, where it has several."
PANELS = (
    Panel("validation-loss", "Validation loss", lambda run: run.losses, LOSS, EVALUATED),
    Panel(TRAINED, "Training loss", lambda run: run.training_losses, LOSS,
          "Thin: loss of each batch before its step, thinned to the ends and the extremes of each bin. Thick: the "
          f"median over the runs of an arm, averaged over {100 * SMOOTHED:g}% of the records at a time."),
    Panel("weight-norm", "Weight norm", lambda run: run.norms, Axis("weight RMS"),
          "Root mean square over all elements of the weights that decay, before each recorded step."),
    Panel(PREDICTED, "Predicted and observed norm", lambda run: run.predicted_norms, Axis("weight RMS"),
          "Solid: observed. Dashed: the norm recursion replayed from the first observed norm alone, with the measured "
          "update size, decay and alignment."),
    Panel("alignment", "Alignment", lambda run: run.recorded("alignment_update"), Axis("cosine of weight and update"),
          "Cosine between the weights that decay and their update, pooled over all elements; negative grows the norm."),
    Panel("relative-update", "Relative update", lambda run: run.recorded("relative_update"),
          Axis("update RMS / weight RMS", log=10),
          "Root mean square of the update over that of the weights that decay."),
    Panel("learning-rate", "Learning rate",
          lambda run: logged if len((logged := run.train.known("lr"))[0]) else run.recorded("lr"),
          Axis("η"), "Base learning rate of each step."),
    Panel("decay", "Decay", lambda run: run.recorded("decay"), Axis("φ", "share per step"),
          "Share φ by which a step shrinks the weights that decay: W ← (1 \N{MINUS SIGN} φ) W \N{MINUS SIGN} u."),
)  # fmt: skip


class Charts:
    """The charts of a set of runs, all with the same arms and names."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = list(runs)
        self.labels = unique_names(run.name for run in self.runs)
        self.arm_of = name_arms(self.runs)
        first = dict(reversed(list(zip(self.arm_of, self.runs, strict=True))))
        self.arms = [LegendEntry(arm, first[arm].rule, count) for arm, count in Counter(self.arm_of).items()]
        self._points = int(np.clip(TOTAL_POINTS / (8 * max(1, len(self.runs))), LEAST, MOST))

    def all(self) -> list[Chart]:
        """Every chart for which something was recorded."""
        names = dict.fromkeys(name for run in self.runs for name in run.metrics)
        files = unique_names(f"metric-{anchor(name)[:LONGEST_NAME]}" for name in names)  # such as val/accuracy
        metrics = [
            Panel(file, name, partial(_metric, name), Axis(name), EVALUATED)
            for file, name in zip(files, names, strict=True)
        ]
        return [chart for chart in map(self.chart, (PANELS[0], *metrics, *PANELS[1:])) if chart.curves]

    def chart(self, panel: Panel) -> Chart:
        """One panel of all runs; the predicted norm, which takes long, of a few."""
        if panel.name == PREDICTED:
            return self._predicted(panel)
        curves = self.curves(panel.measure, smooth=panel.name == TRAINED)
        axis = loss_axis(curves, self.runs) if panel.y is LOSS else panel.y
        return Chart(panel.name, panel.title, curves, y=axis, note=panel.note)

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
                middle = median_curve(parts)
                if not len(middle[0]):  # the runs have no step in common
                    continue
                points = self._thin(smoothed(middle, SMOOTHED, self._points) if smooth else middle)
                curves.append(Curve("median" if len(parts) > 1 else "mean", entry.name, *points, middle=True))
        return curves

    def _predicted(self, panel: Panel) -> Chart:
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


def _metric(name: str, run: Run) -> Points:
    return run.evals.known(name)


def loss_axis(curves: Sequence[Curve], runs: Sequence[Run]) -> Axis:
    """An axis for losses on which each run is seen from the first tenth of its steps on.

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
        steps = np.intersect1d(steps, other, assume_unique=True)
    return steps, np.median(np.stack([values[np.isin(at, steps)] for at, values in parts]), axis=0)


def smoothed(points: Points, share: float, most: int) -> Points:
    """Means over a centred window of that share of the values, at this many places; windows are cut off at the ends.

    Examples:
        >>> smoothed((np.arange(4), np.array([0.0, 3.0, 0.0, 3.0])), share=0.75, most=9)[1].tolist()
        [1.5, 1.0, 2.0, 1.5]
    """
    steps, values = points
    half = int(share * len(values) / 2)
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), most), dtype=int))
    # Not differences of cumulative sums: one huge value would leave its rounding in every later window.
    means = [float(values[max(0, place - half) : place + half + 1].mean()) for place in places]
    return steps[places], np.array(means)


def extremes(values: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """At most so many places to keep of a finite curve: its ends, and the extremes of each of equally long bins.

    Examples:
        >>> extremes(np.array([5.0, 4.0, 9.0, 4.0, 1.0, 2.0, 3.0]), points=6).tolist()
        [0, 1, 2, 4, 6]
    """
    count = len(values)
    if count <= max(points, 4):
        return np.arange(count)
    bins = max(1, (points - 2) // 2)
    width = -(-count // bins)
    # The last bin is filled up with the last value, which is kept anyway.
    grid = np.pad(values, (0, -count % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(grid)) * width
    found = np.concatenate([starts + grid.argmin(1), starts + grid.argmax(1), [0, count - 1]])
    return np.unique(np.minimum(found, count - 1))
