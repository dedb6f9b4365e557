"""What a rule has to say about a run, in words that a reader can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding should worry: a problem ruins the run, a warning costs, a note explains."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


ORDER = tuple(Severity)


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found.

    Attributes:
        rule: Name of the rule, as in the guide.
        severity: How much it should worry.
        scope: Which weights it is about.
        text: What was found, and what to do.
        numbers: What the text rests on.
        also: Further scopes in which the same rule found the same.
    """

    rule: str
    severity: Severity
    scope: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def words(scope: str) -> str:
    """A scope in words.

    Examples:
        >>> words("role:experts"), words("decayed")
        ('the weights of role experts', 'the decayed weights')
    """
    kind, _, name = scope.partition(":")
    return {"all": "all weights", "decayed": "the decayed weights"}.get(scope) or f"the weights of {kind} {name}"


def subject(scope: str) -> str:
    """A scope in words, to begin a sentence with.

    Examples:
        >>> subject("layer:3")
        'The weights of layer 3'
    """
    return words(scope)[0].upper() + words(scope)[1:]


def percent(share: float) -> str:
    """A share with two digits at most, or fewer where the last would mean nothing.

    Examples:
        >>> percent(0.6), percent(0.0123), percent(0.0004)
        ('60%', '1.2%', '0.04%')
    """
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """The worst first, otherwise as they came."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.severity))
