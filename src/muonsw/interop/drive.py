"""Decay rules for optimizers that are not ours, by driving the `weight_decay` of their groups."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from muonsw import peak
from muonsw.decay import DECAY_RULES, Points, decay_factor, refuse_unknown_run
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
# Settings of timm under which the decay of a decoupled optimizer is not `lr * weight_decay`.
_OTHERWISE = ("corrected_weight_decay", "unscaled_wd", "fixed_decay")
# Classes of timm whose groups do not say it: decay is added to the gradient or enters a trust ratio (Lars, Lamb), or it
# is divided by 1 - momentum (SGDP).
_KNOWN_OTHERWISE = frozenset({"Lars", "Lamb", "MADGRAD", "NAdamLegacy", "NvNovoGrad", "SGDP"})


def drive_weight_decay(
    optimizer: Optimizer,
    decay: str = "scaled",
    *,
    peak_lr: float | str | None = None,
    total_steps: int | None = None,
    decay_points: Points | None = None,
) -> DecayDriver:
    """Make a decoupled optimizer of another library follow a decay rule.

    Such an optimizer shrinks weights by `lr * weight_decay`. Before each of its steps this sets `weight_decay` so
    that the product is the rule's. Each group's own lambda is kept under `base_weight_decay`, and the peak
    under `resolved_peak_lr`, both in the group, so that they are saved and loaded with the optimizer. A `weight_decay`
    that is set later is the group's lambda from then on. The peak is found as for our own optimizers; in the middle of
    a run it must have been recorded by a scheduler, or be given. Rules that follow the step count on from the `step` in
    the optimizer's state, or from here where it has none. A copy of the optimizer is not driven, which is warned of;
    drive it too, and it goes on from there.

    Args:
        optimizer: one whose decay is decoupled: torch's AdamW and Muon, timm's and dion's optimizers. One that
            Accelerate has wrapped is unwrapped.
        decay: a name from `DECAY_RULES`; not one that follows the gradients, which other optimizers do not show.
        peak_lr: the highest learning rate of the run, None to find it, or "running_max". A number is the peak of the
            group with the highest rate; the others get the same fraction of theirs.
        total_steps: the length of the run in updates, for rules that end with it.
        decay_points: (fraction of the run, multiple of weight_decay) for a piecewise decay.

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
    if DECAY_RULES[validate_option("decay", decay)].uses_gradient:
        raise ValueError(f"decay={decay!r} follows the gradients, which {type(optimizer).__name__} keeps to itself")
    length, points = validate_option("total_steps", total_steps), validate_option("decay_points", decay_points)
    refuse_unknown_run(decay, f"decay={decay!r}", length, points)
    optimizer = required_optimizer(optimizer, "drive_weight_decay")
    setting = validate_option("peak_lr", peak_lr)
    if hasattr(optimizer, _DRIVER):
        raise ValueError(f"this {type(optimizer).__name__} is driven already; call remove() on its driver first")
    for group in optimizer.param_groups:
        _refuse_coupled(optimizer, group)
        if optimizer.state and DECAY_RULES[decay].uses_peak:
            _refuse_unknown_peak(group, setting)
    _warn_of_coupled(optimizer)
    for group in optimizer.param_groups:
        group.setdefault("step_count", _steps_taken(optimizer, group))
    _adopt_groups(optimizer.param_groups, decay, setting, under_way=bool(optimizer.state))
    return DecayDriver(optimizer, decay, setting, length, points)


class DecayDriver:
    """Sets the `weight_decay` of an optimizer's groups before each of its steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        decay: str,
        peak_lr: float | str | None,
        total_steps: int | None,
        decay_points: Points | None,
    ) -> None:
        self.optimizer = optimizer
        self.decay = decay
        self.peak_lr = peak_lr
        self.total_steps = total_steps
        self.decay_points = decay_points
        self._warned = False
        self._before_load: list[dict[str, Any]] = []
        setattr(optimizer, _DRIVER, self)
        vars(optimizer)["__getstate__"] = self._state_of_copy
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._remember),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        )

    def remove(self) -> None:
        """Stop driving, and give the groups their own `weight_decay` back."""
        for handle in self._handles:
            handle.remove()
        for key in (_DRIVER, "__getstate__"):
            vars(self.optimizer).pop(key, None)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = own_weight_decay(group)
            for key in (*_KEYS, *LAMBDA_KEYS, "decay"):
                group.pop(key, None)

    def _state_of_copy(self) -> dict[str, Any]:
        """What torch copies and pickles of the optimizer, which are no hooks."""
        name = type(self.optimizer).__name__
        warnings.warn(
            f"a copy of this {name} is not driven: its weight_decay stays where it is; call drive_weight_decay on it",
            stacklevel=users_line(),
        )
        return type(self.optimizer).__getstate__(self.optimizer)

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
        _adopt_groups(optimizer.param_groups, self.decay, self.peak_lr)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        groups = optimizer.param_groups
        on_gpu = any(param.is_cuda for group in groups for param in group["params"][:1])
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph would freeze the weight_decay that is set before each step; step outside the graph, or "
                "take one of our optimizers with capturable=True"
            )
        before = [dict(group) for group in groups]
        try:
            changes: list[str | None] = []
            decays = [self._decay_of(group, f"param group {number}", changes) for number, group in enumerate(groups)]
            peak.warn_of_changes(changes)
        except BaseException:  # a peak of a step that is not taken would stay
            for group, old in zip(groups, before, strict=True):
                group.clear()
                group.update(old)
            raise
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = group["driven_weight_decay"] = decay
            group["step_count"] += 1

    def _decay_of(self, group: dict[str, Any], label: str, changes: list[str | None]) -> float:
        """The `weight_decay` with which the next step follows the rule; warnings of changed peaks go to `changes`."""
        if "base_weight_decay" not in group:
            _adopt_group(group, self.decay, self.peak_lr)
            self._join(group, label)
        group["base_weight_decay"] = float(own_weight_decay(group))
        group["decay"] = self.decay
        changed = peak.update_peak(group, label)
        lam, eta = group["base_weight_decay"], float(group["lr"])
        if DECAY_RULES[self.decay].uses_peak and lam:
            changes.append(changed)
            peak.check_lr(group, label)
            self._warn_if_never_reached(group, label)
        step, top = group["step_count"] + 1, group["resolved_peak_lr"]
        steps, points = self.total_steps, self.decay_points
        phi = float(decay_factor(self.decay, lam, eta, top, step=step, steps=steps, points=points))
        if not phi <= 1:
            raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
        return phi / eta if eta else 0.0

    def _join(self, group: dict[str, Any], label: str) -> None:
        """A group that is added during the run counts and peaks with those that are at the same learning rate."""
        groups = [other for other in self.optimizer.param_groups if other is not group and "step_count" in other]
        peak.inherit(group, groups)
        needed = DECAY_RULES[self.decay].uses_peak and group["base_weight_decay"] > 0
        peak.join_in_mid_run(group, groups, label, needed=needed)
        group["step_count"] = max((other["step_count"] for other in groups), default=0)

    def _warn_if_never_reached(self, group: dict[str, Any], label: str) -> None:
        message = peak.never_reached(group, label)
        if message is not None and not self._warned:
            self._warned = True
            warnings.warn(message, peak.PeakLRWarning, stacklevel=users_line())


# Where an optimizer keeps its driver.
_DRIVER = "_decay_driver"
# A driven group's lambda, and the `weight_decay` that was set last.
LAMBDA_KEYS = ("base_weight_decay", "driven_weight_decay")
# What else driving keeps in a group.
_KEYS = ("constructor_lr", "peak_lr", "resolved_peak_lr", "peak_record", "highest_lr", "step_count")


def _adopt_groups(
    groups: list[dict[str, Any]], decay: str, peak_lr: float | str | None, *, under_way: bool = False
) -> None:
    """Adopt each group; a number for all is the peak of the highest rate among them."""
    for group, own in zip(groups, peak.shared_peaks(peak_lr, groups), strict=True):
        _adopt_group(group, decay, own, under_way=under_way)


def _adopt_group(group: dict[str, Any], decay: str, peak_lr: float | str | None, *, under_way: bool = False) -> None:
    """Add the keys that driving needs; those that a loaded state brought along stay."""
    group.setdefault("base_weight_decay", float(group["weight_decay"]))
    group.setdefault("driven_weight_decay", float(group["weight_decay"]))
    group.setdefault("constructor_lr", float(group["lr"]))
    group.setdefault("peak_lr", peak_lr)
    group.setdefault("resolved_peak_lr", None)
    group.setdefault("peak_record", None)
    # A run under way may be past its peak: that its rate is lower now says nothing against it.
    group.setdefault("highest_lr", peak.expected_peak(group) if under_way else None)
    group.setdefault("step_count", 0)
    group["decay"] = decay


def _steps_taken(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many steps the parameters of a group have taken, where their state counts them."""
    counts = [optimizer.state[param].get("step", 0) for param in group["params"] if param in optimizer.state]
    return int(max(map(float, counts), default=0.0))


def own_weight_decay(group: dict[str, Any]) -> Any:
    """A group's lambda, driven or not: a `weight_decay` that no step was driven with was set by the user."""
    now = group["weight_decay"]
    return group["base_weight_decay"] if now == group.get("driven_weight_decay") else now


def _refuse_coupled(optimizer: Optimizer, group: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    coupled = isinstance(optimizer, _COUPLED) or any(group.get(key) is False for key in _DECOUPLED)
    if coupled or "weight_decay" not in group:
        reason = "adds its decay to the gradient" if coupled else "has no weight_decay in its groups"
        raise ValueError(
            f"{name} {reason}, so driving weight_decay cannot make it decoupled; use SGDSW, AdamWSW or "
            f"another optimizer with decoupled decay"
        )
    otherwise = [key for key in _OTHERWISE if group.get(key)]
    if otherwise:
        raise ValueError(f"{name} has {otherwise[0]}=True, so its decay is not lr * weight_decay; build it without")
    if "algorithm" in group and "resolved_peak_lr" in group:
        raise ValueError(f"{name} is one of ours; pass decay= to it instead")


def _refuse_unknown_peak(group: dict[str, Any], peak_lr: float | str | None) -> None:
    known = peak_lr is not None or "constructor_lr" in group or peak.scheduler_record(group) is not None
    if not known and group["weight_decay"]:
        raise ValueError(
            f"this optimizer has taken steps, no scheduler has left its peak in the groups, and the learning rate is "
            f"now {float(group['lr']):g}; pass peak_lr=<the highest learning rate of the run>"
        )


def _warn_of_coupled(optimizer: Optimizer) -> None:
    """Warn of a class that is known to decay in another way, unless its groups say that this one does not."""
    names = {cls.__name__ for cls in type(optimizer).__mro__} & _KNOWN_OTHERWISE
    if names and not any(group.get(key) for group in optimizer.param_groups for key in _DECOUPLED):
        warnings.warn(
            f"{names.pop()} does not shrink weights by lr * weight_decay, so driving its weight_decay gives it no "
            f"decay rule; use an optimizer whose decay is decoupled",
            stacklevel=3,
        )
