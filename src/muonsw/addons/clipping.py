"""Gradient clipping for the algorithms that need it.

- SGD moves by the gradient, so an outlier makes an outlying step: clip.
- AdamW divides by the average size of past gradients. One outlier moves the weights little more than any other
  gradient, but it stays in the average for `1 / (1 - beta2)` steps and makes all of them small: clip.
- Muon moves every matrix by a fixed amount, Lion every element, whatever the size of the gradient. Clipping would only
  change how much each batch counts in the momentum, and with one norm for the whole model a spike in an embedding would
  take that batch out of every momentum: do not clip.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw.algorithms import ALGORITHMS
from muonsw.checkpoint import required_optimizer
from muonsw.distributed.shards import is_dtensor, whole
from muonsw.options import require_number

# Calls that clipped, and all calls, since telemetry last read this. Updated in place, because captured graphs write
# to the tensor.
_counts: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()


@torch.no_grad()
def clip_optimizer_grads_(optimizer: Any, max_norm: float, *, algorithms: Collection[str] | None = None) -> Tensor:
    """Clip gradients in place by their total norm, for algorithms whose steps depend on the gradient's size.

    Use it in place of `torch.nn.utils.clip_grad_norm_`: after the last backward (and `scaler.unscale_`), before
    `optimizer.step()`. It does not wait for the device.

    Args:
        optimizer: an optimizer of this library, or Accelerate's wrapper around one.
        max_norm: the largest total norm of all clipped gradients.
        algorithms: the algorithms whose gradients are measured and clipped; by default all but Muon, Lion, Dion2 and
            ASGO, whose steps do not depend on the gradient's size. Pass `("adamw", "sgd", "muon")` to clip the whole
            model by one norm.

    Returns:
        The total norm before clipping, a plain tensor that is equal on all ranks. DTensor gradients may be on
        several meshes.

    Examples:
        >>> from muonsw import MuonSW
        >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 8, bias=False))
        >>> optimizer = MuonSW.for_model(model, lr=0.02)
        >>> for param in model.parameters():
        ...     param.grad = torch.ones_like(param)
        >>> round(clip_optimizer_grads_(optimizer, 1.0).item(), 3)  # of the 32 elements of the embedding
        5.657
        >>> [round(param.grad.norm().item(), 3) for param in model.parameters()]
        [1.0, 8.0]
    """
    optimizer = required_optimizer(optimizer, "clip_optimizer_grads_")
    if max_norm != math.inf:  # infinity measures without clipping
        require_number("max_norm", max_norm, open_ends=True)
    if isinstance(algorithms, str):
        raise TypeError(f"algorithms={algorithms!r}: must be a collection of names, such as ('{algorithms}',)")
    if any("algorithm" not in group for group in optimizer.param_groups):
        raise TypeError(
            f"clip_optimizer_grads_ needs an optimizer of this library, whose groups name their algorithm, not a "
            f"{type(optimizer).__name__}; use torch.nn.utils.clip_grad_norm_"
        )
    clipped = [name for name, rule in ALGORITHMS.items() if not rule.scale_free] if algorithms is None else algorithms
    for name in clipped:
        ALGORITHMS[name]  # raises if unknown

    # torch's functions refuse mixed meshes; a DTensor without a gradient here may have one on other ranks
    by_mesh: dict[Any, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"] if group["algorithm"] in clipped else ():
            if param.grad is not None or (is_dtensor(param) and param.requires_grad):
                by_mesh.setdefault(param.device_mesh if is_dtensor(param) else None, []).append(param)
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
    if counts is None or counts.device != norm.device:
        counts = _counts[optimizer] = torch.zeros(2, dtype=torch.int64, device=norm.device)
    counts[0].add_(norm > max_norm)
    counts[1].add_(1)
    return norm


def clipped_share(optimizer: Optimizer) -> float | None:
    """The share of calls that clipped since the last read, None without calls; waits for the device."""
    counts = _counts.get(optimizer)
    if counts is None:
        return None
    clipped, calls = counts.tolist()
    counts.zero_()
    return clipped / calls if calls else None
