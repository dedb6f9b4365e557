"""Hypotheses of the theory: a closed form checks them and names the one that does not hold."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch

Number = TypeVar("Number", float, torch.Tensor)
Steps = Iterable[float] | torch.Tensor
# Relative rounding that a learning rate at its limit may have.
ROUNDING = 1e-12


class HypothesisError(ValueError):
    """A closed form was used where its hypothesis does not hold.

    `hypothesis` holds it as it reads in the message, for example `"lambda > 0"`.
    """

    def __init__(self, hypothesis: str, values: str = "") -> None:
        super().__init__(f"the hypothesis {hypothesis} does not hold" + (f": {values}" if values else ""))
        self.hypothesis = hypothesis
        self._values = values

    def __reduce__(self) -> tuple[type["HypothesisError"], tuple[str, str]]:
        return type(self), (self.hypothesis, self._values)


def require(hypothesis: str, holds: bool | torch.Tensor, **values: float | torch.Tensor) -> None:
    """Raise `HypothesisError` unless the hypothesis holds, in every element of a tensor."""
    if not (bool(holds.all()) if isinstance(holds, torch.Tensor) else holds):
        raise HypothesisError(hypothesis, ", ".join(f"{name}={value}" for name, value in values.items()))


def require_positive(name: str, value: float) -> None:
    require(f"{name} > 0", 0.0 < value < math.inf, **{name: value})


def require_at_least(name: str, value: float, least: float) -> None:
    """Raise unless a constant such as a rank or a noise level is finite and not below its least value."""
    require(f"{name} >= {least:g}", least <= value < math.inf, **{name: value})


def check_rates(etas: Steps, limits: Mapping[str, float] | None = None) -> list[float]:
    """Return the learning rates as floats; none may be negative or exceed a limit, which is named by its hypothesis.

    A rate of zero is allowed: such a step changes nothing.
    """
    rates: list[float] = etas.tolist() if isinstance(etas, torch.Tensor) else [float(eta) for eta in etas]
    for step, eta in enumerate(rates):
        require("eta >= 0", 0.0 <= eta < math.inf, eta=eta, step=step)
    largest = max(rates, default=0.0)
    for hypothesis, limit in (limits or {}).items():
        require(hypothesis, largest <= limit * (1.0 + ROUNDING), largest_eta=largest, limit=limit)
    return rates


def robbins_monro(steps: int, eta0: float, p: float = 1.0) -> list[float]:
    """The learning rates `eta0 (1 + t)^-p`: their sum is infinite, the sum of their squares is not.

    Hypotheses: eta0 > 0, and 1/2 < p <= 1, which is when both hold.
    """
    require_positive("eta0", eta0)
    require("sum eta = infinity", p <= 1.0, p=p)
    require("sum eta^2 < infinity", p > 0.5, p=p)
    return [float(eta0 * (1.0 + t) ** -p) for t in range(steps)]
