"""The regret map: tables, the best lambdas, claims, and its picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from evidence_page.records import Evidence, bold, claim_table, markdown, rounded
from muonsw.decay import decay_factors
from muonsw.lab.claims.claim import Claim
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.report.sections import Axis, Chart, Curve, Level, Sheet
from muonsw.lab.studies.scales import MINI
from muonsw.lab.studies.training.regret import (
    GOOD,
    RULES,
    Losses,
    at_horizon,
    best_of_means,
    judge_losses,
    octaves_within,
    regrets,
)
from muonsw.lab.studies.training.sweeps import mean_losses, power
from muonsw.lab.train.state import schedule_multiple
from planned import of_map

# Fewer lambdas say nothing about a best one.
FEWEST = 4

# By rule, by horizon, by seed: the loss of each lambda.
Map = dict[str, dict[int, list[dict[float, float]]]]


def regret_map(evidence: Evidence) -> Map:
    """Of each horizon the lambdas that seed 0 has under both rules, and the seeds that have all of them."""
    found: Map = {rule: {} for rule in RULES}
    for steps in MINI.map_horizons:
        by_seed: dict[int, dict[str, dict[float, float]]] = {}
        for one in of_map(steps):
            loss, chosen = evidence.loss(one), one.config.optimizer
            if loss is not None:
                rules = by_seed.setdefault(one.config.seed, {rule: {} for rule in RULES})
                rules[chosen.decay][chosen.weight_decay] = loss
        first = by_seed.get(0, {})
        grid = sorted(set.intersection(*(set(losses) for losses in first.values()))) if first else []
        if len(grid) >= FEWEST:
            whole = [rules for _, rules in sorted(by_seed.items()) if all(set(grid) <= set(r) for r in rules.values())]
            for rule in RULES:
                found[rule][steps] = [{lam: rules[rule][lam] for lam in grid} for rules in whole]
    return found


def peak_of(steps: int) -> float:
    """The peak learning rate of a horizon, by the rule for horizons."""
    return at_horizon(MINI.map_run, steps).optimizer.lr


def loss_table(found: Map, epochs: Mapping[int, float]) -> str:
    columns = [(rule, steps) for steps in found["constant"] for rule in RULES]
    means = [mean_losses(found[rule][steps]) for rule, steps in columns]
    rows = [
        ["peak rate", *(f"{peak_of(steps):.3g}" for _, steps in columns)],
        ["epochs", *(f"{epochs[steps]:.1f}" for _, steps in columns)],
    ]
    for lam in sorted({lam for losses in means for lam in losses}):
        cells = (bold(losses[lam], min(losses.values())) if lam in losses else "-" for losses in means)
        rows.append([f"{lam:g}", *cells])
    return markdown(["lambda", *(f"{rule}, {steps:,} updates" for rule, steps in columns)], rows)


def optima_table(found: Map, epochs: Mapping[int, float]) -> str:
    rows = []
    for rule in RULES:
        for one in optima(found[rule], rule, epochs):
            high = f"{one['at_four_times']:+.3f}" if one["at_four_times"] is not None else "-"
            run = rule, f"{one['steps']:,}", f"{one['peak_lr']:.3g}", f"{one['epochs']:.1f}"
            good = f"{one['low']:.3g} to {one['high']:.3g}"
            rows.append([*run, f"{one['best']:.3g}", f"{one['total']:.2f}", good, f"{one['octaves']:.1f}", high])
    headings = ["rule", "updates", "peak rate", "epochs", "best lambda", "total (Σφ)", f"within {GOOD} nats"]
    return markdown([*headings, "octaves", "loss at 4 times"], rows, texts=1)


def optima(by_horizon: Mapping[int, Sequence[Losses]], rule: str, epochs: Mapping[int, float]) -> list[dict[str, Any]]:
    """The best lambda at each horizon, what it takes in all, and how wrong it may be."""
    result = []
    for steps, seeds in by_horizon.items():
        losses, per_lambda = mean_losses(seeds), total_per_lambda(rule, steps)
        best, (low, high), lowest = vertex(losses), good_range(losses), best_of_means(seeds)
        result.append(
            {
                "rule": rule,
                "steps": steps,
                "peak_lr": rounded(peak_of(steps)),
                "epochs": epochs[steps],
                "seeds": len(seeds),
                "best": rounded(best),
                "low": rounded(low),
                "high": rounded(high),
                "total": rounded(best * per_lambda),
                "low_total": rounded(low * per_lambda),
                "high_total": rounded(high * per_lambda),
                "octaves": rounded(octaves_within(losses)),
                "at_four_times": at_factor(losses, best, 4.0),
                "at_an_end": lowest in (min(losses), max(losses)),
                "costs": [[rounded(lam * per_lambda), *cost_of(seeds, lam, lowest)] for lam in losses],
            }
        )
    return result


def cost_of(seeds: Sequence[Losses], lam: float, best: float) -> tuple[float, float | None]:
    """The mean regret of a lambda, and half of its 95% t interval over seeds; None of one seed."""
    cost = over_seeds([losses[lam] - losses[best] for losses in seeds])
    return rounded(cost.value), None if cost.interval is None else rounded(cost.interval.high - cost.value)


def vertex(losses: Mapping[float, float]) -> float:
    """The best lambda: the vertex of the parabola over log lambda through the lowest point and its neighbours.

    A basin rises more steeply towards large lambdas, so points far out would pull a parabola through all of them.
    """
    lambdas, values = list(losses), list(losses.values())
    place = values.index(min(values))
    if place in (0, len(values) - 1):
        return lambdas[place]
    x, y = [math.log(lam) for lam in lambdas[place - 1 : place + 2]], values[place - 1 : place + 2]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    return math.exp((x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / (right - left))


def total_per_lambda(rule: str, steps: int) -> float:
    """What a rule takes over a run of the map for each unit of lambda."""
    run = at_horizon(MINI.map_run, steps)
    multiple, lr = schedule_multiple(run), run.optimizer.lr
    return math.fsum(decay_factors(rule, 1.0, [lr * multiple(step) for step in range(steps)], lr))


def good_range(losses: Mapping[float, float]) -> tuple[float, float]:
    """The lambdas around the lowest point between which the loss is within `GOOD` of it, by lines over log lambda."""
    points = [(math.log2(lam), regret) for lam, regret in regrets(losses).items()]
    place = min(range(len(points)), key=lambda i: points[i][1])

    def edge(rest: Sequence[tuple[float, float]]) -> float:
        for (x0, y0), (x1, y1) in pairwise(rest):
            if y1 > GOOD:
                return x0 + (x1 - x0) * (GOOD - y0) / (y1 - y0)
        return rest[-1][0]

    return 2.0 ** edge(points[place::-1]), 2.0 ** edge(points[place:])


def at_factor(losses: Mapping[float, float], best: float, factor: float) -> float | None:
    """The regret at a multiple of the best lambda, by lines over log lambda; None beyond the grid."""
    points = [(math.log2(lam), regret) for lam, regret in regrets(losses).items()]
    x = math.log2(best * factor)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return rounded(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return None


@dataclass(frozen=True)
class TooLarge:
    """The regrets of one lambda; `same_total` is that of scaled decay which takes as much as constant decay does."""

    steps: int
    lam: float
    constant: float
    scaled: float
    same_total: float | None


def too_large(found: Map) -> list[TooLarge]:
    """For each horizon the lambdas above the best one of both rules."""
    rows = []
    for steps in found["constant"]:
        mean = {rule: mean_losses(found[rule][steps]) for rule in RULES}
        more = total_per_lambda("constant", steps) / total_per_lambda("scaled", steps)
        above = max(vertex(losses) for losses in mean.values())
        cost = {rule: regrets(losses) for rule, losses in mean.items()}
        for lam in (lam for lam in cost["constant"] if lam > above):
            same_total = at_factor(mean["scaled"], lam, more)
            rows.append(TooLarge(steps, lam, cost["constant"][lam], cost["scaled"][lam], same_total))
    return rows


def too_large_table(found: Map, epochs: Mapping[int, float]) -> str:
    rows = []
    for row in too_large(found):
        costs = (row.constant, row.scaled, row.same_total)
        cells = ("-" if cost is None else f"{cost:+.3f}" for cost in costs)
        run = f"{row.steps:,}", f"{peak_of(row.steps):.3g}", f"{epochs[row.steps]:.1f}", f"{row.lam:g}"
        rows.append([*run, *cells])
    headings = ["updates", "peak rate", "epochs", "lambda", "constant", "scaled", "scaled of the same total"]
    return markdown(headings, rows, texts=0)


def regret_claims(found: Map, epochs: Mapping[int, float]) -> str:
    """The claims for each longer horizon against the shortest, on the seeds and lambdas that both have."""
    short, *longer = found["constant"]
    claims: list[Claim] = []
    for steps in longer:
        seeds = min(len(found[rule][h]) for rule in RULES for h in (short, steps))
        common = set(found["constant"][short][0]) & set(found["constant"][steps][0])
        losses = {
            rule: [
                [{lam: loss for lam, loss in one.items() if lam in common} for one in found[rule][h][:seeds]]
                for h in (short, steps)
            ]
            for rule in RULES
        }
        claims += judge_losses(losses, [f"{short:,} updates", f"{steps:,} updates"])
    powers = [
        f"{rule} {power([one['best'] for one in optima(found[rule], rule, epochs)], list(found[rule])):.2f}"
        for rule in RULES
        if len(found[rule]) > 1
    ]
    return f"{claim_table(claims)}\n\nThe best lambda goes with the horizon to the power: {', '.join(powers)}."


def map_sheet(found: Map) -> Sheet:
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
    return Sheet("regret-map", "", charts, columns=len(charts))


def _curve(rule: str, seeds: list[dict[float, float]]) -> Curve:
    found = regrets(mean_losses(seeds))
    return Curve(rule, rule, list(found), [value if value < math.inf else math.nan for value in found.values()])
