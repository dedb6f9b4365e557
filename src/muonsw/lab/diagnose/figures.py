"""The figures of a diagnosis; each diagnostic figure of the paper has its counterpart here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muonsw.lab.diagnose.diagnosis import Diagnosis
from muonsw.lab.diagnose.history import History
from muonsw.lab.diagnose.rules import words
from muonsw.lab.report.charts import loss_axis
from muonsw.lab.report.sections import Axis, Band, Chart, Curve, LegendEntry, Level, Mark, Sheet
from muonsw.lab.report.static import write_sheet
from muonsw.lab.report.theme import RULE_NAMES
from muonsw.lab.runs import Points, unique_names
from muonsw.lab.runs.curves import smooth_curve

ACROSS = 4  # small panels side by side
COSINE = Axis("cosine")
FROM_PEAK = Axis("step, from the peak of the learning rate")
OBSERVED, TARGET = ("solid", "observed"), ("dashed", "steady state r*")
RECURSION, ENDS = ("dotted", "recursion from first norm"), ("mark", "norm no longer follows r*")


class NamedDiagnosis(NamedTuple):
    """A diagnosis with the name that it has in every figure, and the telemetry of its chosen scope."""

    name: str
    diagnosis: Diagnosis
    history: History


def draw(diagnoses: Sequence[Diagnosis], folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Draw the figures of these names, or all, as PNG and SVG; one for which nothing was recorded is left out."""
    arms = legend(diagnoses)
    named = [NamedDiagnosis(arm.name, one, one.history) for arm, one in zip(arms, diagnoses, strict=True)]
    sheets = (FIGURES[name](named) for name in names or FIGURES)
    return [path for sheet in sheets if sheet is not None for path in write_sheet(sheet, arms, folder)]


def legend(diagnoses: Sequence[Diagnosis]) -> list[LegendEntry]:
    """Names and colours: the first run of a rule has the rule's colour, further ones have other colours.

    Runs are called by their rule where that tells them apart, else by their folder.
    """
    rules = [one.run.rule for one in diagnoses]
    by_rule = len(set(rules)) == len(rules) and all(rule in RULE_NAMES for rule in rules)
    names = [RULE_NAMES[rule] for rule in rules] if by_rule else unique_names(one.run.name for one in diagnoses)
    hues = [rule if rule not in rules[:place] else f"run {place}" for place, rule in enumerate(rules)]
    return [LegendEntry(name, hue) for name, hue in zip(names, hues, strict=True)]


def loss_and_norm(named: Sequence[NamedDiagnosis]) -> Sheet:
    """Loss and weight norm over steps (the paper's first figure, and those of widths 512 and 768)."""
    evaluated = all(len(one.diagnosis.run.losses[0]) for one in named)
    losses: list[Curve] = []
    for name, diagnosis, _ in named:
        losses += _curves(name, diagnosis.run.losses) if evaluated else _noisy(name, diagnosis.run.training_losses)
    axis = loss_axis(losses, [one.diagnosis.run for one in named])
    loss = Chart("loss", "Validation loss" if evaluated else "Training loss", losses, y=axis)
    norms = _each(named, "weight_rms", _curves)
    norm = Chart("norm", f"Weight RMS of {_scope(named)}", norms, y=_from_zero([one.history for one in named], 1.05))
    return Sheet("loss-and-norm", "Loss and weight norm", [chart for chart in (loss, norm) if chart.curves])


def alignment_and_prediction(named: Sequence[NamedDiagnosis]) -> Sheet | None:
    """Alignment, and observed norm beside the steady state and the recursion (the paper's second figure)."""
    if not _recorded(named, "alignment_update"):
        return None
    norms, marks = [], []
    for name, _, history in named:
        tracking = history.tracking
        norms += _curves(name, history.points("weight_rms"))
        if tracking is not None and history.norm is not None:
            norms += _curves(name, (history.norm.steps, tracking.smooth_target), line="dashed")
            norms += _curves(name, (history.norm.steps, tracking.predicted), line="dotted", neutral=True)
            marks += [] if tracking.broke_at is None else [Mark(tracking.broke_at, name)]
    cosines = _each(named, "alignment_update", _noisy)
    alignment = Chart("alignment", "Cosine of weight and update", cosines, y=COSINE, levels=[Level(0.0)])
    axis, key = _from_zero([one.history for one in named], 1.45), [OBSERVED, TARGET, RECURSION]
    key += [ENDS] if marks else []
    norm = Chart("norm", f"Weight RMS of {_scope(named)}", norms, y=axis, marks=marks, key=key)
    return Sheet("alignment-and-prediction", "Alignment, and the norm it predicts", [alignment, norm])


def tracking_ratio_and_lag(named: Sequence[NamedDiagnosis]) -> Sheet | None:
    """The adiabatic ratio and the lag: whether the norm can follow its target, and whether it does."""
    ratios, lags = [], []
    for name, _, history in named:
        tracking = history.tracking
        if tracking is None or history.norm is None:
            continue
        fell = history.peak_at < len(history.steps) - 3
        after = history.norm.steps >= (int(history.steps[history.peak_at]) if fell else 0)
        steps = history.norm.steps[after]
        ratios += _curves(name, (steps, tracking.ratio[after]))
        ratios += _curves(name, (steps, tracking.ratio_fixed[after]), line="dashed")
        lags += _curves(name, (steps, tracking.lag[after]))
    if not lags:
        return None
    # Where the target stands still the ratio is the noise of a slope around zero.
    limits = (1e-3, max(10.0, 1.5 * max(y for curve in ratios for y in curve.y)))
    key = [("solid", "τ = 1/(2φ)"), ("dashed", "τ with the alignment frozen")]
    charts = [
        Chart("ratio", "Adiabatic ratio τ |d ln r*/dt|", ratios, x=FROM_PEAK, y=Axis("ratio", log=10, limits=limits),
              levels=[Level(1.0)], key=key),
        Chart("lag", "Lag ln(r/r*)", lags, x=FROM_PEAK, y=Axis("lag"), levels=[Level(0.0)], bands=[Band(-0.2, 0.2)]),
    ]  # fmt: skip
    return Sheet("tracking", "Does the norm follow its steady state?", charts)


def orthogonality(named: Sequence[NamedDiagnosis]) -> Sheet | None:
    """How far from orthogonal Muon's direction is (the paper's figure on Newton-Schulz)."""
    if not _recorded(named, "defect"):
        return None
    curves = _each(named, "defect", _noisy)
    values = [y for curve in curves for y in curve.y]
    axis = Axis("‖O‖ / √min(m, n)", limits=(min(0.8, *values) - 0.02, max(1.05, *values) + 0.02))
    chart = Chart("defect", "Mean over matrices", curves, y=axis, levels=[Level(1.0, "orthogonal")])
    return Sheet("orthogonality", "Size of Muon's direction", [chart], columns=1)


def gradient_and_momentum(named: Sequence[NamedDiagnosis]) -> Sheet | None:
    """Alignment of the weights with gradient and momentum (the paper's figure of the same)."""
    keys = {"alignment_gradient": "Weight and gradient", "alignment_momentum": "Weight and momentum"}
    if not _recorded(named, *keys):
        return None
    curves = {key: _each(named, key, _noisy) for key in keys}
    values = [y for those in curves.values() for curve in those for y in curve.y] + [0.0]
    margin = 0.05 * (max(values) - min(values)) or 0.01
    axis = Axis("cosine", limits=(min(values) - margin, max(values) + margin))
    charts = [Chart(key, title, curves[key], y=axis, levels=[Level(0.0)]) for key, title in keys.items()]
    return Sheet("gradient-and-momentum", "Gradient and momentum against the weights", charts)


def late_alignment(named: Sequence[NamedDiagnosis]) -> Sheet | None:
    """Late alignment over learning rate with both fits, extended to zero (the paper's figure of the same)."""
    curves, key = [], []
    for name, diagnosis, history in named:
        fits = diagnosis.fits
        if fits is None:
            continue
        late = (history.steps >= fits.first_step) & np.isfinite(history.column("alignment_update"))
        lr, observed = history.column("lr")[late], history.column("alignment_update")[late]
        order = lr.argsort()
        curves += _curves(name, (lr[order], observed[order]), line="none")
        reach = np.linspace(0.0, float(lr.max()), 50)
        if fits.origin:
            curves += _curves(name, (reach, fits.origin.at(reach)), line="dashed")
            key.append(("dashed", f"{name}: \N{MINUS SIGN}{fits.origin.k:.3g} η"))
        if fits.offset:
            curves += _curves(name, (reach, fits.offset.at(reach)), line="dotted")
            line = f"{-fits.offset.a0:+.2g} {-fits.offset.k:+.3g} η".replace("-", "\N{MINUS SIGN}")
            key.append(("dotted", f"{name}: {line}"))
    if not curves:
        return None
    axis = Axis("learning rate η", limits=(0.0, 1.03 * max(x for curve in curves for x in curve.x)))
    title = f"Cosine of weight and update, {_scope(named)}"
    chart = Chart("late-alignment", title, curves, x=axis, y=COSINE, levels=[Level(0.0)], key=key)
    return Sheet("late-alignment", "Late alignment against the learning rate", [chart], columns=1)


def small_multiples(name: str, title: str, kind: str, key: str, named: Sequence[NamedDiagnosis]) -> Sheet | None:
    """One panel for each role or layer; the norm is drawn with its steady state."""
    histories = [(one.name, history) for one in named for history in getattr(one.diagnosis, kind)]
    if not any(np.isfinite(history.column(key)).any() for _, history in histories):
        return None
    panel = _norm_panel if key == "weight_rms" else _cosine_panel
    scopes = dict.fromkeys(history.scope for _, history in histories)
    charts = [panel(scope, [pair for pair in histories if pair[1].scope == scope]) for scope in scopes]
    return Sheet(name, title, charts, columns=ACROSS)


def _norm_panel(scope: str, pairs: Sequence[tuple[str, History]]) -> Chart:
    curves: list[Curve] = []
    for name, history in pairs:
        curves += _curves(name, history.points("weight_rms"))
        curves += _curves(name, history.smooth_target, line="dashed")
    axis = _from_zero([history for _, history in pairs], 1.4)
    return Chart(scope, scope.replace(":", " "), curves, y=axis, key=(OBSERVED, TARGET))


def _cosine_panel(scope: str, pairs: Sequence[tuple[str, History]]) -> Chart:
    curves = [curve for name, history in pairs for curve in _noisy(name, history.points("alignment_update"))]
    return Chart(scope, scope.replace(":", " "), curves, y=COSINE, levels=[Level(0.0)])


def _each(named: Sequence[NamedDiagnosis], key: str, draw: Callable[[str, Points], list[Curve]]) -> list[Curve]:
    return [curve for one in named for curve in draw(one.name, one.history.points(key))]


def _curves(name: str, points: Any, **looks: Any) -> list[Curve]:
    """A curve through the finite points; none where there are none."""
    x, y = (np.asarray(part, dtype=np.float64) for part in points)
    known = np.isfinite(x) & np.isfinite(y)
    return [Curve(name, name, x[known].tolist(), y[known].tolist(), **looks)] if known.any() else []


def _noisy(name: str, points: Points) -> list[Curve]:
    """The samples, and their smoothed middle where there are enough to be noisy."""
    smooth = smooth_curve(points)
    return _curves(name, points) + ([] if smooth is None else _curves(name, smooth, middle=True))


def _recorded(named: Sequence[NamedDiagnosis], *keys: str) -> bool:
    return any(np.isfinite(one.history.column(key)).any() for one in named for key in keys)


def _from_zero(histories: Iterable[History], factor: float) -> Axis:
    """An axis for norms that a target far outside, as during warmup, does not stretch."""
    highest = max(history.highest("weight_rms") for history in histories)
    return Axis("weight RMS", limits=(0.0, factor * highest if highest > 0 else 1.0))


def _scope(named: Sequence[NamedDiagnosis]) -> str:
    return words(named[0].history.scope)


Build = Callable[[Sequence[NamedDiagnosis]], Sheet | None]
FIGURES: Mapping[str, Build] = {
    "loss-and-norm": loss_and_norm,
    "alignment-and-prediction": alignment_and_prediction,
    "tracking": tracking_ratio_and_lag,
    "orthogonality": orthogonality,
    "gradient-and-momentum": gradient_and_momentum,
    "late-alignment": late_alignment,
    **{
        name: partial(small_multiples, name, title, kind, key)
        for name, title, kind, key in (
            ("roles", "Weight RMS by role", "roles", "weight_rms"),
            ("roles-alignment", "Cosine of weight and update by role", "roles", "alignment_update"),
            ("layers", "Weight RMS by layer", "layers", "weight_rms"),
            ("layers-alignment", "Cosine of weight and update by layer", "layers", "alignment_update"),
        )
    },
}
