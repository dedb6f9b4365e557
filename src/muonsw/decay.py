"""Decay rules: the fraction `phi` of a weight that one step takes away, `W <- (1 - phi) W - ...`.

With lambda the weight decay, eta the learning rate of the step and eta_max its peak:

| rule          | phi                    | who means it                                                  |
|---------------|------------------------|---------------------------------------------------------------|
| `constant`    | lambda eta             | `torch.optim.AdamW`, `torch.optim.Muon` and most codebases    |
| `scaled`      | lambda eta^2 / eta_max | this library's default; Defazio's AdamC                       |
| `squared`     | lambda eta^2           | modded-nanogpt and others, lambda then carries the 1/eta_max  |
| `independent` | lambda eta / eta_max   | the decay schedule of the original decoupled-decay paper      |
| `none`        | 0                      | embeddings, norms, biases                                     |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from muonsw.peak import PEAK_TOLERANCE
from muonsw.registry import Registry


class DecayRule(NamedTuple):
    """How lambda, eta and eta_max make phi; linear in lambda."""

    phi: Callable[[float | Tensor, float | Tensor, float], float | Tensor]
    uses_peak: bool


def constant(lam: float | Tensor, eta: float | Tensor, eta_max: float) -> float | Tensor:  # noqa: ARG001
    """Phi = lambda eta."""
    return lam * eta


def scaled(lam: float | Tensor, eta: float | Tensor, eta_max: float) -> float | Tensor:
    """Phi = lambda eta^2 / eta_max."""
    return lam * eta * (eta / eta_max)


def squared(lam: float | Tensor, eta: float | Tensor, eta_max: float) -> float | Tensor:  # noqa: ARG001
    """Phi = lambda eta^2."""
    return lam * eta * eta


def independent(lam: float | Tensor, eta: float | Tensor, eta_max: float) -> float | Tensor:
    """Phi = lambda eta / eta_max."""
    return lam * (eta / eta_max)


def none(lam: float | Tensor, eta: float | Tensor, eta_max: float) -> float | Tensor:  # noqa: ARG001
    """Phi = 0."""
    return 0.0


DECAY_RULES: Registry[DecayRule] = Registry("decay rule")
DECAY_RULES.register("constant", DecayRule(constant, uses_peak=False))
DECAY_RULES.register("scaled", DecayRule(scaled, uses_peak=True))
DECAY_RULES.register("squared", DecayRule(squared, uses_peak=False))
DECAY_RULES.register("independent", DecayRule(independent, uses_peak=True))
DECAY_RULES.register("none", DecayRule(none, uses_peak=False))


def decay_factor(rule: str, lam: float | Tensor, eta: float | Tensor, eta_max: float | None) -> float | Tensor:
    """The fraction of a weight that a step at learning rate `eta` takes away.

    A peak that is zero or not known yet (no step with a learning rate above zero has been taken) means
    no decay for the rules that divide by it.

    Examples:
        >>> decay_factor("constant", 0.1, 0.01, 0.02)
        0.001
        >>> decay_factor("scaled", 0.1, 0.01, 0.02)
        0.0005
    """
    entry = DECAY_RULES[rule]
    if entry.uses_peak and not eta_max:
        return 0.0
    return entry.phi(lam, eta, eta_max or 0.0)


def convert_weight_decay(
    value: float,
    from_rule: str,
    to_rule: str,
    peak_lr: float,
    schedule: Iterable[float] | None = None,
) -> float:
    """Translate a weight decay from one rule's convention into another's.

    By default both rules take the same fraction of a weight at the peak. With a `schedule`, the learning
    rate of every step, both take the same total `sum(phi_t)` over it.

    Args:
        value: lambda in the convention of `from_rule`.
        from_rule: the rule that `value` belongs to, a name from `DECAY_RULES`.
        to_rule: the rule to express it in.
        peak_lr: the peak of the schedule, eta_max.
        schedule: learning rates, one for each step, none above `peak_lr`.

    Examples:
        The original decoupled decay of 1e-3 a step at the peak, as AdamW's lambda at a peak of 0.01:

        >>> convert_weight_decay(1e-3, "independent", "constant", peak_lr=0.01)
        0.1

        Scaled decay takes less than constant decay over a run that falls linearly to zero, so equal
        totals need a larger lambda:

        >>> falling = [0.01 * (1 - t / 1000) for t in range(1000)]
        >>> round(convert_weight_decay(0.1, "constant", "scaled", 0.01, schedule=falling), 3)
        0.15
    """
    if not peak_lr > 0:
        raise ValueError(f"peak_lr must be above zero to convert a weight decay, got {peak_lr}")
    etas = [peak_lr] if schedule is None else [float(eta) for eta in schedule]
    highest = max(etas, default=0.0)
    if highest > peak_lr * (1 + PEAK_TOLERANCE):
        raise ValueError(f"the schedule reaches {highest:g}, above peak_lr={peak_lr:g}; pass its true peak")
    given, wanted = _decay_per_lambda(from_rule, etas, peak_lr), _decay_per_lambda(to_rule, etas, peak_lr)
    if value * given == 0:
        return 0.0
    if wanted == 0:
        raise ValueError(f"decay rule {to_rule!r} takes nothing away over this schedule; no value can match")
    return value * given / wanted


def _decay_per_lambda(rule: str, etas: list[float], eta_max: float) -> float:
    return float(sum(decay_factor(rule, 1.0, eta, eta_max) for eta in etas))
