"""Claims as a table, for the terminal and for a page; those that failed come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muonsw.lab.claims.claim import Claim, Criterion, failed_first
from muonsw.lab.claims.statistics import ONE_SEED
from muonsw.lab.console import Cell, Column, Table

Claims = Mapping[str, Sequence[Claim]]
SIGNS = {Criterion.AT_MOST: "≤ ", Criterion.AT_LEAST: "≥ ", Criterion.ABOVE: "> ", Criterion.BELOW: "< "}


def claims_table(claims: Claims, headings: tuple[str, str] = ("paper", "ours"), *, named: bool = False) -> Table:
    """Claims, by who makes them, with what was said and what was found under these headings; `named` adds their ids."""
    owners = {id(claim): name for name, those in claims.items() for claim in those}
    ordered = failed_first(claim for those in claims.values() for claim in those)
    columns = [
        Column("claim"),
        *([Column("name", rank=3)] if named else []),
        Column(headings[0], number=True, rank=2),
        Column(headings[1], number=True, rank=1),
        Column("verdict", rank=0),
    ]
    rows = []
    for claim in ordered:
        name, word = f"{owners[id(claim)]}/{claim.id}", str(claim.verdict)
        statement = Cell(claim.statement, note=f"{name} · {details(claim)}")
        verdict = Cell(f"{word}, one seed" if ONE_SEED in claim.limits else word, tone=word)
        numbers = Cell(predicted_text(claim)), Cell(measured_text(claim)), verdict
        rows.append((statement, *([Cell(name)] if named else []), *numbers))
    return Table("claims", "Claims", columns, rows)


def details(claim: Claim) -> str:
    """Where a claim is made, what it assumes, how it is judged and what it cannot show, in sentences."""
    sentences = [
        claim.reference,
        f"assumes {claim.hypothesis}" if claim.hypothesis else "",
        f"tolerance {claim.tolerance:.2g}{f': {claim.because}' if claim.because else ''}",
        f"interval: {claim.interval.method}" if claim.interval is not None else "",
        claim.limits,
    ]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)


def any_failed(claims: Claims) -> bool:
    """Whether one of the claims fails; one that is undecided does not."""
    return any(claim.fails for those in claims.values() for claim in those)


def predicted_text(claim: Claim) -> str:
    """The prediction, with its sign and any slack that a reader would see, where it is a bound.

    Examples:
        >>> predicted_text(Claim("x", "", "", "", 0.5, 0.4, Criterion.AT_MOST, 0.0, ""))
        '≤ 0.5'
        >>> predicted_text(Claim("x", "", "", "", 1.0, 1.001, Criterion.AT_MOST, 0.015, ""))
        '≤ 1 + 1.5%'
        >>> predicted_text(Claim("x", "", "", "", 0.1, 0.2, Criterion.AT_MOST, 1.37, ""))
        '≤ 0.1 + 140%'
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
