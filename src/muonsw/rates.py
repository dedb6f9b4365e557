"""The two numbers that a step needs for each group: the learning rate eta and the decay phi.

Some decay rules depend on the position in the run: `total_steps` is the user's; `step_count` counts calls of `step`,
skipped ones included, as a scheduler does. Both are kept in the param group and saved with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from muonsw import peak
from muonsw.decay import DECAY_RULES, decay_factor, decays, require_length
from muonsw.work import Group, label_of

if TYPE_CHECKING:
    from muonsw.nonfinite import Counters

# Schedules that end at zero may pass it by a rounding error.
_ROUNDING = 1e-12


def needs_peak(group: Group) -> bool:
    return DECAY_RULES[group["decay"]].uses_peak and decays(group)


def check(group: Group, number: int, counters: Counters) -> str | None:
    """Refuse invalid rates and bring a group's peak up to date; return the warning of a changed peak.

    Rate and lambda become floats: numpy's numbers would compute in their own precision, and a tensor is read once.
    """
    if any(param.is_cuda and torch.cuda.is_current_stream_capturing() for param in group["params"][:1]):
        raise RuntimeError(
            f"a CUDA graph would freeze the learning rate of {label_of(group, number)}; capture forward and backward, "
            f"and step outside the graph: small steps are replayed as graphs by themselves"
        )
    least = {"weight_decay": 0.0, "lr": -peak.PEAK_TOLERANCE * (group["constructor_lr"] or 0.0) - _ROUNDING}
    for key, low in least.items():
        try:
            value = float(group[key])
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not math.isfinite(value) or value < low:
            name = {"lr": "learning rate", "weight_decay": "weight decay"}[key]
            raise ValueError(
                f"the {name} of {label_of(group, number)} is {group[key]!r}; it must be a finite number of at least 0"
            )
        group[key] = value
    rule = DECAY_RULES[group["decay"]]
    if rule.uses_length:
        require_run(group, number)
    changed = peak.update_peak(group, number)
    if not rule.uses_peak or not group["weight_decay"]:
        return None
    message = peak.check_lr(group, number)
    if message is not None:
        counters.warn_once("peak never reached", message, peak.PeakLRWarning)
    return changed


def require_run(group: Group, number: int) -> None:
    """Refuse a rule that needs the length of the run where the group has none."""
    if decays(group):
        require_length(group["decay"], group.get("total_steps"), f" of {label_of(group, number)}")


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
    )
    if phi > 1:
        raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
    return phi
