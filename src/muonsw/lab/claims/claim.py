"""What an experiment hands back: claims that can fail, and series that can be drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from muonsw.lab.storage import plain


class Comparison(StrEnum):
    """How a measured value is held against a predicted one."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"
    AT_MOST = "at most"
    AT_LEAST = "at least"
    INSIDE = "inside the interval"


@dataclass(frozen=True)
class Interval:
    """Where a measured mean lies, and by which method that was found."""

    low: float
    high: float
    method: str

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Claim:
    """One statement of the paper with what it predicts, what was measured, and when the two agree.

    Attributes:
        id: Short name, unique within its experiment.
        statement: The statement in the project's own words.
        reference: Where the paper makes it.
        hypothesis: Under which condition it is made; the run satisfies it.
        predicted: The value or the bound that theory gives.
        measured: What the run gave.
        comparison: How the two are compared. `RELATIVE` is relative to the prediction; `AT_MOST` and
            `AT_LEAST` treat it as a bound that may be exceeded by `tolerance` of its size (or absolutely,
            where the bound is zero); `INSIDE` asks that the interval around the measurement covers it.
        tolerance: By how much they may differ.
        because: Where the tolerance comes from.
        interval: Uncertainty of the measurement, for statements about means.
        limits: What a finite run cannot show of this statement.
    """

    id: str
    statement: str
    reference: str
    hypothesis: str
    predicted: float
    measured: float
    comparison: Comparison
    tolerance: float
    because: str
    interval: Interval | None = None
    limits: str = ""

    @property
    def holds(self) -> bool:
        """The verdict. A measurement that is not a number never agrees with anything.

        Examples:
            >>> claim = Claim("gap", "", "", "", 2.0, 2.01, Comparison.RELATIVE, 0.01, "")
            >>> claim.holds
            True
        """
        slack = self.tolerance * (abs(self.predicted) or 1.0)
        match self.comparison:
            case Comparison.RELATIVE:
                return abs(self.measured - self.predicted) <= self.tolerance * abs(self.predicted)
            case Comparison.ABSOLUTE:
                return abs(self.measured - self.predicted) <= self.tolerance
            case Comparison.AT_MOST:
                return self._upper() <= self.predicted + slack
            case Comparison.AT_LEAST:
                return self._lower() >= self.predicted - slack
            case Comparison.INSIDE:
                return self.interval is not None and self.predicted in self.interval

    def _upper(self) -> float:
        return self.measured if self.interval is None else max(self.measured, self.interval.high)

    def _lower(self) -> float:
        return self.measured if self.interval is None else min(self.measured, self.interval.low)

    def as_data(self) -> dict[str, Any]:
        """The claim with its verdict as plain data; numbers that JSON does not know become None."""
        return {**plain(asdict(self)), "verdict": verdict(self.holds)}


@dataclass(frozen=True)
class Series:
    """Curves over steps of several chains that follow one rule.

    Attributes:
        name: Which curves these are.
        rule: `"constant"` or `"scaled"`, which fixes their colour.
        steps: The steps at which values were kept.
        values: One list for each chain, as long as `steps`.
        level: An analytic value to draw as a line, if there is one.
    """

    name: str
    rule: str
    steps: Sequence[float]
    values: Sequence[Sequence[float]]
    level: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What one experiment found."""

    claims: Sequence[Claim]
    series: Sequence[Series] = field(default=())


def verdict(holds: bool) -> str:
    """The word for it."""
    return "holds" if holds else "fails"


def failed_first(claims: Iterable[Claim]) -> list[Claim]:
    """The same claims, those that failed on top."""
    return sorted(claims, key=lambda claim: claim.holds)
