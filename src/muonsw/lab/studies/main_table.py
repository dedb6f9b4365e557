"""The paper's main table: the same run with constant and with scaled decay at every width, and controls.

`main-table/width-256` is one width of it. Two more studies judge the telemetry of the headline runs: steady state, and
diagnostics (alignment, orthogonality, late fits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muonsw.lab import paper
from muonsw.lab.compare import (
    CONSTANT,
    CONTROL,
    RULES,
    SCALED,
    Arm,
    Comparison,
    Results,
    paired,
    same_total,
)
from muonsw.lab.diagnose import MIN_SAMPLES, History, open_history
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs import Run
from muonsw.lab.stats import Claim, Source, above, at_least, at_most, below, over_seeds, within, within_share
from muonsw.lab.studies.scales import SCALES, Scale
from muonsw.lab.studies.study import Study
from muonsw.lab.theory.norm import predict_norms, tracking_end
from muonsw.lab.train.config import RunConfig

GROUP = "scaled, group peak"
GROUP_CONTROL = "constant, group peak's total"
BEYOND = "beyond the paper"
SMALLER = (
    "lambda is raised so that decay acts in a short run as in a long one; gains in loss may differ from the paper's"
)
SAME_RUNS = "the same weights and batches for every arm"
SAME_LAMBDA = "the same weights, batches, learning rate and lambda for both rules"
NEGATIVE = Tolerance(0.0, "the whole interval must lie below zero")
# Smaller differences of norms do not count, even if significant.
MOVED = Tolerance(0.01, "the whole interval of the paired difference must lie above a hundredth: less is no movement")
SAME_TOTAL = Source(BEYOND, "the same weights, batches, learning rate and total decay")
GROUP_PEAK = Source(BEYOND, f"{SAME_LAMBDA}; eta_max is the group's own peak, so that rules agree at the peak")
# For each form of scaled decay: suffix of its claims, words, control, and sources of the claims about loss and norm.
FORMS = {
    SCALED: ("", "scaled decay", CONTROL, Source(paper.TABLE, SAME_LAMBDA), Source(paper.HEADLINE, SAME_LAMBDA)),
    GROUP: ("-group", "scaled decay by the group's own peak", GROUP_CONTROL, GROUP_PEAK, GROUP_PEAK),
}


@cache
def decay_arms(run: RunConfig) -> tuple[Arm, ...]:
    """Constant decay, scaled decay, and constant decay of the same total.

    Where muP divides the group's learning rate, also scaled decay with the group's own peak, and its control.
    """
    scaled = Arm(SCALED, replace(run.optimizer, decay="scaled"))
    constant = Arm(CONSTANT, replace(run.optimizer, decay="constant", peak="group"))
    if run.decoder.relative_width == 1.0:
        return constant, scaled, same_total(run, scaled)
    group = Arm(GROUP, replace(scaled.optimizer, peak="group"))
    return constant, scaled, group, same_total(run, scaled), replace(same_total(run, group), name=GROUP_CONTROL)


def row(scale: Scale, width: int) -> Comparison:
    """The arms of one width, and both rules at further lambdas, with every group's own peak."""
    run = scale.rows[width]
    arms = list(decay_arms(run))
    for factor in scale.near_best:
        lam = factor * run.optimizer.weight_decay
        for rule in RULES:
            peak = run.optimizer.peak if rule == SCALED and run.decoder.relative_width == 1.0 else "group"
            optimizer = replace(run.optimizer, decay=rule, weight_decay=lam, peak=peak)
            arms.append(Arm(f"{rule}, lambda {lam:g}", optimizer))
    return Comparison(f"width {width}", run, tuple(arms), tuple(range(scale.seeds)))


def headline_row(scale: Scale) -> list[Comparison]:
    """Both rules at the width of the figures."""
    headline = row(scale, scale.headline)
    return [replace(headline, arms=tuple(arm for arm in headline.arms if arm.name in RULES))]


def judge_rows(results: Results, scale: Scale) -> list[Claim]:
    """Loss and norm at every width, the controls, and the numbers that the paper prints."""
    claims: list[Claim] = []
    for key, arms in results.items():
        width, limits = arms[CONSTANT][0].config.decoder.width, "" if scale.printed else SMALLER
        for arm in (arm for arm in FORMS if arm in arms):
            suffix, form, control, table, figure = FORMS[arm]
            id, pair = f"w{width}{suffix}", (arms[arm], arms[CONSTANT])
            lower = f"{key}: {form} ends at a lower validation loss than constant decay"
            larger = f"{key}: the weights end larger under {form} (logarithm of the ratio of their RMS)"
            claims.append(lower_loss(f"{id}-loss", lower, table, *pair, limits))
            claims.append(larger_norm(f"{id}-norm", larger, figure, *pair))
            if arm == SCALED:
                keeps = f"{key}: scaled decay keeps more of the largest norm while the learning rate falls"
                change = over_seeds(paired(*pair, lambda run: run.norm_change))
                claims.append(above(f"{id}-kept", keeps, figure, change, 0.0, MOVED))
            if control in arms:  # at equal totals, a gain comes from when decay acts and not from less decay
                words = f"{key}: {arm} minus constant decay of the same total, in nats"
                claims.append(lower_loss(f"{id}-control", words, SAME_TOTAL, arms[arm], arms[control]))
        if scale.printed:
            claims += judge_printed(width, arms[CONSTANT], arms[SCALED])
    return claims


def lower_loss(
    id: str, statement: str, source: Source, arm: Sequence[Run], baseline: Sequence[Run], limits: str = ""
) -> Claim:
    """An arm ends at a lower validation loss than the baseline, paired by seed."""
    differences = over_seeds(paired(arm, baseline, lambda run: run.final_loss))
    return below(id, statement, source, differences, 0.0, NEGATIVE, limits=limits)


def larger_norm(id: str, statement: str, source: Source, arm: Sequence[Run], baseline: Sequence[Run]) -> Claim:
    """The weights of an arm end larger than those of the baseline, paired by seed."""
    return above(id, statement, source, over_seeds(paired(arm, baseline, log_end_norm)), 0.0, MOVED)


def log_end_norm(run: Run) -> float:
    """The logarithm of the last norm, so that differences are ratios; NaN if none was recorded."""
    return math.log(run.final_norm) if run.final_norm > 0 else math.nan


def steps_to_match(baseline: Run, arm: Run) -> float | None:
    """Return the step at which the arm reaches the baseline's best loss, over the step at which the baseline did.

    The loss is interpolated between evaluations. None if the arm never reaches it.
    """
    steps, losses = baseline.losses
    best = int(losses.argmin()) if len(losses) else 0
    if not len(losses) or steps[best] == 0:
        return None
    level, before = float(losses[best]), None
    for step, loss in zip(*arm.losses, strict=True):
        if loss <= level:
            share = 1.0 if before is None else (before[1] - level) / (before[1] - loss)
            start = step if before is None else before[0]
            return float((start + share * (step - start)) / steps[best])
        before = step, loss
    return None


def judge_printed(width: int, constant: Sequence[Run], scaled: Sequence[Run]) -> list[Claim]:
    """The numbers that the paper prints for a width: losses, gain, steps saved, end norms."""
    printed, name = paper.ROWS[width], f"w{width}"
    table, figure = Source(paper.TABLE, SAME_RUNS), Source(paper.FIGURES.get(width, ""), SAME_RUNS)
    gain = over_seeds(paired(scaled, constant, lambda run: run.best_loss))
    matches = (steps_to_match(*pair) for pair in zip(constant, scaled, strict=True))
    saved = over_seeds([math.nan if match is None else 1.0 - match for match in matches])
    lower = f"width {width}: difference of the best losses, scaled minus constant"
    sooner = f"width {width}: steps saved until scaled decay has the best loss of constant decay"
    limits = "compares the middle of one schedule with the end of another"
    claims = [
        within(f"{name}-gain", lower, table, gain, printed.scaled - printed.constant, paper.GAIN),
        within(f"{name}-saved", sooner, table, saved, printed.saved, paper.SAVED, limits=limits),
    ]
    arms = {
        CONSTANT: (constant, printed.constant, printed.constant_norm),
        SCALED: (scaled, printed.scaled, printed.scaled_norm),
    }
    for arm, (runs, loss, norm) in arms.items():
        best = f"width {width}: best validation loss, {arm} decay"
        lowest = over_seeds([run.best_loss for run in runs])
        claims.append(within(f"{name}-{arm}-loss", best, table, lowest, loss, paper.LOSS))
        if not math.isnan(norm):
            end = f"width {width}: weight RMS at the end, {arm} decay"
            norms = over_seeds([run.final_norm for run in runs])
            claims.append(within_share(f"{name}-{arm}-norm", end, figure, norms, norm, paper.NORM))
    return claims


# ---- The telemetry of the headline runs

LATE = 0.133  # the paper fits the alignment over the last 50,000 of 376,000 steps
STEADY_FIGURE = Source(paper.STEADY, SAME_RUNS)
DEFECT_FIGURE = Source("appendix, figure on Newton-Schulz", SAME_RUNS)
GRADIENT_FIGURE = Source("appendix, figure on gradient and momentum", SAME_RUNS)
LATE_FIGURE = Source("appendix, figure on late alignment", SAME_RUNS)


def judge_steady_state(results: Results, scale: Scale) -> list[Claim]:
    """Negative alignment, the recursion, which rule keeps its norm, and at paper scale when tracking ends."""
    (arms,) = results.values()
    histories = {rule: [open_history(run) for run in arms[rule]] for rule in RULES}
    predicted = Source(paper.STEADY, "measured update size, decay and alignment")
    interpolated = Tolerance(
        0.1, "alignment is sampled every few steps and interpolated between, and the error adds up"
    )
    claims = []
    for rule in RULES:
        outward = f"{rule} decay: updates push weights outward (late cosine of weight and update)"
        follows = f"{rule} decay: end norm that the recursion predicts from the first one, over the observed"
        cosine = over_seeds([seen.typical(seen.column("alignment_update"), late(seen)) for seen in histories[rule]])
        ratio = over_seeds(list(map(recursion_ratio, histories[rule])))
        claims += [
            below(f"{rule}-alignment", outward, STEADY_FIGURE, cosine, 0.0, NEGATIVE),
            within_share(f"{rule}-recursion", follows, predicted, ratio, 1.0, interpolated),
        ]
    larger = "the norm ends higher under scaled than under constant decay (logarithm of the ratio)"
    claims.append(larger_norm("separation", larger, STEADY_FIGURE, arms[SCALED], arms[CONSTANT]))
    if not scale.printed:
        return claims

    printed = paper.ROWS[1024]
    tracked = Source(paper.STEADY, "a norm follows while it is within a fifth of its target")
    breaks = over_seeds([min(map(last_followed, pair)) for pair in zip(*histories.values(), strict=True)])
    fall = over_seeds([run.norm_change for run in arms[CONSTANT]])
    ends = over_seeds([math.exp(gap) for gap in paired(arms[SCALED], arms[CONSTANT], log_end_norm)])
    printed_ends = printed.scaled_norm / printed.constant_norm
    boundary = "the step from which the first of the two norms no longer follows its steady state"
    shrinks = "constant decay: change of the norm since its largest value"
    apart = "end norm under scaled over that under constant decay"
    return [
        *claims,
        within_share("boundary", boundary, tracked, breaks, *paper.BOUNDARY),
        within("fall", shrinks, STEADY_FIGURE, fall, *paper.FALL_FROM_PEAK),
        within_share("ratio", apart, STEADY_FIGURE, ends, printed_ends, paper.NORM_RATIO),
    ]


def judge_diagnostics(results: Results, scale: Scale) -> list[Claim]:
    """The three figures of the appendix: orthogonality, gradient and momentum, late alignment."""
    (arms,) = results.values()
    singular = Tolerance(0.0, "five Newton-Schulz steps leave singular values between about 0.7 and 1.13")
    histories = {rule: [open_history(run) for run in arms[rule]] for rule in RULES}
    twentieth = Tolerance(0.0, "a twentieth: a cosine at which a gradient is all but orthogonal to its weight")
    claims: list[Claim] = []
    for rule in RULES:
        size = f"{rule} decay: normalized size of Muon's direction"
        low, high = f"{size} is not far below that of a rotation", f"{size} stays below one"
        orthogonal = f"{rule} decay: gradients are nearly orthogonal to weights (size of the cosine)"
        against = f"{rule} decay: momentum is aligned against the weights"
        defect, gradient, momentum = (
            [seen.typical(seen.column(key)) for seen in histories[rule]]
            for key in ("defect", "alignment_gradient", "alignment_momentum")
        )
        claims += [
            at_least(f"{rule}-defect-low", low, DEFECT_FIGURE, over_seeds(defect), 0.8, singular),
            at_most(f"{rule}-defect-high", high, DEFECT_FIGURE, over_seeds(defect), 1.0, singular),
            at_most(
                f"{rule}-gradient", orthogonal, GRADIENT_FIGURE, over_seeds(list(map(abs, gradient))), 0.05, twentieth
            ),
            below(f"{rule}-momentum", against, GRADIENT_FIGURE, over_seeds(momentum), 0.0, NEGATIVE),
        ]
    if not scale.printed:
        # In short runs only one part of the late fits holds: scaled decay's alignment falls with the learning rate.
        shrinks = "scaled decay: late alignment over its size at the peak of the learning rate"
        limits = "too few late samples for the paper's fits; only that the alignment falls with the learning rate"
        half = Tolerance(0.0, "less than half as much")
        ratio = over_seeds(list(map(late_over_peak, histories[SCALED])))
        return [*claims, at_most("late-alignment", shrinks, LATE_FIGURE, ratio, 0.5, half, limits=limits)]

    parts = "the last 50 of 376 parts of the run; learning rates are those of the matrices, as muP divides them"
    figure = Source(LATE_FIGURE.reference, parts)
    slope, line = "scaled decay: k of the late fit a = -k eta", "constant decay: {} of the late fit a = -a0 - k eta"
    k_scaled = over_seeds([late_fits(seen).k for seen in histories[SCALED]])
    a0 = over_seeds([late_fits(seen).offset for seen in histories[CONSTANT]])
    k = over_seeds([late_fits(seen).slope for seen in histories[CONSTANT]])
    return [
        *claims,  # `defect` and `size` are those of scaled decay, the last rule
        within("defect", size, DEFECT_FIGURE, over_seeds(defect), *paper.DEFECT),
        within_share("scaled-slope", slope, figure, k_scaled, *paper.SCALED_SLOPE),
        within_share("constant-offset", line.format("a0"), figure, a0, *paper.CONSTANT_OFFSET),
        within_share("constant-slope", line.format("k"), figure, k, *paper.CONSTANT_SLOPE),
    ]


def recursion_ratio(seen: History) -> float:
    """The end norm that the recursion predicts over the observed one; NaN without telemetry."""
    return math.nan if seen.norm is None else float(predict_norms(seen.norm)[-1] / seen.norm.r[-1])


def last_followed(seen: History) -> float:
    """The step at which the norm stops following its target, infinite if it never does; NaN without telemetry."""
    return math.nan if seen.norm is None else tracking_end(seen.norm)


def late_over_peak(seen: History) -> float:
    """The late alignment over the alignment while the learning rate is above nine tenths of its peak."""
    alignment, lr = seen.column("alignment_update"), seen.column("lr")
    high = (lr >= 0.9 * seen.highest("lr")) & np.isfinite(lr)
    return seen.typical(alignment, late(seen)) / seen.typical(alignment, high)


def late(seen: History) -> NDArray[np.bool_]:
    """Mask of the samples in the last part of the run."""
    first, last = seen.steps[0], seen.steps[-1]
    return np.asarray(seen.steps > last - LATE * (last - first))


class LateFits(NamedTuple):
    """Least squares of the late alignment over the learning rate: `a = -k eta` and `a = -offset - slope eta`."""

    k: float
    offset: float
    slope: float


def late_fits(seen: History) -> LateFits:
    """Fit the alignment over the last part of a run; NaN with too few samples or a flat learning rate."""
    lr, alignment = seen.column("lr"), seen.column("alignment_update")
    where = late(seen) & np.isfinite(lr) & np.isfinite(alignment) & (lr > 0)
    if where.sum() < MIN_SAMPLES or np.ptp(lr[where]) < 1e-3 * lr[where].mean():
        return LateFits(math.nan, math.nan, math.nan)
    lr, alignment = lr[where], alignment[where]
    slope, offset = np.polyfit(lr, alignment, 1)
    return LateFits(-float(lr @ alignment / (lr @ lr)), -float(offset), -float(slope))


MAIN_TABLE = Study(
    name="main-table",
    title="constant against scaled decay at every width, both readings of eta_max, and controls of the same total",
    comparisons=lambda scale: [row(scale, width) for width in scale.rows],
    judge=judge_rows,
    scales=tuple(SCALES),
)
STEADY_STATE = Study(
    name="steady-state",
    title="the steady-state figure: alignment, and the norm next to its target and its recursion",
    comparisons=headline_row,
    judge=judge_steady_state,
    scales=tuple(SCALES),
)
DIAGNOSTICS = Study(
    name="diagnostics",
    title="the three diagnostic figures: orthogonality, gradient and momentum, late alignment",
    comparisons=headline_row,
    judge=judge_diagnostics,
    scales=tuple(SCALES),
)
