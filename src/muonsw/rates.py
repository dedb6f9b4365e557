"""Learning rate and decay of one step: combines peak, decay rule, norm rule and position in the run.

Some decay rules ask where the run is; what they need is kept in the param group and saved with it:

- `total_steps` and `decay_points` are the user's: the length of the run, and what a piecewise decay goes through.
- `step_count` counts calls of `step`, skipped ones included, as a scheduler does. Where the learning rate is a tensor
  it is one too, so that a captured graph counts.
- `gradient_average` holds two scalars: the mean squared gradient of the group, averaged over steps with AdamW's second
  beta, and the weight of that average. For AdamW the first over the second is exactly the mean of its corrected
  average squares, as averaging over elements and over steps commute; so the rule needs no such state and serves all.

No gradient is summed for rules that do not ask. On many ranks the mean is over all shards of a DTensor; plain
parameters count as the same on every rank, so an expert that only one rank holds needs a group of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonsw import norms, peak
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import Rates
from muonsw.decay import DECAY_RULES, decay_factor, decays, refuse_unknown_run
from muonsw.distributed.shards import as_dtensor, is_dtensor, local
from muonsw.nonfinite import Flag
from muonsw.slots import wide_dtype
from muonsw.work import Batch, Group, Item, copied_to, label_of

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


def check(number: int, group: Group, label: str, counters: Counters) -> str | None:
    """Bring a group's peak up to date and refuse an invalid learning rate; return the warning of a changed peak."""
    if isinstance(group["lr"], Tensor) or DECAY_RULES[group["decay"]].uses_gradient:
        _place(group, label)
    if isinstance(group["lr"], Tensor):
        changed = _check_tensor(number, group, label, counters)
        return changed if needs_peak(group) else None
    _check_lr(group, label)
    changed = peak.update_peak(group, label)
    if not needs_peak(group):
        return None
    peak.check_lr(group, label)
    message = peak.never_reached(group, label)
    if message is not None:
        counters.never_reached(message)
    return changed


def check_on_device(groups: Sequence[Group], counters: Counters) -> None:
    """Bring the highest rates of tensors into the groups, and warn where a schedule never came near its peak."""
    counters.read_rates()
    for number, group in enumerate(groups):
        if isinstance(group["lr"], Tensor) and needs_peak(group):
            message = peak.never_reached(group, label_of(group, number))
            if message is not None:
                counters.never_reached(message)


def _check_lr(group: Group, label: str) -> None:
    try:
        lr = float(group["lr"])
    except (TypeError, ValueError):
        lr = math.nan
    if any(_capturing(param) for param in group["params"][:1]):
        raise RuntimeError(
            f"a CUDA graph would freeze the learning rate {lr:g} of {label}; pass capturable=True or a tensor lr"
        )
    _refuse_lr(lr, -_ROUNDING, group, label)
    group["lr"] = lr  # numpy's numbers would compute in their own precision


def _least(group: Group) -> float:
    """How far below zero the roundings of a schedule that ends there may bring a learning rate in a tensor."""
    return -(peak.tolerance(group["lr"]) * (group["resolved_peak_lr"] or 0.0)) - _ROUNDING


def _refuse_lr(lr: float, least: float, group: Group, label: str) -> None:
    if not math.isfinite(lr) or lr < least:
        raise ValueError(f"the learning rate of {label} is {group['lr']!r}; it must be a finite number of at least 0")


def _check_tensor(number: int, group: Group, label: str, counters: Counters) -> str | None:
    """The peak of a learning rate in a tensor: resolved once, raised by schedulers, frozen in a captured graph."""
    lr = group["lr"]
    if lr.numel() != 1 or not lr.is_floating_point():
        raise ValueError(f"the learning rate of {label} is {lr!r}; a tensor must hold one floating-point number")
    if lr.is_cpu:  # a GPU would have to be waited for
        _refuse_lr(float(lr), _least(group), group, label)
    if _capturing(lr):
        if counts_steps(group):
            raise RuntimeError(f"{label} does something else every few steps, which a CUDA graph would freeze")
        if group["resolved_peak_lr"] is None and needs_peak(group):
            peak.resolve_before_capture(group, label)
        return None
    before, is_new = group["resolved_peak_lr"], counters.is_new_record(number, group)
    if before is None:
        return peak.update_peak(group, label)
    changed = peak.follow_peak(group, label) if is_new or group["peak_lr"] is not None else None
    if group["resolved_peak_lr"] > before:
        counters.forget_highest(number)
    return changed


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def rates_of(work: Sequence[Batch], groups: Sequence[Group], flag: Flag | None, counters: Counters) -> list[Rates]:
    """Learning rate and decay of every batch; the step counts as taken once all of them are known to be right."""
    averages = _averages(work, flag)
    found = [_rates(batch, flag, averages.get(batch.number)) for batch in work]
    for batch, one in zip(work, found, strict=True):
        _record(batch, one, counters)
    count_updates(groups)
    for average in averages.values():  # into the tensors that a graph knows
        average.group["gradient_average"].copy_(average.kept)
    return found


def _rates(batch: Batch, flag: Flag | None, average: Average | None) -> Rates:
    """With a tensor learning rate nothing is read back from the device."""
    group, device = batch.group, batch.device
    eta, lam = (_on(x, device) for x in (group["lr"], group["weight_decay"]))
    step = _step_of(group, device) if DECAY_RULES[group["decay"]].uses_step else 1  # compiled code must not read it
    phi = _phi(group, lam, eta, peak.eta_max(group), step, average.root if average else 0.0)
    if not isinstance(phi, Tensor) and phi > 1:
        _refuse_phi(phi)
    return Rates(eta, phi, None if flag is None else flag.to(device), _norm_rule(group))


def _record(batch: Batch, rates: Rates, counters: Counters) -> None:
    """Let the device remember which of its tensors the host would have refused, and how high a rate with a peak was."""
    group, lam = batch.group, batch.group["weight_decay"]
    if isinstance(rates.eta, Tensor):
        top = group["resolved_peak_lr"] if needs_peak(group) else None
        most = torch.finfo(rates.eta.dtype).max if top is None else top * (1 + peak.tolerance(group["lr"]))
        counters.record_wrong(rates.eta.clamp(_least(group), most) != rates.eta)  # true for NaN as well
        if top is not None:
            counters.record_highest(batch.number, rates.eta)
    if isinstance(lam, Tensor):
        counters.record_wrong(~(lam.reshape(()) >= 0))
    if isinstance(rates.phi, Tensor):
        counters.record_wrong(~(rates.phi <= 1))


def _refuse_phi(phi: float) -> None:
    raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")


def _norm_rule(group: Group) -> norms.NormRule | None:
    """The rule that acts on a group; a step whose norms are all free does not enter `norms`."""
    return None if group["norm"] == norms.FREE else norms.acting(group)


def _on(value: float | Tensor, device: torch.device) -> Any:
    """A rate or a lambda for a batch; a tensor in float32 or better, as its square has more digits than bfloat16."""
    if not isinstance(value, Tensor):
        return value
    return copied_to(value, device, torch.promote_types(value.dtype, torch.float32)).reshape(())


def last_decay(group: Group, lr: float) -> float:
    """The decay of the last step, from what it has left in the group; waits for the device."""
    average = group["gradient_average"]
    known = isinstance(average, Tensor) and float(average[1]) > 0
    root = float((average[0] / average[1]).sqrt()) if known else 0.0
    count = max(1, int(group["step_count"]))
    return float(_phi(group, float(group["weight_decay"]), lr, peak.eta_max(group), count, root))


def _phi(
    group: Group,
    lam: float | Tensor,
    eta: float | Tensor,
    top: float | None,
    step: float | Tensor,
    gradient: float | Tensor,
) -> float | Tensor:
    """The decay factor of a group; one without decay is not asked how long its run is."""
    rule, norm = DECAY_RULES[group["decay"]], _norm_rule(group)
    if (norm is not None and not norm.decays) or (rule.follows_run and not decays(group)):
        return 0.0
    steps, points = group["total_steps"], group["decay_points"]
    return decay_factor(group["decay"], lam, eta, top, step=step, steps=steps, gradient=gradient, points=points)


# the position in the run


def require_run(group: Group, label: str) -> None:
    """Refuse a rule that needs the length of the run, or points, where the group has none."""
    if decays(group):
        rule = group["decay"]
        refuse_unknown_run(rule, f"decay={rule!r} of {label}", group["total_steps"], group["decay_points"])


def join_in_mid_run(group: Group, others: Iterable[Group]) -> None:
    """A group that joins a run under way counts on from where the others are."""
    if not group["step_count"]:
        group["step_count"] = max((int(other["step_count"]) for other in others), default=0)


def saved_position(group: Group) -> Group:
    """A group whose counter and average are plain numbers, as many before the first step as after it.

    A distributed checkpoint is read into the state of a fresh optimizer, which must hold the same kinds.
    """
    average = group["gradient_average"]
    if average is None and DECAY_RULES[group["decay"]].uses_gradient:
        average = [0.0, 0.0]
    plain = average.tolist() if isinstance(average, Tensor) else average
    return {**group, "step_count": int(group["step_count"]), "gradient_average": plain}


def loaded_position(value: Any, own: Any) -> Any:
    """A counter or average from a saved state, as the kind that this optimizer has; its tensor is filled in place."""
    if isinstance(own, Tensor):
        scalars = [0.0, 0.0] if value is None else value
        return own.copy_(torch.as_tensor(scalars, dtype=own.dtype, device=own.device).reshape(own.shape))
    if isinstance(value, Tensor) and not value.dim():
        return int(value)
    return value


def count_steps(groups: Iterable[Group]) -> None:
    """Count a step in every group, whatever its rule: the rule may be changed in mid-run."""
    for group in groups:
        if isinstance(group["step_count"], Tensor):
            group["step_count"].add_(1)
        else:
            group["step_count"] = int(group["step_count"]) + 1


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


def _step_of(group: Group, device: torch.device) -> float | Tensor:
    """The number of the step that is about to be taken, from 1."""
    count = group["step_count"]
    return copied_to(count, device) + 1 if isinstance(count, Tensor) else count + 1


def _place(group: Group, label: str) -> None:
    """Bring a counter and an average that a graph may change to the group's device."""
    rule = DECAY_RULES[group["decay"]]
    if not group["params"]:
        return
    like = local(group["params"][0])
    if isinstance(group["lr"], Tensor) and (rule.uses_step or not _capturing(like)):
        group["step_count"] = _placed(group["step_count"], 0.0, like, label)
    if rule.uses_gradient:
        group["gradient_average"] = _placed(group["gradient_average"], [0.0, 0.0], like, label)


def _placed(value: Any, fresh: Any, like: Tensor, label: str) -> Tensor:
    if isinstance(value, Tensor) and value.device == like.device:
        return value
    if _capturing(like):
        raise RuntimeError(f"the decay rule of {label} counts steps; take one step before a CUDA graph is captured")
    dtype, known = wide_dtype(like.dtype), fresh if value is None else value
    return torch.as_tensor(known, dtype=dtype, device=like.device).clone()


class Average(NamedTuple):
    """A group's average of squared gradients with this step's in it, and the root of its mean."""

    group: Group
    kept: Tensor
    root: float | Tensor


def _averages(work: Sequence[Batch], flag: Flag | None) -> dict[int, Average]:
    """By the number of each group whose rule asks: its average with the gradients of this step; nothing is changed.

    Of sharded gradients the sum is taken over all ranks, so every rank must come here.
    """
    batches: dict[int, list[Batch]] = {}
    for batch in work:
        group = batch.group
        moves = isinstance(group["lr"], Tensor) or group["lr"] > 0  # a step at zero leaves no trace
        if DECAY_RULES[group["decay"]].uses_gradient and decays(group) and moves:
            batches.setdefault(batch.number, []).append(batch)
    return {number: _average(same[0].group, same, flag) for number, same in batches.items()}


def _average(group: Group, batches: Sequence[Batch], flag: Flag | None) -> Average:
    before: Tensor = group["gradient_average"]
    items = [item for batch in batches for item in batch.items]
    total = sum((_sum_of_squares(item).to(before) for item in items), torch.zeros_like(before[0]))
    mean = total / sum(item.parameter.numel() for item in items)
    beta = group["betas"][1]
    after = beta * before + (1 - beta) * torch.stack([mean, torch.ones_like(mean)])
    if flag is not None:
        after = torch.where(flag.to(before.device).ok, after, before)
    root = (after[0] / after[1].clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
    return Average(group, after, float(root) if before.device.type == "cpu" else root)


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
