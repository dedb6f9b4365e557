"""Predictions and measurements of claims as short text, for terminals and pages."""

from __future__ import annotations

from muonsw.lab.claims.claim import Claim, Criterion

SIGNS = {Criterion.AT_MOST: "≤ ", Criterion.AT_LEAST: "≥ ", Criterion.ABOVE: "> ", Criterion.BELOW: "< "}


def predicted_text(claim: Claim) -> str:
    """The prediction, with its sign and any slack that a reader would see, where it is a bound.

    Examples:
        >>> predicted_text(Claim("x", "", "", "", 0.5, 0.4, Criterion.AT_MOST, 0.0, ""))
        '≤ 0.5'
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
        slack = f" {'-' if claim.criterion is Criterion.AT_LEAST else '+'} {100 * claim.tolerance:.2g}%"
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
