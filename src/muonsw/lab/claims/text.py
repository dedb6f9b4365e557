"""Predictions and measurements of claims as short text, for terminals and pages."""

from __future__ import annotations

from muonsw.lab.claims.claim import Claim, Comparison

SIGNS = {Comparison.AT_MOST: "≤ ", Comparison.AT_LEAST: "≥ "}


def predicted_text(claim: Claim) -> str:
    """The prediction, with its sign and any slack that a reader would see, where it is a bound.

    Examples:
        >>> predicted_text(Claim("x", "", "", "", 0.5, 0.4, Comparison.AT_MOST, 0.0, ""))
        '≤ 0.5'
        >>> predicted_text(Claim("x", "", "", "", 1.0, 1.001, Comparison.AT_MOST, 0.015, ""))
        '≤ 1 + 1.5%'
    """
    visible = claim.comparison in SIGNS and claim.tolerance >= 1e-4
    slack = (
        f" {'-' if claim.comparison is Comparison.AT_LEAST else '+'} {100 * claim.tolerance:.2g}%" if visible else ""
    )
    return f"{SIGNS.get(claim.comparison, '')}{claim.predicted:.6g}{slack}"


def measured_text(claim: Claim) -> str:
    """The measurement, with its interval, or by how much it deviates where that is what is judged.

    Examples:
        >>> measured_text(Claim("x", "", "", "", 2.0, 2.0001, Comparison.RELATIVE, 1e-3, ""))
        '2.0001 (+5e-05)'
    """
    if claim.interval is None and claim.comparison is Comparison.RELATIVE and claim.predicted:
        return f"{claim.measured:.6g} ({claim.measured / claim.predicted - 1.0:+.1g})"
    if claim.interval is None:
        return f"{claim.measured:.6g}"
    return f"{claim.measured:.4g} [{claim.interval.low:.4g}, {claim.interval.high:.4g}]"
