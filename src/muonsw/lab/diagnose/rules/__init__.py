"""The rules of `muonsw diagnose`, in one table: each is a function from a history to a finding, or to None.

A rule for which `parts` holds is asked about every role as well as about the chosen scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from muonsw.lab.diagnose.findings import Finding, ordered
from muonsw.lab.diagnose.history import History
from muonsw.lab.diagnose.rules import norm, run, update


@dataclass(frozen=True)
class Rule:
    """A question that is put to a history.

    Attributes:
        name: As in the guide and in the findings.
        check: The question.
        parts: Whether it is put to every role too.
    """

    name: str
    check: Callable[[History], Finding | None]
    parts: bool = False


RULES = (
    Rule("unfinished", run.unfinished),
    Rule("too-few-samples", run.too_few_samples),
    Rule("skipped", run.skipped_steps),
    Rule("diverging", run.diverging),
    Rule("collapsing", norm.collapsing, parts=True),
    Rule("norm-held", norm.norm_held, parts=True),
    Rule("decay-idle", norm.decay_idle),
    Rule("partly-relaxed", norm.partly_relaxed),
    Rule("peak-not-reached", norm.peak_not_reached, parts=True),
    Rule("tracking-broke", norm.tracking_broke),
    Rule("unexplained-norm", norm.unexplained_norm),
    Rule("large-updates", update.large_updates, parts=True),
    Rule("fast-decay", update.fast_decay),
    Rule("defect", update.defect_out_of_range, parts=True),
    Rule("rounding", update.lost_in_rounding, parts=True),
    Rule("radial-gradient", update.radial_gradient),
)


def examine(history: History, parts: Iterable[History] = ()) -> list[Finding]:
    """Put every rule to a history and its parts; the worst findings come first.

    What holds for the whole is said once, with the parts it also holds for; what holds for parts alone is said of each.
    """
    known, findings = list(parts), []
    for rule in RULES:
        whole = rule.check(history)
        within = [part for part in known if part.scope != history.scope] if rule.parts else []
        found = [finding for part in within if (finding := rule.check(part))]
        if whole is None:
            findings += found
        else:
            findings.append(replace(whole, also=tuple(finding.scope for finding in found)))
    return ordered(findings)
