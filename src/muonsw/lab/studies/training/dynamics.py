"""What the telemetry of the headline runs says: steady state, alignment, orthogonality, late fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from muonsw.lab import paper
from muonsw.lab.claims.claim import Claim
from muonsw.lab.claims.claim import Comparison as Held
from muonsw.lab.diagnose import diagnose, late_fits
from muonsw.lab.diagnose.figures import draw
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs import Run
from muonsw.lab.studies.training.effects import ABOVE, CONSTANT, SCALED, subfolder
from muonsw.lab.studies.training.evidence import claim, end_norm, history, norm_left, paired
from muonsw.lab.studies.training.scales import Scale
from muonsw.lab.studies.training.study import Results

RULES = (CONSTANT, SCALED)
RECURSION = Tolerance(0.1, "alignment is sampled every few updates and interpolated between, and the error adds up")
NEGATIVE = Tolerance(0.0, "the whole interval must lie below zero")
DEFECT_LOW, DEFECT_HIGH = 0.8, 1.0
DEFECT_RANGE = Tolerance(0.0, "five Newton-Schulz steps leave singular values between about 0.7 and 1.13")
SMALL_COSINE = 0.05
NEAR_ZERO = Tolerance(0.0, "a twentieth: a cosine at which a gradient is all but orthogonal to its weight")
HALF = Tolerance(0.0, "less than half as much")
DEFECT_FIGURE = "appendix, figure on Newton-Schulz"
GRADIENT_FIGURE = "appendix, figure on gradient and momentum"
LATE_FIGURE = "appendix, figure on late alignment"


def judge_steady_state(results: Results, scale: Scale) -> list[Claim]:
    """Negative alignment, the recursion, who holds its norm, and at paper scale where tracking ends."""
    (arms,) = results.values()
    claims = []
    for rule in RULES:
        runs = arms[rule]
        claims += [
            claim(
                f"{rule}-alignment", f"{rule} decay: updates push weights outward (late cosine of weight and update)",
                [late(run, "alignment_update") for run in runs], Held.AT_MOST, 0.0, NEGATIVE, reference=paper.STEADY,
            ),
            claim(
                f"{rule}-recursion",
                f"{rule} decay: end norm that the recursion predicts from the first one, over the observed",
                [recursion_ratio(run) for run in runs], Held.RELATIVE, 1.0, RECURSION, reference=paper.STEADY,
                hypothesis="measured update size, decay and alignment",
            ),
        ]  # fmt: skip
    claims.append(
        claim(
            "separation",
            "the norm ends higher under scaled than under constant decay (logarithm of the ratio)",
            paired(arms[SCALED], arms[CONSTANT], lambda run: math.log(end_norm(run))),
            Held.AT_LEAST,
            0.0,
            ABOVE,
            reference=paper.STEADY,
        )
    )
    return [*claims, *(_printed_steady_state(arms) if scale.printed else [])]


def _printed_steady_state(arms: Mapping[str, Sequence[Run]]) -> list[Claim]:
    breaks = [min(map(tracking_end, pair)) for pair in zip(*(arms[rule] for rule in RULES), strict=True)]
    ratio = [math.exp(gap) for gap in paired(arms[SCALED], arms[CONSTANT], lambda run: math.log(end_norm(run)))]
    told = paper.ROWS[1024]
    assert told.scaled_norm is not None
    assert told.constant_norm is not None
    return [
        claim(
            "boundary", "the update from which the first of the two norms no longer follows its steady state",
            breaks, Held.RELATIVE, paper.BOUNDARY, paper.TRACKING, reference=paper.STEADY,
            hypothesis="a norm follows while it is within a fifth of its target",
        ),
        claim(
            "fall", "constant decay: change of the norm since its largest value",
            [norm_left(run) for run in arms[CONSTANT]], Held.ABSOLUTE, paper.FALL_FROM_PEAK,
            Tolerance(0.1, "the paper says roughly"), reference=paper.STEADY,
        ),
        claim(
            "ratio", "end norm under scaled over that under constant decay",
            ratio, Held.RELATIVE, told.scaled_norm / told.constant_norm, Tolerance(0.2, "two figures of two digits"),
            reference=paper.STEADY,
        ),
    ]  # fmt: skip


def judge_diagnostics(results: Results, scale: Scale) -> list[Claim]:
    """The three figures of the appendix: orthogonality, gradient and momentum, late alignment."""
    (arms,) = results.values()
    claims = []
    for rule in RULES:
        runs = arms[rule]
        defects = [typical(run, "defect") for run in runs]
        words = f"{rule} decay: normalized size of Muon's direction"
        claims += [
            claim(f"{rule}-defect-low", f"{words} is not far below that of a rotation", defects, Held.AT_LEAST,
                  DEFECT_LOW, DEFECT_RANGE, reference=DEFECT_FIGURE),
            claim(f"{rule}-defect-high", f"{words} stays below one", defects, Held.AT_MOST,
                  DEFECT_HIGH, DEFECT_RANGE, reference=DEFECT_FIGURE),
            claim(f"{rule}-gradient", f"{rule} decay: gradients are nearly orthogonal to weights (size of the cosine)",
                  [abs(typical(run, "alignment_gradient")) for run in runs], Held.AT_MOST, SMALL_COSINE, NEAR_ZERO,
                  reference=GRADIENT_FIGURE),
            claim(f"{rule}-momentum", f"{rule} decay: momentum is aligned against the weights",
                  [typical(run, "alignment_momentum") for run in runs], Held.AT_MOST, 0.0, NEGATIVE,
                  reference=GRADIENT_FIGURE),
        ]  # fmt: skip
    if not scale.printed:
        return [*claims, _shrinking_offset(arms)]
    return [*claims, *_printed_diagnostics(arms)]


def _shrinking_offset(arms: Mapping[str, Sequence[Run]]) -> Claim:
    """What carries over of the late fits: scaled decay's alignment falls with the learning rate."""
    return claim(
        "late-alignment",
        "scaled decay: late alignment over its size at the peak of the learning rate",
        [late(run, "alignment_update") / at_peak(run, "alignment_update") for run in arms[SCALED]],
        Held.AT_MOST, 0.5, HALF, reference=LATE_FIGURE,
        limits="too few late samples for the paper's fits; only that the alignment falls with the learning rate",
    )  # fmt: skip


def _printed_diagnostics(arms: Mapping[str, Sequence[Run]]) -> list[Claim]:
    origin = [_fit(run, "origin", "k") for run in arms[SCALED]]
    offsets, slopes = ([_fit(run, "offset", key) for run in arms[CONSTANT]] for key in ("a0", "k"))
    defects = [typical(run, "defect") for run in arms[SCALED]]
    group = "the last 50 of 376 parts of the run; learning rates are those of the matrices, as muP divides them"
    return [
        claim("defect", "scaled decay: normalized size of Muon's direction", defects, Held.ABSOLUTE, paper.DEFECT,
              paper.DEFECT_TOLERANCE, reference=DEFECT_FIGURE),
        claim("scaled-slope", "scaled decay: k of the late fit a = -k eta", origin, Held.RELATIVE,
              paper.SCALED_SLOPE, paper.FIT, reference=LATE_FIGURE, hypothesis=group),
        claim("constant-offset", "constant decay: a0 of the late fit a = -a0 - k eta", offsets, Held.RELATIVE,
              paper.CONSTANT_OFFSET, paper.FIT, reference=LATE_FIGURE, hypothesis=group),
        claim("constant-slope", "constant decay: k of the late fit a = -a0 - k eta", slopes, Held.RELATIVE,
              paper.CONSTANT_SLOPE, paper.FIT, reference=LATE_FIGURE, hypothesis=group),
    ]  # fmt: skip


def late(run: Run, key: str) -> float:
    """The median of a column over the last part of a run."""
    seen = history(run)
    return seen.typical(seen.column(key), seen.late())


def typical(run: Run, key: str) -> float:
    """The median of a column from the peak of the learning rate on."""
    seen = history(run)
    return seen.typical(seen.column(key))


def at_peak(run: Run, key: str) -> float:
    """The median of a column while the learning rate is above nine tenths of its peak."""
    seen = history(run)
    lr = seen.column("lr")
    return seen.typical(seen.column(key), (lr >= 0.9 * seen.highest("lr")) & np.isfinite(lr))


def recursion_ratio(run: Run) -> float:
    """The end norm that the recursion gives, over the one that was observed; not a number without telemetry for it."""
    seen = history(run)
    if seen.tracking is None or seen.norm is None:
        return math.nan
    return float(seen.tracking.predicted[-1] / seen.norm.r[-1])


def tracking_end(run: Run) -> float:
    """The update from which the norm no longer follows its target; infinite where it follows to the end."""
    tracking = history(run).tracking
    if tracking is None:
        return math.nan
    return math.inf if tracking.broke_at is None else float(tracking.broke_at)


def _fit(run: Run, which: str, key: str) -> float:
    fits = late_fits(history(run))
    chosen = None if fits is None else getattr(fits, which)
    return math.nan if chosen is None else float(getattr(chosen, key))


def draw_steady_state(results: Results, folder: Path) -> list[Path]:
    """Alignment beside norm, target and recursion, and how well the norm follows."""
    return _draw(results, folder, ("alignment-and-prediction", "tracking"))


def draw_diagnostics(results: Results, folder: Path) -> list[Path]:
    """Orthogonality, gradient and momentum, late alignment."""
    return _draw(results, folder, ("orthogonality", "gradient-and-momentum", "late-alignment"))


def _draw(results: Results, folder: Path, figures: Sequence[str]) -> list[Path]:
    paths: list[Path] = []
    for name, arms in results.items():
        diagnoses = [diagnose(arms[rule][0]) for rule in RULES]
        paths += draw(diagnoses, subfolder(folder, name), figures)
    return paths
