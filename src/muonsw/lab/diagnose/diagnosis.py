"""All that is known about one run, and the same as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from muonsw.lab.diagnose.fits import LateFits, late_fits
from muonsw.lab.diagnose.history import LATE, History, open_history, parts
from muonsw.lab.diagnose.rules import Finding, examine
from muonsw.lab.runs import Run
from muonsw.lab.storage import plain

SERIES = (
    "weight_rms", "update_rms", "decay", "lr", "alignment_update", "alignment_gradient", "alignment_momentum",
    "alignment_update_mean", "alignment_gradient_mean", "alignment_momentum_mean", "defect",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """One run, examined.

    Attributes:
        history: The chosen scope.
        roles: The roles that were recorded.
        layers: The layers that were recorded.
        fits: The late alignment; None where there is too little of it.
        findings: What the rules found, the worst first.
    """

    history: History
    roles: tuple[History, ...]
    layers: tuple[History, ...]
    fits: LateFits | None
    findings: tuple[Finding, ...]

    @property
    def run(self) -> Run:
        """The run."""
        return self.history.run


def diagnose(run: Run, *, scope: str = "decayed", late: float = LATE) -> Diagnosis:
    """Examine a run.

    Args:
        run: A loaded run.
        scope: Which weights: `decayed`, `all`, `role:NAME`, `layer:NUMBER` or `parameter:NAME`.
        late: Share of the steps, at the end, over which the alignment is fitted.

    Raises:
        UsageError: If the run has no telemetry of this scope.
    """
    history = open_history(run, scope)
    roles = tuple(parts(run, "role"))
    within = roles if scope in ("decayed", "all") else ()
    findings = examine(history, [role for role in within if _counts(role, scope)])
    return Diagnosis(history, roles, tuple(parts(run, "layer")), late_fits(history, late), tuple(findings))


def _counts(role: History, scope: str) -> bool:
    """Roles that do not decay are no part of the decayed weights."""
    return scope == "all" or role.highest("decay") > 0


def norm_numbers(history: History) -> dict[str, float]:
    """The numbers of the table: where the norm was, is, and would settle, and why."""
    r, steps = history.column("weight_rms"), history.steps
    known = np.flatnonzero(np.isfinite(r))
    top = int(known[r[known].argmax()]) if len(known) else None
    return {
        "first_norm": float(r[known[0]]) if len(known) else math.nan,
        "peak_norm": float(r[top]) if top is not None else math.nan,
        "peak_norm_step": float(steps[top]) if top is not None else math.nan,
        "last_norm": history.last("weight_rms"),
        "last_target": float(history.target[-1]) if history.target is not None else math.nan,
        "lr_left": history.lr_left,
        "relaxations": history.relaxations,
        "relative_update": history.typical(history.relative_update),
        "late_alignment": history.typical(history.column("alignment_update"), history.late()),
        "memory": history.memory,
        "lambda": history.lam,
        "update_at_lr_1": history.update,
    }


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as JSON data; what is not finite is null."""
    history = diagnosis.history
    data = {
        "name": diagnosis.run.name,
        "path": str(diagnosis.run.path),
        "rule": diagnosis.run.rule,
        "complete": diagnosis.run.complete,
        "scope": history.scope,
        "samples": int(history.complete.sum()),
        "norm": norm_numbers(history),
        "tracking": _tracking(history),
        "late_fits": asdict(diagnosis.fits) if diagnosis.fits else None,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "roles": {role.scope.partition(":")[2]: norm_numbers(role) for role in diagnosis.roles},
        "layers": {layer.scope.partition(":")[2]: norm_numbers(layer) for layer in diagnosis.layers},
        "series": {"step": history.steps, **{key: history.column(key) for key in SERIES}},
    }
    result: dict[str, Any] = plain(data)
    return result


def _tracking(history: History) -> dict[str, Any] | None:
    if history.tracking is None or history.norm is None:
        return None
    return {"step": history.norm.steps, **vars(history.tracking)}
