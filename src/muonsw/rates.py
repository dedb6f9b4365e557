"""The learning rate and the decay of a param group at one step: checked on the host before anything changes.

Here those meet that each know one thing of it: peaks, decay rules, norm rules, and what rules must know of the run.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonsw import moments, norms, peak
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import Coefficients, Group
from muonsw.decay import DECAY_RULES, decay_factor, decays
from muonsw.flag import Flag
from muonsw.options import CHECKS, validate_option
from muonsw.work import Batch

if TYPE_CHECKING:
    from muonsw.notices import Notices

# Schedules that end at zero may pass it by a rounding error.
_ROUNDING = 1e-12


def needs_peak(group: Group) -> bool:
    """Whether a group decays by a rule that divides by the peak."""
    return DECAY_RULES[group["decay"]].uses_peak and norms.uses_decay(group)


class OptionCheck:
    """Refuses options that were set in the middle of a run and are wrong; those that stayed are only compared."""

    def __init__(self) -> None:
        self._right: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, number: int, group: Group, label: str) -> None:
        """Check what has changed in a group since its last check."""
        lam, others = group["weight_decay"], _options(group)
        known = self._right.get(number)
        if known is not None and known[0] is lam and known[1] == others:
            return
        before = [self] * (1 + len(others)) if known is None else [known[0], *known[1]]  # an option is never `self`
        pairs = zip(("weight_decay", *_OPTIONS), (lam, *others), before, strict=True)
        changed = {key: now for key, now, old in pairs if now is not old}
        for key, value in changed.items():
            _check_option(key, value, label)
        moments.require_length(group, label)
        norms.refuse(group, label)
        _check_parameters(group, label, group["params"] if changed.keys() - _SCHEDULED else group["params"][:1])
        self._right[number] = lam, others


# Every option but the rates: `lr` is checked at each step, and a lambda in a tensor must not be compared.
_OPTIONS = tuple(sorted(CHECKS.keys() - {"lr", "weight_decay"}))
_options = itemgetter(*_OPTIONS)

# What schedulers change in every step; whether it fits a parameter does not depend on the parameter.
_SCHEDULED = {"weight_decay", "momentum", "betas"}


def _check_option(key: str, value: Any, label: str) -> None:
    try:
        validate_option(key, value)
    except ValueError as error:
        raise ValueError(f"{label} has {error}") from None


def _check_parameters(group: Group, label: str, params: list[Tensor]) -> None:
    names = group.get("param_names") or ()
    for place, param in enumerate(params):
        name = names[place] if place < len(names) else f"parameter {place} of {label}"
        ALGORITHMS[group["algorithm"]].matrices(group, param)  # says of what it was if ZeRO has flattened it
        ALGORITHMS[group["algorithm"]].validate(group, name, param)


def prepare(number: int, group: Group, label: str, notices: Notices) -> None:
    """Bring a group's peak up to date, and refuse a learning rate that no step could be taken with."""
    moments.place(group, label)
    if isinstance(group["lr"], Tensor):
        _prepare_tensor(number, group, label, notices)
        return
    _check_number(group, label)
    peak.update_peak(group, label)
    if needs_peak(group):
        peak.check_lr(group, label)
        notices.never_reached(group, label)


def _check_number(group: Group, label: str) -> None:
    lr = float(group["lr"])
    if any(_capturing(param) for param in group["params"][:1]):
        raise RuntimeError(
            f"a CUDA graph would freeze the learning rate {lr:g} of {label}; pass capturable=True or a tensor lr"
        )
    if not math.isfinite(lr) or lr < -_ROUNDING:
        raise ValueError(f"the learning rate of {label} is {lr:g}; it must be a finite number of at least 0")
    group["lr"] = lr  # numpy's numbers would compute in their own precision


def _prepare_tensor(number: int, group: Group, label: str, notices: Notices) -> None:
    """The peak of a learning rate in a tensor: resolved once, raised by schedulers, frozen in a captured graph."""
    if _capturing(group["lr"]):
        if group["resolved_peak_lr"] is None and needs_peak(group):
            peak.resolve_before_capture(group, label)
        return
    before, is_new = group["resolved_peak_lr"], notices.is_new_record(number, group)
    if before is None:
        peak.update_peak(group, label)
    elif is_new or group["peak_lr"] is not None:
        peak.follow_peak(group, label)
        if group["resolved_peak_lr"] > before:
            notices.forget_highest(number)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def coefficients(batch: Batch, flag: Flag | None, average: moments.Average | None) -> Coefficients:
    """Learning rate and decay of a batch, or an error; a learning rate in a tensor is not read back."""
    group, device = batch.group, batch.device
    eta, lam, top = group["lr"], group["weight_decay"], peak.eta_max(group)
    eta, lam = (_placed(x, device) if isinstance(x, Tensor) else x for x in (eta, lam))
    phi = _phi(group, lam, eta, top, moments.step_of(group, device), average.root if average else 0.0)
    if not isinstance(phi, Tensor) and phi > 1:
        raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
    return Coefficients(eta, phi, None if flag is None else flag.to(device))


def _placed(rate: Tensor, device: torch.device) -> Tensor:
    """A rate or a lambda on the device of a batch, in float32 or better: its square has more digits than bfloat16."""
    return rate.to(device, torch.promote_types(rate.dtype, torch.float32), non_blocking=True).reshape(())


def record(batch: Batch, found: Coefficients, notices: Notices) -> None:
    """Remember on the device a rate or a decay that only it knows, once no group has refused the step."""
    if isinstance(found.phi, Tensor):
        eta = found.eta if isinstance(found.eta, Tensor) and needs_peak(batch.group) else None
        notices.record_rate(batch.number, batch.group, eta, found.phi)


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
    gradient: float | Tensor | None,
) -> float | Tensor:
    """The decay factor of a group; one without decay is not asked how long its run is."""
    rule, norm = DECAY_RULES[group["decay"]], norms.acting(group)
    if (norm is not None and not norm.decays) or ((rule.uses_length or rule.uses_gradient) and not decays(group)):
        return 0.0
    return decay_factor(group["decay"], lam, eta, top, step=step, steps=group["total_steps"], gradient=gradient)
