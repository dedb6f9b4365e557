"""What frameworks share: options that are checked at once, and the few numbers of a record that their logs show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.options import validate_option
from muonsw.routing.groups import check_adamw
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


def refuse_wrong_options(
    optimizer: type[ScaledDecayOptimizer],
    *,
    patterns: dict[str, dict[str, Any]] | None,
    adamw: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Refuse what `for_model` would refuse of any model, where a configuration is made and no model is there yet.

    Examples:
        >>> from muonsw import MuonSW
        >>> patterns = {"*.q_proj.*": {"heads": 12}}  # whether a matrix has so many is left to the model
        >>> refuse_wrong_options(MuonSW, lr=0.02, patterns=patterns, adamw=None)
        >>> refuse_wrong_options(MuonSW, lr=0.02, patterns=patterns, adamw=None, headz=12)
        Traceback (most recent call last):
        ValueError: unknown option 'headz'...
    """
    check_adamw(adamw or {})
    for chosen in (patterns or {}).values():
        for name, value in chosen.items():
            validate_option(name, value)
    # on the meta device first, as values that are drawn would change the random numbers of the run
    layer = torch.nn.Linear(2, 2, bias=False, dtype=torch.float32, device="meta")
    for_any_model = {name: value for name, value in options.items() if name not in ("heads", "split_sizes")}
    optimizer.for_model(layer.to_empty(device="cpu"), **for_any_model)
