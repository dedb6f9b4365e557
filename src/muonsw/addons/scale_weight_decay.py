"""Scaled decay for the optimizer that you already have.

An optimizer with decoupled decay shrinks weights by `lr * weight_decay`. Before each of its steps a hook sets
`weight_decay` so that this product is the decay rule's. Lambda, peak and step count are kept in the param groups, so
they are saved and loaded with the optimizer.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw import peak
from muonsw.checkpoint import required_optimizer
from muonsw.decay import DECAY_RULES, LAMBDA_KEYS, decay_factor, own_weight_decay, require_length
from muonsw.options import validate_option
from muonsw.text import users_line

# Classes of torch, timm, bitsandbytes and pytorch-optimizer that add their decay to the gradient, put it under a trust
# ratio or divide it, and whose groups do not say so.
_COUPLED = {
    *("SGD", "ASGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Lars", "Lamb", "MADGRAD", "NAdamLegacy"),
    *("NvNovoGrad", "SGDP", "LARS", "AccSGD", "ApolloDQN", "FAdam"),
}
# The words in which groups say whether their decay is decoupled.
_DECOUPLED = ("decoupled_weight_decay", "decoupled_decay", "decoupled", "weight_decouple")
# Settings under which the decay of a decoupled optimizer is not `lr * weight_decay`.
_OTHERWISE = ("corrected_weight_decay", "unscaled_wd", "fixed_decay")
# Keys of a group in addition to its lambda.
_KEYS = ("constructor_lr", "peak_lr", "resolved_peak_lr", "peak_record", "highest_lr", "step_count")
_HANDLE = "_scaled_weight_decay"


def scale_weight_decay(
    optimizer: Optimizer,
    decay: str = "scaled",
    *,
    peak_lr: float | str | None = None,
    total_steps: int | None = None,
) -> ScaledWeightDecay:
    """Make an optimizer with decoupled weight decay follow a decay rule, by default lambda * lr^2 / peak.

    Call it once, after the optimizer is built, and again after a resume or on a copy: hooks are not saved. A
    `weight_decay` that you set later is the group's lambda from then on.

    Args:
        optimizer: torch's AdamW or Muon, or another with decoupled decay. One that Accelerate has wrapped is unwrapped.
        decay: a name from `DECAY_RULES`; not one that follows the gradients.
        peak_lr: the highest learning rate of the run; None takes what a scheduler recorded, else the current rate.
            "running_max" follows the highest rate so far.
        total_steps: the length of the run, for rules that end with it.

    Returns:
        A handle; its `remove()` gives the groups their own `weight_decay` back.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> handle = scale_weight_decay(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.05
        >>> weight.sum().backward(); optimizer.step()
        >>> optimizer.param_groups[0]["weight_decay"]
        0.25
    """
    rule = DECAY_RULES[validate_option("decay", decay)]
    if rule.uses_gradient:
        raise ValueError(f"decay={decay!r} follows the gradients, which {type(optimizer).__name__} keeps to itself")
    length = validate_option("total_steps", total_steps)
    require_length(decay, length)
    optimizer = required_optimizer(optimizer, "scale_weight_decay")
    setting, groups = validate_option("peak_lr", peak_lr), optimizer.param_groups
    if hasattr(optimizer, _HANDLE):
        raise ValueError(f"this {type(optimizer).__name__} is scaled already; call remove() on its handle first")
    for group in groups:
        _refuse_other_decay(optimizer, group)
        is_known = setting is not None or "constructor_lr" in group or peak.scheduler_record(group) is not None
        if rule.uses_peak and group["weight_decay"] and not is_known and _has_stepped(optimizer):
            raise ValueError(
                f"this optimizer has taken steps, no scheduler has left its peak in the groups, and the learning rate "
                f"is now {float(group['lr']):g}; pass peak_lr=<the highest learning rate of the run>"
            )
    peak.refuse_shared(setting, [group for group in groups if group["weight_decay"]])
    return ScaledWeightDecay(optimizer, decay, setting, length)


class ScaledWeightDecay:
    """Sets the `weight_decay` of an optimizer's groups before each of its steps."""

    def __init__(self, optimizer: Optimizer, decay: str, peak_lr: float | str | None, total_steps: int | None) -> None:
        self.optimizer, self.decay, self.peak_lr, self.total_steps = optimizer, decay, peak_lr, total_steps
        self._warned = False
        self._before_load: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            self._join(group)
        setattr(optimizer, _HANDLE, self)
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._remember),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        )

    def remove(self) -> None:
        """Stop, and give the groups their own `weight_decay` back."""
        for handle in self._handles:
            handle.remove()
        delattr(self.optimizer, _HANDLE)
        for group in self.optimizer.param_groups:
            _set(group, own_weight_decay(group))
            for key in (*_KEYS, *LAMBDA_KEYS, "decay"):
                group.pop(key, None)

    def _join(self, group: dict[str, Any]) -> None:
        """Add the keys that a group needs; those that a loaded state brought along stay."""
        others = [other["step_count"] for other in self.optimizer.param_groups if "step_count" in other]
        counts = [float(self.optimizer.state[p].get("step", 0)) for p in group["params"] if p in self.optimizer.state]
        group.setdefault("base_weight_decay", float(group["weight_decay"]))
        group.setdefault("driven_weight_decay", float(group["weight_decay"]))
        group.setdefault("constructor_lr", float(group["lr"]))
        group.setdefault("peak_lr", self.peak_lr)
        group.setdefault("resolved_peak_lr", None)
        group.setdefault("peak_record", None)
        # A run under way may be past its peak: that its rate is lower now says nothing against it.
        group.setdefault("highest_lr", peak.expected_peak(group) if counts else None)
        group.setdefault("step_count", int(max([*others, *counts], default=0)))
        group["decay"] = self.decay

    def _remember(self, optimizer: Optimizer, state: dict[str, Any]) -> None:  # noqa: ARG002
        self._before_load = [{key: group[key] for key in _KEYS if key in group} for group in optimizer.param_groups]

    def _after_load(self, optimizer: Optimizer) -> None:
        """Keep this optimizer's peak if the loaded state was not scaled and so knows none."""
        for group, known in zip(optimizer.param_groups, self._before_load, strict=True):
            if "constructor_lr" not in group:
                group.update({**known, "highest_lr": None})
                group["highest_lr"] = peak.expected_peak(group)
            self._join(group)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        groups = optimizer.param_groups
        if any(p.is_cuda for group in groups for p in group["params"][:1]) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph would freeze the weight_decay of this step; step outside the graph")
        # Work on copies: a step that is refused changes no group.
        planned = [dict(group) for group in groups]
        changes = [self._plan(group, number) for number, group in enumerate(planned)]
        peak.warn_of_changes(changes)
        for group, plan in zip(groups, planned, strict=True):
            _set(group, plan["driven_weight_decay"])
            group.update({key: plan[key] for key in (*_KEYS, *LAMBDA_KEYS, "decay")})

    def _plan(self, group: dict[str, Any], number: int) -> str | None:
        """Write into a copy of a group what its next step needs; return a warning if its peak has changed."""
        self._join(group)
        lam, eta = float(own_weight_decay(group)), float(group["lr"])
        changed = peak.update_peak(group, number)
        uses_peak = DECAY_RULES[self.decay].uses_peak and lam > 0
        if uses_peak:
            message = peak.check_lr(group, number)
            if message is not None and not self._warned:
                self._warned = True
                warnings.warn(message, peak.PeakLRWarning, stacklevel=users_line())
        group["step_count"] += 1
        step, steps = group["step_count"], self.total_steps
        phi = decay_factor(self.decay, lam, eta, group["resolved_peak_lr"], step=step, steps=steps)
        if not phi <= 1:
            raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
        group["base_weight_decay"], group["driven_weight_decay"] = lam, phi / eta if eta else 0.0
        return changed if uses_peak else None


def _set(group: dict[str, Any], value: float) -> None:
    """Set `weight_decay`; a tensor, which a CUDA graph may read, is filled in place."""
    if isinstance(group["weight_decay"], Tensor):
        group["weight_decay"].fill_(value)
    else:
        group["weight_decay"] = value


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether there is state that a step has written; dion makes it before the first step, as zeros."""
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    values = counts or [value for state in optimizer.state.values() for value in state.values()]
    tensors = any(bool(value.any()) for value in values if isinstance(value, Tensor))
    return tensors or any(value for value in values if isinstance(value, int | float))


def _refuse_other_decay(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Refuse a group whose decay is not `lr * weight_decay`."""
    name, said = type(optimizer).__name__, [group[key] for key in _DECOUPLED if isinstance(group.get(key), bool)]
    classes = {re.sub(r"^Paged|(8|32)bit$", "", cls.__name__) for cls in type(optimizer).__mro__}
    coupled = not all(said) if said else bool(classes & _COUPLED)
    if coupled or "weight_decay" not in group:
        reason = "adds its decay to the gradient" if coupled else "has no weight_decay in its groups"
        raise ValueError(f"{name} {reason}, so no weight_decay gives it scaled decay; use AdamWSW, SGDSW or MuonSW")
    otherwise = [key for key in _OTHERWISE if group.get(key)]
    if otherwise:
        raise ValueError(f"{name} has {otherwise[0]}=True, so its decay is not lr * weight_decay; build it without")
    if "algorithm" in group and "resolved_peak_lr" in group:
        raise ValueError(f"{name} is one of ours; pass decay= to it instead")
