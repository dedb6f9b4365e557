"""The two numbers that a step needs for each group: the learning rate eta and the decay phi.

Some decay rules ask where the run is. `total_steps` and `decay_points` are the user's; `step_count` counts calls of
`step`, skipped ones included, as a scheduler does. All of it is kept in the param group and saved with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muonsw import peak
from muonsw.algorithms import ALGORITHMS
from muonsw.decay import DECAY_RULES, decay_factor, decays, refuse_unknown_run
from muonsw.work import Group, label_of

if TYPE_CHECKING:
    from muonsw.counters import Counters

# Schedules that end at zero may pass it by a rounding error.
_ROUNDING = 1e-12


def needs_peak(group: Group) -> bool:
    """Whether a group decays by a rule that divides by the peak."""
    return DECAY_RULES[group["decay"]].uses_peak and decays(group)


def check(group: Group, number: int, counters: Counters) -> str | None:
    """Refuse invalid rates and bring a group's peak up to date; return the warning of a changed peak."""
    if any(param.is_cuda and torch.cuda.is_current_stream_capturing() for param in group["params"][:1]):
        raise RuntimeError(
            f"a CUDA graph would freeze the learning rate of {label_of(group, number)}; capture forward and backward, "
            f"and step outside the graph: small steps are replayed as graphs by themselves"
        )
    group["weight_decay"] = _number(group, "weight_decay", number)
    least = -peak.PEAK_TOLERANCE * (group["constructor_lr"] or 0.0) - _ROUNDING
    group["lr"] = _number(group, "lr", number, least)  # numpy's numbers would compute in their own precision
    rule = DECAY_RULES[group["decay"]]
    if rule.uses_length:
        require_run(group, label_of(group, number))
    changed = peak.update_peak(group, number)
    if not rule.uses_peak or not group["weight_decay"]:
        return None
    message = peak.check_lr(group, number)
    if message is not None:
        counters.never_reached(message)
    return changed


def _number(group: Group, key: str, number: int, least: float = 0.0) -> float:
    """A rate or lambda as a number; a tensor on a GPU is waited for."""
    try:
        value = float(group[key])
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value) or value < least:
        name, label = {"lr": "learning rate", "weight_decay": "weight decay"}[key], label_of(group, number)
        raise ValueError(f"the {name} of {label} is {group[key]!r}; it must be a finite number of at least 0")
    return value


def phi_of(group: Group, eta: float, step: int) -> float:
    """The fraction of each weight that decay takes at a step of this learning rate."""
    if not decays(group):
        return 0.0
    average = group.get("gradient_average")
    phi = decay_factor(
        group["decay"],
        float(group["weight_decay"]),
        eta,
        peak.eta_max(group),
        step=step,
        steps=group.get("total_steps"),
        gradient=math.sqrt(average[0] / average[1]) if average and average[1] else 0.0,
        points=group.get("decay_points"),
    )
    if phi > 1:
        raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
    return phi


# the position in the run


def require_run(group: Group, label: str) -> None:
    """Refuse a rule that needs the length of the run, or points, where the group has none."""
    rule = group["decay"]
    if DECAY_RULES[rule].uses_length and decays(group):
        refuse_unknown_run(rule, f"decay={rule!r} of {label}", group.get("total_steps"), group.get("decay_points"))


def join_in_mid_run(group: Group, others: Iterable[Group]) -> None:
    """A group that joins a run under way counts on from where the others are, and may be past its peak."""
    if not group["step_count"]:
        group["step_count"] = max((int(other["step_count"]) for other in others), default=0)
    if group["step_count"] and group["highest_lr"] is None:
        group["highest_lr"] = peak.expected_peak(group)


def counts_steps(group: Group) -> bool:
    """Whether the group's algorithm follows the number of the step, on the host."""
    asks = ALGORITHMS[group["algorithm"]].counts_steps
    return asks is not None and asks(group)


def forget_skipped_start(groups: Iterable[Group], bad: bool | Tensor) -> None:
    """Let algorithms that begin their bases at the first step do so at the next one, if the first was skipped."""
    if bad:
        for group in groups:
            group["update_count"] = 0
