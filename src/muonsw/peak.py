"""Where eta_max comes from, group by group, and the check that no learning rate exceeds it.

Scaled decay is only right if the peak is. A param group carries:

- `peak_lr`, the user's setting: None (find it), a float, or `"running_max"`;
- `resolved_peak_lr`, the float in use, or None until the first step with a learning rate above zero;
- `peak`, whether eta_max is the group's own peak (`"group"`) or the peak before the group's learning rate
  was multiplied (`"base"`), with `lr_multiplier` the factor between the two;
- `constructor_lr` and `peak_record`: the learning rate the group was made with, and what a scheduler had
  written when the peak was resolved, so that a later change of mind is noticed.

All of it is plain data, so `state_dict` carries it. Schedulers write `max_lr`, `min_lr` and `initial_lr`;
these keys are read here and never written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import Any

from torch.optim.lr_scheduler import MultiplicativeLR

# LinearLR and others reach the peak with a rounding error.
PEAK_TOLERANCE = 1e-6

RUNNING_MAX = "running_max"

Group = dict[str, Any]


class PeakLRError(ValueError):
    """A learning rate above the peak that scaled decay divides by."""


class PeakLRWarning(UserWarning):
    """The peak learning rate was changed, or a change to it was ignored."""


def scheduler_record(group: Group) -> float | None:
    """What a scheduler wrote into the group about its peak: `max_lr` (OneCycleLR), else `initial_lr`."""
    for key in ("max_lr", "initial_lr"):
        if group.get(key) is not None:
            return float(group[key])
    return None


def expected_peak(group: Group) -> float:
    """The peak that the group's settings and its scheduler's record imply: setting > record > constructor."""
    setting = group["peak_lr"]
    if setting is not None and setting != RUNNING_MAX:
        return float(setting)
    record = scheduler_record(group)
    return float(group["constructor_lr"]) if record is None else record


def eta_max(group: Group) -> float | None:
    """The eta_max that decay divides by: the group's own peak, or the peak before muP multiplied its lr."""
    peak = group["resolved_peak_lr"]
    if peak is None or group["peak"] == "group":
        return None if peak is None else float(peak)
    return float(peak) / float(group["lr_multiplier"])


def update_peak(group: Group, label: str) -> None:
    """Bring `resolved_peak_lr` up to date before a step, from a learning rate that the host knows.

    The peak is resolved at the first step with a learning rate above zero: distributed checkpointing
    steps a fresh optimizer at zero before it loads the real state.
    """
    lr = float(group["lr"])
    if group["peak_lr"] == RUNNING_MAX:
        group["resolved_peak_lr"] = max(lr, group["resolved_peak_lr"] or 0.0) or None
    elif group["peak_lr"] is not None:
        group["resolved_peak_lr"] = float(group["peak_lr"])
    elif group["resolved_peak_lr"] is None:
        if lr > 0:
            set_resolved_peak(group, expected_peak(group))
    else:
        _follow_record(group, label)


def set_resolved_peak(group: Group, peak: float) -> None:
    """Fix the peak in use, and remember what the scheduler's record was at that moment."""
    group["resolved_peak_lr"] = peak
    group["peak_record"] = scheduler_record(group)


def _follow_record(group: Group, label: str) -> None:
    """A scheduler that starts later may raise the peak; it may not lower it."""
    record, peak = scheduler_record(group), group["resolved_peak_lr"]
    if record is None or record == group["peak_record"]:
        return
    if record > peak * (1 + PEAK_TOLERANCE):
        message = f"a scheduler raised the peak learning rate of {label} from {peak:g} to {record:g}"
        peak = record
    else:
        message = (
            f"a scheduler recorded a peak of {record:g} for {label}, below the {peak:g} in use, which is kept; "
            f"call set_peak_lr({record:g}) if a new run starts here"
        )
    set_resolved_peak(group, peak)
    warnings.warn(message, PeakLRWarning, stacklevel=2)


def check_lr(group: Group, label: str) -> None:
    """Refuse a learning rate above the peak, before anything is changed."""
    lr, peak = float(group["lr"]), group["resolved_peak_lr"]
    if peak is not None and lr > peak * (1 + PEAK_TOLERANCE):
        raise PeakLRError(
            f"the learning rate of {label} is {lr:g}, above its peak {peak:g}, so decay={group['decay']!r} would "
            f"be too strong; pass peak_lr=<the highest learning rate of the run> to the optimizer, or hand over "
            f"the scheduler with optimizer.set_peak_lr(scheduler), or use peak_lr='running_max'"
        )


def warn_after_load(expected: float, group: Group, label: str, matters: bool) -> None:
    """After a load the saved peak wins; the user hears of one that is not theirs, or that had to be guessed."""
    setting = group["peak_lr"] if group["peak_lr"] != RUNNING_MAX else None
    saved = group["resolved_peak_lr"] if group["resolved_peak_lr"] is not None else setting
    lr = float(group["lr"])
    if saved is not None and _differ(saved, expected):
        message = (
            f"{label} was built for a peak learning rate of {expected:g} and loaded one of {saved:g}, which is kept; "
            f"call set_peak_lr({expected:g}) if a new run starts here"
        )
    elif matters and saved is None and scheduler_record(group) is None and lr > 0 and _differ(lr, expected):
        message = (
            f"the state loaded into {label} knows no peak learning rate; its own is {lr:g} and the {expected:g} that "
            f"this optimizer was built with is taken for the peak; pass peak_lr or call set_peak_lr if it was another"
        )
    else:
        return
    warnings.warn(message, PeakLRWarning, stacklevel=3)


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > PEAK_TOLERANCE * max(a, b)


def scheduler_peaks(scheduler: Any, total_steps: int | None = None) -> list[float]:
    """The highest learning rate that a torch scheduler reaches, for each param group of its optimizer.

    Args:
        scheduler: any scheduler of `torch.optim.lr_scheduler`; SequentialLR and ChainedScheduler are
            looked into.
        total_steps: lets the lambdas of a LambdaLR be evaluated; without it they are taken to peak at 1.
    """
    children = getattr(scheduler, "_schedulers", None)
    if children:
        return [max(peaks) for peaks in zip(*(scheduler_peaks(s, total_steps) for s in children), strict=True)]
    if hasattr(scheduler, "max_lrs"):  # CyclicLR
        return [float(lr) for lr in scheduler.max_lrs]
    groups: list[Group] = scheduler.optimizer.param_groups
    base_lrs = [float(lr) for lr in getattr(scheduler, "base_lrs", None) or [group["lr"] for group in groups]]
    if hasattr(scheduler, "lr_lambdas") and total_steps:
        running = isinstance(scheduler, MultiplicativeLR)
        return [
            base * _highest_factor(factor, total_steps, running)
            for base, factor in zip(base_lrs, scheduler.lr_lambdas, strict=True)
        ]
    records = [(group.get("max_lr"), group.get("swa_lr"), base) for group, base in zip(groups, base_lrs, strict=True)]
    return [max(float(lr) for lr in known if lr is not None) for known in records]


def _highest_factor(factor: Callable[[int], float], total_steps: int, running: bool) -> float:
    """The highest multiple of its base that a lambda reaches; MultiplicativeLR multiplies them up."""
    factors = [float(factor(step)) for step in range(total_steps)]
    return max(accumulate([1.0, *factors[1:]], mul)) if running else max(factors)
