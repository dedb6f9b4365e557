"""How a closed form says which of its hypotheses does not hold."""

import math
from collections.abc import Iterable
from typing import TypeVar

import torch

Number = TypeVar("Number", float, torch.Tensor)
Steps = Iterable[float] | torch.Tensor


class HypothesisError(ValueError):
    """A closed form was asked for where its hypothesis does not hold.

    Attributes:
        hypothesis: The hypothesis as it reads in the message, for example `"lambda > 0"`.
    """

    def __init__(self, hypothesis: str, found: str = "") -> None:
        super().__init__(f"the hypothesis {hypothesis} does not hold" + (f": {found}" if found else ""))
        self.hypothesis = hypothesis
        self._found = found

    def __reduce__(self) -> tuple[type["HypothesisError"], tuple[str, str]]:
        return type(self), (self.hypothesis, self._found)


def require(hypothesis: str, holds: bool | torch.Tensor, **values: float | torch.Tensor) -> None:
    """Raise unless the hypothesis holds, in every entry if it was tested on a tensor.

    Examples:
        >>> require("lambda > 0", -0.1 > 0, lam=-0.1)
        Traceback (most recent call last):
        muonsw.lab.theory.hypotheses.HypothesisError: the hypothesis lambda > 0 does not hold: lam=-0.1
    """
    if isinstance(holds, torch.Tensor):
        holds = bool(holds.all())
    if not holds:
        raise HypothesisError(hypothesis, ", ".join(f"{name}={value}" for name, value in values.items()))


def require_decay(lam: float) -> None:
    """The weight decay is positive."""
    require("lambda > 0", 0.0 < lam < math.inf, lam=lam)


def require_curvature(a: float) -> None:
    """The scalar quadratic has a minimum."""
    require("a > 0", 0.0 < a < math.inf, a=a)


def require_noise(sigma: float) -> None:
    """The noise level is a standard deviation."""
    require("sigma >= 0", 0.0 <= sigma < math.inf, sigma=sigma)


def require_momentum(beta: float) -> None:
    """The momentum buffer forgets."""
    require("0 <= beta < 1", 0.0 <= beta < 1.0, beta=beta)


def require_at_least(name: str, value: float, least: float) -> None:
    """A constant such as a rank, a batch size or a smoothness is in its range."""
    require(f"{name} >= {least:g}", least <= value < math.inf, **{name: value})


def step_sizes(etas: Steps) -> list[float]:
    """The learning rates as floats, none negative. A zero is allowed: such a step changes nothing.

    Examples:
        >>> step_sizes(torch.tensor([0.5, 0.25]))
        [0.5, 0.25]
    """
    values: list[float] = etas.tolist() if isinstance(etas, torch.Tensor) else [float(eta) for eta in etas]
    for t, eta in enumerate(values):
        if not 0.0 <= eta < math.inf:
            raise HypothesisError("eta >= 0", f"eta={eta}, step={t}")
    return values


def at_most(value: float, bound: float) -> bool:
    """Whether the value is below the bound, or above it by rounding only."""
    return value <= bound * (1.0 + 1e-12)


def require_largest(hypothesis: str, etas: list[float], bound: float) -> None:
    """No learning rate exceeds the bound."""
    largest = max(etas, default=0.0)
    require(hypothesis, at_most(largest, bound), largest_eta=largest, bound=bound)
