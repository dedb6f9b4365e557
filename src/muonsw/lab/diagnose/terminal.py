"""A diagnosis in the terminal: the table of norms, the late fits, and what to make of it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from muonsw.lab.claims.claim import Interval
from muonsw.lab.diagnose.diagnosis import Diagnosis, norm_numbers
from muonsw.lab.diagnose.findings import Finding, Severity
from muonsw.lab.diagnose.fits import AlignmentFit
from muonsw.lab.diagnose.history import History
from muonsw.lab.report.sections import Column, Table
from muonsw.lab.report.terminal_table import print_table

COLOURS = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan", Severity.GOOD: "green"}
NORM_HEADINGS = ("weights", "first", "peak", "at step", "last", "r* last", "lr left", "2Σφ", "s/r", "late a", "memory")
FIT_HEADINGS = ("fit", "steps", "k", "a0", "norm at lr 0")


def print_diagnosis(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    """Tables first, then the findings of each run."""
    several = len(diagnoses) > 1
    norms = [row for one in diagnoses for row in _norm_rows(one, several)]
    print_table(console, Table("norms", "Weight norms", _columns(NORM_HEADINGS), norms))
    fits = [row for one in diagnoses for row in _fit_rows(one, several)]
    if fits:
        print_table(console, Table("fits", "Late alignment against the learning rate", _columns(FIT_HEADINGS), fits))
    for diagnosis in diagnoses:
        _print_findings(console, diagnosis)


def _columns(headings: Sequence[str]) -> list[Column]:
    return [Column(heading, number=place > 0) for place, heading in enumerate(headings)]


def _norm_rows(diagnosis: Diagnosis, several: bool) -> Iterator[tuple[str, ...]]:
    prefix = f"{diagnosis.run.name} " if several else ""
    others = [role for role in diagnosis.roles if role.scope != diagnosis.history.scope]
    for history in (diagnosis.history, *others):
        yield (prefix + history.scope, *_norm_cells(history))


def _norm_cells(history: History) -> tuple[str, ...]:
    n = norm_numbers(history)
    step = "-" if math.isnan(n["peak_norm_step"]) else f"{n['peak_norm_step']:,.0f}"
    left = "-" if math.isnan(n["lr_left"]) else f"{100 * n['lr_left']:.0f}%"
    numbers = [number(n[key]) for key in ("relaxations", "relative_update", "late_alignment", "memory")]
    norms = [number(n[key]) for key in ("last_norm", "last_target")]
    return number(n["first_norm"]), number(n["peak_norm"]), step, *norms, left, *numbers


def _fit_rows(diagnosis: Diagnosis, several: bool) -> Iterator[tuple[str, ...]]:
    fits = diagnosis.fits
    if fits is None:
        return
    prefix, steps = f"{diagnosis.run.name} " if several else "", f"{fits.first_step:,} to {fits.last_step:,}"
    limits = {fits.limit.fit: f"{number(fits.limit.value)} {_ends(fits.limit.interval)}"} if fits.limit else {}
    if fits.origin:
        yield (f"{prefix}a = -k eta", steps, *_coefficients(fits.origin), limits.get("origin", ""))
    if fits.offset:
        yield (f"{prefix}a = -a0 - k eta", steps, *_coefficients(fits.offset), limits.get("offset", ""))


def _coefficients(fit: AlignmentFit) -> tuple[str, str]:
    a0 = f"{number(fit.a0)} {_ends(fit.a0_interval)}" if fit.a0_interval else "0"
    return f"{number(fit.k)} {_ends(fit.k_interval)}", a0


def _ends(interval: Interval) -> str:
    return f"[{number(interval.low)}, {number(interval.high)}]"


def number(value: float) -> str:
    """Three digits, a dash where there is no number.

    Examples:
        >>> number(0.20413), number(float("nan"))
        ('0.204', '-')
    """
    return f"{value:.3g}" if math.isfinite(value) else "-"


def _print_findings(console: Console, diagnosis: Diagnosis) -> None:
    title = f"{diagnosis.run.name} ({diagnosis.run.rule or 'rule unknown'})"
    console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False)
    if not diagnosis.findings:
        console.print("  nothing to report", highlight=False)
    for finding in diagnosis.findings:
        lines = textwrap.wrap(finding_text(finding), width=max(min(console.width, 110) - 11, 30))
        colour = COLOURS[finding.severity]
        for place, line in enumerate(lines):
            label = f"[{colour}]{finding.severity:>8}[/{colour}]" if place == 0 else " " * 8
            console.print(f"{label}  {escape(line)}", highlight=False, soft_wrap=True)


def finding_text(finding: Finding) -> str:
    """The sentence, with the parts it also holds for."""
    if not finding.also:
        return finding.text
    return f"{finding.text} The same in: {', '.join(scope.partition(':')[2] for scope in finding.also)}."
