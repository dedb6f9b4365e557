"""Where eta_max comes from, group by group, and the check that no learning rate exceeds it.

Scaled decay is only right if the peak is. A param group carries:

- `peak_lr`, the user's setting: None (find it), a float, or `"running_max"`;
- `resolved_peak_lr`, the float in use, or None until the first step with a learning rate above zero;
- `peak`, whether eta_max is the group's own peak (`"group"`) or the peak before the group's learning rate
  was multiplied (`"base"`), with `lr_multiplier` the factor between the two;
- `constructor_lr` and `peak_record`: the learning rate the group was made with, and what a scheduler had
  written when the peak was resolved, so that a later change of mind is noticed;
- `highest_lr`, the highest learning rate of any step so far: a schedule that turns down before it has come near its
  peak was given the wrong one.

All of it is plain data, so `state_dict` carries it. Schedulers write `max_lr`, `min_lr` and `initial_lr`, timm's
layer decay writes `lr_scale`; these keys are read here and never written.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    OneCycleLR,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR

from muonsw.text import users_line
from muonsw.work import Group

# LinearLR and others reach the peak with a rounding error. They multiply the rate again and again, so a rate that is
# held in a tensor may be off by many roundings of its dtype: allow a thousand, but never a noticeable excess.
PEAK_TOLERANCE = 1e-6  # messages print eight digits, so that rates which differ by more look different
_ROUNDINGS = 1000
_LARGEST_TOLERANCE = 0.05

# A run whose rate is below this fraction of its peak is not at it.
_BELOW = 0.999

# A rate that has fallen to `_TURNED_DOWN` of its highest, which was below `_REACHED` of its peak, will hardly reach it.
# Not at the first fall: under a ChainedScheduler, ConstantLR may hold down for some steps a rate that another lowers.
_REACHED = 0.9
_TURNED_DOWN = 0.65

# After a load, a rate below this fraction of its peak, and not within it of the rate that was loaded, is of a new run.
_FAR = 0.5

RUNNING_MAX = "running_max"

# What a step changes of it.
KEPT = ("resolved_peak_lr", "peak_record", "highest_lr")

# Where schedulers write the peak of a group; the first that is there counts.
RECORDS = ("max_lr", "initial_lr")


class PeakLRError(ValueError):
    """A learning rate above the peak that scaled decay divides by."""


class PeakLRWarning(UserWarning):
    """The peak learning rate was changed, a change to it was ignored, or the schedule never came near it."""


def tolerance(lr: float | Tensor) -> float:
    """By which fraction a learning rate may exceed its peak through rounding alone."""
    if not isinstance(lr, Tensor):
        return PEAK_TOLERANCE
    return min(max(PEAK_TOLERANCE, _ROUNDINGS * torch.finfo(lr.dtype).eps), _LARGEST_TOLERANCE)


def scheduler_record(group: Group) -> float | None:
    """What a scheduler wrote into the group about its peak: `max_lr` (OneCycleLR), else `initial_lr`."""
    for key in RECORDS:
        if group.get(key) is not None:
            return float(group[key])
    return None


def expected_peak(group: Group) -> float:
    """The peak that the group's settings and its scheduler's record imply: setting > record > constructor."""
    setting = group["peak_lr"]
    if setting is not None and setting != RUNNING_MAX:
        return float(setting)
    return _after_lr_scale(group, _base_rate(group))


def _base_rate(group: Group) -> float:
    """The learning rate that a schedule multiplies: its record, else the rate that the group was made with."""
    record, made_with = scheduler_record(group), group.get("constructor_lr")
    if record is not None:
        return record
    return float(group["lr"] if made_with is None else made_with)


def shared_peaks(peak_lr: Any, groups: Sequence[Group]) -> list[Any]:
    """The peak of each group where one is given for all: a number is that of the highest rate among them.

    A group with a lower rate gets the same fraction of its own, since a schedule multiplies them alike: the number
    itself would divide its decay by the ratio of the two. Rates are compared before `lr_multiplier` and after
    `lr_scale`.
    """
    if not isinstance(peak_lr, float):
        return [peak_lr] * len(groups)
    multipliers = [float(group.get("lr_multiplier", 1.0)) for group in groups]
    rates = [_base_rate(group) * float(group.get("lr_scale", 1.0)) for group in groups]
    bases = [rate / multiplier for rate, multiplier in zip(rates, multipliers, strict=True)]
    highest = max(bases, default=0.0)
    return [
        peak_lr * (base / highest if base else 1.0) * multiplier
        for base, multiplier in zip(bases, multipliers, strict=True)
    ]


def share(peak_lr: Any, groups: Sequence[Group], given: Sequence[Any]) -> None:
    """Give each group its part of the constructor's peak, unless the user gave it one of its own."""
    for group, shared, options in zip(groups, shared_peaks(peak_lr, groups), given, strict=False):
        if not (isinstance(options, dict) and "peak_lr" in options):
            group["peak_lr"] = shared


def give_where_unrecorded(peak_lr: float, groups: Sequence[Group]) -> None:
    """Set the peak of groups without one of their own or of a scheduler; it is that of the highest rate among them."""
    bare = [group for group in groups if group["peak_lr"] is None and scheduler_record(group) is None]
    for group, shared in zip(bare, shared_peaks(peak_lr, bare), strict=True):
        group["peak_lr"] = shared
    highest = max(expected_peak(group) for group in groups)
    if not bare and _differ(peak_lr, highest):
        warnings.warn(
            f"all groups have peaks of their own or from schedulers, {highest:.8g} the highest, so "
            f"peak_lr={peak_lr:.8g} is not used; call set_peak_lr({peak_lr:.8g}) if they are wrong",
            PeakLRWarning,
            stacklevel=users_line(),
        )


def inherited(peak_lr: Any, groups: Sequence[Group]) -> list[bool]:
    """Which groups have their peak from the constructor's number, if it is one."""
    if not isinstance(peak_lr, float):
        return [False] * len(groups)
    return [group["peak_lr"] == own for group, own in zip(groups, shared_peaks(peak_lr, groups), strict=True)]


def share_anew(peak_lr: Any, groups: Sequence[Group], chosen: Sequence[bool]) -> None:
    """Share the constructor's number by the rates that groups have now, after a load from another optimizer."""
    if any(chosen):
        now = [{**group, "constructor_lr": None} for group in groups]
        for group, own, take in zip(groups, shared_peaks(peak_lr, now), chosen, strict=True):
            if take:
                group["peak_lr"] = group["highest_lr"] = own


def inherit(group: Group, others: Sequence[Group]) -> None:
    """The peak of a group that leaves it to the number in the constructor, beside those that are there already.

    In the middle of a run that number says nothing of a new group: its rate may be the current one or its highest.
    """
    if isinstance(group["peak_lr"], float):
        group["peak_lr"] = None if _below_peak(others) else shared_peaks(group["peak_lr"], [*others, group])[-1]


def _after_lr_scale(group: Group, base: float) -> float:
    """The peak under `lr_scale`, by which timm's schedulers and loops like its multiply every rate of a group.

    torch's own schedulers do not know the key: a rate above the scaled peak shows that no loop multiplies.
    """
    scaled = base * float(group.get("lr_scale", 1.0))
    return scaled if float(group["lr"]) <= scaled * (1 + tolerance(group["lr"])) else base


def eta_max(group: Group) -> float | None:
    """The eta_max that decay divides by: the group's own peak, or the peak before muP multiplied its lr."""
    peak = group["resolved_peak_lr"]
    if peak is None or group["peak"] == "group":
        return None if peak is None else float(peak)
    return float(peak) / float(group["lr_multiplier"])


def update_peak(group: Group, label: str) -> str | None:
    """Bring `resolved_peak_lr` and `highest_lr` up to date before a step; return the warning if a scheduler changed it.

    The peak is resolved at the first step with a learning rate above zero: distributed checkpointing
    steps a fresh optimizer at zero before it loads the real state.
    """
    lr = float(group["lr"])
    group["highest_lr"] = max(lr, group["highest_lr"] or 0.0)
    if group["peak_lr"] == RUNNING_MAX:
        group["resolved_peak_lr"] = max(lr, group["resolved_peak_lr"] or 0.0) or None
    elif group["peak_lr"] is not None or group["resolved_peak_lr"] is not None:
        return follow_peak(group, label)
    elif lr > 0:
        set_resolved_peak(group, expected_peak(group))
    else:
        group["peak_record"] = scheduler_record(group)  # a graph that is captured now cannot read it any more
    return None


def follow_peak(group: Group, label: str) -> str | None:
    """Bring a peak up to date that the user has set, or that was resolved before; reads no learning rate."""
    if group["peak_lr"] is None:
        return _follow_record(group, label)
    group["resolved_peak_lr"] = float(group["peak_lr"])
    return None


def resolve_before_capture(group: Group, label: str) -> None:
    """Settle the peak while a CUDA graph is being captured, from numbers that the host already has.

    The graph would otherwise contain no decay at all, for ever.
    """
    setting = group["peak_lr"]
    known = setting if setting is not None else group["peak_record"] or group["constructor_lr"]
    if not known:
        raise RuntimeError(
            f"a CUDA graph is being captured while the peak learning rate of {label} is not known, so it would contain "
            f"no decay; pass peak_lr=<the highest learning rate of the run>, or take a step above zero before capturing"
        )
    group["resolved_peak_lr"] = float(known)


def set_resolved_peak(group: Group, peak: float | None) -> None:
    """Fix the peak in use, and remember what the scheduler's record was at that moment."""
    group["resolved_peak_lr"] = peak
    group["peak_record"] = scheduler_record(group)


def _follow_record(group: Group, label: str) -> str | None:
    """A scheduler that starts later may raise the peak; it may not lower it."""
    record, peak = scheduler_record(group), group["resolved_peak_lr"]
    if record is None or (record == group["peak_record"] and "lr_scale" not in group):
        return None
    implied = _after_lr_scale(group, record)
    if implied > peak * (1 + PEAK_TOLERANCE):
        message = f"a scheduler raised the peak learning rate of {label} from {peak:.8g} to {implied:.8g}"
        peak, group["highest_lr"] = implied, float(group["lr"])
    elif record != group["peak_record"] and _differ(implied, peak):
        message = (
            f"a scheduler recorded a peak of {implied:.8g} for {label}, below the {peak:.8g} in use, which is kept; "
            f"call set_peak_lr({implied:.8g}, group=<its number>) if a new run starts here"
        )
    else:
        group["peak_record"] = record
        return None
    set_resolved_peak(group, peak)
    return message


def warn_of_changes(messages: Sequence[str | None]) -> None:
    """Warn once of all peaks that a scheduler has changed before this step."""
    found = [message for message in messages if message is not None]
    if found:
        warnings.warn("; ".join(found), PeakLRWarning, stacklevel=users_line())


def join_in_mid_run(group: Group, others: list[Group], label: str, *, needed: bool) -> None:
    """Give a group that is added during a run the peak that its neighbours have at the same learning rate.

    Its learning rate is most often the current one of the run; taken for the peak, that would mean far more decay
    than its neighbours get, which is warned of where a peak is needed.
    """
    lr = float(group["lr"])
    running = _below_peak(others)
    if group["peak_lr"] is not None or group["resolved_peak_lr"] is not None or not running or lr == 0:
        return
    if scheduler_record(group) is not None:
        group["highest_lr"] = expected_peak(group)  # the run may be past it
        return
    for other in running:
        if not _differ(lr, float(other["lr"])):
            group["constructor_lr"] = other["resolved_peak_lr"]
            group["highest_lr"] = other["highest_lr"]
            return
    if needed:
        warnings.warn(
            f"{label} joins a run whose learning rate is below its peak; its own peak is taken to be its learning rate "
            f"{lr:.8g}; pass peak_lr in the group if it is another",
            PeakLRWarning,
            stacklevel=users_line(),
        )


def _below_peak(groups: Sequence[Group]) -> list[Group]:
    """The groups of a run under way whose rate is below its peak."""
    return [g for g in groups if g["resolved_peak_lr"] and float(g["lr"]) < g["resolved_peak_lr"] * _BELOW]


_REMEDY = (
    "pass peak_lr=<the highest learning rate of the run> to the optimizer, or hand over the scheduler with "
    "optimizer.set_peak_lr(scheduler), a LambdaLR with total_steps=<steps of the run>, or use peak_lr='running_max'"
)
_REMEDY_OF_A_SETTING = (
    "a peak_lr for all groups is that of the group with the highest rate, and the others get the same fraction of "
    "theirs: give each group its own in its options (adamw=, patterns=) or by set_peak_lr(x, group=<its number>), or "
    "hand over the scheduler with set_peak_lr(None) and set_peak_lr(scheduler)"
)


def check_lr(group: Group, label: str) -> None:
    """Refuse a learning rate above the peak, or beside a loaded one that is NaN, before anything is changed."""
    lr, peak = float(group["lr"]), group["resolved_peak_lr"]
    if peak is not None and not lr <= peak * (1 + PEAK_TOLERANCE):
        raise PeakLRError(
            f"the learning rate of {label} is {lr:.8g}, above its peak {peak:.8g}, so decay={group['decay']!r} would "
            f"be too strong; {_REMEDY if group['peak_lr'] is None else _REMEDY_OF_A_SETTING}"
        )


def never_reached(group: Group, label: str) -> str | None:
    """What to say of a learning rate that has turned down well below its peak, or None.

    A peak that the user has set is taken at their word.
    """
    peak, highest = group["resolved_peak_lr"], group["highest_lr"]
    if group["peak_lr"] is not None or not peak or not highest:
        return None
    if highest >= _REACHED * peak or float(group["lr"]) >= _TURNED_DOWN * highest:
        return None
    return (
        f"the learning rate of {label} has turned down at {highest:.8g} without coming near its peak {peak:.8g}, so "
        f"decay={group['decay']!r} is {peak / highest:.3g} times weaker than it should be; unless the schedule rises "
        f"again, pass peak_lr=<the highest learning rate of the run>, or call "
        f"set_peak_lr({highest:.8g}, group=<its number>) on the optimizer now"
    )


class PeakBeforeLoad(NamedTuple):
    """What a group believed of its peak before a state was loaded, and whether the constructor's number was that."""

    setting: float | str | None
    expected: float
    handed_over: float | None
    is_inherited: bool


def peaks_before_load(peak_lr: Any, groups: Sequence[Group]) -> list[PeakBeforeLoad]:
    """What the groups of an optimizer with this number for all were built for."""
    pairs = zip(groups, inherited(peak_lr, groups), strict=True)
    return [
        PeakBeforeLoad(group["peak_lr"], expected_peak(group), group["resolved_peak_lr"], own) for group, own in pairs
    ]


def surprise_after_load(before: PeakBeforeLoad, group: Group) -> str | None:
    """After a load the saved peak wins; what to say of one that is not the user's, or that had to be guessed.

    Where both optimizers were built alike, a saved peak that is higher was handed over by a scheduler or found during
    the run, and resuming that run is no surprise; nor is any where both follow the highest rate so far.
    """
    if before.setting == group["peak_lr"] == RUNNING_MAX:
        return None
    setting = group["peak_lr"] if group["peak_lr"] != RUNNING_MAX else None
    saved = group["resolved_peak_lr"] if group["resolved_peak_lr"] is not None else setting
    lr = float(group["lr"])
    mine = before.expected if before.handed_over is None else before.handed_over
    built_alike = before.handed_over is None and not _differ(before.expected, expected_peak(group))
    if saved is not None and _differ(saved, mine) and not (built_alike and saved > mine):
        return (
            f"built for a peak learning rate of {mine:.8g} and loaded one of {saved:.8g}, which is kept; "
            f"call set_peak_lr({mine:.8g}, group=<its number>) if a new run starts here"
        )
    if saved is None and scheduler_record(group) is None and lr > 0 and _differ(lr, mine):
        return (
            f"the loaded state knows no peak learning rate; its own is {lr:.8g} and the {mine:.8g} that "
            f"this optimizer was built with is taken for the peak; pass peak_lr or call set_peak_lr if it was another"
        )
    return None


def warn_after_load(groups: Sequence[Group | None], loaded: Sequence[float | Tensor | None]) -> None:
    """Warn of rates far below a loaded peak, from groups that need one and the rates that were loaded with peaks.

    A loop that sets rates by hand and goes on where the saved one stopped is at nearly the same rate.
    """
    far: list[tuple[int, float, float]] = []
    for number, (group, before) in enumerate(zip(groups, loaded, strict=False)):
        if group is not None and before is not None and not isinstance(group["lr"], Tensor):
            lr, peak = group["lr"], group["resolved_peak_lr"]
            if 0 < lr < _FAR * peak and not _FAR * lr <= float(before) <= lr / _FAR:
                far.append((number, lr, peak))
    if far:
        lines = "; ".join(f"optimizer.set_peak_lr({lr}, group={number})" for number, lr, _ in far)
        warnings.warn(
            f"the learning rate is far below the peak of the loaded run, so decay is "
            f"{max(peak / lr for _, lr, peak in far):.3g} times weaker than in a run with this peak; if a new run "
            f"starts here, write {lines}",
            PeakLRWarning,
            stacklevel=users_line(),
        )


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > PEAK_TOLERANCE * max(a, b)


def scheduler_peaks(scheduler: Any, total_steps: int | None = None) -> list[float]:
    """The highest learning rate that a scheduler reaches, for each param group of its optimizer.

    Args:
        scheduler: any scheduler of `torch.optim.lr_scheduler` or of timm; SequentialLR and ChainedScheduler are
            looked into.
        total_steps: the length of the run. Schedulers with others inside, those with lambdas and those that multiply by
            a gamma above 1 are tried out on copies for as many steps; a million take some seconds. The last two need
            it. Others are otherwise taken to reach the highest peak of their parts, which is too high where one falls
            while another warms up.
    """
    children = getattr(scheduler, "_schedulers", None)
    unbounded = hasattr(scheduler, "lr_lambdas") or getattr(scheduler, "gamma", 1.0) > 1
    if total_steps and (children or unbounded):
        return _tried_peaks(scheduler, total_steps)
    if children:
        starts = getattr(scheduler, "_milestones", None)  # of a SequentialLR, of which only the last has no known end
        lengths = [None] * len(children) if starts is None else [b - a for a, b in pairwise([0, *starts])] + [None]
        peaks = [scheduler_peaks(child, length) for child, length in zip(children, lengths, strict=True) if length != 0]
        return [max(of_group) for of_group in zip(*peaks, strict=True)]
    if hasattr(scheduler, "max_lrs"):  # CyclicLR
        return [float(lr) for lr in scheduler.max_lrs]
    groups: list[Group] = scheduler.optimizer.param_groups
    if hasattr(scheduler, "base_values"):  # timm
        return [
            float(lr) * float(group.get("lr_scale", 1.0))
            for lr, group in zip(scheduler.base_values, groups, strict=True)
        ]
    base_lrs = [float(lr) for lr in getattr(scheduler, "base_lrs", None) or map(_known_top, groups)]
    if unbounded:
        raise ValueError(
            f"a {type(scheduler).__name__} gives its learning rate only step by step; pass total_steps=<steps of the "
            f"run> with it, or the highest learning rate itself"
        )
    # Other schedulers leave their records in the groups, and what others call eta_min may be a fraction.
    if isinstance(scheduler, OneCycleLR | SWALR):
        key = "max_lr" if isinstance(scheduler, OneCycleLR) else "swa_lr"
        ends = [float(group[key]) for group in groups]
    elif isinstance(scheduler, CosineAnnealingLR | CosineAnnealingWarmRestarts):
        ends = [float(scheduler.eta_min)] * len(groups)
    else:
        ends = base_lrs
    return [max(pair) for pair in zip(base_lrs, ends, strict=True)]


def _tried_peaks(scheduler: Any, total_steps: int) -> list[float]:
    """What a scheduler reaches: a copy of it changes the rates of copied groups, from the first step on."""
    bases = [float(group["initial_lr"]) for group in scheduler.optimizer.param_groups]
    groups = [
        {**group, "lr": base, "initial_lr": base}
        for group, base in zip(scheduler.optimizer.param_groups, bases, strict=True)
    ]
    with warnings.catch_warnings(action="ignore"):  # that no optimizer has stepped
        trial = _begun_again(scheduler, SimpleNamespace(param_groups=groups, step=None))
        peaks = [float(group["lr"]) for group in groups]
        for _ in range(total_steps - 1):
            trial.step()
            peaks = [max(peak, float(group["lr"])) for peak, group in zip(peaks, groups, strict=True)]
    return peaks


def _begun_again(scheduler: Any, optimizer: Any) -> Any:
    """A copy of a scheduler and of those inside it, as they are when they have just been made, in this order."""
    again, children = copy(scheduler), getattr(scheduler, "_schedulers", None)
    if children:
        parts = [_begun_again(child, optimizer) for child in children]
        milestones = getattr(scheduler, "_milestones", None)
        if milestones is None:
            ChainedScheduler.__init__(again, parts, optimizer)
        else:
            SequentialLR.__init__(again, optimizer, parts, milestones)
        return again
    again.optimizer = optimizer
    again.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    again.last_epoch = -1
    again._initial_step()
    again.base_lrs = [float(lr) for lr in scheduler.base_lrs]  # CyclicLR has its own after the first rate
    return again


def _known_top(group: Group) -> float:
    """The top of a scheduler that has no base and only lowers rates, as ReduceLROnPlateau, at any time of the run."""
    return max(_base_rate(group), float(group["lr"]))
