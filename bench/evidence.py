"""Rebuild docs/evidence.md and its figures from the records in evidence/.

    make evidence

A record is one finished run; nothing here trains. `bench/regret_map.py` makes the records, on a GPU.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from muonsw.lab.claims.claim import Claim
from muonsw.lab.claims.table import measured_text, predicted_text
from muonsw.lab.report.sections import Axis, Chart, Curve, LegendEntry, Level, Sheet
from muonsw.lab.report.static import write_sheet
from muonsw.lab.studies.training.regret import GOOD, RULES, judge_losses, octaves_within, regrets
from muonsw.lab.studies.training.sweeps import mean_losses

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "evidence" / "regret-mini.jsonl"
TEMPLATE = ROOT / "evidence" / "evidence.md.in"
PAGE = ROOT / "docs" / "evidence.md"
ASSETS = ROOT / "docs" / "assets"

# By rule, by horizon, by seed: the loss of each lambda. Only seeds with every lambda under both rules are in it.
Map = dict[str, dict[int, list[dict[float, float]]]]


def main() -> None:
    records = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    found = complete(records)
    if "--figures" in sys.argv[1:]:
        draw(found)
    PAGE.write_text(page(records, found), encoding="utf-8")


def complete(records: list[dict[str, float]]) -> Map:
    lambdas = {record["lambda"] for record in records}
    points: dict[tuple[str, int, int], dict[float, float]] = {}
    for record in records:
        loss = record["final_loss"]
        place = points.setdefault((str(record["rule"]), int(record["steps"]), int(record["seed"])), {})
        place[record["lambda"]] = math.inf if loss is None else loss
    whole = {key for key, losses in points.items() if set(losses) == lambdas}
    found: Map = {rule: {} for rule in RULES}
    for steps in sorted({steps for _, steps, _ in points}):
        seeds = [seed for seed in sorted({seed for *_, seed in points}) if {(r, steps, seed) for r in RULES} <= whole]
        for rule in RULES:
            found[rule][steps] = [dict(sorted(points[rule, steps, seed].items())) for seed in seeds]
    return found


def draw(found: Map) -> None:
    charts = [
        Chart(
            f"regret-{steps}",
            f"{steps:,} updates",
            [_curve(rule, found[rule][steps]) for rule in RULES],
            x=Axis("lambda", log=2),
            y=Axis("regret", "nats per token"),
            points=True,
            levels=[Level(GOOD, f"{GOOD} nats")],
        )
        for steps in found["constant"]
    ]
    arms = [LegendEntry(rule, rule) for rule in RULES]
    for path in write_sheet(Sheet("regret-map", "", charts, columns=2), arms, ASSETS):
        if path.suffix == ".svg":
            path.unlink()


def _curve(rule: str, seeds: list[dict[float, float]]) -> Curve:
    found = regrets(mean_losses(seeds))
    return Curve(rule, rule, list(found), list(found.values()))


def page(records: list[dict[str, float]], found: Map) -> str:
    return TEMPLATE.read_text(encoding="utf-8").format(
        losses=loss_table(found),
        widths=width_table(found),
        claims=claim_table(claims_of(found)),
        seeds=", ".join(
            f"{steps:,} updates {min(len(found[rule][steps]) for rule in RULES)}" for steps in found["constant"]
        ),
        runs=len(records),
        minutes=f"{sum(record['seconds'] for record in records) / 60:.0f}",
    )


def claims_of(found: Map) -> list[Claim]:
    horizons = list(found["constant"])
    seeds = min(len(found[rule][steps]) for rule in RULES for steps in horizons)
    losses = {rule: [found[rule][steps][:seeds] for steps in horizons] for rule in RULES}
    return judge_losses(losses, [f"{steps:,} updates" for steps in horizons])


def loss_table(found: Map) -> str:
    columns = [(rule, steps) for steps in found["constant"] for rule in RULES]
    means = {column: mean_losses(found[column[0]][column[1]]) for column in columns}
    lines = [
        "| lambda | " + " | ".join(f"{rule}, {steps:,} updates" for rule, steps in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for lam in means[columns[0]]:
        cells = [f"**{m[lam]:.3f}**" if m[lam] == min(m.values()) else f"{m[lam]:.3f}" for m in means.values()]
        lines.append(f"| {lam:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def width_table(found: Map) -> str:
    lines = [f"| updates | octaves of lambda within {GOOD} nats, constant | scaled |", "| --- | ---: | ---: |"]
    for steps in found["constant"]:
        widths = [octaves_within(mean_losses(found[rule][steps])) for rule in RULES]
        lines.append(f"| {steps:,} | {widths[0]:.1f} | {widths[1]:.1f} |")
    return "\n".join(lines)


def claim_table(claims: list[Claim]) -> str:
    lines = ["| claim, written down before the runs | asked | found | verdict |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {claim.statement} | {predicted_text(claim)} | {measured_text(claim)} | {claim.verdict} |"
        for claim in claims
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
