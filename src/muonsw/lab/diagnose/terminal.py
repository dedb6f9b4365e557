"""A diagnosis in the terminal: the table of norms, the late fits, and what to make of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from muonsw.lab.claims.claim import Interval
from muonsw.lab.diagnose.diagnosis import Diagnosis, norm_numbers
from muonsw.lab.diagnose.fits import AlignmentFit
from muonsw.lab.diagnose.history import History
from muonsw.lab.diagnose.rules import Finding, Severity
from muonsw.lab.tables import Column, Table, Value, change_text, norm_text, print_table
from muonsw.lab.terminal import harmless, say

COLOURS = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan", Severity.GOOD: "green"}
NORM_COLUMNS = (
    "weights",
    Column("last norm", number=True, rank=0),
    Column("change since peak", number=True, rank=0),
    Column("r* last", number=True),
    Column("lr left", number=True),
    Column("2Σφ", number=True),
    Column("first norm", number=True, rank=2),
    Column("peak norm", number=True, rank=2),
    Column("peak at step", number=True, rank=2),
    Column("s/r", number=True, rank=3),
    Column("late a", number=True, rank=3),
    Column("memory", number=True, rank=3),
)
FIT_COLUMNS = (
    "fit",
    Column("k", number=True, rank=0),
    Column("a0", number=True, rank=2),
    Column("norm at lr 0", number=True),
    Column("steps", number=True, rank=2),
)


def print_diagnosis(console: Console, diagnoses: Sequence[Diagnosis], *, verbose: bool = False) -> None:
    """Tables first, then the findings of each run."""
    several = len(diagnoses) > 1
    norms = [row for one in diagnoses for row in _norm_rows(one, several)]
    print_table(console, Table("norms", "Weight norms", NORM_COLUMNS, norms), verbose=verbose)
    fits = [row for one in diagnoses for row in _fit_rows(one, several)]
    if fits:
        table = Table("fits", "Late alignment against the learning rate", FIT_COLUMNS, fits)
        print_table(console, table, verbose=verbose)
    for diagnosis in diagnoses:
        _print_findings(console, diagnosis)


def _norm_rows(diagnosis: Diagnosis, several: bool) -> Iterator[tuple[Value, ...]]:
    prefix = f"{diagnosis.run.name} " if several else ""
    others = [role for role in diagnosis.roles if role.scope != diagnosis.history.scope]
    for history in (diagnosis.history, *others):
        yield (prefix + history.scope, *_norm_cells(history))


def _norm_cells(history: History) -> tuple[Value, ...]:
    n = {key: None if value != value else value for key, value in norm_numbers(history).items()}  # noqa: PLR0124
    text = {key: None if value is None else norm_text(value) for key, value in n.items()}
    last, peak, step, left = n["last_norm"], n["peak_norm"], n["peak_norm_step"], n["lr_left"]
    return (
        text["last_norm"],
        change_text(last / peak - 1.0) if last is not None and peak else None,
        text["last_target"],
        None if left is None else f"{100 * left:.0f} %",
        text["relaxations"],
        text["first_norm"],
        text["peak_norm"],
        None if step is None else int(step),
        text["relative_update"],
        text["late_alignment"],
        text["memory"],
    )


def _fit_rows(diagnosis: Diagnosis, several: bool) -> Iterator[tuple[Value, ...]]:
    fits = diagnosis.fits
    if fits is None:
        return
    prefix, steps = f"{diagnosis.run.name} " if several else "", f"{fits.first_step:,} to {fits.last_step:,}"
    limits = {fits.limit.fit: f"{norm_text(fits.limit.value)} {_ends(fits.limit.interval)}"} if fits.limit else {}
    if fits.origin:
        yield (f"{prefix}a = -k η", *_coefficients(fits.origin), limits.get("origin"), steps)
    if fits.offset:
        yield (f"{prefix}a = -a0 - k η", *_coefficients(fits.offset), limits.get("offset"), steps)


def _coefficients(fit: AlignmentFit) -> tuple[str, str]:
    a0 = f"{norm_text(fit.a0)} {_ends(fit.a0_interval)}" if fit.a0_interval else "0"
    return f"{norm_text(fit.k)} {_ends(fit.k_interval)}", a0


def _ends(interval: Interval) -> str:
    return f"[{norm_text(interval.low)}, {norm_text(interval.high)}]"


def _print_findings(console: Console, diagnosis: Diagnosis) -> None:
    title = f"{diagnosis.run.name} ({diagnosis.run.rule or 'rule unknown'})"
    console.print()
    console.print(Text(harmless(title), style="bold"))
    if not diagnosis.findings:
        say(console, "  nothing to report")
    for finding in diagnosis.findings:
        lines = textwrap.wrap(harmless(finding_text(finding)), width=max(min(console.width, 110) - 11, 30))
        for place, line in enumerate(lines):
            label = Text(f"{finding.severity if place == 0 else '':>8}  ", style=COLOURS[finding.severity])
            console.print(label + Text(line, style="default"), soft_wrap=True)


def finding_text(finding: Finding) -> str:
    """The sentence, with the parts it also holds for."""
    if not finding.also:
        return finding.text
    return f"{finding.text} The same holds for: {', '.join(scope.partition(':')[2] for scope in finding.also)}."
