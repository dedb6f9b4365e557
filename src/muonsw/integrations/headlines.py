"""The few numbers of a record that a framework's log can show without drowning in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.telemetry.record import Record

# Sentences about a record, to be logged as warnings.
Findings = Callable[[Record], Iterable[str]]

HEADLINES = ("weight_rms", "relative_update", "decay", "alignment_update", "defect")


def headlines(record: Record) -> dict[str, float]:
    """Size, relative update, decay, alignment and defect of each role, and the skipped updates, under flat names.

    Examples:
        >>> headlines({"step": 1, "roles": {"norm": {"weight_rms": 1.0, "defect": None, "lr": 0.1}}, "skipped": 0})
        {'telemetry/norm/weight_rms': 1.0, 'telemetry/skipped': 0}
    """
    values = {
        f"telemetry/{role}/{key}": found[key]
        for role, found in record["roles"].items()
        for key in HEADLINES
        if found.get(key) is not None
    }
    return {**values, "telemetry/skipped": record["skipped"]}


def routing_counts(optimizer: ScaledDecayOptimizer) -> dict[str, float]:
    """How many parameters each group has, by its name and algorithm."""
    return {
        f"routing/{group.get('name', number)}/{group['algorithm']}": sum(p.numel() for p in group["params"])
        for number, group in enumerate(optimizer.param_groups)
    }
