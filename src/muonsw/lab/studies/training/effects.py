"""The paper's main effect: the same run with constant and with scaled decay, at one width or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from muonsw.lab import paper
from muonsw.lab.claims.claim import Claim
from muonsw.lab.claims.claim import Comparison as Held
from muonsw.lab.diagnose import diagnose
from muonsw.lab.diagnose.figures import draw
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Table
from muonsw.lab.runs import Run
from muonsw.lab.studies.compare.arms import CONTROL_SUFFIX, Arm, same_total
from muonsw.lab.studies.compare.outcome import Outcome, pair_outcome, steps_to_match
from muonsw.lab.studies.compare.tables import pairs_table
from muonsw.lab.studies.training.evidence import claim, end_norm, last_loss, lowest_loss, norm_left, paired
from muonsw.lab.studies.training.scales import Scale
from muonsw.lab.studies.training.study import Comparison, Results
from muonsw.lab.train.config import RunConfig

CONSTANT, SCALED, GROUP = "constant", "scaled", "scaled, group peak"
CONTROL = f"constant, {CONTROL_SUFFIX}"
BELOW = Tolerance(0.0, "the whole interval of the paired difference must lie below zero")
ABOVE = Tolerance(0.0, "the whole interval of the paired difference must lie above zero")
SMALLER = "a short run with raised lambda: its gain need not be the paper's"
SAME_LAMBDA = "the same weights, batches, learning rate and lambda for both rules"


@cache
def decay_arms(run: RunConfig) -> tuple[Arm, ...]:
    """Constant decay, scaled decay, and constant decay of the same total.

    Where muP divides the group's learning rate, scaled decay with the group's own peak beside it.
    """
    scaled = Arm(SCALED, replace(run.optimizer, decay="scaled"))
    arms = [Arm(CONSTANT, replace(run.optimizer, decay="constant", peak="group")), scaled]
    if run.model.relative_width != 1.0 and run.optimizer.peak == "base":
        arms.append(Arm(GROUP, replace(scaled.optimizer, peak="group")))
    control = same_total(run, scaled)
    return (*arms, replace(control, optimizer=replace(control.optimizer, peak="group")))


def row(scale: Scale, width: int) -> Comparison:
    """The arms of one width."""
    run = scale.rows[width]
    return Comparison(f"width {width}", run, decay_arms(run), tuple(range(scale.seeds)))


def all_rows(scale: Scale) -> list[Comparison]:
    """Every width of the main table."""
    return [row(scale, width) for width in scale.rows]


def headline_row(scale: Scale) -> list[Comparison]:
    """The width of the figures."""
    return [row(scale, scale.headline)]


def other_rows(scale: Scale) -> list[Comparison]:
    """The widths of the figures beside it."""
    return [row(scale, width) for width in scale.others]


def judge_rows(results: Results, scale: Scale) -> list[Claim]:
    """Loss and norm at every width that was run, and what the paper prints about it."""
    claims: list[Claim] = []
    for name, arms in results.items():
        width = int(name.removeprefix("width "))
        who, limits = (f"w{width}", f"width {width}"), limits_at(scale)
        claims += judge_pair(*who, arms[CONSTANT], arms[SCALED], reference=paper.TABLE, limits=limits)
        if GROUP in arms:
            claims += judge_group(*who, arms[CONSTANT], arms[GROUP], limits=limits)
        if scale.printed:
            claims += judge_printed(width, arms[CONSTANT], arms[SCALED])
    return claims


def limits_at(scale: Scale) -> str:
    """What a loss at this scale cannot show."""
    return "" if scale.printed else SMALLER


def judge_pair(
    identity: str, where: str, constant: Sequence[Run], scaled: Sequence[Run], *, reference: str, limits: str
) -> list[Claim]:
    """Scaled decay ends lower and keeps its weights."""
    return [
        claim(
            f"{identity}-loss",
            f"{where}: scaled decay ends at a lower validation loss than constant decay",
            paired(scaled, constant, last_loss),
            Held.AT_MOST, 0.0, BELOW, reference=reference, hypothesis=SAME_LAMBDA, limits=limits,
        ),
        claim(
            f"{identity}-norm",
            f"{where}: the weights end larger under scaled decay (logarithm of the ratio of their RMS)",
            paired(scaled, constant, lambda run: math.log(end_norm(run))),
            Held.AT_LEAST, 0.0, ABOVE, reference=paper.HEADLINE, hypothesis=SAME_LAMBDA,
        ),
        claim(
            f"{identity}-kept",
            f"{where}: scaled decay keeps more of the largest norm while the learning rate falls",
            paired(scaled, constant, norm_left),
            Held.AT_LEAST, 0.0, ABOVE, reference=paper.HEADLINE, hypothesis=SAME_LAMBDA,
        ),
    ]  # fmt: skip


def judge_group(
    identity: str, where: str, constant: Sequence[Run], group: Sequence[Run], *, limits: str
) -> list[Claim]:
    """The same where decay divides by the group's own peak, so that both rules decay alike at the peak."""
    reference, hypothesis = "beyond the paper", f"{SAME_LAMBDA}; eta_max is the group's own peak"
    return [
        claim(
            f"{identity}-group-loss",
            f"{where}: scaled decay by the group's own peak ends at a lower validation loss than constant decay",
            paired(group, constant, last_loss),
            Held.AT_MOST, 0.0, BELOW, reference=reference, hypothesis=hypothesis, limits=limits,
        ),
        claim(
            f"{identity}-group-norm",
            f"{where}: the weights end larger under scaled decay by the group's own peak (logarithm of the ratio)",
            paired(group, constant, lambda run: math.log(end_norm(run))),
            Held.AT_LEAST, 0.0, ABOVE, reference=reference, hypothesis=hypothesis,
        ),
    ]  # fmt: skip


def judge_printed(width: int, constant: Sequence[Run], scaled: Sequence[Run]) -> list[Claim]:
    """What the paper prints about a width: losses, gain, steps saved, end norms."""
    told, name, table = paper.ROWS[width], f"w{width}", paper.TABLE
    matches = (steps_to_match(*pair) for pair in zip(constant, scaled, strict=True))
    saved = [math.nan if match is None else 1.0 - match for match in matches]
    arms = {CONSTANT: (constant, told.constant, told.constant_norm), SCALED: (scaled, told.scaled, told.scaled_norm)}
    claims = [
        claim(
            f"{name}-gain", f"width {width}: difference of the best losses, scaled minus constant",
            paired(scaled, constant, lowest_loss), Held.ABSOLUTE, told.scaled - told.constant, paper.GAIN,
            reference=table,
        ),
        claim(
            f"{name}-saved", f"width {width}: updates saved until scaled decay has the best loss of constant decay",
            saved, Held.ABSOLUTE, told.saved, paper.SAVED, reference=table,
            limits="compares the middle of one schedule with the end of another",
        ),
    ]  # fmt: skip
    for arm, (runs, loss, norm) in arms.items():
        losses = [lowest_loss(run) for run in runs]
        statement = f"width {width}: best validation loss, {arm} decay"
        claims.append(claim(f"{name}-{arm}-loss", statement, losses, Held.ABSOLUTE, loss, paper.LOSS, reference=table))
        if norm is not None:
            norms, where = [end_norm(run) for run in runs], paper.FIGURES[width]
            statement = f"width {width}: weight RMS at the end, {arm} decay"
            claims.append(
                claim(f"{name}-{arm}-norm", statement, norms, Held.RELATIVE, norm, paper.NORM, reference=where)
            )
    return claims


def control_tables(results: Results, _scale: Scale) -> list[Table]:
    """Scaled decay against constant decay of the same total: later decay alone, where less decay is ruled out."""
    pairs = {name: pair_outcome(arms[CONTROL], arms[SCALED]) for name, arms in results.items()}
    named = tuple(replace(pair, arm=f"{name}: {pair.arm}") for name, pair in pairs.items())
    table = pairs_table(Outcome((), named))
    return [replace(table, name="control", title="Scaled decay against constant decay of the same total")]


def draw_rows(results: Results, folder: Path) -> list[Path]:
    """Loss and norm over the updates, one figure for each width, the first seed of the two rules."""
    return [
        path
        for name, arms in results.items()
        for path in draw(
            [diagnose(arms[arm][0]) for arm in (CONSTANT, SCALED)], subfolder(folder, name), ("loss-and-norm",)
        )
    ]


def subfolder(folder: Path, name: str) -> Path:
    """A folder for the figures of one comparison."""
    chosen = folder / "figures" / name.replace(" ", "-").replace(",", "")
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen
