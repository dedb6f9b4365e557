"""Gradient clipping by what it does to each algorithm.

- SGD moves by the gradient, so an outlier is an outlying step: clip.
- AdamW divides by the size that gradients had, so one outlier moves the weights little more than any other gradient,
  but it stays in the average square for `1 / (1 - beta2)` steps and makes all of them small: clip.
- Muon moves every matrix by a fixed amount whatever the size of its gradient, Lion every element. All that clipping
  changes is how much one batch counts in the momentum. A limit that always acts changes nothing; one that acts now and
  then makes some batches count less; and under one norm for the whole model a spike in an embedding takes a batch out
  of the momentum of every matrix. People clip for none of that: leave it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw.algorithms import ALGORITHMS
from muonsw.checkpoint import unwrap_optimizer
from muonsw.distributed.shards import as_dtensor, is_dtensor, whole
from muonsw.options import require_number


class Counts(NamedTuple):
    """How often `clip_optimizer_grads_` was called since telemetry last looked, and how often it clipped."""

    # on the device and written in place, because a captured graph writes to these tensors
    calls: Tensor
    clipped: Tensor


_counts: WeakKeyDictionary[Optimizer, Counts] = WeakKeyDictionary()


@torch.no_grad()
def clip_optimizer_grads_(optimizer: Any, max_norm: float, *, algorithms: Collection[str] | None = None) -> Tensor:
    """Scale gradients down, in place, so that their common norm is at most `max_norm`, where that makes sense.

    Call it where `torch.nn.utils.clip_grad_norm_` is called: after the last backward of an update (and
    `scaler.unscale_`), before `optimizer.step()`. Nothing waits for the device.

    Args:
        optimizer: one of ours; one that Accelerate has wrapped is unwrapped.
        max_norm: the largest norm that all clipped gradients together may have.
        algorithms: whose gradients are measured and clipped; by default those of all algorithms but Muon, Lion,
            Dion2 and ASGO, whose steps do not depend on the size of a gradient. Pass `("adamw", "sgd", "muon")` to clip
            the whole model by one norm.

    Returns:
        The norm of these gradients before clipping, a plain tensor that is equal on all ranks. Gradients may be plain,
        or DTensors of one mesh or of several.

    Examples:
        >>> from muonsw import MuonSW
        >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 8, bias=False))
        >>> optimizer = MuonSW.for_model(model, lr=0.02)
        >>> for param in model.parameters():
        ...     param.grad = torch.ones_like(param)
        >>> round(clip_optimizer_grads_(optimizer, 1.0).item(), 3)  # of the 32 entries of the embedding
        5.657
        >>> [round(param.grad.norm().item(), 3) for param in model.parameters()]
        [1.0, 8.0]
    """
    optimizer = unwrap_optimizer(optimizer)
    if max_norm != math.inf:  # which measures and clips nothing
        require_number("max_norm", max_norm, open_ends=True)
    if isinstance(algorithms, str) or not isinstance(algorithms, Iterable | None):
        raise TypeError(f"algorithms={algorithms!r}: must be a collection of names, such as ('{algorithms}',)")
    if any("algorithm" not in group for group in getattr(optimizer, "param_groups", [{}])):
        raise TypeError(
            f"clip_optimizer_grads_ needs an optimizer of this library, whose groups name their algorithm, not a "
            f"{type(optimizer).__name__}; use torch.nn.utils.clip_grad_norm_"
        )
    chosen = [name for name, algorithm in ALGORITHMS.items() if not algorithm.scale_free]
    if algorithms is not None:
        chosen = [str(name) for name in algorithms]
        for name in chosen:
            ALGORITHMS[name]  # raises for a name that it does not know

    # torch's functions take no mixture of meshes; a shard without a gradient may have one on other ranks
    by_mesh: dict[Any, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"] if group["algorithm"] in chosen else ():
            if param.grad is not None or (is_dtensor(param) and param.requires_grad):
                by_mesh.setdefault(as_dtensor(param).device_mesh if is_dtensor(param) else None, []).append(param)
    norms = []
    for params in by_mesh.values():
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        norms.append(whole(torch.nn.utils.get_total_norm(grads)))
    norm = norms[0] if norms else torch.zeros((), dtype=torch.float32, device="cpu")
    if len(norms) > 1:
        norm = torch.linalg.vector_norm(torch.stack([part.to(norm.device) for part in norms]))
    for params in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)

    counts = _counts.get(optimizer)
    if counts is None or counts.clipped.device != norm.device:
        counts = _counts[optimizer] = Counts(*(torch.zeros_like(norm, dtype=torch.int64) for _ in Counts._fields))
    counts.calls.add_(1)
    counts.clipped.add_(norm > max_norm)
    return norm


def clipped_share(optimizer: Optimizer) -> float | None:
    """The share of calls that clipped since the last look, None without calls; waits for the device."""
    counts = _counts.get(optimizer)
    if counts is None or not int(counts.calls):
        return None
    share = float(counts.clipped) / int(counts.calls)
    torch._foreach_zero_(list(counts))
    return share
