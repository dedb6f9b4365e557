"""Decay rules for optimizers that are not ours, by driving the `weight_decay` of their groups."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from muonsw import peak
from muonsw.decay import DECAY_RULES, decay_factor
from muonsw.options import validate_option
from muonsw.wrapped import unwrap_optimizer

# torch optimizers that add their decay to the gradient: no weight_decay makes that a shrinkage of the weight.
_COUPLED = (
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
)


def drive_weight_decay(
    optimizer: Optimizer,
    decay: str = "scaled",
    *,
    peak_lr: float | str | None = None,
    total_steps: int | None = None,
) -> DecayDriver:
    """Make a decoupled optimizer of another library follow a decay rule.

    Such an optimizer shrinks weights by `lr * weight_decay`. Before each of its steps this sets `weight_decay` so
    that the product is the rule's. Each group's own lambda is kept under `base_weight_decay`, and the peak
    under `resolved_peak_lr`, both in the group, so that they are saved and loaded with the optimizer. The peak
    is found as for our own optimizers.

    Args:
        optimizer: one whose decay is decoupled: torch's AdamW and Muon, timm's and dion's optimizers. One that
            Accelerate has wrapped is unwrapped.
        decay: a name from `DECAY_RULES`; not one that follows the gradients, which other optimizers do not tell.
        peak_lr: the highest learning rate of the run, None to find it, or "running_max".
        total_steps: the length of the run in updates, for rules that end with it.

    Returns:
        A handle; its `remove()` stops driving and gives the groups their own `weight_decay` back.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> handle = drive_weight_decay(optimizer, "scaled")
        >>> optimizer.param_groups[0]["lr"] = 0.05
        >>> weight.sum().backward(); optimizer.step()
        >>> optimizer.param_groups[0]["weight_decay"]
        0.25
    """
    if DECAY_RULES[decay].uses_gradient:
        raise ValueError(f"decay={decay!r} follows the gradients, which {type(optimizer).__name__} keeps to itself")
    length = validate_option("total_steps", total_steps)
    if DECAY_RULES[decay].uses_length and length is None:
        raise ValueError(f"decay={decay!r} ends with the run; pass total_steps=<updates of the whole run>")
    optimizer = unwrap_optimizer(optimizer)
    setting = validate_option("peak_lr", peak_lr)
    for group in optimizer.param_groups:
        _refuse_coupled(optimizer, group)
        _adopt_group(group, decay, setting)
    return DecayDriver(optimizer, decay, setting, length)


class DecayDriver:
    """Sets the `weight_decay` of an optimizer's groups before each of its steps."""

    def __init__(
        self, optimizer: Optimizer, decay: str, peak_lr: float | str | None, total_steps: int | None = None
    ) -> None:
        self.optimizer = optimizer
        self.decay = decay
        self.peak_lr = peak_lr
        self.total_steps = total_steps
        self._told = False
        self._before_load: list[dict[str, Any]] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._remember),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        )

    def remove(self) -> None:
        """Stop driving, and give the groups their own `weight_decay` back."""
        for handle in self._handles:
            handle.remove()
        for group in self.optimizer.param_groups:
            group["weight_decay"] = group.pop("base_weight_decay", group["weight_decay"])
            for key in (*_KEYS, "decay"):
                group.pop(key, None)

    def _remember(self, optimizer: Optimizer, state: dict[str, Any]) -> None:  # noqa: ARG002
        self._before_load = [{key: group[key] for key in _KEYS if key in group} for group in optimizer.param_groups]

    def _after_load(self, optimizer: Optimizer) -> None:
        """Groups of a state that was not driven know no peak: theirs is the one that this optimizer was built with.

        Their learning rate may be any of the schedule, and their `weight_decay` is their own lambda.
        """
        for group, known in zip(optimizer.param_groups, self._before_load, strict=True):
            if "constructor_lr" not in group:
                group.update({**known, "highest_lr": None})
                group["highest_lr"] = peak.expected_peak(group)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        for number, group in enumerate(optimizer.param_groups):
            _adopt_group(group, self.decay, self.peak_lr)
            label = f"param group {number}"
            peak.update_peak(group, label)
            lam, eta = group["base_weight_decay"], float(group["lr"])
            if DECAY_RULES[self.decay].uses_peak and lam:
                peak.check_lr(group, label)
                self._tell_if_never_reached(group, label)
            step = group["step_count"] + 1
            top, length = group["resolved_peak_lr"], self.total_steps
            phi = float(decay_factor(self.decay, lam, eta, top, step=step, steps=length))
            if phi > 1:
                raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
            group["weight_decay"] = phi / eta if eta else 0.0
        for group in optimizer.param_groups:
            group["step_count"] += 1

    def _tell_if_never_reached(self, group: dict[str, Any], label: str) -> None:
        message = peak.never_reached(group, label)
        if message is not None and not self._told:
            self._told = True
            warnings.warn(message, peak.PeakLRWarning, stacklevel=4)


# What driving keeps in a group, beside its lambda.
_KEYS = ("constructor_lr", "peak_lr", "resolved_peak_lr", "peak_record", "highest_lr", "step_count")


def _adopt_group(group: dict[str, Any], decay: str, peak_lr: float | str | None) -> None:
    """Add the keys that driving needs; those that a loaded state brought along stay."""
    group.setdefault("base_weight_decay", float(group["weight_decay"]))
    group.setdefault("constructor_lr", float(group["lr"]))
    group.setdefault("peak_lr", peak_lr)
    group.setdefault("resolved_peak_lr", None)
    group.setdefault("peak_record", None)
    group.setdefault("highest_lr", None)
    group.setdefault("step_count", 0)
    group["decay"] = decay


def _refuse_coupled(optimizer: Optimizer, group: dict[str, Any]) -> None:
    coupled = isinstance(optimizer, _COUPLED) or group.get("decoupled_weight_decay") is False
    if coupled or "weight_decay" not in group:
        reason = "adds its decay to the gradient" if coupled else "has no weight_decay in its groups"
        raise ValueError(f"{type(optimizer).__name__} {reason}, so driving weight_decay cannot make it decoupled")
    if "algorithm" in group and "resolved_peak_lr" in group:
        raise ValueError(f"{type(optimizer).__name__} is one of ours; pass decay= to it instead")
