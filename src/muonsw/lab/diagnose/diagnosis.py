"""All that is known about one run: as an object, as plain data, and in the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from muonsw.lab.base.storage import plain
from muonsw.lab.base.tables import MISSING, Column, Table, change_text, norm_text, print_table
from muonsw.lab.base.terminal import harmless, say
from muonsw.lab.claims.claim import Interval
from muonsw.lab.diagnose.fits import LateFits, late_fits
from muonsw.lab.diagnose.history import LATE, History, open_history, parts
from muonsw.lab.diagnose.rules import Finding, Severity, examine
from muonsw.lab.runs import Run

SERIES = (
    "weight_rms", "update_rms", "decay", "lr", "alignment_update", "alignment_gradient", "alignment_momentum",
    "alignment_update_mean", "alignment_gradient_mean", "alignment_momentum_mean", "defect",
)  # fmt: skip
COLOURS = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan", Severity.GOOD: "green"}
# The numbers of `norm_numbers` that a terminal shows, most important first: heading, rank, and how they are written.
NORM_COLUMNS: Mapping[str, tuple[str, int, Callable[[float], str]]] = {
    "last_norm": ("last norm", 0, norm_text),
    "change": ("change since peak", 0, change_text),
    "last_target": ("r* last", 1, norm_text),
    "lr_left": ("lr left", 1, lambda share: f"{100 * share:.0f}%"),
    "relaxations": ("2Σφ", 1, norm_text),
    "first_norm": ("first norm", 2, norm_text),
    "peak_norm": ("peak norm", 2, norm_text),
    "peak_norm_step": ("peak at step", 2, lambda step: f"{step:,.0f}"),
    "relative_update": ("s/r", 3, norm_text),
    "late_alignment": ("late a", 3, norm_text),
    "memory": ("memory", 3, norm_text),
}
NORM_NOTE = (
    "norm: RMS of the weights; r*: where it would settle at the present learning rate; φ: share of a weight that decay "
    "takes in a step, 2Σφ: relaxation times so far. All columns: docs/glossary.md."
)
FIT_NOTE = "a: alignment of update and weights over the last steps; η: learning rate; 95% intervals in brackets."
FIT_COLUMNS = (
    "fit",
    Column("k", number=True, rank=0),
    Column("a0", number=True, rank=2),
    Column("norm at lr 0", number=True),
    Column("steps", number=True, rank=2),
)


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """One run, examined."""

    history: History  # the chosen scope
    roles: tuple[History, ...]  # those that were recorded
    layers: tuple[History, ...]
    fits: LateFits | None  # the late alignment; None where there is too little of it
    findings: tuple[Finding, ...]  # the worst first

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
    history, roles, layers = open_history(run, scope), parts(run, "role"), parts(run, "layer")
    # Roles that do not decay are no part of the decayed weights.
    within = [role for role in roles if scope == "all" or (scope == "decayed" and role.highest("decay") > 0)]
    return Diagnosis(history, roles, layers, late_fits(history, late), tuple(examine(history, within)))


def norm_numbers(history: History) -> dict[str, float]:
    """Where the norm was, is, and would settle, and why; not a number where that was not recorded."""
    r, steps = history.column("weight_rms"), history.steps
    known = np.flatnonzero(np.isfinite(r))
    top = known[r[known].argmax()] if len(known) else None
    return {
        "first_norm": float(r[known[0]]) if len(known) else math.nan,
        "peak_norm": math.nan if top is None else float(r[top]),
        "peak_norm_step": math.nan if top is None else float(steps[top]),
        "last_norm": history.last("weight_rms"),
        "last_target": math.nan if history.target is None else float(history.target[-1]),
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
    history, run = diagnosis.history, diagnosis.run
    norm, tracking = history.norm, history.tracking
    data: dict[str, Any] = plain(
        {
            "name": run.name,
            "path": str(run.path),
            "rule": run.rule,
            "complete": run.complete,
            "scope": history.scope,
            "samples": history.complete,
            "norm": norm_numbers(history),
            "tracking": {"step": norm.steps, **vars(tracking)} if norm is not None and tracking is not None else None,
            "late_fits": asdict(diagnosis.fits) if diagnosis.fits else None,
            "findings": [asdict(finding) for finding in diagnosis.findings],
            "roles": {role.name: norm_numbers(role) for role in diagnosis.roles},
            "layers": {layer.name: norm_numbers(layer) for layer in diagnosis.layers},
            "series": {"step": history.steps, **{key: history.column(key) for key in SERIES}},
        }
    )
    return data


def print_diagnosis(console: Console, diagnoses: Sequence[Diagnosis], *, verbose: bool = False) -> None:
    """Tables first, then the findings of each run."""
    prefixes = [f"{one.run.name} " if len(diagnoses) > 1 else "" for one in diagnoses]
    named = list(zip(diagnoses, prefixes, strict=True))
    columns = [Column("weights"), *(Column(title, number=True, rank=rank) for title, rank, _ in NORM_COLUMNS.values())]
    norms = [row for one, prefix in named for row in _norm_rows(one, prefix)]
    print_table(console, Table("norms", "Weight norms", columns, norms, NORM_NOTE), verbose=verbose)
    if fits := [row for one, prefix in named for row in _fit_rows(one, prefix)]:
        table = Table("fits", "Late alignment against the learning rate", FIT_COLUMNS, fits, FIT_NOTE)
        print_table(console, table, verbose=verbose)
    for diagnosis in diagnoses:
        _print_findings(console, diagnosis)


def _norm_rows(diagnosis: Diagnosis, prefix: str) -> Iterator[tuple[str, ...]]:
    others = [role for role in diagnosis.roles if role.scope != diagnosis.history.scope]
    for history in (diagnosis.history, *others):
        numbers = norm_numbers(history)
        numbers["change"] = numbers["last_norm"] / numbers["peak_norm"] - 1.0 if numbers["peak_norm"] else math.nan
        texts = [
            MISSING if math.isnan(numbers[key]) else text(numbers[key]) for key, (*_, text) in NORM_COLUMNS.items()
        ]
        yield (prefix + history.scope, *texts)


def _fit_rows(diagnosis: Diagnosis, prefix: str) -> Iterator[tuple[str | None, ...]]:
    fits = diagnosis.fits
    if fits is None:
        return
    for name, fit, line in (("origin", fits.origin, "a = -k η"), ("offset", fits.offset, "a = -a0 - k η")):
        if fit is not None:
            a0 = _within(fit.a0, fit.a0_interval) if fit.a0_interval else "0"
            limit = _within(fits.limit.value, fits.limit.interval) if fits.limit and fits.limit.fit == name else None
            steps = f"{fits.first_step:,} to {fits.last_step:,}"
            yield f"{prefix}{line}", _within(fit.k, fit.k_interval), a0, limit, steps


def _within(value: float, interval: Interval) -> str:
    return f"{norm_text(value)} [{norm_text(interval.low)}, {norm_text(interval.high)}]"


def _print_findings(console: Console, diagnosis: Diagnosis) -> None:
    title = f"{diagnosis.run.name} ({diagnosis.run.rule or 'rule unknown'})"
    console.print()
    console.print(Text(harmless(title), style="bold"))
    if not diagnosis.findings:
        say(console, "  nothing to report")
    for finding in diagnosis.findings:
        also = ", ".join(scope.partition(":")[2] for scope in finding.also)
        text = f"{finding.text} The same holds for: {also}." if also else finding.text
        lines = textwrap.wrap(harmless(text), width=max(min(console.width, 110) - 11, 30))
        for place, line in enumerate(lines):
            label = Text(f"{finding.severity if place == 0 else '':>8}  ", style=COLOURS[finding.severity])
            console.print(label + Text(line, style="default"), soft_wrap=True)
