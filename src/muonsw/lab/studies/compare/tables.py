"""The numbers of a comparison as tables, for the page and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from muonsw.lab.claims.claim import Interval
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.report.sections import Column, Table, Value
from muonsw.lab.studies.compare.outcome import ArmOutcome, Outcome, PairOutcome


def arms_table(outcome: Outcome) -> Table:
    """One row for each arm: losses and norms with their intervals over seeds."""
    columns = (
        "arm",
        Column("lambda", number=True),
        Column("seeds", number=True),
        Column("final loss", number=True),
        Column("best loss", number=True),
        Column("weight RMS at the end", number=True),
        Column("change since largest", number=True),
        Column("relative update at peak", number=True, digits=3),
        Column("N", number=True, digits=3),
        Column("sum of phi", number=True, digits=3),
        Column("phi at peak / (1 - beta)", number=True, digits=2),
    )
    note = (
        "Means over seeds with 95% t intervals. N = 2 sum phi counts relaxation times: runs with equal N forget their "
        "initial norm equally well. Losses are validation cross-entropy in nats a token."
    )
    return Table("arms", "Arms", columns, [_arm_row(arm) for arm in outcome.arms], note)


def _arm_row(arm: ArmOutcome) -> tuple[Value, ...]:
    change = sum(arm.norm_change) / len(arm.norm_change)
    return (
        arm.name,
        arm.weight_decay,
        len(arm.seeds),
        with_interval(arm.final),
        with_interval(arm.best),
        with_interval(arm.norm, digits=3),
        f"{100 * change:+.0f} %" if math.isfinite(change) else None,
        sum(arm.relative_update) / len(arm.relative_update),
        arm.relaxation,
        arm.total_decay,
        arm.memory_ratio,
    )


def pairs_table(outcome: Outcome) -> Table:
    """One row for each arm against the baseline: paired differences and steps to match."""
    columns = (
        "arm",
        "against",
        Column("difference of final loss", number=True),
        Column("95% t interval", number=True),
        Column("seed by seed", number=True),
        Column("steps to match", number=True),
    )
    note = (
        "Differences are paired by seed; negative is better. Steps to match: the update at which the arm reaches the "
        "other's best loss, over the update at which the other did; it compares the middle of one schedule with the "
        "end of another, so read it beside the final losses."
    )
    return Table("pairs", "Against the baseline", columns, [_pair_row(pair) for pair in outcome.pairs], note)


def _pair_row(pair: PairOutcome) -> tuple[Value, ...]:
    matches = "never" if pair.mean_match is None else f"{100 * pair.mean_match:.0f} %"
    if pair.match_interval is not None:
        matches += f" [{100 * pair.match_interval.low:.0f}, {100 * pair.match_interval.high:.0f}]"
    return (
        pair.arm,
        pair.baseline,
        f"{pair.mean:+.4f}",
        None if pair.interval is None else f"[{pair.interval.low:+.4f}, {pair.interval.high:+.4f}]",
        ", ".join(f"{value:+.4f}" for value in pair.differences),
        matches,
    )


def with_interval(values: Sequence[float], digits: int = 4) -> str:
    """A mean with the half-width of its interval.

    Examples:
        >>> with_interval([1.0, 2.0, 3.0])
        '2.0000 ± 2.4841'
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    interval: Interval = t_interval(torch.tensor(values, dtype=torch.float64))
    return f"{mean:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"
