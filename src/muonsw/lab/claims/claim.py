"""Claims: statements with a prediction, a measurement, and a verdict that the two numbers decide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from muonsw.lab.files import plain
from muonsw.lab.paper import Tolerance


class Criterion(StrEnum):
    """When a measured value agrees with a predicted one; `tolerance` means something else in each."""

    RELATIVE = "relative"  # it is within `tolerance` times the size of the prediction
    ABSOLUTE = "absolute"  # it is within `tolerance`
    AT_MOST = "at most"  # it is no larger; `tolerance` is a share of the bound, absolute where the bound is zero
    AT_LEAST = "at least"  # it is no smaller, with the same slack
    ABOVE = "above"  # it is larger by more than `tolerance`: an effect, which is not there if nothing moved
    BELOW = "below"  # it is smaller by more than `tolerance`
    COVERED = "inside the interval"  # the interval around the measurement contains the prediction


class Verdict(StrEnum):
    """What the numbers say about a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """Where a measured mean lies, and by which method that was found."""

    low: float
    high: float
    method: str

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Estimate:
    """A measured mean with its interval."""

    value: float  # the mean
    interval: Interval | None = None  # of the mean; None where there is one sample only
    limits: str = ""  # what this sample cannot show


@dataclass(frozen=True)
class Source:
    """Where the paper makes a statement, and under which condition; the run satisfies it."""

    reference: str
    hypothesis: str


@dataclass(frozen=True)
class Claim:
    """One statement with what it predicts, what was measured, and when the two agree."""

    id: str  # short name, unique within its experiment
    statement: str  # in the project's own words
    reference: str  # where the paper makes it
    hypothesis: str  # under which condition it is made; the run satisfies it
    predicted: float  # the value or the bound that theory gives
    measured: float  # what the run gave
    criterion: Criterion  # how the two are compared
    tolerance: float  # by how much they may differ
    because: str  # where the tolerance comes from
    interval: Interval | None = None  # uncertainty of the measurement, for statements about means
    limits: str = ""  # what a finite run cannot show of this statement

    @property
    def verdict(self) -> Verdict:
        """It holds if the whole interval agrees, fails if none of it does, and is undecided in between.

        A measurement without interval is judged as it stands. One that is not a number agrees with nothing: it fails.

        Examples:
            >>> bound = Source("", "")
            >>> close = Estimate(0.9, Interval(0.7, 1.1, "95% t, n=3"))
            >>> str(at_most("gap", "", bound, close, 1.0, Tolerance(0.0, "")).verdict)
            'undecided'
        """
        ends = (self.measured,) if self.interval is None else (self.measured, self.interval.low, self.interval.high)
        if any(map(math.isnan, (self.predicted, *ends))):
            return Verdict.FAILS
        if self.criterion is Criterion.COVERED:
            covered = self.interval is not None and self.predicted in self.interval
            return Verdict.HOLDS if covered else Verdict.FAILS
        holds, fails = self._judge(min(ends), max(ends))
        return Verdict.HOLDS if holds else Verdict.FAILS if fails else Verdict.UNDECIDED

    def _judge(self, low: float, high: float) -> tuple[bool, bool]:
        """Whether all between low and high is as the claim says, and whether none of it is."""
        slack = self.tolerance * (abs(self.predicted) or 1.0)
        above, below = low > self.predicted + self.tolerance, high < self.predicted - self.tolerance
        match self.criterion:
            case Criterion.ABOVE:
                return above, below
            case Criterion.BELOW:
                return below, above
            case Criterion.AT_MOST:
                floor, ceiling = -math.inf, self.predicted + slack
            case Criterion.AT_LEAST:
                floor, ceiling = self.predicted - slack, math.inf
            case _:
                low, high = low - self.predicted, high - self.predicted
                ceiling = self.tolerance * (abs(self.predicted) if self.criterion is Criterion.RELATIVE else 1.0)
                floor = -ceiling
        return floor <= low and high <= ceiling, high < floor or ceiling < low

    @property
    def holds(self) -> bool:
        """Whether the verdict is that it holds."""
        return self.verdict is Verdict.HOLDS

    @property
    def fails(self) -> bool:
        """Whether the verdict is that it fails, which sets the exit code of a command."""
        return self.verdict is Verdict.FAILS

    def as_data(self) -> dict[str, Any]:
        """The claim with its verdict as plain data; numbers that JSON does not know become None."""
        data = {("comparison" if key == "criterion" else key): value for key, value in asdict(self).items()}
        return {**plain(data), "verdict": str(self.verdict)}


def make_claim(
    criterion: Criterion,
    id: str,
    statement: str,
    source: Source,
    measured: float | Estimate,
    predicted: float,
    tolerance: Tolerance,
    *,
    limits: str = "",
) -> Claim:
    """A claim; the functions below have the criterion filled in."""
    found = measured if isinstance(measured, Estimate) else Estimate(measured)
    return Claim(
        id=id,
        statement=statement,
        reference=source.reference,
        hypothesis=source.hypothesis,
        predicted=predicted,
        measured=found.value,
        criterion=criterion,
        tolerance=tolerance.size,
        because=tolerance.because,
        interval=found.interval,
        limits="; ".join(part for part in (limits, found.limits) if part),
    )


within = partial(make_claim, Criterion.ABSOLUTE)
within_share = partial(make_claim, Criterion.RELATIVE)
at_most = partial(make_claim, Criterion.AT_MOST)
at_least = partial(make_claim, Criterion.AT_LEAST)
above = partial(make_claim, Criterion.ABOVE)
below = partial(make_claim, Criterion.BELOW)
covered = partial(make_claim, Criterion.COVERED)


@dataclass(frozen=True)
class Series:
    """Curves over steps of several chains that follow one rule."""

    name: str  # which curves these are
    rule: str  # `"constant"` or `"scaled"`, which fixes their colour
    steps: Sequence[float]  # the steps at which values were kept
    values: Sequence[Sequence[float]]  # one list for each chain, as long as `steps`
    level: float | None = None  # an analytic value to draw as a line, if there is one


@dataclass(frozen=True)
class Evidence:
    """What one experiment found: claims that can fail, and series that can be drawn."""

    claims: Sequence[Claim]
    series: Sequence[Series] = ()


def failed_first(claims: Iterable[Claim]) -> list[Claim]:
    """The same claims: those that failed, then those that are undecided, then those that hold."""
    order = (Verdict.FAILS, Verdict.UNDECIDED, Verdict.HOLDS)
    return sorted(claims, key=lambda claim: order.index(claim.verdict))


def count_verdicts(claims: Sequence[Claim]) -> str:
    """How the claims came out, in one sentence.

    Examples:
        >>> claim = at_most("x", "", Source("", ""), 2.0, 1.0, Tolerance(0.0, ""))
        >>> count_verdicts([claim, claim])
        '2 of 2 claims FAILED their stated tolerance; they are shown first.'
        >>> count_verdicts([])
        'No claim is made.'
    """
    counts = {verdict: sum(claim.verdict is verdict for claim in claims) for verdict in Verdict}
    failed, undecided = counts[Verdict.FAILS], counts[Verdict.UNDECIDED]
    if not claims:
        return "No claim is made."
    if not failed and not undecided:
        return f"All {len(claims)} claims hold within their stated tolerances."
    open_ones = f"{undecided} of {len(claims)} claims {'is' if undecided == 1 else 'are'} undecided"
    if not failed:
        return f"No claim failed; {open_ones}: their intervals reach across the bound."
    rest = f" {open_ones[0].upper()}{open_ones[1:]}." if undecided else ""
    return f"{failed} of {len(claims)} claims FAILED their stated tolerance; they are shown first.{rest}"
