"""The optimizer or scheduler inside what a framework has wrapped around it, such as Accelerate's `prepare`."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def unwrap_optimizer(optimizer: Any) -> Any:
    """The innermost optimizer: wrappers keep theirs under `optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def required_optimizer(given: Any, caller: str) -> Optimizer:
    """The innermost optimizer of what a caller was given.

    Raises:
        TypeError: If that is none, such as a model.
    """
    optimizer = unwrap_optimizer(given)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{caller} needs a torch.optim.Optimizer, not a {type(optimizer).__name__}; of a wrapper, pass the "
            f"optimizer inside"
        )
    return optimizer


def unwrap_scheduler(scheduler: Any) -> Any:
    """The innermost scheduler: wrappers keep theirs under `scheduler`."""
    while callable(getattr(inner := getattr(scheduler, "scheduler", None), "step", None)):
        scheduler = inner
    return scheduler
