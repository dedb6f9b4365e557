"""The hypotheses of the theorems: their checks, and learning rates that satisfy Robbins-Monro."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from torch import Tensor

Steps: TypeAlias = Iterable[float]  # learning rates, step by step
# Relative rounding allowed for a learning rate at its limit.
ROUNDING = 1e-12


class HypothesisError(ValueError):
    """A closed form was used although a hypothesis that the message names, such as lambda > 0, does not hold."""


def require(hypothesis: str, holds: bool | Tensor, **values: float | Tensor) -> None:
    """Raise `HypothesisError` unless the hypothesis holds, in every element of a tensor."""
    if not (bool(holds.all()) if isinstance(holds, Tensor) else holds):
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        raise HypothesisError(f"the hypothesis {hypothesis} does not hold" + (f": {shown}" if shown else ""))


def require_positive(name: str, value: float) -> None:
    require(f"{name} > 0", 0.0 < value < math.inf, **{name: value})


def require_at_least(name: str, value: float, least: float) -> None:
    require(f"{name} >= {least:g}", least <= value < math.inf, **{name: value})


def check_rates(etas: Steps, limits: Mapping[str, float] | None = None) -> list[float]:
    """Return the learning rates as floats; refuse negative rates and rates above a limit of a named hypothesis."""
    rates = [float(eta) for eta in etas]
    for step, eta in enumerate(rates):
        require("eta >= 0", 0.0 <= eta < math.inf, eta=eta, step=step)
    largest = max(rates, default=0.0)
    for hypothesis, limit in (limits or {}).items():
        require(hypothesis, largest <= limit * (1.0 + ROUNDING), largest_eta=largest, limit=limit)
    return rates


def robbins_monro(steps: int, eta0: float, p: float = 1.0) -> list[float]:
    """The learning rates `eta0 (1 + t)^-p`: their sum is infinite, the sum of their squares is not.

    Hypotheses: eta0 > 0, and 1/2 < p <= 1, which makes both true.
    """
    require_positive("eta0", eta0)
    require("sum eta = infinity", p <= 1.0, p=p)
    require("sum eta^2 < infinity", p > 0.5, p=p)
    return [float(eta0 * (1.0 + t) ** -p) for t in range(steps)]
