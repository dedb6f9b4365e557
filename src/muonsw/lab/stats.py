"""Claims: statements with a prediction, a measurement and a verdict; t intervals; claims as a table.

Student's t is implemented here: scipy would save thirty lines and cost a hundred megabytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from muonsw.lab.console import Cell, Column, Table
from muonsw.lab.files import plain
from muonsw.lab.paper import Tolerance

ONE_SEED = "one seed gives no error bar"


class Criterion(StrEnum):
    """How a measurement must agree with a prediction; each criterion uses `tolerance` differently."""

    RELATIVE = "relative"  # within `tolerance` times the size of the prediction
    ABSOLUTE = "absolute"  # within `tolerance`
    AT_MOST = "at most"  # no larger; `tolerance` is a share of the bound, or absolute if the bound is zero
    AT_LEAST = "at least"  # no smaller, with the same slack
    ABOVE = "above"  # larger by more than `tolerance`, so the claim fails if there is no effect
    BELOW = "below"  # smaller by more than `tolerance`
    COVERED = "inside the interval"  # the interval of the measurement contains the prediction


SIGNS = {Criterion.AT_MOST: "≤ ", Criterion.AT_LEAST: "≥ ", Criterion.ABOVE: "> ", Criterion.BELOW: "< "}


class Verdict(StrEnum):
    """The outcome of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a mean and its method."""

    low: float
    high: float
    method: str

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Estimate:
    """A measured mean with its interval."""

    value: float
    interval: Interval | None = None  # None with a single sample
    limits: str = ""  # what this sample cannot show


@dataclass(frozen=True)
class Source:
    """Where the paper makes a statement, and the hypothesis it assumes."""

    reference: str
    hypothesis: str


@dataclass(frozen=True)
class Claim:
    """A statement with its prediction, its measurement, and how the two must agree."""

    id: str  # short name, unique within its experiment
    statement: str  # in plain words
    reference: str  # where the paper makes it
    hypothesis: str  # what it assumes; the run satisfies it
    predicted: float  # value or bound from theory
    measured: float  # value from the run
    criterion: Criterion
    tolerance: float
    because: str  # reason for the tolerance
    interval: Interval | None = None  # of the measurement, if it is a mean
    limits: str = ""  # what a finite run cannot show

    @property
    def verdict(self) -> Verdict:
        """Hold if the entire interval agrees, fail if none of it does, else undecided.

        Without an interval only the measurement counts. NaN fails.

        Examples:
            >>> close = Estimate(0.9, Interval(0.7, 1.1, "95% t, n=3"))
            >>> str(at_most("gap", "", Source("", ""), close, 1.0, Tolerance(0.0, "")).verdict)
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
        """Return whether all values from low to high agree, and whether none does."""
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
        return self.verdict is Verdict.HOLDS

    @property
    def fails(self) -> bool:
        return self.verdict is Verdict.FAILS

    def as_data(self) -> dict[str, Any]:
        """Return the claim and its verdict as JSON data; non-finite numbers become None."""
        return {**plain(asdict(self)), "verdict": str(self.verdict)}


Claims = Mapping[str, Sequence[Claim]]  # by experiment


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
    """Make a claim; the functions below fill in the criterion."""
    estimate = measured if isinstance(measured, Estimate) else Estimate(measured)
    return Claim(
        id=id,
        statement=statement,
        reference=source.reference,
        hypothesis=source.hypothesis,
        predicted=predicted,
        measured=estimate.value,
        criterion=criterion,
        tolerance=tolerance.size,
        because=tolerance.because,
        interval=estimate.interval,
        limits="; ".join(part for part in (limits, estimate.limits) if part),
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
    """Curves over steps of several chains under one rule."""

    name: str
    rule: str  # `"constant"` or `"scaled"`; sets the colour
    steps: Sequence[float]
    values: Sequence[Sequence[float]]  # one list per chain, as long as `steps`
    level: float | None = None  # an analytic value to draw as a line


@dataclass(frozen=True)
class Evidence:
    """The claims and series of one experiment."""

    claims: Sequence[Claim]
    series: Sequence[Series] = ()


def failed_first(claims: Iterable[Claim]) -> list[Claim]:
    """Sort claims: failed, then undecided, then those that hold."""
    order = (Verdict.FAILS, Verdict.UNDECIDED, Verdict.HOLDS)
    return sorted(claims, key=lambda claim: order.index(claim.verdict))


def any_failed(claims: Claims) -> bool:
    """Whether a claim fails; an undecided one does not."""
    return any(claim.fails for those in claims.values() for claim in those)


def count_verdicts(claims: Sequence[Claim]) -> str:
    """Summarize the verdicts in a sentence.

    Examples:
        >>> claim = at_most("x", "", Source("", ""), 2.0, 1.0, Tolerance(0.0, ""))
        >>> count_verdicts([claim, claim])
        '2 of 2 claims FAILED.'
    """
    if not claims:
        return "No claim is made."
    counts = Counter(claim.verdict for claim in claims)
    words = {Verdict.FAILS: "FAILED", Verdict.UNDECIDED: "are undecided"}
    parts = [f"{counts[verdict]} of {len(claims)} claims {word}" for verdict, word in words.items() if counts[verdict]]
    return f"{'; '.join(parts) or f'All {len(claims)} claims hold'}."


def student_t_cdf(t: float, freedom: int) -> float:
    """Compute the probability that Student's t is at most t, for an integer number of degrees of freedom.

    The density then integrates to a finite sum in the angle `atan(t / sqrt(freedom))`.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cos2, odd = math.cos(angle) ** 2, freedom % 2
    term, total = 1.0, 0.0 if freedom == 1 else 1.0
    for k in range(2 + odd, freedom, 2):
        term *= cos2 * (k - 1) / k
        total += term
    even_case, odd_case = math.sin(angle) * total, (angle + math.sin(angle) * math.cos(angle) * total) * 2.0 / math.pi
    return 0.5 + 0.5 * (odd_case if odd else even_case)


@lru_cache
def student_t_quantile(probability: float, freedom: int) -> float:
    """Find the quantile of Student's t by bisection, for a probability of at least one half."""
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < probability:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if student_t_cdf(middle, freedom) < probability else (low, middle)
    return high


def t_interval(samples: Tensor, confidence: float = 0.95) -> Interval:
    """Compute the t interval of the mean of independent samples.

    Examples:
        >>> interval = t_interval(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        >>> f"{interval.low:.3f} {interval.high:.3f} {interval.method}"
        '-0.484 4.484 95% t, n=3'
    """
    n = samples.numel()
    mean = float(samples.mean())
    half = student_t_quantile(0.5 + confidence / 2.0, n - 1) * float(samples.std()) / math.sqrt(n)
    return Interval(mean - half, mean + half, f"{100 * confidence:g}% t, n={n}")


def mean_of(samples: Tensor, confidence: float = 0.95) -> Estimate:
    """Estimate the mean of independent samples with its t interval."""
    return Estimate(float(samples.mean()), t_interval(samples, confidence))


def interval_of(values: Sequence[float]) -> Interval | None:
    """Compute the t interval of the mean of numbers; None if there are fewer than two."""
    return t_interval(torch.tensor(values, dtype=torch.float64)) if len(values) > 1 else None


def over_seeds(values: Sequence[float]) -> Estimate:
    """Estimate the mean over seeds with its t interval; a single seed has no interval, only `limits`."""
    mean, interval = math.fsum(values) / len(values), interval_of(values)
    return Estimate(mean, interval, "" if interval else ONE_SEED)


def from_means(value: float, seeds: int) -> Estimate:
    """Wrap a number computed from means over seeds, which has no interval."""
    return Estimate(value, None, "from means over seeds, so without an interval" if seeds > 1 else ONE_SEED)


def log_log_slope(x: Tensor, y: Tensor) -> Tensor:
    """Fit least-squares slopes of log y (..., n) over log x (n,), one per row of y."""
    u = x.log() - x.log().mean()
    slopes: Tensor = (y.log() * u).sum(-1) / u.square().sum()
    return slopes


def claims_table(claims: Claims) -> Table:
    """Show claims, failed ones first."""
    names = {id(claim): f"{owner}/{claim.id}" for owner, members in claims.items() for claim in members}
    numbers = (Column(name, number=True) for name in ("predicted", "measured"))
    columns = [Column("claim"), Column("name"), *numbers, Column("verdict")]
    rows = []
    for claim in failed_first(claim for members in claims.values() for claim in members):
        parts = [
            claim.reference,
            f"assumes {claim.hypothesis}" if claim.hypothesis else "",
            f"tolerance {claim.tolerance:.2g}{f': {claim.because}' if claim.because else ''}",
            f"interval: {claim.interval.method}" if claim.interval is not None else "",
            claim.limits,
        ]
        details = " ".join(f"{text[0].upper()}{text[1:]}." for text in parts if text)
        word = str(claim.verdict)
        verdict = Cell(f"{word}, one seed" if ONE_SEED in claim.limits else word, tone=word)
        statement = Cell(claim.statement, note=details)
        rows.append((statement, names[id(claim)], predicted_text(claim), measured_text(claim), verdict))
    return Table("claims", "Claims", columns, rows)


def predicted_text(claim: Claim) -> str:
    """Format the prediction; a bound has its sign and any visible slack.

    Examples:
        >>> predicted_text(Claim("x", "", "", "", 1.0, 1.001, Criterion.AT_MOST, 0.015, ""))
        '≤ 1 + 1.5%'
        >>> predicted_text(Claim("x", "", "", "", 0.0, 0.2, Criterion.ABOVE, 0.01, ""))
        '> 0.01'
    """
    sign, bound, slack = SIGNS.get(claim.criterion, ""), claim.predicted, ""
    if claim.criterion is Criterion.ABOVE:
        bound += claim.tolerance
    elif claim.criterion is Criterion.BELOW:
        bound -= claim.tolerance
    elif sign and claim.tolerance >= 1e-4:
        slack = f" {'-' if claim.criterion is Criterion.AT_LEAST else '+'} {float(f'{100 * claim.tolerance:.2g}'):g}%"
    return f"{sign}{bound:.6g}{slack}"


def measured_text(claim: Claim) -> str:
    if claim.interval is None:
        return f"{claim.measured:.6g}"
    return f"{claim.measured:.4g} [{claim.interval.low:.4g}, {claim.interval.high:.4g}]"
