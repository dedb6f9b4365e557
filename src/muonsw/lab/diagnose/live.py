"""Findings while training: sentences about what goes wrong, from the records as they come.

A few rules of `muonsw diagnose` that need no look at the whole run. Each says its sentence when it first holds, and
again when ten times as many updates have been made, so that a log stays readable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from muonsw.telemetry.record import Record

# A norm that follows sqrt(lr) is down by this much when the learning rate has halved. Part of the fall must come after
# that: a norm that started too large falls before.
COLLAPSE, HALVED, LATE_LOSS = 0.29, 0.5, 0.1
FALLING_RULES = ("constant", "independent")
# Momentum with the usual coefficient of 0.95 then replaces the weights within the 20 steps that it remembers.
LARGE_UPDATE = 0.05
MANY_SKIPPED = 0.01
ROUNDING = 0.05
NEARLY_ALWAYS = 0.9
# Samples that a median is taken over, so that no single update is reported.
SAMPLES = 5
# When a finding is said again: after so many times the updates.
AGAIN = 10


class RoleHistory:
    """What must be remembered of a role: its largest norm since the peak of lr, that at half of it, the latest."""

    def __init__(self) -> None:
        self.top_lr = self.top_norm = 0.0
        self.halved: float | None = None
        self.latest: deque[dict[str, Any]] = deque(maxlen=SAMPLES)

    def add(self, values: dict[str, Any]) -> None:
        """Take up the values of one sampled update."""
        norm, lr = values["weight_rms"], values["lr"]
        self.latest.append(values)
        if norm is None or lr is None:
            return
        self.top_norm = norm if lr >= self.top_lr else max(self.top_norm, norm)
        self.top_lr = max(self.top_lr, lr)
        if lr > HALVED * self.top_lr:
            self.halved = None
        elif self.halved is None:
            self.halved = norm

    def typical(self, value: Callable[[dict[str, Any]], float | None]) -> float | None:
        """The median of a value over the latest samples, None before there are enough."""
        known = [found for found in map(value, self.latest) if found is not None]
        return median(known) if len(known) == SAMPLES else None


class Findings:
    """A sink for records that returns what they reveal, in words, each finding rarely.

    Attributes:
        history: every sentence so far, with the step of its record.

    Examples:
        >>> findings = Findings()
        >>> findings({"step": 10, "roles": {}, "skipped": 5})
        ['5 of 10 updates were skipped because a gradient was not finite: lower the learning rate, or ...']
        >>> findings({"step": 20, "roles": {}, "skipped": 10})
        []
    """

    def __init__(self) -> None:
        self.history: list[tuple[int, str]] = []
        self._reported_at: dict[str, int] = {}
        self._roles: dict[str, RoleHistory] = {}

    def __call__(self, record: Record) -> list[str]:
        """Take up a record, and return the sentences that are due now."""
        found = [text for topic, text in self._examine(record) if self._is_due(topic, record["step"])]
        self.history += [(record["step"], text) for text in found]
        return found

    def _is_due(self, topic: str, step: int) -> bool:
        if step < AGAIN * self._reported_at.get(topic, 0):
            return False
        self._reported_at[topic] = step
        return True

    def _examine(self, record: Record) -> Iterator[tuple[str, str]]:
        step, skipped = record["step"], record["skipped"]
        if skipped > MANY_SKIPPED * step:
            yield (
                "skipped",
                f"{skipped} of {step} updates were skipped because a gradient was not finite: lower the learning rate, "
                f"or look for overflow",
            )
        if (record.get("clipped") or 0.0) > NEARLY_ALWAYS:
            yield (
                "clipped",
                f"gradient clipping acted on {record['clipped']:.0%} of the updates since the last sample: it is then "
                f"a division by the norm, not a guard against outliers; raise the limit",
            )
        groups = record.get("groups", ())
        rules = {group["role"]: group["rule"] for group in groups if group["decay"]}
        # Stochastic rounding is right on average.
        loses = not groups or any(group.get("rounding", "nearest") == "nearest" for group in groups)
        for role, values in record["roles"].items():
            history = self._roles.setdefault(role, RoleHistory())
            history.add(values)
            yield from _of_role(role, history, rules.get(role), loses=loses)


def _of_role(role: str, history: RoleHistory, rule: str | None, *, loses: bool) -> Iterator[tuple[str, str]]:
    norm = history.latest[-1]["weight_rms"]
    if rule in FALLING_RULES and history.halved and norm is not None:
        lost = 1 - norm / history.top_norm
        if lost >= COLLAPSE and 1 - norm / history.halved >= LATE_LOSS:
            yield (
                f"collapsing {role}",
                f"{rule} decay is collapsing the weights of role {role!r}: they have lost {lost:.0%} of their largest "
                f"RMS while the learning rate came down; decay='scaled' holds it, a smaller lambda takes less",
            )
    size = history.typical(lambda values: values["relative_update"] if values.get("defect") is not None else None)
    if size is not None and size > LARGE_UPDATE:
        yield (
            f"large updates {role}",
            f"updates of role {role!r} are {size:.0%} of its weights, so momentum replaces them within the steps "
            f"that it remembers; lower the learning rate, or lambda if decay has made the weights this small",
        )
    arrived = history.typical(_arrived) if loses else None
    if arrived is not None and arrived < 1 - ROUNDING:
        yield (
            f"rounding {role}",
            f"weights of role {role!r} move by {arrived:.0%} of what is intended, the rest is lost in rounding; keep "
            f"them in float32, or use rounding='stochastic'",
        )


def _arrived(values: dict[str, Any]) -> float | None:
    """The change that was stored, over the one that decay and update intended."""
    keys = ("weight_rms", "update_rms", "decay", "alignment_update", "applied_rms")
    r, s, phi, a, applied = (values.get(key) for key in keys)
    if r is None or s is None or phi is None or a is None or applied is None:
        return None
    intended = float((phi * r + a * s) ** 2 + (1 - a * a) * s * s) ** 0.5
    return float(applied) / intended if intended else None
