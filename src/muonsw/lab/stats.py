"""Claims: statements with a prediction, a measurement and a verdict; t intervals; claims as a table.

Student's t is ours because scipy would replace thirty lines by a hundred megabytes on every machine that judges runs.
"""

from __future__ import annotations

import math
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

ONE_SEED = "one seed: chance is not excluded"


class Criterion(StrEnum):
    """When a measured value agrees with a predicted one; `tolerance` means something else in each."""

    RELATIVE = "relative"  # it is within `tolerance` times the size of the prediction
    ABSOLUTE = "absolute"  # it is within `tolerance`
    AT_MOST = "at most"  # it is no larger; `tolerance` is a share of the bound, absolute where the bound is zero
    AT_LEAST = "at least"  # it is no smaller, with the same slack
    ABOVE = "above"  # it is larger by more than `tolerance`: an effect, which is not there if nothing moved
    BELOW = "below"  # it is smaller by more than `tolerance`
    COVERED = "inside the interval"  # the interval around the measurement contains the prediction


SIGNS = {Criterion.AT_MOST: "≤ ", Criterion.AT_LEAST: "≥ ", Criterion.ABOVE: "> ", Criterion.BELOW: "< "}


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


# By who makes them.
Claims = Mapping[str, Sequence[Claim]]


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


def any_failed(claims: Claims) -> bool:
    """Whether one of the claims fails; one that is undecided does not."""
    return any(claim.fails for those in claims.values() for claim in those)


def count_verdicts(claims: Sequence[Claim]) -> str:
    """How the claims came out, in one sentence.

    Examples:
        >>> claim = at_most("x", "", Source("", ""), 2.0, 1.0, Tolerance(0.0, ""))
        >>> count_verdicts([claim, claim])
        '2 of 2 claims FAILED their stated tolerance; they are shown first.'
    """
    verdicts = [claim.verdict for claim in claims]
    failed, undecided = verdicts.count(Verdict.FAILS), verdicts.count(Verdict.UNDECIDED)
    if not claims:
        return "No claim is made."
    if not failed and not undecided:
        return f"All {len(claims)} claims hold within their stated tolerances."
    rest = f"{undecided} of {len(claims)} claims {'is' if undecided == 1 else 'are'} undecided"
    if not failed:
        return f"No claim failed; {rest}: their intervals reach across the bound."
    text = f"{failed} of {len(claims)} claims FAILED their stated tolerance; they are shown first."
    return f"{text} {rest}." if undecided else text


def student_t_cdf(t: float, freedom: int) -> float:
    """The probability that Student's t with a whole number of degrees of freedom is at most t.

    Its density has an elementary integral then, a finite sum in the angle `atan(t / sqrt(freedom))`.
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
    """The value that Student's t stays below with the given probability, above one half, by bisection."""
    if not 0.5 <= probability < 1.0 or freedom < 1:
        raise ValueError(f"no t quantile for probability {probability} and {freedom} degrees of freedom")
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < probability:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if student_t_cdf(middle, freedom) < probability else (low, middle)
    return high


def t_interval(samples: Tensor, confidence: float = 0.95) -> Interval:
    """The t interval of the mean of independent samples.

    Examples:
        >>> interval = t_interval(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        >>> f"{interval.low:.3f} {interval.high:.3f} {interval.method}"
        '-0.484 4.484 95% t, n=3'
    """
    n = samples.numel()
    if n < 2:
        raise ValueError("an interval needs at least two independent samples")
    mean = float(samples.mean())
    half = student_t_quantile(0.5 + confidence / 2.0, n - 1) * float(samples.std()) / math.sqrt(n)
    return Interval(mean - half, mean + half, f"{100 * confidence:g}% t, n={n}")


def mean_of(samples: Tensor, confidence: float = 0.95) -> Estimate:
    """The mean of independent samples with its t interval."""
    return Estimate(float(samples.mean()), t_interval(samples, confidence))


def interval_of(values: Sequence[float]) -> Interval | None:
    """The t interval of the mean of plain numbers; None where there are fewer than two."""
    return t_interval(torch.tensor(values, dtype=torch.float64)) if len(values) > 1 else None


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean over seeds with its t interval; one seed has none, and its limits say so."""
    mean, interval = math.fsum(values) / len(values), interval_of(values)
    return Estimate(mean, interval, "" if interval else ONE_SEED)


def from_means(value: float, seeds: int) -> Estimate:
    """A number that means over seeds make together, so that it has no interval."""
    return Estimate(value, None, "from means over seeds, so without an interval" if seeds > 1 else ONE_SEED)


def log_log_slope(x: Tensor, y: Tensor) -> Tensor:
    """Least-squares slopes of log y (..., n) over log x (n,), one for each row of y."""
    u = x.log() - x.log().mean()
    slopes: Tensor = (y.log() * u).sum(-1) / u.square().sum()
    return slopes


def claims_table(claims: Claims, headings: tuple[str, str] = ("paper", "ours")) -> Table:
    """Claims with what was predicted and what was measured under these headings, those that failed first."""
    names = {id(claim): f"{owner}/{claim.id}" for owner, members in claims.items() for claim in members}
    numbers = [Column(heading, number=True) for heading in headings]
    columns = [Column("claim"), Column("name"), *numbers, Column("verdict")]
    rows = []
    for claim in failed_first(claim for members in claims.values() for claim in members):
        # Where it is made, what it assumes, how it is judged and what it cannot show, in sentences.
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
    """The prediction, with its sign and any slack that a reader would see, where it is a bound.

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
    """The measurement, with its interval, or by how much it deviates where that is what is judged.

    Examples:
        >>> measured_text(Claim("x", "", "", "", 2.0, 2.0001, Criterion.RELATIVE, 1e-3, ""))
        '2.0001 (+5e-05)'
    """
    if claim.interval is None and claim.criterion is Criterion.RELATIVE and claim.predicted:
        return f"{claim.measured:.6g} ({claim.measured / claim.predicted - 1.0:+.1g})"
    if claim.interval is None:
        return f"{claim.measured:.6g}"
    return f"{claim.measured:.4g} [{claim.interval.low:.4g}, {claim.interval.high:.4g}]"
