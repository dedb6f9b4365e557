"""Claims as a table in the terminal, as aligned plain text where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from muonsw.lab.claims.claim import Claim, failed_first, verdict
from muonsw.lab.claims.text import measured_text, predicted_text
from muonsw.lab.studies.experiment import Study
from muonsw.lab.studies.runner import Finished
from muonsw.lab.terminal import say

HEADINGS = ("claim", "predicted", "measured", "verdict")


def summary(results: Mapping[str, Finished], seconds: float) -> str:
    """One sentence that claims no more than the numbers carry."""
    claims = [claim for result in results.values() for claim in result.outcome.claims]
    failed = sum(not claim.holds for claim in claims)
    if failed:
        return (
            f"{failed} of {len(claims)} claims FAILED their stated tolerance ({seconds:.0f} s); they are shown first."
        )
    return (
        f"All {len(claims)} claims hold within their stated tolerances ({seconds:.0f} s); finite runs on these "
        "objectives agree with the theory, and cannot prove its limits."
    )


def print_results(console: Console, results: Mapping[str, Finished], paths: Sequence[Path], seconds: float) -> None:
    """The table, the sentence, and where everything was written."""
    owners = {id(claim): name for name, result in results.items() for claim in result.outcome.claims}
    claims = failed_first(claim for result in results.values() for claim in result.outcome.claims)
    names = [f"{owners[id(claim)]}/{claim.id}" for claim in claims]
    if console.is_terminal:
        console.print(_table(claims, names))
    else:
        say(console, _plain_table(claims, names))
    console.print(summary(results, seconds), highlight=False, soft_wrap=True)
    for path in paths:
        console.print(f"wrote {escape(str(path))}", highlight=False, soft_wrap=True)


def _table(claims: Sequence[Claim], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("claim", ratio=1)
    for heading in HEADINGS[1:3]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(HEADINGS[3])
    for claim, name in zip(claims, names, strict=True):
        colour = "green" if claim.holds else "bold red"
        text = f"{escape(claim.statement)}\n[dim]{escape(claim.reference)} · {escape(name)}[/dim]"
        word = f"[{colour}]{verdict(claim.holds)}[/{colour}]"
        table.add_row(text, escape(predicted_text(claim)), escape(measured_text(claim)), word)
    return table


def _plain_table(claims: Sequence[Claim], names: Sequence[str]) -> str:
    rows = [HEADINGS]
    for claim, name in zip(claims, names, strict=True):
        rows.append((name, predicted_text(claim), measured_text(claim), verdict(claim.holds)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def print_list(console: Console, studies: Iterable[Study]) -> None:
    """What can be reproduced."""
    for study in studies:
        say(console, f"{study.name}: {study.title}")
        for experiment in study.experiments:
            name = f"{study.name}/{experiment.name}"
            say(console, f"  {name:<28} {experiment.title}")
