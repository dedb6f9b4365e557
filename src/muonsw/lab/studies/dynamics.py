"""What the telemetry of the headline runs says: steady state, alignment, orthogonality, late fits."""

from __future__ import annotations

import math

import numpy as np

from muonsw.lab import paper
from muonsw.lab.arms import CONSTANT, RULES, SCALED, Results, Runs
from muonsw.lab.diagnose import late_fits, open_history
from muonsw.lab.outcome import log_end_norm, over_runs, paired
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.charts import Axis, Chart, Curve, Level
from muonsw.lab.runs import Run
from muonsw.lab.stats import Claim, Source, at_least, at_most, below, over_seeds, within, within_share
from muonsw.lab.studies.main_table import NOTES, SAME_RUNS, draw_figures, larger_norm, sampled_row
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.study import TrainingStudy

RECURSION = Tolerance(0.1, "alignment is sampled every few steps and interpolated between, and the error adds up")
NEGATIVE = Tolerance(0.0, "the whole interval must lie below zero")
DEFECT_LOW, DEFECT_HIGH = 0.8, 1.0
DEFECT_RANGE = Tolerance(0.0, "five Newton-Schulz steps leave singular values between about 0.7 and 1.13")
SMALL_COSINE = 0.05
NEAR_ZERO = Tolerance(0.0, "a twentieth: a cosine at which a gradient is all but orthogonal to its weight")
HALF = Tolerance(0.0, "less than half as much")
STEADY_FIGURE = Source(paper.STEADY, SAME_RUNS)
DEFECT_FIGURE = Source("appendix, figure on Newton-Schulz", SAME_RUNS)
GRADIENT_FIGURE = Source("appendix, figure on gradient and momentum", SAME_RUNS)
LATE_FIGURE = Source("appendix, figure on late alignment", SAME_RUNS)


def judge_steady_state(results: Results, scale: Scale) -> list[Claim]:
    """Negative alignment, the recursion, who holds its norm, and at paper scale where tracking ends."""
    (arms,) = results.values()
    predicted, claims = Source(paper.STEADY, "measured update size, decay and alignment"), []
    for rule in RULES:
        outward = f"{rule} decay: updates push weights outward (late cosine of weight and update)"
        follows = f"{rule} decay: end norm that the recursion predicts from the first one, over the observed"
        cosine = over_runs(arms[rule], lambda run: late(run, "alignment_update"))
        claims += [
            below(f"{rule}-alignment", outward, STEADY_FIGURE, cosine, 0.0, NEGATIVE),
            within_share(
                f"{rule}-recursion", follows, predicted, over_runs(arms[rule], recursion_ratio), 1.0, RECURSION
            ),
        ]
    larger = "the norm ends higher under scaled than under constant decay (logarithm of the ratio)"
    claims.append(larger_norm("separation", larger, arms[CONSTANT], arms[SCALED], STEADY_FIGURE))
    return [*claims, *(_printed_steady_state(arms) if scale.printed else [])]


def _printed_steady_state(arms: Runs) -> list[Claim]:
    printed = paper.ROWS[1024]
    assert printed.scaled_norm is not None
    assert printed.constant_norm is not None
    follows = Source(paper.STEADY, "a norm follows while it is within a fifth of its target")
    breaks = over_seeds([min(map(tracking_end, pair)) for pair in zip(*(arms[rule] for rule in RULES), strict=True)])
    ratio = over_seeds([math.exp(gap) for gap in paired(arms[SCALED], arms[CONSTANT], log_end_norm)])
    fall = over_runs(arms[CONSTANT], lambda run: run.norm_change)
    printed_ratio = printed.scaled_norm / printed.constant_norm
    boundary = "the update from which the first of the two norms no longer follows its steady state"
    shrinks = "constant decay: change of the norm since its largest value"
    apart = "end norm under scaled over that under constant decay"
    return [
        within_share("boundary", boundary, follows, breaks, paper.BOUNDARY, paper.TRACKING),
        within("fall", shrinks, STEADY_FIGURE, fall, paper.FALL_FROM_PEAK, paper.FALL),
        within_share("ratio", apart, STEADY_FIGURE, ratio, printed_ratio, paper.NORM_RATIO),
    ]


def norm_charts(results: Results, _scale: Scale) -> list[Chart]:
    """Weight RMS beside what the recursion makes of the first one, and the alignment of weights and updates."""
    norms, alignments = [], []
    for rule, run in ((rule, arms[rule][0]) for arms in results.values() for rule in RULES):
        (steps, seen), (known, predicted) = run.norms, run.predicted_norms
        norms += [
            Curve(rule, rule, steps.tolist(), seen.tolist()),
            Curve(f"{rule}, recursion", rule, known.tolist(), predicted.tolist(), dashed=True),
        ]
        at, alignment = run.recorded("alignment_update")
        alignments.append(Curve(rule, rule, at.tolist(), alignment.tolist()))
    key = [("solid", "observed"), ("dashed", "by the recursion")]
    return [
        Chart("recursion", "Weight RMS", norms, y=Axis("RMS of the entries"), key=key),
        Chart("outward", "cos(weights, update)", alignments, y=Axis("alignment"), levels=[Level(0.0)]),
    ]


def judge_diagnostics(results: Results, scale: Scale) -> list[Claim]:
    """The three figures of the appendix: orthogonality, gradient and momentum, late alignment."""
    (arms,) = results.values()
    claims: list[Claim] = []
    for rule in RULES:
        size = f"{rule} decay: normalized size of Muon's direction"
        low, high = f"{size} is not far below that of a rotation", f"{size} stays below one"
        orthogonal = f"{rule} decay: gradients are nearly orthogonal to weights (size of the cosine)"
        against = f"{rule} decay: momentum is aligned against the weights"
        defect = over_runs(arms[rule], lambda run: typical(run, "defect"))
        gradient = over_runs(arms[rule], lambda run: abs(typical(run, "alignment_gradient")))
        momentum = over_runs(arms[rule], lambda run: typical(run, "alignment_momentum"))
        claims += [
            at_least(f"{rule}-defect-low", low, DEFECT_FIGURE, defect, DEFECT_LOW, DEFECT_RANGE),
            at_most(f"{rule}-defect-high", high, DEFECT_FIGURE, defect, DEFECT_HIGH, DEFECT_RANGE),
            at_most(f"{rule}-gradient", orthogonal, GRADIENT_FIGURE, gradient, SMALL_COSINE, NEAR_ZERO),
            below(f"{rule}-momentum", against, GRADIENT_FIGURE, momentum, 0.0, NEGATIVE),
        ]
    return [*claims, *(_printed_diagnostics(arms) if scale.printed else [_shrinking_offset(arms)])]


def _shrinking_offset(arms: Runs) -> Claim:
    """What carries over of the late fits: scaled decay's alignment falls with the learning rate."""
    shrinks = "scaled decay: late alignment over its size at the peak of the learning rate"
    limits = "too few late samples for the paper's fits; only that the alignment falls with the learning rate"
    ratio = over_runs(arms[SCALED], lambda run: late(run, "alignment_update") / at_peak(run, "alignment_update"))
    return at_most("late-alignment", shrinks, LATE_FIGURE, ratio, 0.5, HALF, limits=limits)


def _printed_diagnostics(arms: Runs) -> list[Claim]:
    parts = "the last 50 of 376 parts of the run; learning rates are those of the matrices, as muP divides them"
    figure = Source(LATE_FIGURE.reference, parts)
    size, slope = "scaled decay: normalized size of Muon's direction", "scaled decay: k of the late fit a = -k eta"
    line = "constant decay: {} of the late fit a = -a0 - k eta"
    defect = over_runs(arms[SCALED], lambda run: typical(run, "defect"))
    k_scaled = over_runs(arms[SCALED], lambda run: _fit(run, "k"))
    a0 = over_runs(arms[CONSTANT], lambda run: _fit(run, "offset"))
    k = over_runs(arms[CONSTANT], lambda run: _fit(run, "slope"))
    return [
        within("defect", size, DEFECT_FIGURE, defect, paper.DEFECT, paper.DEFECT_TOLERANCE),
        within_share("scaled-slope", slope, figure, k_scaled, paper.SCALED_SLOPE, paper.FIT),
        within_share("constant-offset", line.format("a0"), figure, a0, paper.CONSTANT_OFFSET, paper.FIT),
        within_share("constant-slope", line.format("k"), figure, k, paper.CONSTANT_SLOPE, paper.FIT),
    ]


def late(run: Run, key: str) -> float:
    """The median of a column over the last part of a run."""
    seen = open_history(run)
    return seen.typical(seen.column(key), seen.late)


def typical(run: Run, key: str) -> float:
    """The median of a column from the peak of the learning rate on."""
    seen = open_history(run)
    return seen.typical(seen.column(key))


def at_peak(run: Run, key: str) -> float:
    """The median of a column while the learning rate is above nine tenths of its peak."""
    seen = open_history(run)
    lr = seen.column("lr")
    return seen.typical(seen.column(key), (lr >= 0.9 * seen.highest("lr")) & np.isfinite(lr))


def recursion_ratio(run: Run) -> float:
    """The end norm that the recursion gives, over the one that was observed; not a number without telemetry for it."""
    seen = open_history(run)
    if seen.tracking is None or seen.norm is None:
        return math.nan
    return float(seen.tracking.predicted[-1] / seen.norm.r[-1])


def tracking_end(run: Run) -> float:
    """The update from which the norm no longer follows its target; infinite where it follows to the end."""
    tracking = open_history(run).tracking
    if tracking is None:
        return math.nan
    return math.inf if tracking.broke_at is None else float(tracking.broke_at)


def _fit(run: Run, key: str) -> float:
    fits = late_fits(open_history(run))
    return math.nan if fits is None else float(getattr(fits, key))


STEADY_STATE = TrainingStudy(
    name="steady-state",
    title="the steady-state figure: alignment, and the norm beside its target and its recursion",
    reference=paper.STEADY,
    comparisons=sampled_row,
    claims=judge_steady_state,
    charts=norm_charts,
    figures=draw_figures,
    notes=NOTES,
)
DIAGNOSTICS = TrainingStudy(
    name="diagnostics",
    title="the three diagnostic figures: orthogonality, gradient and momentum, late alignment",
    reference="appendix with additional data",
    comparisons=sampled_row,
    claims=judge_diagnostics,
    figures=draw_figures,
    notes=NOTES,
)
