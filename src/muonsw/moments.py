"""What some decay rules must know of a run, kept in param groups: the step, its length, and the size of gradients.

- `total_steps` is the user's: the length of the run, asked for by rules that end with it.
- `step_count` counts calls of `step`, skipped ones included, as a scheduler does; only while a rule asks for it. Where
  the learning rate is a tensor it is one too, so that a captured graph counts.
- `gradient_average` holds two numbers: the mean squared gradient of the group, averaged over steps with AdamW's second
  beta, and the weight of that average. For AdamW the first over the second is exactly the mean of its corrected
  average squares, as averaging over entries and over steps commute; so the rule needs no such state and serves all.

All three are saved with the group. On many ranks the mean is over all shards of a DTensor; plain parameters count as
the same on every rank, so an expert that only one rank holds needs a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muonsw.algorithms.base import Item
from muonsw.decay import DECAY_RULES, decays
from muonsw.distributed.shards import as_spread, is_spread, local
from muonsw.flag import Flag
from muonsw.work import Batch

Group = dict[str, Any]


class Average(NamedTuple):
    """A group's average of squared gradients with this step's in it, and the root of its mean."""

    group: Group
    kept: Tensor
    root: float | Tensor


def require_length(group: Group, label: str) -> None:
    """Refuse a rule that ends with the run where nobody has said when that is."""
    rule = group["decay"]
    if DECAY_RULES[rule].uses_length and group["total_steps"] is None and decays(group):
        raise ValueError(f"decay={rule!r} of {label} ends with the run; pass total_steps=<updates of the whole run>")


def place(group: Group, label: str) -> None:
    """Bring a counter and an average that a graph may change to the group's device."""
    rule = DECAY_RULES[group["decay"]]
    if not group["params"] or not (rule.uses_step or rule.uses_gradient):
        return
    like = local(group["params"][0])
    if rule.uses_step and isinstance(group["lr"], Tensor):
        group["step_count"] = _placed(group["step_count"], 0.0, like, label)
    if rule.uses_gradient:
        group["gradient_average"] = _placed(group["gradient_average"], [0.0, 0.0], like, label)


def _placed(value: Any, fresh: Any, like: Tensor, label: str) -> Tensor:
    if isinstance(value, Tensor) and value.device == like.device:
        return value
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the decay rule of {label} counts steps; take one step before a CUDA graph is captured")
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.as_tensor(fresh if value is None else value, dtype=dtype, device=like.device).clone()


def join_in_mid_run(group: Group, others: Iterable[Group]) -> None:
    """A group that joins a run under way counts on from where the others are."""
    if DECAY_RULES[group["decay"]].uses_step and not group["step_count"]:
        group["step_count"] = max((int(other["step_count"]) for other in others), default=0)


def step_of(group: Group, device: torch.device) -> float | Tensor:
    """The number of the step that is about to be taken, from 1."""
    count = group["step_count"]
    return count.to(device, non_blocking=True) + 1 if isinstance(count, Tensor) else count + 1


def count_steps(groups: Iterable[Group]) -> None:
    """Count a step in every group whose rule follows it."""
    for group in groups:
        if DECAY_RULES[group["decay"]].uses_step:
            if isinstance(group["step_count"], Tensor):
                group["step_count"].add_(1)
            else:
                _count_on_host(group)


@_disable_dynamo  # a number that differs in every step would compile every step anew
def _count_on_host(group: Group) -> None:
    group["step_count"] = int(group["step_count"]) + 1


def averages(work: Sequence[Batch], flag: Flag | None) -> dict[int, Average]:
    """By the number of each group whose rule asks: its average with the gradients of this step; nothing is changed.

    Of gradients that are spread over ranks the sum is taken over all of them, so every rank must come here.
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
    on_host = before.device.type == "cpu" and not torch.compiler.is_compiling()
    return Average(group, after, float(root) if on_host else root)


def _sum_of_squares(item: Item) -> Tensor:
    norm = torch.linalg.vector_norm(item.grad, dtype=torch.promote_types(item.grad.dtype, torch.float32))
    squares: Tensor = norm.square()
    if not is_spread(item.parameter):
        return squares
    from torch.distributed.tensor import DTensor, Partial, Replicate

    like = as_spread(item.parameter)
    # A shard that tensor parallelism has cut before FSDP is no Shard to torch, so ask for the opposite.
    places = [Replicate() if place.is_replicate() else Partial() for place in like.placements]
    total: Tensor = DTensor.from_local(squares, like.device_mesh, places, run_check=False).full_tensor()
    return total


def keep(found: Iterable[Average]) -> None:
    """Keep the averages of a step that is taken, in the tensors that a graph knows."""
    for average in found:
        average.group["gradient_average"].copy_(average.kept)


def as_saved(group: Group) -> Group:
    """A group whose counter and average are plain numbers, as many before the first step as after it.

    A distributed checkpoint is read into the state of a fresh optimizer, which must hold the same kinds.
    """
    average = group["gradient_average"]
    if average is None and DECAY_RULES[group["decay"]].uses_gradient:
        average = [0.0, 0.0]
    plain = average.tolist() if isinstance(average, Tensor) else average
    return {**group, "step_count": int(group["step_count"]), "gradient_average": plain}


def loaded(value: Any, own: Any) -> Any:
    """A counter or average from a saved state, as the kind that this optimizer has; its tensor is filled in place."""
    if isinstance(own, Tensor):
        number = [0.0, 0.0] if value is None else value
        return own.copy_(torch.as_tensor(number, dtype=own.dtype, device=own.device).reshape(own.shape))
    if isinstance(value, Tensor) and not value.dim():
        return int(value)
    return value
