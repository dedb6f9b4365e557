"""Rebuild docs/evidence.md, its figures and what `muonsw advise` has measured from the records in evidence/.

    make evidence

A record is one finished run; nothing here trains. `bench/gather.py` makes the records, on a GPU. Whatever is there is
shown, and what is missing is said.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gather import identity, read, settings
from muonsw.decay import decay_factors
from muonsw.lab.claims.claim import Claim, Measured
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.claims.table import measured_text, predicted_text
from muonsw.lab.diagnose.fits import fit_alignment
from muonsw.lab.paper import CONSTANT_OFFSET, CONSTANT_SLOPE, DEFECT, ROWS, SCALED_SLOPE
from muonsw.lab.report.sections import Axis, Chart, Curve, LegendEntry, Level, Sheet
from muonsw.lab.report.static import write_sheet
from muonsw.lab.studies.arms import CONSTANT, CONTROL_SUFFIX, SCALED
from muonsw.lab.studies.scales import MINI
from muonsw.lab.studies.training.best_rules import best_strength, candidates, judge_strengths, rules_run
from muonsw.lab.studies.training.regret import GOOD, RULES, at_horizon, judge_losses, octaves_within, regrets
from muonsw.lab.studies.training.sweeps import mean_losses, power
from muonsw.lab.train.state import schedule_multiple
from muonsw.theory import NormHistory, predict_norms
from planned import BEST, GROUPS, RATES, Planned, all_rules, of_map

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "evidence"
TEMPLATE = EVIDENCE / "evidence.md.in"
PAGE = ROOT / "docs" / "evidence.md"
ASSETS = ROOT / "docs" / "assets"
MEASURED = ROOT / "src" / "muonsw" / "measured.json"

# Fewer lambdas say nothing about a best one.
FEWEST = 4
# Totals of the best lambdas within this factor count as one: basins are flatter than that.
SAME_TOTAL = 3.0
LATE = 50 / 376  # the share of a run over which the paper fits the late alignment

Record = Mapping[str, Any]
# By rule, by horizon, by seed: the loss of each lambda.
Map = dict[str, dict[int, list[dict[float, float]]]]


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
        return None if record is None else _loss(record)

    def count(self, group: str) -> tuple[int, int]:
        """How many runs of a group were made, and how many there are."""
        runs = GROUPS[group].runs()
        return sum(self.of(one) is not None for one in runs), len(runs)


def main() -> None:
    evidence = load()
    if "--figures" in sys.argv[1:]:
        draw(map_sheet(regret_map(evidence)))
        draw(dynamics_sheet(evidence))
    PAGE.write_text(page(evidence), encoding="utf-8")
    MEASURED.write_text(json.dumps(measured(evidence), indent=1) + "\n", encoding="utf-8")


def load() -> Evidence:
    return Evidence([record for path in sorted(EVIDENCE.glob("*.jsonl")) for record in read(path)])


def page(evidence: Evidence) -> str:
    found, records = regret_map(evidence), evidence.records.values()
    return TEMPLATE.read_text(encoding="utf-8").format(
        conclusion=conclusion(evidence, found),
        losses=loss_table(found),
        seeds=", ".join(f"{len(seeds)} at {steps:,} updates" for steps, seeds in found["constant"].items()),
        optima=optima_table(found),
        too_large=too_large_table(found),
        claims=regret_claims(found),
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


# The regret map.


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


def loss_table(found: Map) -> str:
    columns = [(rule, steps) for steps in found["constant"] for rule in RULES]
    means = [mean_losses(found[rule][steps]) for rule, steps in columns]
    rows = []
    for lam in sorted({lam for losses in means for lam in losses}):
        cells = (_bold(losses[lam], min(losses.values())) if lam in losses else "-" for losses in means)
        rows.append([f"{lam:g}", *cells])
    return _table(["lambda", *(f"{rule}, {steps:,} updates" for rule, steps in columns)], rows)


def optima_table(found: Map) -> str:
    rows = []
    for rule in RULES:
        for optimum in optima(found, rule):
            high = f"{optimum['at_four_times']:+.3f}" if optimum["at_four_times"] is not None else "-"
            good = f"{optimum['low']:.3g} to {optimum['high']:.3g}"
            numbers = f"{optimum['best']:.3g}", f"{optimum['total']:.2f}", good, f"{optimum['octaves']:.1f}", high
            rows.append([rule, f"{optimum['steps']:,}", *numbers])
    headings = ["rule", "updates", "best lambda", "takes in all", f"within {GOOD} nats", "octaves", "loss at 4 times"]
    return _table(headings, rows, texts=1)


def optima(found: Map, rule: str) -> list[dict[str, Any]]:
    """The best lambda at each horizon, what it takes in all, and how wrong it may be."""
    result = []
    for steps, seeds in found[rule].items():
        losses, per_lambda = mean_losses(seeds), total_per_lambda(rule, steps)
        best = vertex(losses)
        low, high = good_range(losses)
        result.append(
            {
                "rule": rule,
                "steps": steps,
                "seeds": len(seeds),
                "best": _short(best),
                "low": _short(low),
                "high": _short(high),
                "total": _short(best * per_lambda),
                "low_total": _short(low * per_lambda),
                "high_total": _short(high * per_lambda),
                "octaves": _short(octaves_within(losses)),
                "at_four_times": at_factor(losses, best, 4.0),
                "loss": _short(min(losses.values())),
                "costs": [[_short(lam * per_lambda), _short(cost)] for lam, cost in regrets(losses).items()],
            }
        )
    return result


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
            return _short(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return None


def regret_claims(found: Map) -> str:
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
        f"{rule} {power([one['best'] for one in optima(found, rule)], list(found[rule])):.2f}"
        for rule in RULES
        if len(found[rule]) > 1
    ]
    return f"{claim_table(claims)}\n\nThe best lambda goes with the horizon to the power: {', '.join(powers)}."


def conclusion(evidence: Evidence, found: Map) -> str:
    """A few sentences with the numbers of the longest horizon; what they say follows from the numbers."""
    totals = sorted(one["total"] for rule in RULES for one in optima(found, rule))
    sentences = (
        _best_against_best(found),
        _too_large(found),
        _in_all(totals),
        _other_rules(evidence),
        _little_text(evidence),
    )
    told = [sentence for sentence in sentences if sentence]
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(told, start=1))


def _best_against_best(found: Map) -> str:
    steps = list(found["constant"])[-1]
    pairs = zip(found["scaled"][steps], found["constant"][steps], strict=True)
    gap = over_seeds([min(scaled.values()) - min(constant.values()) for scaled, constant in pairs])
    close = "Choose lambda well and the rule hardly matters" if abs(gap.value) <= GOOD else "The rule matters"
    told = f"scaled decay ends {gap.value:+.3f} nats from constant decay (at {steps:,} updates; {_chance(gap)})"
    return f"{close}: best against best, {told}."


def _too_large(found: Map) -> str:
    """What the lambdas above both best ones cost, at the longest horizon."""
    last = list(found["constant"])[-1]
    rows = [row for row in too_large(found) if row.steps == last and max(row.constant, row.scaled) > GOOD]
    if not rows:
        return "What too large a lambda costs lies beyond the lambdas that were tried."
    milder = "scaled" if sum(row.constant - row.scaled for row in rows) > 0 else "constant"
    cost = ", ".join(f"{row.constant:.3f} and {row.scaled:.3f} at {row.lam:g}" for row in rows)
    known = [row for row in rows if row.same_total is not None]
    told = f"Too large a lambda costs less under {milder} decay: constant and scaled end {cost} above their best"
    if not known:
        return f"{told}."
    less = all(row.same_total < row.constant for row in known)
    how = "so it matters when decay acts, not only how much there is" if less else "so it is the amount that matters"
    total = ", ".join(f"{row.same_total:.3f}" for row in known)
    return f"{told} ({rows[0].steps:,} updates). Scaled decay of the same total ends {total} above, {how}."


def _in_all(totals: Sequence[float]) -> str:
    took = f"the best lambdas took {totals[0]:.1f} to {totals[-1]:.1f}, over all horizons and both rules"
    if totals[-1] > SAME_TOTAL * totals[0]:
        return f"What decay takes over the whole run, the sum of phi, does not settle lambda: {took}."
    return (
        f"Count what decay takes over the whole run, the sum of phi: {took}, so lambda should fall as the run gets "
        f"longer. [`muonsw advise`](guide/which-rule.md#which-lambda) does the sum."
    )


def _other_rules(evidence: Evidence) -> str:
    """Whether anything was better than choosing lambda well, among the rules that have all their strengths."""
    gaps = gaps_to_constant(strengths(evidence))
    if "none" not in gaps:
        return ""
    best = {rule: _mean(gap) for rule, gap in gaps.items()}
    lowest = min(best, key=lambda rule: best[rule])
    better = (
        f"One rule is better, `{lowest}`" if best[lowest] < -GOOD else "No rule is better than choosing lambda well"
    )
    close = ", ".join(f"`{rule}`" for rule in best if rule != "constant" and abs(best[rule]) <= GOOD)
    return (
        f"{better}: at the best of three strengths {close} end within {GOOD} nats of constant decay, no decay at all "
        f"{best['none']:+.3f} from it (1,600 updates, {len(gaps['constant'])} seeds)."
    )


def _little_text(evidence: Evidence) -> str:
    """What happens where decay is needed against overfitting."""
    gaps = [gap for (case, lam), gap in hard_gaps(evidence).items() if case == "little text" and lam == BEST]
    if not gaps or len(gaps[0]) < 2:
        return ""
    gap = over_seeds(gaps[0])
    worse = "costs" if gap.value > 0 else "gains"
    return (
        f"Where text is seen many times decay is what keeps a model from learning it by heart, and there scaled decay "
        f"{worse} {abs(gap.value):.2f} nats at the same lambda ({_chance(gap)}, {len(gaps[0])} seeds), as it takes "
        f"less in all and least at the end: use constant decay there, and more of it."
    )


def _chance(gap: Measured) -> str:
    return "one seed" if gap.interval is None else f"95% interval {gap.interval.low:+.3f} to {gap.interval.high:+.3f}"


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


def too_large_table(found: Map) -> str:
    rows = []
    for row in too_large(found):
        costs = (row.constant, row.scaled, row.same_total)
        cells = ("-" if cost is None else f"{cost:+.3f}" for cost in costs)
        rows.append([f"{row.steps:,}", f"{row.lam:g}", *cells])
    return _table(["updates", "lambda", "constant", "scaled", "scaled of the same total"], rows, texts=0)


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


def draw(sheet: Sheet) -> None:
    """Write a picture into docs/assets, or nothing if there is nothing to see."""
    (ASSETS / f"{sheet.name}.png").unlink(missing_ok=True)
    if not any(chart.curves for chart in sheet.charts):
        return
    for path in write_sheet(sheet, [LegendEntry(rule, rule) for rule in RULES], ASSETS):
        if path.suffix == ".svg":
            path.unlink()


def _curve(rule: str, seeds: list[dict[float, float]]) -> Curve:
    found = regrets(mean_losses(seeds))
    return Curve(rule, rule, list(found), [value if value < math.inf else math.nan for value in found.values()])


# The other groups.


def rules_section(evidence: Evidence) -> str:
    """Every rule at its strengths, on the seeds that it has; its best against constant decay's, on the same seeds."""
    found, arms = strengths(evidence), candidates(rules_run(MINI))
    rows = []
    for rule, values in found.items():
        for arm, losses in zip(arms[rule], values, strict=False):
            strength = "" if arm.name == rule else arm.name.removeprefix(f"{rule}, ")
            rows.append([rule, strength, _bold(_mean(losses), min(map(_mean, values))), str(len(losses))])
    gaps = gaps_to_constant(found)
    ranked = ", ".join(f"{rule} {_mean(gap):+.3f}" for rule, gap in sorted(gaps.items(), key=lambda one: _mean(one[1])))
    judged = {rule: whole(found)[rule] for rule, gap in gaps.items() if len(gap) > 1}
    claims = claim_table(judge_strengths(judged)) if len(judged) > 1 else "One seed: nothing is judged yet."
    single = ", ".join(rule for rule, gap in gaps.items() if len(gap) == 1)
    alone = f" Of one seed, so not judged: {single}." if single and len(judged) > 1 else ""
    told = f"The best of each that has all its strengths, minus constant decay's on the same seeds: {ranked}.{alone}"
    return f"{_table(['rule', 'strength', 'loss', 'seeds'], rows, texts=2)}\n\n{told}\n\n{claims}"


def strengths(evidence: Evidence) -> dict[str, list[list[float]]]:
    """By rule, of each strength that was tried, the losses of the first seeds that all of them have."""
    losses = {(one.arm, one.config.seed): evidence.loss(one) for one in all_rules()}
    seeds, found = sorted({seed for _, seed in losses}), {}
    for rule, arms in candidates(rules_run(MINI)).items():
        tried = [arm.name for arm in arms if losses[arm.name, seeds[0]] is not None]
        had = _first_seeds(losses, tried, seeds)
        found[rule] = [[losses[name, seed] for seed in had] for name in tried]
    return found


def _first_seeds(losses: Mapping[tuple[str, int], float | None], names: Sequence[str], seeds: list[int]) -> list[int]:
    """The seeds up to the first that one of these arms lacks."""
    return list(takewhile(lambda seed: all(losses[name, seed] is not None for name in names), seeds))


def whole(found: Mapping[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """The rules all of whose strengths were tried: the best of some is not a rule's best."""
    arms = candidates(rules_run(MINI))
    return {rule: values for rule, values in found.items() if len(values) == len(arms[rule])}


def gaps_to_constant(found: Mapping[str, list[list[float]]]) -> dict[str, list[float]]:
    """By rule, its best strength minus constant decay's best, seed by seed; nothing before constant decay is whole."""
    tried = whole(found)
    if "constant" not in tried:
        return {}
    gaps = {}
    for rule, values in tried.items():
        constant = [losses[: len(values[0])] for losses in tried["constant"]]
        pairs = zip(values[best_strength(values)], constant[best_strength(constant)], strict=False)
        gaps[rule] = [ours - theirs for ours, theirs in pairs]
    return gaps


def hard_section(evidence: Evidence) -> str:
    """Of each case the mean over seeds under both rules, and the differences of the pairs."""
    cases = hard_records(evidence)
    rows = []
    for (case, lam), gaps in hard_gaps(evidence).items():
        found = cases[case, lam]
        means = [_mean([_loss(record) for record in found[rule].values()]) for rule in RULES]
        without = [_loss(record) for record in cases.get((case, 0.0), {}).get("none", {}).values()]
        gap = over_seeds(gaps)
        interval = "-" if gap.interval is None else f"{gap.interval.low:+.3f} to {gap.interval.high:+.3f}"
        epochs = max(record["epochs"] for record in found["constant"].values())
        cells = [f"{mean:.3f}" for mean in means] + [f"{_mean(without):.3f}" if without else "-"]
        rows.append([case, f"{lam:g}", f"{epochs:.1f}", *cells, f"{gap.value:+.3f}", interval, str(len(gaps))])
    headings = ["case", "lambda", "epochs", "constant", "scaled", "no decay", "scaled minus constant"]
    return _table([*headings, "95% t interval", "seeds"], rows, texts=1)


def hard_records(evidence: Evidence) -> dict[tuple[str, float], dict[str, dict[int, Record]]]:
    """By case and lambda, by rule, by seed."""
    cases: dict[tuple[str, float], dict[str, dict[int, Record]]] = {}
    for one in GROUPS["hard"].runs():
        record = evidence.of(one)
        if record is not None:
            rules = cases.setdefault((one.arm.split(":")[0], record["lambda"]), {})
            rules.setdefault(record["rule"], {})[record["seed"]] = record
    return cases


def hard_gaps(evidence: Evidence) -> dict[tuple[str, float], list[float]]:
    """By case and lambda, scaled minus constant of every seed that has both."""
    gaps = {}
    for case, rules in hard_records(evidence).items():
        seeds = rules.get("constant", {}).keys() & rules.get("scaled", {}).keys()
        if seeds:
            gaps[case] = [_loss(rules["scaled"][seed]) - _loss(rules["constant"][seed]) for seed in sorted(seeds)]
    return gaps


def table_section(evidence: Evidence) -> str:
    rows = []
    for name in ("table-128", "table-256", "table-512", "adamw"):
        arms: dict[str, list[Record]] = {}
        for one in GROUPS[name].runs():
            record = evidence.of(one)
            if record is not None:
                arms.setdefault(one.arm, []).append(record)
        for arm, records in arms.items():
            mean, norm = _mean([_loss(record) for record in records]), _mean([record["end_norm"] for record in records])
            first = records[0]
            rows.append(
                [str(first["width"]), arm, f"{first['lambda']:.3g}", f"{mean:.3f}", f"{norm:.3f}", str(len(records))]
            )
    printed = "; ".join(
        f"width {width}: {row.constant_norm:g} and {row.scaled_norm:g}"
        for width, row in ROWS.items()
        if row.constant_norm is not None
    )
    note = f"The paper's end norms under constant and scaled decay: {printed}."
    told = " ".join(filter(None, (gains(evidence, width) for width in MINI.rows)))
    table = _table(["width", "arm", "lambda", "loss", "end norm (RMS)", "seeds"], rows, texts=2)
    return "\n\n".join(filter(None, (table, told, note)))


def gains(evidence: Evidence, width: int) -> str:
    """What scaled decay gains at the matched lambda, how much of it less decay alone would, and how much sooner."""
    of_arm: dict[str, list[Record]] = {}
    for one in GROUPS[f"table-{width}"].runs():
        record = evidence.of(one)
        if record is not None:
            of_arm.setdefault(one.arm, []).append(record)
    arms = [of_arm.get(name, []) for name in (CONSTANT, SCALED, f"{CONSTANT}, {CONTROL_SUFFIX}")]
    seeds = min(map(len, arms))
    if not seeds or len({record["seed"] for arm in arms for record in arm[:seeds]}) != seeds:
        return ""
    constant, scaled, same = (_mean([_loss(record) for record in arm[:seeds]]) for arm in arms)
    gain, share = constant - scaled, (constant - same) / (constant - scaled)
    told = f"Width {width}, the matched lambda: scaled decay ends {gain:.3f} below constant decay"
    told += f", of which constant decay of the same total gets {share:.0%}"
    sooner = [_first_below(ours["losses"], _loss(theirs)) for ours, theirs in zip(arms[1], arms[0], strict=False)]
    steps = arms[0][0]["steps"]
    known = [step for step in sooner[:seeds] if step is not None]
    return f"{told}; it is there after {_mean(known) / steps:.0%} of the updates." if known else f"{told}."


def _first_below(losses: Sequence[Sequence[float]], level: float) -> float | None:
    """The update at which a curve of evaluations first comes down to a level, by lines; None if it never does."""
    for (x0, y0), (x1, y1) in pairwise(losses):
        if y1 <= level < y0:
            return x0 + (x1 - x0) * (y0 - level) / (y0 - y1)
    return None


def sampled(evidence: Evidence) -> dict[str, dict[str, Sequence[float]]]:
    """By arm, what its telemetry sampled, column by column, and the norm that the recursion gives."""
    found = {}
    for one in GROUPS["dynamics"].runs():
        record = evidence.of(one)
        if record is None or "samples" not in record:
            continue
        columns = dict(zip(record["sampled"], zip(*record["samples"], strict=True), strict=True))
        history = NormHistory.of(
            columns["step"], r=columns["weight_rms"], s=columns["update_rms"], phi=columns["decay"],
            a=columns["alignment_update"],
        )  # fmt: skip
        found[one.arm] = {**columns, "predicted": predict_norms(history).tolist()}
    return found


def dynamics_section(evidence: Evidence) -> str:
    rows = []
    for arm, columns in sampled(evidence).items():
        norms = columns["weight_rms"]
        rows.append(
            [arm, f"{max(norms):.3f}", f"{norms[-1]:.3f}", f"{columns['predicted'][-1]:.3f}"]
            + [f"{_mean(columns[key]):+.4f}" for key in ("alignment_gradient", "alignment_momentum")]
            + [late_fit(columns, arm), f"{_mean(columns['defect']):.3f}"]
        )
    headings = ["rule", "highest norm", "end norm", "by the recursion", "cos(W, gradient)", "cos(W, momentum)"]
    headings += ["late alignment", "orthogonality"]
    note = (
        "The recursion starts from the first observed norm alone. Late alignment is a line over the last "
        f"{LATE:.0%} of the run; the paper, at width 1024, has a = -{SCALED_SLOPE:g} eta under scaled and "
        f"a = -{CONSTANT_OFFSET:g} - {CONSTANT_SLOPE:g} eta under constant decay, and an orthogonality of {DEFECT:g}."
    )
    picture = (
        "![Weight RMS over the updates: under constant decay it rises and then falls to a third, under scaled decay it "
        "settles; the recursion lies on both. Beside it the alignment of weights and updates.](assets/dynamics.png)"
    )
    return f"{picture}\n\n{_table(headings, rows, texts=1)}\n\n{note}"


def dynamics_sheet(evidence: Evidence) -> Sheet:
    norms, alignments = [], []
    for arm, columns in sampled(evidence).items():
        steps = columns["step"]
        norms += [
            Curve(arm, arm, steps, columns["weight_rms"]),
            Curve(f"{arm}, recursion", arm, steps, columns["predicted"], line="dashed", neutral=True),
        ]
        alignments.append(Curve(arm, arm, steps, columns["alignment_update"]))
    key = [("solid", "observed"), ("dashed", "by the recursion")]
    return Sheet(
        "dynamics",
        "",
        [
            Chart("norms", "Weight RMS", norms, y=Axis("RMS of the entries"), key=key),
            Chart("alignment", "cos(weights, update)", alignments, y=Axis("alignment"), levels=[Level(0.0)]),
        ],
    )


def late_fit(columns: Mapping[str, Sequence[float]], rule: str) -> str:
    import numpy as np

    steps, rates, alignment = (np.array(columns[key], dtype=float) for key in ("step", "lr", "alignment_update"))
    late = steps > steps[-1] * (1 - LATE)
    fit = fit_alignment(rates[late], alignment[late], offset=rule == "constant")
    return f"-{fit.a0:.2g} - {fit.k:.3g} eta" if rule == "constant" else f"-{fit.k:.3g} eta"


def transfer_section(evidence: Evidence) -> str:
    columns: dict[str, dict[float, float]] = {}
    for name in ("widths", "horizons"):
        for one in GROUPS[name].runs():
            loss, config = evidence.loss(one), one.config
            if loss is not None:
                where = f"{config.optimizer.algorithm}, width {config.model.width}, {config.steps:,} updates"
                columns.setdefault(where, {})[config.optimizer.lr] = loss
    rows = [
        [where, *(_bold(losses[rate], min(losses.values())) if rate in losses else "-" for rate in RATES)]
        for where, losses in columns.items()
    ]
    note = f"One seed. Muon with scaled, AdamW with constant decay, lambda {BEST:g}; muP divides both alike."
    return f"{_table(['run', *(f'lr {rate:g}' for rate in RATES)], rows, texts=1)}\n\n{note}"


# What `muonsw advise` knows.


def measured(evidence: Evidence) -> dict[str, Any]:
    """The best lambda of each rule at each horizon, for `muonsw.advice`."""
    found, run = regret_map(evidence), MINI.map_run
    basis = (
        f"width {run.model.width}, {run.model.layers} layers, {run.model.experts} experts, Muon at a peak of "
        f"{run.optimizer.lr:g}, cosine to a tenth, {run.tokens_per_step:,} tokens an update, English Wikipedia"
    )
    return {"basis": basis, "good": GOOD, "optima": [one for rule in RULES for one in optima(found, rule)]}


# Small things.


def _loss(record: Record) -> float:
    return math.inf if record["final_loss"] is None else float(record["final_loss"])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _bold(value: float, best: float) -> str:
    text = "diverged" if value == math.inf else f"{value:.3f}"
    return f"**{text}**" if value == best else text


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table of Markdown whose first columns are text and whose others are numbers."""
    rule = ["---"] * texts + ["---:"] * (len(headings) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def claim_table(claims: list[Claim]) -> str:
    rows = [[c.statement, predicted_text(c), measured_text(c), str(c.verdict)] for c in claims]
    return _table(["claim, written down before the runs", "asked", "found", "verdict"], rows, texts=4)


if __name__ == "__main__":
    main()
