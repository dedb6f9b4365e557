"""Learning rate and decay of one step: combines peak, decay rule, norm rule and position in the run.

Some decay rules ask where the run is; what they need is kept in the param group and saved with it:

- `total_steps` and `decay_points` are the user's: the length of the run, and what a piecewise decay goes through.
- `step_count` counts calls of `step`, skipped ones included, as a scheduler does.
- `gradient_average` holds two scalars: the mean squared gradient of the group, averaged over steps with AdamW's second
  beta, and the weight of that average. For AdamW the first over the second is exactly the mean of its corrected
  average squares, as averaging over elements and over steps commute; so the rule needs no such state and serves all.

No gradient is summed for rules that do not ask. On many ranks the mean is over all shards of a DTensor; plain
parameters count as the same on every rank, so an expert that only one rank holds needs a group of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muonsw import norms, peak
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import Rates
from muonsw.decay import DECAY_RULES, decay_factor, decays, refuse_unknown_run
from muonsw.distributed.shards import as_dtensor, is_dtensor
from muonsw.nonfinite import Flag
from muonsw.work import Batch, Group, Item

if TYPE_CHECKING:
    from muonsw.counters import Counters

# What steps count in a group.
KEPT = ("step_count", "update_count", "gradient_average")

# Schedules that end at zero may pass it by a rounding error.
_ROUNDING = 1e-12


def needs_peak(group: Group) -> bool:
    """Whether a group decays by a rule that divides by the peak."""
    if group["norm"] != norms.FREE and not norms.uses_decay(group):
        return False
    return DECAY_RULES[group["decay"]].uses_peak and decays(group)


def check(group: Group, label: str, counters: Counters) -> str | None:
    """Refuse invalid rates and bring a group's peak up to date; return the warning of a changed peak."""
    if any(param.is_cuda and torch.cuda.is_current_stream_capturing() for param in group["params"][:1]):
        raise RuntimeError(
            f"a CUDA graph would freeze the learning rate of {label}; capture forward and backward, and step outside "
            f"the graph: small steps are replayed as graphs by themselves"
        )
    _number(group, "weight_decay", label)
    lr = _number(group, "lr", label, least=-peak.PEAK_TOLERANCE * (group["constructor_lr"] or 0.0) - _ROUNDING)
    if not isinstance(group["lr"], Tensor):
        group["lr"] = lr  # numpy's numbers would compute in their own precision
    if DECAY_RULES[group["decay"]].uses_length:
        require_run(group, label)
    changed = peak.update_peak(group, label)
    if not needs_peak(group):
        return None
    peak.check_lr(group, label)
    message = peak.never_reached(group, label)
    if message is not None:
        counters.never_reached(message)
    return changed


def _number(group: Group, key: str, label: str, least: float = 0.0) -> float:
    """A rate or lambda as a number; a tensor on a GPU is waited for."""
    try:
        number = float(group[key])
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < least:
        name = {"lr": "learning rate", "weight_decay": "weight decay"}[key]
        raise ValueError(f"the {name} of {label} is {group[key]!r}; it must be a finite number of at least 0")
    return number


def rates_of(work: Sequence[Batch], groups: Sequence[Group], flag: Flag | None) -> list[Rates]:
    """Learning rate and decay of every batch; the step counts as taken once all of them are known to be right."""
    averages = _averages(work, flag)
    found = [_rates(batch, flag, averages.get(batch.number)) for batch in work]
    count_updates(groups)
    for batch in work:
        batch.group["gradient_average"] = averages.get(batch.number, batch.group["gradient_average"])
    return found


def _rates(batch: Batch, flag: Flag | None, average: list[float] | None) -> Rates:
    group = batch.group
    eta = float(group["lr"])
    phi = _phi(group, eta, group["step_count"] + 1, average)
    if phi > 1:
        raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
    return Rates(eta, phi, None if flag is None else flag.to(batch.device), _norm_rule(group))


def _norm_rule(group: Group) -> norms.NormRule | None:
    """The rule that acts on a group; a step whose norms are all free does not enter `norms`."""
    return None if group["norm"] == norms.FREE else norms.acting(group)


def last_decay(group: Group, lr: float) -> float:
    """The decay of the last step, from what it has left in the group."""
    return _phi(group, lr, max(1, group["step_count"]), group["gradient_average"])


def _phi(group: Group, eta: float, step: int, average: list[float] | None) -> float:
    """The decay factor of a group; one without decay is not asked how long its run is."""
    rule, norm = DECAY_RULES[group["decay"]], _norm_rule(group)
    if (norm is not None and not norm.decays) or (rule.follows_run and not decays(group)):
        return 0.0
    return decay_factor(
        group["decay"],
        float(group["weight_decay"]),
        eta,
        peak.eta_max(group),
        step=step,
        steps=group["total_steps"],
        gradient=math.sqrt(average[0] / average[1]) if average and average[1] else 0.0,
        points=group["decay_points"],
    )


# the position in the run


def require_run(group: Group, label: str) -> None:
    """Refuse a rule that needs the length of the run, or points, where the group has none."""
    if decays(group):
        rule = group["decay"]
        refuse_unknown_run(rule, f"decay={rule!r} of {label}", group["total_steps"], group["decay_points"])


def join_in_mid_run(group: Group, others: Iterable[Group]) -> None:
    """A group that joins a run under way counts on from where the others are, and may be past its peak."""
    if not group["step_count"]:
        group["step_count"] = max((int(other["step_count"]) for other in others), default=0)
    if group["step_count"] and group["highest_lr"] is None:
        group["highest_lr"] = peak.expected_peak(group)


def count_steps(groups: Iterable[Group]) -> None:
    """Count a step in every group, whatever its rule: the rule may be changed in mid-run."""
    for group in groups:
        group["step_count"] += 1


def count_updates(groups: Iterable[Group]) -> None:
    """Count a step in every group whose algorithm follows it, before the update."""
    for group in groups:
        if counts_steps(group):
            group["update_count"] = int(group["update_count"]) + 1


def counts_steps(group: Group) -> bool:
    """Whether the group's algorithm follows the number of the step, on the host."""
    asks = ALGORITHMS[group["algorithm"]].counts_steps
    return asks is not None and asks(group)


def forget_skipped_start(groups: Iterable[Group], bad: bool | Tensor) -> None:
    """Let algorithms that begin their bases at the first step do so at the next one, if the first was skipped.

    Only after the first step the device is waited for.
    """
    first = [group for group in groups if counts_steps(group) and group["update_count"] == 1]
    if first and bad:
        for group in first:
            group["update_count"] = 0


def _averages(work: Sequence[Batch], flag: Flag | None) -> dict[int, list[float]]:
    """By the number of each group whose rule asks: its average with the gradients of this step; nothing is changed.

    Of sharded gradients the sum is taken over all ranks, so every rank must come here. It waits for the device.
    """
    items: dict[int, list[Item]] = {}
    groups = {batch.number: batch.group for batch in work}
    for batch in work:
        group = batch.group
        if DECAY_RULES[group["decay"]].uses_gradient and decays(group) and group["lr"] > 0:  # zero leaves no trace
            items.setdefault(batch.number, []).extend(batch.items)
    found = {}
    for number, own in items.items():
        total = sum(float(_sum_of_squares(item)) for item in own)
        mean, beta = total / sum(item.parameter.numel() for item in own), groups[number]["betas"][1]
        before = groups[number]["gradient_average"] or [0.0, 0.0]
        after = [beta * before[0] + (1 - beta) * mean, beta * before[1] + (1 - beta)]
        found[number] = after if flag is None or bool(flag.ok) else before
    return found


def _sum_of_squares(item: Item) -> Tensor:
    norm = torch.linalg.vector_norm(item.grad, dtype=torch.promote_types(item.grad.dtype, torch.float32))
    squares: Tensor = norm.square()
    if not is_dtensor(item.parameter):
        return squares
    from torch.distributed.tensor import DTensor, Partial, Replicate

    like = as_dtensor(item.parameter)
    # A shard that tensor parallelism has cut before FSDP is no Shard to torch, so ask for the opposite.
    places = [Replicate() if place.is_replicate() else Partial() for place in like.placements]
    total: Tensor = DTensor.from_local(squares, like.device_mesh, places, run_check=False).full_tensor()
    return total
