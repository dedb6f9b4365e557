"""Claims as a table, for the terminal and for a page; those that failed come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console

from muonsw.lab.claims.claim import Claim, failed_first, verdict
from muonsw.lab.claims.text import measured_text, predicted_text
from muonsw.lab.tables import Cell, Column, Table, print_table

Claims = Mapping[str, Sequence[Claim]]


def claims_table(claims: Claims, headings: tuple[str, str] = ("paper", "ours")) -> Table:
    """Claims, by who makes them, with what was said and what was found."""
    owners = {id(claim): name for name, those in claims.items() for claim in those}
    ordered = failed_first(claim for those in claims.values() for claim in those)
    columns = (
        "claim",
        Column(headings[0], number=True, rank=1),
        Column(headings[1], number=True, rank=0),
        Column("verdict", rank=0),
    )
    return Table("claims", "Claims", columns, [_row(owners[id(claim)], claim) for claim in ordered])


def print_claims(console: Console, claims: Sequence[Claim], *, verbose: bool = False) -> None:
    """Print claims with what was expected, what was measured and the verdict."""
    if claims:
        print_table(console, claims_table({"": claims}, ("expected", "measured")), verbose=verbose)


def claims_summary(table: Table) -> str:
    """How many claims of a table came out which way, in one sentence.

    Examples:
        >>> rows = [("a", Cell("holds")), ("b", Cell("fails"))]
        >>> claims_summary(Table("claims", "Claims", ("claim", "verdict"), rows))
        'Of 2 claims 1 holds and 1 fails.'
    """
    counts = Counter(row[-1].text for row in table.cells())
    if len(counts) == 1 and len(table.rows) > 1:
        return f"All {len(table.rows)} claims {_plural(*counts)}."
    parts = [f"{count} {_plural(word) if count > 1 else word}" for word, count in counts.items()]
    return f"Of {len(table.rows)} claims {' and '.join(parts)}."


def _plural(word: str) -> str:
    return {"holds": "hold", "fails": "fail", "undecided": "are undecided"}.get(word, word)


def any_failed(claims: Claims) -> bool:
    """Whether one of the claims does not hold."""
    return any(not claim.holds for those in claims.values() for claim in those)


def _row(owner: str, claim: Claim) -> tuple[Cell, ...]:
    details = f"{claim.reference}. Assumes {claim.hypothesis}. Tolerance {claim.tolerance:.2g}: {claim.because}."
    if claim.interval is not None:
        details += f" Interval: {claim.interval.method}."
    if claim.limits:
        details += f" {claim.limits[0].upper()}{claim.limits[1:]}."
    word = verdict(claim.holds)
    name = f"{owner}/{claim.id}" if owner else claim.id
    statement = Cell(claim.statement, note=f"{name} · {details}")
    return statement, Cell(predicted_text(claim)), Cell(measured_text(claim)), Cell(word, tone=word)
