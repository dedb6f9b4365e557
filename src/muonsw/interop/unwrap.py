"""The optimizer or scheduler inside what a framework has wrapped around it, such as Accelerate's `prepare`."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def unwrap_optimizer(optimizer: Any) -> Any:
    """The innermost optimizer: wrappers keep theirs under `optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def unwrap_scheduler(scheduler: Any) -> Any:
    """The innermost scheduler: wrappers keep theirs under `scheduler`."""
    while callable(getattr(inner := getattr(scheduler, "scheduler", None), "step", None)):
        scheduler = inner
    return scheduler
