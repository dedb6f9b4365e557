"""Decay rules: the fraction `phi` of a weight that one step removes, `W <- (1 - phi) W - ...`.

`docs/guide/which-rule.md` says who uses each rule. Norm rules (`muonsw.addons.norm_rules`) control the norm of a weight
instead. The user sets `total_steps`; `step_count` counts calls of `step`, including skipped ones, as a scheduler does.
Both are saved with the group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from muonsw import peak
from muonsw.registry import Registry
from muonsw.text import users_line
from muonsw.work import Group, label_of

if TYPE_CHECKING:
    from muonsw.nonfinite import Counters

# Written by `scale_weight_decay`: a group's lambda, and the last `weight_decay` it set.
LAMBDA_KEYS = ("base_weight_decay", "driven_weight_decay")


class RunPosition(NamedTuple):
    """The position in a run: everything that phi depends on, except lambda."""

    eta: float
    eta_max: float = 0.0
    step: float = 1  # t, from 1
    steps: int = 1  # T, the length of the run
    gradient: float = 1.0  # g, the root of the mean squared gradient, averaged over steps


class DecayRule(NamedTuple):
    """Phi as a function of lambda (always linear) and the position in the run, and which parts of it are used."""

    phi: Callable[[float, RunPosition], float]
    uses_peak: bool = False
    uses_step: bool = False
    uses_length: bool = False
    uses_gradient: bool = False


def _cosine(lam: float, at: RunPosition) -> float:
    return lam * at.eta * ((1 + math.cos(math.pi * min((at.step - 1) / at.steps, 1.0))) / 2)


DECAY_RULES: Registry[DecayRule] = Registry("decay rule")
DECAY_RULES.register("constant", DecayRule(lambda lam, at: lam * at.eta))
DECAY_RULES.register("scaled", DecayRule(lambda lam, at: lam * at.eta * (at.eta / at.eta_max), uses_peak=True))
DECAY_RULES.register("squared", DecayRule(lambda lam, at: lam * at.eta * at.eta))
DECAY_RULES.register("independent", DecayRule(lambda lam, at: lam * (at.eta / at.eta_max), uses_peak=True))
DECAY_RULES.register("fixed", DecayRule(lambda lam, at: lam if at.eta > 0 else 0.0))
DECAY_RULES.register("cosine", DecayRule(_cosine, uses_step=True, uses_length=True))
DECAY_RULES.register(
    "log_time", DecayRule(lambda lam, at: lam / at.step * (at.eta / at.eta_max), uses_peak=True, uses_step=True)
)
DECAY_RULES.register(
    "gradient_norm", DecayRule(lambda lam, at: lam * at.eta / at.gradient if at.gradient else 0.0, uses_gradient=True)
)
DECAY_RULES.register("none", DecayRule(lambda lam, at: 0.0))  # noqa: ARG005


def decays(group: Group) -> bool:
    return float(group["weight_decay"]) != 0


def needs_peak(group: Group) -> bool:
    return DECAY_RULES[group["decay"]].uses_peak and decays(group)


def user_weight_decay(group: Group) -> Any:
    """Return a group's lambda: a `weight_decay` that differs from the last one we set is the user's.

    We never read back a tensor that we fill, because that would wait for the GPU.
    """
    current = group["weight_decay"]
    is_driven = isinstance(current, Tensor) or current == group.get("driven_weight_decay")
    return group["base_weight_decay"] if is_driven and "base_weight_decay" in group else current


def require_length(rule: str, total_steps: int | None) -> None:
    if DECAY_RULES[rule].uses_length and total_steps is None:
        raise ValueError(f"decay={rule!r} depends on the length of the run; pass total_steps")


def check_rates(group: Group, number: int, counters: Counters) -> None:
    """Refuse invalid rates and update a group's peak; warn if a scheduler changed it.

    Rate and lambda become floats: numpy scalars would compute in their precision, and tensors are read only once.
    """
    # schedules that end at zero may overshoot by a rounding error
    for key, low in (("lr", -peak.PEAK_TOLERANCE * (group["constructor_lr"] or 0.0)), ("weight_decay", 0.0)):
        try:
            value = float(group[key])
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not math.isfinite(value) or value < low:
            raise ValueError(
                f"{key} of {label_of(group, number)} is {group[key]!r}; it must be a finite number of at least 0"
            )
        group[key] = value
    changed = peak.update_peak(group, number)
    if not DECAY_RULES[group["decay"]].uses_peak or not group["weight_decay"]:
        return
    if never_reached := peak.check_lr(group, number):
        counters.warn_once(f"peak of group {number} never reached", never_reached, peak.PeakLRWarning)
    if changed:
        warnings.warn(changed, peak.PeakLRWarning, stacklevel=users_line())


def phi_of(group: Group, eta: float, step: int) -> float:
    """The fraction of each weight that decay removes at this learning rate."""
    if not decays(group):
        return 0.0
    average = group.get("gradient_average")
    phi = decay_factor(
        group["decay"],
        float(group["weight_decay"]),
        eta,
        peak.eta_max(group),
        step=step,
        steps=group.get("total_steps"),
        gradient=math.sqrt(average[0] / average[1]) if average and average[1] else 0.0,
    )
    if phi > 1:
        raise ValueError(
            f"decay={group['decay']!r} would remove {phi:g} times the weight in one step; lower "
            f"weight_decay={float(group['weight_decay']):g}"
        )
    return phi


def decay_factor(
    rule: str,
    lam: float,
    eta: float,
    eta_max: float | None,
    *,
    step: float | None = None,
    steps: int | None = None,
    gradient: float | None = None,
) -> float:
    """The fraction of a weight that a step at learning rate `eta` removes.

    Rules that divide by the peak give 0 until the peak is known, at the first step with a rate above zero.

    Args:
        rule: a name from `DECAY_RULES`.
        lam: lambda.
        eta: the learning rate of the step.
        eta_max: its peak.
        step: the number of the step, from 1, for rules that use it.
        steps: the number of steps in the run, for rules that use it.
        gradient: the root of the mean squared gradient, for rules that use it.

    Examples:
        >>> decay_factor("constant", 0.1, 0.01, 0.02)
        0.001
        >>> decay_factor("scaled", 0.1, 0.01, 0.02)
        0.0005
        >>> decay_factor("cosine", 0.1, 0.01, 0.02, step=501, steps=1000)
        0.0005
    """
    entry = DECAY_RULES[rule]
    if entry.uses_peak and not eta_max:
        return 0.0
    if entry.uses_length:
        require_length(rule, steps)
    if (entry.uses_step and step is None) or (entry.uses_gradient and gradient is None):
        raise ValueError(f"decay rule {rule!r} depends on {'step' if entry.uses_step else 'gradient'}; pass it")
    # values that the rule does not use are arbitrary
    return entry.phi(lam, RunPosition(eta, eta_max or 0.0, step or 1, steps or 1, gradient or 0.0))


def decay_factors(rule: str, lam: float, etas: Iterable[float], eta_max: float) -> list[float]:
    """Phi of every step of a run, from the learning rate of each."""
    if DECAY_RULES[rule].uses_gradient:
        raise ValueError(
            f"decay rule {rule!r} depends on the gradients of the run, which a schedule does not determine"
        )
    rates = list(etas)
    return [decay_factor(rule, lam, eta, eta_max, step=t, steps=len(rates)) for t, eta in enumerate(rates, start=1)]


def convert_weight_decay(
    value: float,
    from_rule: str,
    to_rule: str,
    peak_lr: float,
    schedule: Iterable[float] | None = None,
) -> float:
    """Convert a weight decay from one rule's convention to another's.

    By default both rules remove the same fraction of a weight at the peak. With a `schedule`, the learning rate of
    every step, both have the same total decay `sum(phi_t)`; rules that depend on the step need one.

    Args:
        value: lambda in the convention of `from_rule`.
        from_rule: the rule of `value`, a name from `DECAY_RULES`.
        to_rule: the rule to express it in.
        peak_lr: the peak of the schedule, eta_max.
        schedule: learning rates, one for each step, none above `peak_lr`.

    Examples:
        The original decoupled decay of 1e-3 a step at the peak, as AdamW's lambda at a peak of 0.01:

        >>> convert_weight_decay(1e-3, "independent", "constant", peak_lr=0.01)
        0.1

        Scaled decay removes less than constant decay if the rate falls linearly to zero, so equal totals need a
        larger lambda:

        >>> falling = [0.01 * (1 - t / 1000) for t in range(1000)]
        >>> round(convert_weight_decay(0.1, "constant", "scaled", 0.01, schedule=falling), 3)
        0.15
    """
    if not peak_lr > 0:
        raise ValueError(f"peak_lr must be above zero to convert a weight decay, got {peak_lr}")
    etas = [peak_lr] if schedule is None else [float(eta) for eta in schedule]
    highest = max(etas, default=0.0)
    if highest > peak_lr * (1 + peak.PEAK_TOLERANCE):
        raise ValueError(f"the schedule reaches {highest:g}, above peak_lr={peak_lr:g}; pass its true peak")
    for rule in (from_rule, to_rule):
        if schedule is None and DECAY_RULES[rule].uses_step:
            raise ValueError(
                f"decay rule {rule!r} depends on the step; pass schedule=, the learning rate of every step"
            )
    total_from, total_to = (sum(decay_factors(rule, 1.0, etas, peak_lr)) for rule in (from_rule, to_rule))
    if value * total_from == 0:
        return 0.0
    if total_to == 0:
        raise ValueError(f"decay rule {to_rule!r} removes nothing over this schedule; no value can match")
    return value * total_from / total_to
