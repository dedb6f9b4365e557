"""The paper's main effect: the same run with constant and with scaled decay, at one width or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from muonsw.lab import paper
from muonsw.lab.claims.claim import Claim, Source, above, within, within_share
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Table
from muonsw.lab.diagnose import diagnose, draw
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import (
    CONSTANT,
    CONTROL,
    GROUP,
    RULES,
    SCALED,
    Comparison,
    Key,
    Results,
    Runs,
    decay_arms,
    rule_arm,
)
from muonsw.lab.studies.compare import MOVED, SAME_LAMBDA, kept_norm, lower_loss
from muonsw.lab.studies.outcome import (
    Measure,
    against_constant,
    log_end_norm,
    lowest_loss,
    over_runs,
    pair_outcome,
    paired,
    pairs_table,
    steps_to_match,
)
from muonsw.lab.studies.scales import Scale

BEYOND = "beyond the paper"
SMALLER = "a short run with raised lambda: its gain need not be the paper's"
SAME_RUNS = "the same weights and batches for every arm"


def row(scale: Scale, width: int) -> Comparison:
    """The arms of one width."""
    run = scale.rows[width]
    lambdas = [factor * run.optimizer.weight_decay for factor in scale.near_best]
    near = (rule_arm(run, rule, lam) for lam in lambdas for rule in RULES)
    return Comparison(Key(width=width), run, (*decay_arms(run), *near), tuple(range(scale.seeds)))


def all_rows(scale: Scale) -> list[Comparison]:
    """Every width of the main table."""
    return [row(scale, width) for width in scale.rows]


def headline_row(scale: Scale) -> list[Comparison]:
    """The width of the figures."""
    return [row(scale, scale.headline)]


def sampled_row(scale: Scale) -> list[Comparison]:
    """The width of the figures, sampled by telemetry as often as the scale asks for; both rules alone where it does."""
    (one,) = headline_row(scale)
    if scale.sampled_every is None:
        return [one]
    arms = tuple(arm for arm in one.arms if arm.name in RULES)
    return [replace(one, base=replace(one.base, telemetry_every=scale.sampled_every), arms=arms)]


def other_rows(scale: Scale) -> list[Comparison]:
    """The widths of the figures beside it."""
    return [row(scale, width) for width in scale.others]


def judge_rows(results: Results, scale: Scale) -> list[Claim]:
    """Loss and norm at every width that was run, and what the paper prints about it."""
    claims: list[Claim] = []
    for key, arms in results.items():
        width = key.width
        assert width is not None
        claims += judge_pair(f"w{width}", str(key), arms, paper.TABLE, limits_at(scale))
        if GROUP in arms:
            claims += judge_group(f"w{width}", str(key), arms, limits_at(scale))
        if scale.printed:
            claims += judge_printed(width, arms[CONSTANT], arms[SCALED])
    return claims


def limits_at(scale: Scale) -> str:
    """What a loss at this scale cannot show."""
    return "" if scale.printed else SMALLER


def judge_pair(id: str, where: str, arms: Runs, reference: str, limits: str) -> list[Claim]:
    """Scaled decay ends lower and keeps its weights."""
    constant, scaled = arms[CONSTANT], arms[SCALED]
    table, figure = Source(reference, SAME_LAMBDA), Source(paper.HEADLINE, SAME_LAMBDA)
    lower = f"{where}: scaled decay ends at a lower validation loss than constant decay"
    larger = f"{where}: the weights end larger under scaled decay (logarithm of the ratio of their RMS)"
    keeps = f"{where}: scaled decay keeps more of the largest norm while the learning rate falls"
    return [
        lower_loss(f"{id}-loss", lower, constant, scaled, source=table, limits=limits),
        larger_norm(f"{id}-norm", larger, constant, scaled, figure),
        kept_norm(f"{id}-kept", keeps, constant, scaled),
    ]


def larger_norm(
    id: str, statement: str, small: Sequence[Run], large: Sequence[Run], source: Source, measure: Measure = log_end_norm
) -> Claim:
    """The weights of one arm end larger than those of another, seed by seed."""
    return above(id, statement, source, over_seeds(paired(large, small, measure)), 0.0, MOVED)


def judge_group(id: str, where: str, arms: Runs, limits: str) -> list[Claim]:
    """The same where decay divides by the group's own peak, so that both rules decay alike at the peak."""
    constant, group = arms[CONSTANT], arms[GROUP]
    source = Source(BEYOND, f"{SAME_LAMBDA}; eta_max is the group's own peak")
    lower = f"{where}: scaled decay by the group's own peak ends at a lower validation loss than constant decay"
    larger = f"{where}: the weights end larger under scaled decay by the group's own peak (logarithm of the ratio)"
    return [
        lower_loss(f"{id}-group-loss", lower, constant, group, source=source, limits=limits),
        larger_norm(f"{id}-group-norm", larger, constant, group, source),
    ]


def judge_printed(width: int, constant: Sequence[Run], scaled: Sequence[Run]) -> list[Claim]:
    """What the paper prints about a width: losses, gain, steps saved, end norms."""
    printed, name = paper.ROWS[width], f"w{width}"
    table, figure = Source(paper.TABLE, SAME_RUNS), Source(paper.FIGURES.get(width, ""), SAME_RUNS)
    gain = over_seeds(paired(scaled, constant, lowest_loss))
    matches = (steps_to_match(*pair) for pair in zip(constant, scaled, strict=True))
    saved = over_seeds([math.nan if match is None else 1.0 - match for match in matches])
    lower = f"width {width}: difference of the best losses, scaled minus constant"
    sooner = f"width {width}: updates saved until scaled decay has the best loss of constant decay"
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
        claims.append(within(f"{name}-{arm}-loss", best, table, over_runs(runs, lowest_loss), loss, paper.LOSS))
        if norm is not None:
            end = f"width {width}: weight RMS at the end, {arm} decay"
            norms = over_runs(runs, lambda run: run.final_norm)
            claims.append(within_share(f"{name}-{arm}-norm", end, figure, norms, norm, paper.NORM))
    return claims


def row_tables(results: Results, scale: Scale) -> list[Table]:
    """Every arm beside constant decay of its settings; then the control."""
    return [against_constant(results), *control_tables(results, scale)]


def control_tables(results: Results, _scale: Scale) -> list[Table]:
    """Scaled decay against constant decay of the same total: later decay alone, where less decay is ruled out."""
    pairs = {key: pair_outcome(arms[CONTROL], arms[SCALED]) for key, arms in results.items()}
    table = pairs_table([replace(pair, arm=f"{key}: {pair.arm}") for key, pair in pairs.items()])
    return [replace(table, name="control", title="Scaled decay against constant decay of the same total")]


def draw_figures(results: Results, folder: Path) -> list[Path]:
    """Draw the two rules of each comparison, the first seed, as one figure."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    paths = []
    for key, arms in results.items():
        paths += draw([diagnose(arms[rule][0]) for rule in RULES], folder / "figures" / key.slug)
    return paths
