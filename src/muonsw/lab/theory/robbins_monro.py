"""The Robbins-Monro conditions: infinite sum of eta, finite sum of eta squared.

They concern a whole infinite schedule. `check_schedule` reports what a finite one shows, `PowerLaw` knows the
answer exactly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from muonsw.lab.theory.hypotheses import (
    HypothesisError,
    Steps,
    at_most,
    require,
    require_curvature,
    require_decay,
    step_sizes,
)


@dataclass(frozen=True)
class ScheduleReport:
    """What a finite schedule shows of the theory's hypotheses.

    Attributes:
        steps: How many learning rates were given.
        sum_eta: Their sum, which has to grow without bound.
        sum_eta_squared: The sum of their squares, which has to stay finite.
        max_eta: The largest, which scaled decay divides by.
        hypotheses: Each hypothesis by name and whether every learning rate satisfies it.
    """

    steps: int
    sum_eta: float
    sum_eta_squared: float
    max_eta: float
    hypotheses: Mapping[str, bool]

    @property
    def violated(self) -> tuple[str, ...]:
        """The names of the hypotheses that do not hold."""
        return tuple(name for name, holds in self.hypotheses.items() if not holds)

    def require(self) -> None:
        """Raise `HypothesisError` for the first hypothesis that does not hold."""
        for name in self.violated:
            raise HypothesisError(name, f"the largest eta is {self.max_eta:g}")


def check_schedule(
    etas: Steps, *, a: float | None = None, lam: float | None = None, mu: float | None = None
) -> ScheduleReport:
    """Sum a schedule and test it against the hypotheses that its setting involves.

    Args:
        etas: The learning rate of each step, at least one.
        a: Curvature of the scalar quadratic, which needs `lam` too; tests `eta <= 1/(a + lambda)`.
        lam: The weight decay; tests `eta*lambda <= 1`.
        mu: Strong convexity; tests `mu*eta <= 1`.

    Examples:
        >>> report = check_schedule([0.5 / (1 + t) for t in range(1000)], a=3.0, lam=0.1)
        >>> round(report.sum_eta, 2), round(report.sum_eta_squared, 2), report.violated
        (3.74, 0.41, ('eta <= 1/(a + lambda)',))
    """
    steps = step_sizes(etas)
    require("the schedule has a step", len(steps) > 0)
    limits = {}
    if lam is not None:
        require_decay(lam)
        limits["eta*lambda <= 1"] = 1.0 / lam
    if a is not None:
        if lam is None:
            raise ValueError("a needs lam: the hypothesis is eta <= 1/(a + lambda)")
        require_curvature(a)
        limits["eta <= 1/(a + lambda)"] = 1.0 / (a + lam)
    if mu is not None:
        require("mu > 0", mu > 0.0, mu=mu)
        limits["mu*eta <= 1"] = 1.0 / mu
    largest = max(steps)
    return ScheduleReport(
        steps=len(steps),
        sum_eta=math.fsum(steps),
        sum_eta_squared=math.fsum(eta * eta for eta in steps),
        max_eta=largest,
        hypotheses={"eta > 0": min(steps) > 0.0} | {name: at_most(largest, limit) for name, limit in limits.items()},
    )


@dataclass(frozen=True)
class PowerLaw:
    """The schedule `eta0 (1 + t)^-p`, for which both series are decided exactly.

    Hypothesis: eta0 > 0.

    Attributes:
        eta0: The learning rate of step 0; the peak when `p >= 0`.
        p: The exponent; 1 is the harmonic schedule, 0 a fixed learning rate.

    Examples:
        >>> PowerLaw(0.3, 0.6).require_robbins_monro()
        >>> PowerLaw(0.3, 0.5).sum_diverges, PowerLaw(0.3, 0.5).sum_of_squares_converges
        (True, False)
    """

    eta0: float
    p: float

    def __post_init__(self) -> None:
        require("eta0 > 0", 0.0 < self.eta0 < math.inf, eta0=self.eta0)
        require("p is finite", math.isfinite(self.p), p=self.p)

    def __call__(self, t: float) -> float:
        """The learning rate of step t."""
        return float(self.eta0 * (1.0 + t) ** -self.p)

    @property
    def sum_diverges(self) -> bool:
        """Whether the sum of eta is infinite: p <= 1."""
        return self.p <= 1.0

    @property
    def sum_of_squares_converges(self) -> bool:
        """Whether the sum of eta squared is finite: p > 1/2."""
        return self.p > 0.5

    def require_robbins_monro(self) -> None:
        """Raise `HypothesisError` naming the condition that fails."""
        require("sum eta = infinity", self.sum_diverges, p=self.p)
        require("sum eta^2 < infinity", self.sum_of_squares_converges, p=self.p)
