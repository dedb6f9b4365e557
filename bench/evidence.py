"""Rebuild docs/evidence.md, its figures and what `muonsw advise` has measured from the records in evidence/.

    make evidence

A record is one finished run; nothing here trains. `bench/gather.py` makes the records, on a GPU. Whatever is there is
shown, and what is missing is said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from evidence_page.conclusion import conclusion
from evidence_page.groups import (
    dynamics_section,
    dynamics_sheet,
    hard_section,
    other_rules,
    rules_section,
    table_section,
    transfer_section,
)
from evidence_page.records import EVIDENCE, Evidence, load
from evidence_page.regret_map import (
    loss_table,
    map_sheet,
    optima,
    optima_table,
    peak_of,
    regret_claims,
    regret_map,
    too_large_table,
)
from muonsw.lab.report.sections import LegendEntry, Sheet
from muonsw.lab.report.static import write_sheet
from muonsw.lab.studies.scales import MINI
from muonsw.lab.studies.training.regret import GOOD, RULES
from planned import GROUPS

ROOT = Path(__file__).parents[1]
TEMPLATE = EVIDENCE / "evidence.md.in"
PAGE = ROOT / "docs" / "evidence.md"
ASSETS = ROOT / "docs" / "assets"
MEASURED = ROOT / "src" / "muonsw" / "measured.json"


def main() -> None:
    evidence = load()
    if "--figures" in sys.argv[1:]:
        draw(map_sheet(regret_map(evidence)))
        draw(dynamics_sheet(evidence))
    PAGE.write_text(page(evidence), encoding="utf-8")
    MEASURED.write_text(json.dumps(measured(evidence), indent=1) + "\n", encoding="utf-8")


def page(evidence: Evidence) -> str:
    found, records, epochs = regret_map(evidence), evidence.records.values(), evidence.epochs()
    return TEMPLATE.read_text(encoding="utf-8").format(
        conclusion=conclusion(evidence, found),
        losses=loss_table(found, epochs),
        seeds=", ".join(f"{len(seeds)} at {steps:,} updates" for steps, seeds in found["constant"].items()),
        optima=optima_table(found, epochs),
        too_large=too_large_table(found, epochs),
        claims=regret_claims(found, epochs),
        rules=section(evidence, ["rules"], rules_section),
        hard=section(evidence, ["hard"], hard_section),
        table=section(evidence, ["table-128", "table-256", "table-512", "adamw"], table_section),
        dynamics=section(evidence, ["dynamics"], dynamics_section),
        transfer=section(evidence, ["widths", "horizons"], transfer_section),
        runs=len(records),
        minutes=f"{sum(record['seconds'] / record.get('workers', 1) for record in records) / 60:.0f}",
        missing=missing(evidence),
    )


def section(evidence: Evidence, groups: Sequence[str], body: Callable[[Evidence], str]) -> str:
    """What the records of some groups say, and how many of their runs were made."""
    counts = {group: evidence.count(group) for group in groups}
    made = ", ".join(f"{done} of {planned} runs of `{name}`" for name, (done, planned) in counts.items())
    if not any(done for done, _ in counts.values()):
        return f"Not measured yet: {made} were made."
    said = body(evidence)
    return said if all(done == planned for done, planned in counts.values()) else f"{said}\n\nSo far: {made}."


def missing(evidence: Evidence) -> str:
    counts = {name: evidence.count(name) for name in GROUPS}
    lacking = [f"`{name}` {planned - done} of {planned}" for name, (done, planned) in counts.items() if done < planned]
    words = "**What is missing**, in runs: " + ", ".join(lacking) + "." if lacking else "All planned runs were made."
    return (
        f"{words} At 400 updates decay hardly acts, so all differences there are of the size of chance; one or two "
        "seeds give no or wide intervals, and a claim whose interval spans its bound is undecided."
    )


def draw(sheet: Sheet) -> None:
    """Write a picture into docs/assets, or nothing if there is nothing to see."""
    (ASSETS / f"{sheet.name}.png").unlink(missing_ok=True)
    if not any(chart.curves for chart in sheet.charts):
        return
    for path in write_sheet(sheet, [LegendEntry(rule, rule) for rule in RULES], ASSETS):
        if path.suffix == ".svg":
            path.unlink()


def measured(evidence: Evidence) -> dict[str, Any]:
    """The best lambda of each rule at each horizon, for `muonsw.lab.advice`."""
    found, epochs, run = regret_map(evidence), evidence.epochs(), MINI.map_run
    by_rule = {**found, **other_rules(evidence)}
    rates = ", ".join(f"{steps:,} updates at a peak of {peak_of(steps):.3g}" for steps in found["constant"])
    basis = (
        f"width {run.model.width}, {run.model.layers} layers, {run.model.experts} experts, Muon with cosine to a "
        f"tenth, {run.tokens_per_step:,} tokens an update, English Wikipedia; {rates}"
    )
    return {
        "basis": basis,
        "good": GOOD,
        "optima": [one for rule, maps in by_rule.items() for one in optima(maps, rule, epochs)],
    }


if __name__ == "__main__":
    main()
