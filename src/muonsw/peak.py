"""Find eta_max of each group, and check that no learning rate exceeds it.

Scaled decay is only right if the peak is. A param group has:

- `peak_lr`, the user's setting: a number, None, or `"running_max"`. None means the scheduler's record in the group
  (`max_lr`, else `initial_lr`), else the rate when the group was created (`constructor_lr`);
- `resolved_peak_lr`, the number in use, or None until the first step with a learning rate above zero;
- `peak`, whether eta_max is the group's peak (`"group"`) or the peak before `lr_multiplier` (`"base"`);
- `peak_record`, the scheduler's record when the peak was resolved, to notice a later change;
- `highest_lr`, the highest rate so far, to notice a schedule that turns down far below its peak.

All of this is plain data, saved with the state. Keys that schedulers write are only read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import OneCycleLR

from muonsw.work import Group, label_of

# LinearLR and others reach the peak with a rounding error. Messages print eight digits to show it.
PEAK_TOLERANCE = 1e-6

# A schedule probably misses its peak if the rate falls to `_TURNED_DOWN` of its highest, and that was below `_REACHED`
# of the peak. Smaller falls happen earlier: a ChainedScheduler may lower the rate while its ConstantLR holds it down.
_REACHED, _TURNED_DOWN = 0.9, 0.65

RUNNING_MAX = "running_max"

# The keys that a step changes.
STEP_KEYS = ("resolved_peak_lr", "peak_record", "highest_lr")


class PeakLRError(ValueError):
    """A learning rate above the peak that scaled decay divides by."""


class PeakLRWarning(UserWarning):
    """The peak learning rate changed, a change was ignored, or the schedule never came near it."""


def scheduler_record(group: Group) -> float | None:
    """The peak that a scheduler wrote into the group: `max_lr` (OneCycleLR), else `initial_lr`."""
    records = [group[key] for key in ("max_lr", "initial_lr") if group.get(key) is not None]
    return float(records[0]) if records else None


def expected_peak(group: Group) -> float:
    """The peak that a group's settings imply: `peak_lr`, else the scheduler's record, else the constructor's rate."""
    setting = group["peak_lr"]
    if setting is not None and setting != RUNNING_MAX:
        return float(setting)
    return _scaled(group, _base_rate(group))


def _base_rate(group: Group) -> float:
    """The rate that a schedule multiplies: the scheduler's record, else the constructor's rate."""
    rates = (scheduler_record(group), group.get("constructor_lr"), group["lr"])
    return float(next(rate for rate in rates if rate is not None))


def _scaled(group: Group, base: float) -> float:
    """The peak times `lr_scale`, if timm's scheduler is multiplying the group's rates by it.

    torch's schedulers ignore the key: a rate above the scaled peak shows that it is not in use.
    """
    scaled = base * float(group.get("lr_scale", 1.0))
    return scaled if float(group["lr"]) <= scaled * (1 + PEAK_TOLERANCE) else base


def refuse_shared(peak_lr: Any, groups: Sequence[Group]) -> None:
    """Refuse one number for groups with different rates: schedules multiply rates, so their peaks differ too."""
    rates = sorted({_base_rate(group) * float(group.get("lr_scale", 1.0)) for group in groups}, reverse=True)
    if isinstance(peak_lr, float) and len(rates) > 1:
        raise ValueError(
            f"peak_lr={peak_lr:.8g} is one number for param groups with learning rates {rates[0]:.8g} and "
            f"{rates[1]:.8g}; give each group its own peak_lr, or none to use the scheduler's"
        )


def eta_max(group: Group) -> float | None:
    """The eta_max that decay divides by: the group's peak, or the peak before muP's multiplier."""
    peak = group["resolved_peak_lr"]
    return peak if peak is None or group["peak"] == "group" else float(peak) / float(group["lr_multiplier"])


def set_resolved_peak(group: Group, peak: float | None) -> None:
    """Set the peak in use, and store the scheduler's current record."""
    group["resolved_peak_lr"], group["peak_record"] = peak, scheduler_record(group)


def update_peak(group: Group, number: int) -> str | None:
    """Update `resolved_peak_lr` and `highest_lr` before a step; return a warning if a scheduler changed the peak.

    The peak is resolved at the first step with a rate above zero, because distributed checkpoint steps a fresh
    optimizer at zero before it loads the real state. A scheduler that starts later may raise the peak, not lower it.
    """
    lr, setting, peak = float(group["lr"]), group["peak_lr"], group["resolved_peak_lr"]
    group["highest_lr"] = max(lr, group["highest_lr"] or 0.0)
    if setting is not None:
        group["resolved_peak_lr"] = (max(lr, peak or 0.0) or None) if setting == RUNNING_MAX else float(setting)
        return None
    if peak is None and lr > 0:
        set_resolved_peak(group, expected_peak(group))
    record = scheduler_record(group)
    if peak is None or record is None or (record == group["peak_record"] and "lr_scale" not in group):
        return None
    implied, is_new = _scaled(group, record), record != group["peak_record"]
    group["peak_record"] = record
    if implied > peak * (1 + PEAK_TOLERANCE):
        group["resolved_peak_lr"], group["highest_lr"] = implied, lr
        return (
            f"a scheduler raised the peak learning rate of {label_of(group, number)} from {peak:.8g} to {implied:.8g}"
        )
    if is_new and differ(implied, peak):
        return (
            f"a scheduler recorded a peak of {implied:.8g} for {label_of(group, number)}, below the {peak:.8g} in use; "
            f"ignoring it. If this is a new run, set optimizer.param_groups[{number}]['peak_lr'] = {implied:.8g}"
        )
    return None


def check_lr(group: Group, number: int) -> str | None:
    """Refuse a learning rate above the peak; return a warning if it turned down well below the peak.

    An explicit `peak_lr` is never second-guessed.
    """
    lr, peak, highest = float(group["lr"]), group["resolved_peak_lr"], group["highest_lr"]
    if peak is not None and not lr <= peak * (1 + PEAK_TOLERANCE):  # a loaded peak may be NaN
        raise PeakLRError(
            f"the learning rate of {label_of(group, number)} is {lr:.8g}, above its peak {peak:.8g}, so "
            f"decay={group['decay']!r} would be too strong; pass peak_lr=<the highest learning rate of the run> or "
            f"'running_max', or set optimizer.param_groups[{number}]['peak_lr'] to it now"
        )
    if group["peak_lr"] is not None or not peak or not highest:
        return None
    if highest >= _REACHED * peak or lr >= _TURNED_DOWN * highest:
        return None
    return (
        f"the learning rate of {label_of(group, number)} has turned down at {highest:.8g} without coming near its peak "
        f"{peak:.8g}, so decay={group['decay']!r} is {peak / highest:.3g} times weaker than it should be; unless the "
        f"schedule rises again, pass peak_lr=<the highest learning rate of the run>, or set "
        f"optimizer.param_groups[{number}]['peak_lr'] = {highest:.8g} now"
    )


def scheduler_peaks(scheduler: Any) -> list[float]:
    """The peak of each param group from a scheduler's `max_lrs` or `base_lrs`."""
    groups: list[Group] = scheduler.optimizer.param_groups
    parts = getattr(scheduler, "_schedulers", None)  # of a SequentialLR or ChainedScheduler
    if parts:
        return [max(peaks) for peaks in zip(*map(scheduler_peaks, parts), strict=True)]
    rates = getattr(scheduler, "max_lrs", None) or getattr(scheduler, "base_lrs", None)
    # ReduceLROnPlateau and timm's schedulers have no such list, and OneCycleLR's holds the initial rates.
    if rates is None or isinstance(scheduler, OneCycleLR):
        return [max(expected_peak({**group, "peak_lr": None}), float(group["lr"])) for group in groups]
    return [float(lr) for lr in rates]


def differ(a: float, b: float) -> bool:
    return abs(a - b) > PEAK_TOLERANCE * max(a, b)
