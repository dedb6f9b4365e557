"""The regret map: what a wrong lambda costs under each rule, and whether one lambda serves every horizon.

The best lambda of a rule at a horizon is the one whose mean loss over seeds is lowest (`best_of_means`), here and
wherever rules are compared at their best. The regret of a lambda is its final loss minus that of the best one, seed by
seed. All runs share the model, the data and the seeds; the peak learning rate follows the horizon rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from muonsw.lab.claims.claim import Claim, Measured, Stated, at_least, at_most
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Axis, Chart, Curve, Level
from muonsw.lab.studies.arms import Arm, Comparison, Results, Runs
from muonsw.lab.studies.outcome import last_loss
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.sweeps import best_rate, mean_losses, power
from muonsw.lab.tables import Cell, Column, Table, Value
from muonsw.lab.theory.schedule import peak_lr_for_horizon
from muonsw.lab.train.config import RunConfig

RULES = ("constant", "scaled")
# A loss within so many nats of the best counts as good.
GOOD = 0.01
BEYOND = Stated("beyond the paper; claims written down before the runs", "Muon, cosine to a tenth of the peak")
EXACT = Tolerance(0.0, "the bound itself was stated before the runs")

# By seed: the loss of each lambda, lambdas ascending.
Losses = Mapping[float, float]


def maps(scale: Scale) -> list[Comparison]:
    """Every lambda under both rules, at every horizon."""
    return [_at(scale, steps) for steps in scale.map_horizons]


def _at(scale: Scale, steps: int) -> Comparison:
    run = at_horizon(scale.map_run, steps)
    arms = tuple(
        Arm(f"{rule} {lam:g}", replace(run.optimizer, decay=rule, weight_decay=lam))
        for rule in RULES
        for lam in scale.map_lambdas
    )
    return Comparison(f"{steps} updates", run, arms, tuple(range(scale.sweep_seeds)), paired=False)


def at_horizon(run: RunConfig, steps: int) -> RunConfig:
    """The run at another length, its peak by the horizon rule; evaluated and saved at the end alone."""
    optimizer = replace(run.optimizer, lr=min(run.optimizer.lr, peak_lr_for_horizon(steps)))
    every = max(1, steps // 4)
    return replace(
        run, optimizer=optimizer, steps=steps, eval_every=every, checkpoint_every=steps, telemetry_every=every, keep=1
    )


def losses_of(arms: Runs, rule: str) -> list[dict[float, float]]:
    """For each seed, final loss by lambda under one rule; a run that diverged counts as infinitely bad."""
    found: dict[int, dict[float, float]] = {}
    for runs in arms.values():
        for run in runs:
            chosen, loss = run.config["optimizer"], last_loss(run)
            if chosen["decay"] == rule:
                by_lambda = found.setdefault(int(run.config["seed"]), {})
                by_lambda[float(chosen["weight_decay"])] = math.inf if math.isnan(loss) else loss
    return [dict(sorted(found[seed].items())) for seed in sorted(found)]


def best_of_means(seeds: Sequence[Losses]) -> float:
    """The lambda with the lowest mean loss over seeds: the lowest loss of each seed would be too good by chance.

    Examples:
        >>> best_of_means([{0.1: 3.0, 0.2: 3.1}, {0.1: 3.3, 0.2: 3.1}])
        0.2
    """
    means = mean_losses(seeds)
    return min(means, key=lambda lam: means[lam])


def best_against_best(ours: Sequence[Losses], theirs: Sequence[Losses]) -> Measured:
    """One rule at its best minus another at its own, each the best of means, paired by seed."""
    best, other = best_of_means(ours), best_of_means(theirs)
    return over_seeds([a[best] - b[other] for a, b in zip(ours, theirs, strict=True)])


def regrets(losses: Losses, best: float | None = None) -> dict[float, float]:
    """What each lambda costs more than the best one, by default the one with the lowest of these losses.

    Examples:
        >>> regrets({0.1: 3.0, 0.2: 2.5})
        {0.1: 0.5, 0.2: 0.0}
    """
    lowest = min(losses.values()) if best is None else losses[best]
    return {lam: loss - lowest for lam, loss in losses.items()}


def octaves_within(losses: Losses, limit: float = GOOD, best: float | None = None) -> float:
    """How many factors of two of lambda lie within so many nats of the best, by lines between the points of the grid.

    Examples:
        >>> octaves_within({0.125: 2.5, 0.25: 2.0, 0.5: 3.0}, limit=0.5)
        1.5
    """
    points = [(math.log2(lam), value) for lam, value in regrets(losses, best).items() if value < math.inf]
    width = 0.0
    for (x0, y0), (x1, y1) in pairwise(points):
        low, high = min(y0, y1), max(y0, y1)
        if low <= limit:
            width += (x1 - x0) * (1.0 if high <= limit else (limit - low) / (high - low))
    return width


def carried_regrets(short: Sequence[Losses], long: Sequence[Losses]) -> list[float]:
    """What the best lambda of short runs costs in long ones, seed by seed."""
    carried, best = best_of_means(short), best_of_means(long)
    return [losses[carried] - losses[best] for losses in long]


def judge_map(results: Results, scale: Scale) -> list[Claim]:
    """The claims of the map, as they were written down before the runs."""
    names = [f"{steps} updates" for steps in scale.map_horizons]
    return judge_losses({rule: [losses_of(results[name], rule) for name in names] for rule in RULES}, names)


def judge_losses(by_rule: Mapping[str, Sequence[Sequence[Losses]]], names: Sequence[str]) -> list[Claim]:
    """The same from losses alone: by rule, by horizon and by seed, with what the horizons are called."""
    first, last = ({rule: maps[place] for rule, maps in by_rule.items()} for place in (0, -1))
    carried = {rule: carried_regrets(first[rule], last[rule]) for rule in by_rule}
    return [*_carried_claims(carried, names[0], names[-1]), _width_claim(last, names[-1]), _best_claim(last, names[-1])]


def _carried_claims(carried: Mapping[str, Sequence[float]], short: str, long: str) -> list[Claim]:
    """What the best lambda of the shortest run costs in the longest, by rule and seed."""
    gaps = [constant - scaled for constant, scaled in zip(carried["constant"], carried["scaled"], strict=True)]
    costs = f"regret at {long} of {{}} decay's best lambda of {short}, in nats"
    grows, stays = (costs.format(rule) for rule in RULES)
    differ = "the first of these minus the second, in nats"
    return [
        at_least("constant-regret-grows", grows, BEYOND, over_seeds(carried["constant"]), GOOD, EXACT),
        at_most("scaled-regret-does-not", stays, BEYOND, over_seeds(carried["scaled"]), GOOD, EXACT),
        at_least("scaled-forgives-the-horizon", differ, BEYOND, over_seeds(gaps), 0.0, EXACT),
    ]


def _width_claim(last: Mapping[str, Sequence[Losses]], long: str) -> Claim:
    """How many octaves of lambda are good in the longest run."""
    best = {rule: best_of_means(last[rule]) for rule in RULES}
    constant, scaled = ([octaves_within(losses, best=best[rule]) for losses in last[rule]] for rule in RULES)
    ratios = [s / c if c else math.inf for c, s in zip(constant, scaled, strict=True)]
    wider = f"octaves of lambda within {GOOD} of the best at {long}: scaled over constant"
    return at_least("scaled-is-wider", wider, BEYOND, over_seeds(ratios), 2.0, EXACT)


def _best_claim(last: Mapping[str, Sequence[Losses]], long: str) -> Claim:
    """Each rule at the best of its lambdas in the longest run."""
    gap = best_against_best(last["scaled"], last["constant"])
    lower = f"best of scaled minus best of constant over lambda at {long}, in nats"
    limits = "the best of means, on the seeds that it is judged on: a little too good for both rules"
    return at_most("best-against-best", lower, BEYOND, gap, 0.0, EXACT, limits=limits)


def map_tables(results: Results, scale: Scale) -> list[Table]:
    """Mean final loss by lambda, rule and horizon; and the best lambda as a power of the horizon."""
    means = {(name, rule): mean_losses(losses_of(arms, rule)) for name, arms in results.items() for rule in RULES}
    columns = [Column("lambda"), *(Column(f"{rule}, {name}", number=True) for name, rule in means)]
    rows: list[list[Value | Cell]] = [
        [f"{lam:g}", *(_cell(losses, lam) for losses in means.values())] for lam in scale.map_lambdas
    ]
    note = f"Validation loss, means over {scale.sweep_seeds} seeds; the best of each column is marked."
    tables = [Table("regret-map", "Final loss by lambda", columns, rows, note)]
    if len(scale.map_horizons) > 1 and len(results) == len(scale.map_horizons):
        tables.append(_powers(means, scale))
    return tables


def _cell(losses: Losses, lam: float) -> Cell:
    text = f"{losses[lam]:.4f}" if losses[lam] < math.inf else "diverged"
    return Cell(text, tone="holds" if losses[lam] == min(losses.values()) else "")


def _powers(means: Mapping[tuple[str, str], Losses], scale: Scale) -> Table:
    columns = [Column("rule"), *(Column(f"best lambda, {steps} updates", number=True) for steps in scale.map_horizons)]
    rows: list[list[Value | Cell]] = []
    for rule in RULES:
        best = [best_rate(means[f"{steps} updates", rule]) for steps in scale.map_horizons]
        rows.append([rule, *(f"{lam:.3g}" for lam in best), f"{power(best, scale.map_horizons):.2f}"])
    note = "By a parabola over the logarithm of lambda; the power is the slope over the logarithm of the horizon."
    columns.append(Column("power of the horizon", number=True))
    return Table("best-lambda", "The best lambda", columns, rows, note)


def map_charts(results: Results, _scale: Scale) -> list[Chart]:
    """Regret over lambda, one panel for each horizon."""
    return [
        Chart(
            f"regret-{name.split()[0]}",
            f"Regret at {name}",
            [_regret_curve(arms, rule) for rule in RULES],
            x=Axis("lambda", log=2),
            y=Axis("regret", "nats per token"),
            note="Mean final loss over seeds minus the lowest of the same rule.",
            points=True,
            levels=[Level(GOOD, f"{GOOD} nats")],
        )
        for name, arms in results.items()
    ]


def _regret_curve(arms: Runs, rule: str) -> Curve:
    found = regrets(mean_losses(losses_of(arms, rule)))
    return Curve(rule, rule, list(found), _finite(list(found.values())))


def _finite(values: Sequence[float]) -> list[float]:
    return [value if value < math.inf else math.nan for value in values]
