"""Scaled decay for the optimizer that you already have.

An optimizer with decoupled decay shrinks weights by `lr * weight_decay`. Before each of its steps a hook sets
`weight_decay` so that this product is the decay rule's. Lambda, peak and step count are kept in the param groups, so
they are saved and loaded with the optimizer.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw import peak
from muonsw.decay import DECAY_RULES, LAMBDA_KEYS, Points, decay_factor, own_weight_decay, refuse_unknown_run
from muonsw.interop.unwrap import required_optimizer
from muonsw.options import validate_option
from muonsw.text import users_line

# torch optimizers that add their decay to the gradient: no weight_decay makes that a shrinkage of the weight.
_COUPLED = (
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
)
# The words in which groups of torch's, timm's and other optimizers say whether their decay is decoupled.
_DECOUPLED = ("decoupled_weight_decay", "decoupled_decay", "decoupled", "weight_decouple")
# Settings under which the decay of a decoupled optimizer is not `lr * weight_decay`.
_OTHERWISE = ("corrected_weight_decay", "unscaled_wd", "fixed_decay")
# Classes of timm whose groups do not say it: decay is added to the gradient or enters a trust ratio (Lars, Lamb), or it
# is divided by 1 - momentum (SGDP).
_KNOWN_OTHERWISE = frozenset({"Lars", "Lamb", "MADGRAD", "NAdamLegacy", "NvNovoGrad", "SGDP"})

# What is kept in a group beside its lambda.
_KEYS = ("constructor_lr", "peak_lr", "resolved_peak_lr", "peak_record", "highest_lr", "step_count")
_HANDLE = "_scaled_weight_decay"


def scale_weight_decay(
    optimizer: Optimizer,
    decay: str = "scaled",
    *,
    peak_lr: float | str | None = None,
    total_steps: int | None = None,
    decay_points: Points | None = None,
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
        decay_points: (fraction of the run, multiple of weight_decay) for a piecewise decay.

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
    length, points = validate_option("total_steps", total_steps), validate_option("decay_points", decay_points)
    refuse_unknown_run(decay, f"decay={decay!r}", length, points)
    optimizer = required_optimizer(optimizer, "scale_weight_decay")
    setting, groups = validate_option("peak_lr", peak_lr), optimizer.param_groups
    if hasattr(optimizer, _HANDLE):
        raise ValueError(f"this {type(optimizer).__name__} is scaled already; call remove() on its handle first")
    for group in groups:
        _refuse(optimizer, group)
        known = setting is not None or "constructor_lr" in group or peak.scheduler_record(group) is not None
        if optimizer.state and rule.uses_peak and group["weight_decay"] and not known:
            raise ValueError(
                f"this optimizer has taken steps, no scheduler has left its peak in the groups, and the learning rate "
                f"is now {float(group['lr']):g}; pass peak_lr=<the highest learning rate of the run>"
            )
    peak.refuse_shared(setting, [group for group in groups if group["weight_decay"]])
    names = {cls.__name__ for cls in type(optimizer).__mro__} & _KNOWN_OTHERWISE
    if names and not any(group.get(key) for group in groups for key in _DECOUPLED):
        warnings.warn(
            f"{names.pop()} does not shrink weights by lr * weight_decay, so setting its weight_decay gives it no "
            f"decay rule; use an optimizer whose decay is decoupled",
            stacklevel=2,
        )
    return ScaledWeightDecay(optimizer, decay, setting, length, points)


class ScaledWeightDecay:
    """Sets the `weight_decay` of an optimizer's groups before each of its steps."""

    def __init__(
        self, optimizer: Optimizer, decay: str, peak_lr: float | str | None, total_steps: int | None, points: Any
    ) -> None:
        self.optimizer, self.decay, self.peak_lr = optimizer, decay, peak_lr
        self.total_steps, self.decay_points = total_steps, points
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
        """A state that was not scaled knows no peak: it is the one that this optimizer was built for."""
        for group, known in zip(optimizer.param_groups, self._before_load, strict=True):
            if "constructor_lr" not in group:
                group.update({**known, "highest_lr": None})
                group["highest_lr"] = peak.expected_peak(group)
            self._join(group)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        groups = optimizer.param_groups
        if any(p.is_cuda for group in groups for p in group["params"][:1]) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph would freeze the weight_decay of this step; step outside the graph")
        before = [dict(group) for group in groups]
        changes: list[str | None] = []
        try:
            decays = [self._decay_of(group, f"param group {number}", changes) for number, group in enumerate(groups)]
            peak.warn_of_changes(changes)
        except BaseException:  # the peak of a step that is not taken must not stay
            for group, old in zip(groups, before, strict=True):
                group.clear()
                group.update(old)
            raise
        for group, decay in zip(groups, decays, strict=True):
            _set(group, decay)
            group["driven_weight_decay"] = decay
            group["step_count"] += 1

    def _decay_of(self, group: dict[str, Any], label: str, changes: list[str | None]) -> float:
        """The `weight_decay` with which the next step follows the rule; warnings of changed peaks go to `changes`."""
        self._join(group)
        lam, eta = float(own_weight_decay(group)), float(group["lr"])
        group["base_weight_decay"] = lam
        changed = peak.update_peak(group, label)
        if DECAY_RULES[self.decay].uses_peak and lam:
            changes.append(changed)
            peak.check_lr(group, label)
            message = peak.never_reached(group, label)
            if message is not None and not self._warned:
                self._warned = True
                warnings.warn(message, peak.PeakLRWarning, stacklevel=users_line())
        step, steps, points = group["step_count"] + 1, self.total_steps, self.decay_points
        phi = decay_factor(self.decay, lam, eta, group["resolved_peak_lr"], step=step, steps=steps, points=points)
        if not phi <= 1:
            raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
        return phi / eta if eta else 0.0


def _set(group: dict[str, Any], value: float) -> None:
    """Set `weight_decay`; a tensor, which a CUDA graph may read, is filled in place."""
    if isinstance(group["weight_decay"], Tensor):
        group["weight_decay"].fill_(value)
    else:
        group["weight_decay"] = value


def _refuse(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Refuse a group whose decay is not `lr * weight_decay`."""
    name = type(optimizer).__name__
    coupled = isinstance(optimizer, _COUPLED) or any(group.get(key) is False for key in _DECOUPLED)
    if coupled or "weight_decay" not in group:
        reason = "adds its decay to the gradient" if coupled else "has no weight_decay in its groups"
        raise ValueError(f"{name} {reason}, so no weight_decay gives it scaled decay; use AdamWSW, SGDSW or MuonSW")
    otherwise = [key for key in _OTHERWISE if group.get(key)]
    if otherwise:
        raise ValueError(f"{name} has {otherwise[0]}=True, so its decay is not lr * weight_decay; build it without")
    if "algorithm" in group and "resolved_peak_lr" in group:
        raise ValueError(f"{name} is one of ours; pass decay= to it instead")
