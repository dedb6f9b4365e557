"""The records of finished runs, and how numbers of them are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gather import identity, read, settings
from muonsw.lab.claims.claim import Claim, Measured
from muonsw.lab.claims.table import measured_text, predicted_text
from planned import GROUPS, Planned

EVIDENCE = Path(__file__).parents[2] / "evidence"
Record = Mapping[str, Any]


class Evidence:
    """All records, by what tells runs apart."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = {identity(record): record for record in records}

    def of(self, planned: Planned) -> Record | None:
        """The record of a run, if it was made."""
        return self.records.get(identity(settings(planned.config)))

    def loss(self, planned: Planned) -> float | None:
        """Its final loss, infinite where it diverged, None where it was not made."""
        record = self.of(planned)
        return None if record is None else final_loss(record)

    def epochs(self) -> dict[int, float]:
        """How often the text was seen by the runs of a horizon that saw all of it, 16 sequences in each update."""
        found = self.records.values()
        return {one["steps"]: one["epochs"] for one in found if one["windows"] is None and one["batch"] == 16}

    def count(self, group: str) -> tuple[int, int]:
        """How many runs of a group were made, and how many there are."""
        runs = GROUPS[group].runs()
        return sum(self.of(one) is not None for one in runs), len(runs)


def load() -> Evidence:
    return Evidence([record for path in sorted(EVIDENCE.glob("*.jsonl")) for record in read(path)])


def final_loss(record: Record) -> float:
    return math.inf if record["final_loss"] is None else float(record["final_loss"])


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def chance(gap: Measured) -> str:
    return "one seed" if gap.interval is None else f"{gap.interval.low:+.3f} to {gap.interval.high:+.3f}"


def bold(value: float, best: float) -> str:
    text = "diverged" if value == math.inf else f"{value:.3f}"
    return f"**{text}**" if value == best else text


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table of Markdown whose first columns are text and whose others are numbers."""
    rule = ["---"] * texts + ["---:"] * (len(headings) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def claim_table(claims: list[Claim]) -> str:
    rows = [[c.statement, predicted_text(c), measured_text(c), str(c.verdict)] for c in claims]
    return markdown(["claim, written down before the runs", "asked", "found", "verdict"], rows, texts=4)
