"""The regret map: what a wrong lambda costs under each rule, and whether one lambda serves every horizon.

The best lambda of a rule at a horizon is the one whose mean loss over seeds is lowest (`best_of_means`), here and
wherever rules are compared at their best. The regret of a lambda is its final loss minus that of the best one, seed by
seed. All runs share the model, the data and the seeds; the peak learning rate follows the horizon rule.

What is claimed was written down before the runs of docs/evidence.md, with the lowest loss of each seed for the best
one; the best of means took its place after them, and that page says which verdicts it changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from muonsw.lab.claims.claim import Claim, Estimate, Source, at_least, at_most
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Axis, Chart, Curve, Level
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import RULES, Comparison, Key, Results, Runs, decay_factors, lambda_arm
from muonsw.lab.studies.outcome import loss_cell
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.sweeps import Losses, at_an_end, excess, losses_by_seed, mean_losses, power, vertex
from muonsw.lab.theory.schedule import peak_lr_for_horizon
from muonsw.lab.train.config import RunConfig

# A loss within so many nats of the best counts as good.
GOOD = 0.01
BEYOND = Source("beyond the paper; claims written down before the runs", "Muon, cosine to a tenth of the peak")
EXACT = Tolerance(0.0, "the bound itself was stated before the runs")

# By rule, by horizon, by seed: the loss of each lambda, lambdas ascending.
Map = Mapping[str, Mapping[int, Sequence[Losses]]]


def maps(scale: Scale) -> list[Comparison]:
    """Every lambda under both rules, at every horizon."""
    return [
        lambda_map(Key(steps=steps), at_horizon(scale.map_run, steps), lambdas, scale.map_seeds)
        for steps, lambdas in scale.maps.items()
    ]


def lambda_map(key: Key, run: RunConfig, lambdas: Sequence[float], seeds: int) -> Comparison:
    """Every lambda under both rules."""
    arms = tuple(lambda_arm(run.optimizer, rule, lam) for lam in lambdas for rule in RULES)
    return Comparison(key, run, arms, tuple(range(seeds)), paired=False)


def at_horizon(run: RunConfig, steps: int) -> RunConfig:
    """The run at another length, its peak by the horizon rule; evaluated and saved at the end alone."""
    optimizer = replace(run.optimizer, lr=min(run.optimizer.lr, peak_lr_for_horizon(steps)))
    every = max(1, steps // 4)
    return replace(
        run, optimizer=optimizer, steps=steps, eval_every=every, checkpoint_every=steps, telemetry_every=every, keep=1
    )


def of_same_total(run: RunConfig, steps: int) -> RunConfig:
    """The run at another length with a lambda that takes as much over it; evaluated at the end alone."""
    optimizer = replace(run.optimizer, weight_decay=run.optimizer.weight_decay * run.steps / steps)
    return replace(at_horizon(replace(run, optimizer=optimizer), steps), eval_every=steps, log_every=20)


def under(arms: Runs, rule: str) -> Runs:
    """The arms of one decay rule."""
    return {name: runs for name, runs in arms.items() if runs[0].config.optimizer.decay == rule}


def losses_of(arms: Runs, rule: str) -> list[dict[float, float]]:
    """For each seed, final loss by lambda under one rule; a run that diverged counts as infinitely bad."""
    return losses_by_seed(under(arms, rule), "weight_decay")


def map_of(results: Results) -> Map:
    """The losses of a map."""
    return {rule: {first_run(arms).config.steps: losses_of(arms, rule) for arms in results.values()} for rule in RULES}


def first_run(arms: Runs) -> Run:
    """A run, for what all of a comparison share."""
    return next(iter(arms.values()))[0]


def best_of_means(seeds: Sequence[Losses]) -> float:
    """The lambda with the lowest mean loss over seeds: the lowest loss of each seed would be too good by chance.

    Examples:
        >>> best_of_means([{0.1: 3.0, 0.2: 3.1}, {0.1: 3.3, 0.2: 3.1}])
        0.2
    """
    means = mean_losses(seeds)
    return min(means, key=lambda lam: means[lam])


def best_gaps(ours: Sequence[Losses], theirs: Sequence[Losses]) -> list[float]:
    """One rule at its best minus another at its own, each the best of means, on the seeds that both have."""
    best, other = best_of_means(ours), best_of_means(theirs)
    return [a[best] - b[other] for a, b in zip(ours, theirs, strict=False)]


def best_against_best(arms: Runs, rule: str = "scaled") -> Estimate:
    """Their mean with its interval, of a rule and constant decay in one comparison."""
    return over_seeds(best_gaps(losses_of(arms, rule), losses_of(arms, "constant")))


def regrets(losses: Losses, best: float | None = None) -> dict[float, float]:
    """What each lambda costs more than the best one, by default the one with the lowest of these losses.

    Examples:
        >>> regrets({0.1: 3.0, 0.2: 2.5})
        {0.1: 0.5, 0.2: 0.0}
    """
    lowest = min(losses.values()) if best is None else losses[best]
    return {lam: loss - lowest for lam, loss in losses.items()}


def octaves_within(losses: Losses, best: float | None = None) -> float:
    """How many factors of two of lambda lie within `GOOD` of the best, by lines between the points of the grid.

    Examples:
        >>> octaves_within({0.125: 0.01, 0.25: 0.0, 0.5: 0.02})
        1.5
    """
    points = [(math.log2(lam), value) for lam, value in regrets(losses, best).items() if value < math.inf]
    width = 0.0
    for (x0, y0), (x1, y1) in pairwise(points):
        low, high = min(y0, y1), max(y0, y1)
        if low <= GOOD:
            width += (x1 - x0) * (1.0 if high <= GOOD else (GOOD - low) / (high - low))
    return width


def octave_ratios(scaled: Sequence[Losses], constant: Sequence[Losses]) -> list[float]:
    """Octaves of lambda within a hundredth of the best of means, scaled over constant decay, seed by seed."""
    ours, theirs = ([octaves_within(one, best=best_of_means(seeds)) for one in seeds] for seeds in (scaled, constant))
    return [s / c if c else math.inf for s, c in zip(ours, theirs, strict=True)]


def carried_regrets(short: Sequence[Losses], long: Sequence[Losses]) -> list[float]:
    """What the best lambda of short runs costs in long ones, seed by seed."""
    tried = [{lam: loss for lam, loss in losses.items() if lam in long[0]} for losses in short]
    carried, best = best_of_means(tried), best_of_means(long)
    return [losses[carried] - losses[best] for losses in long]


def judge_map(results: Results, _scale: Scale) -> list[Claim]:
    """The claims of the map, as they were written down before the runs, for each longer horizon and the shortest."""
    found = map_of(results)
    short, *longer = found["constant"]
    return [claim for steps in longer for claim in judge_losses(found, short, steps)]


def judge_losses(found: Map, short: int, long: int) -> list[Claim]:
    """The claims about two horizons; a lambda is carried where both have it."""
    carried = {rule: carried_regrets(found[rule][short], found[rule][long]) for rule in RULES}
    scaled, constant = found["scaled"][long], found["constant"][long]
    gaps = [theirs - ours for theirs, ours in zip(carried["constant"], carried["scaled"], strict=True)]
    costs = f"regret at {long:,} updates of {{}} decay's best lambda of {short:,} updates, in nats"
    grows, stays = (costs.format(rule) for rule in RULES)
    differ = (
        f"what those of {short:,} updates cost constant decay at {long:,} minus what they cost scaled decay, in nats"
    )
    wider = f"octaves of the lambdas tried within {GOOD} of the best at {long:,} updates: scaled over constant"
    lower = f"best of scaled minus best of constant over lambda at {long:,} updates, in nats"
    limits = "the best of means, on the seeds that it is judged on: a little too good for both rules"
    gap, ratio = (over_seeds(measure(scaled, constant)) for measure in (best_gaps, octave_ratios))
    return [
        at_least(f"constant-regret-grows-{long}", grows, BEYOND, over_seeds(carried["constant"]), GOOD, EXACT),
        at_most(f"scaled-regret-does-not-{long}", stays, BEYOND, over_seeds(carried["scaled"]), GOOD, EXACT),
        at_least(f"scaled-forgives-the-horizon-{long}", differ, BEYOND, over_seeds(gaps), 0.0, EXACT),
        at_least(f"scaled-is-wider-{long}", wider, BEYOND, ratio, 2.0, EXACT),
        at_most(f"best-against-best-{long}", lower, BEYOND, gap, 0.0, EXACT, limits=limits),
    ]


@dataclass(frozen=True)
class Optimum:
    """What a rule's best lambda is at a horizon, and how wrong it may be."""

    rule: str
    steps: int  # the horizon
    peak_lr: float  # the peak learning rate there
    epochs: float  # how often the text was seen; not a number where that is not known
    seeds: int
    best: float  # the vertex of a parabola over the logarithm of lambda, through the lowest mean and its neighbours
    low: float  # the smallest lambda within `GOOD` of the lowest mean, by lines over the logarithm
    high: float  # the largest one
    per_lambda: float  # what decay takes over the run, the sum of phi, for each unit of lambda
    at_an_end: bool  # whether the best is the smallest or the largest that was tried
    losses: Losses  # means by lambda


def optimum(arms: Runs, rule: str) -> Optimum:
    """What the runs of a rule say, which differ in lambda and seed alone."""
    seeds, run = losses_of(arms, rule), first_run(arms)
    config, losses = run.config, mean_losses(seeds)
    one = replace(config.optimizer, decay=rule, weight_decay=1.0)
    low, high = good_range(losses)
    return Optimum(
        rule=rule,
        steps=config.steps,
        peak_lr=config.optimizer.lr,
        epochs=run.epochs,
        seeds=len(seeds),
        best=vertex(losses),
        low=low,
        high=high,
        per_lambda=math.fsum(decay_factors(config, one)),
        at_an_end=at_an_end(losses),
        losses=losses,
    )


def optima(results: Results) -> list[Optimum]:
    """Of every rule at every horizon."""
    return [optimum(arms, rule) for rule in RULES for arms in results.values()]


def good_range(losses: Losses) -> tuple[float, float]:
    """The lambdas around the lowest point between which the loss is within `GOOD` of it, by lines over log lambda."""
    points = [(math.log2(lam), regret) for lam, regret in regrets(losses).items()]
    place = min(range(len(points)), key=lambda i: points[i][1])

    def edge(rest: Sequence[tuple[float, float]]) -> float:
        for (x0, y0), (x1, y1) in pairwise(rest):
            if y1 > GOOD:
                return x0 + (x1 - x0) * (GOOD - y0) / (y1 - y0) if y1 < math.inf else x0
        return rest[-1][0]

    return 2.0 ** edge(points[place::-1]), 2.0 ** edge(points[place:])


def at_ends(losses: Losses) -> tuple[bool, bool]:
    """Whether the good range reaches the smallest lambda that was tried, and the largest.

    Examples:
        >>> at_ends({0.1: 3.0, 0.2: 3.001, 0.4: 3.1})
        (True, False)
    """
    low, high = good_range(losses)
    return math.isclose(low, min(losses)), math.isclose(high, max(losses))


def loss_at(losses: Losses, lam: float) -> float | None:
    """The loss at a lambda, by lines over log lambda; None beyond those that were tried.

    Examples:
        >>> loss_at({0.1: 3.0, 0.4: 3.2}, 0.2)
        3.1
        >>> loss_at({0.1: 3.0, 0.2: 3.1}, 0.8) is None
        True
    """
    points, x = [(math.log2(lam), loss) for lam, loss in losses.items()], math.log2(lam)
    if not points[0][0] <= x <= points[-1][0]:
        return None
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if x <= pair[1][0])
    if math.inf in (y0, y1):
        return {x0: y0, x1: y1}.get(x, math.inf)
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class TooLargeLambda:
    """The regrets of one lambda; `same_total` is that of scaled decay which takes as much as constant decay does."""

    constant_at: Optimum
    lam: float
    constant: float
    scaled: float
    same_total: float | None


def too_large(found: Sequence[Optimum]) -> list[TooLargeLambda]:
    """For each horizon the lambdas above the best one of both rules."""
    rows = []
    scaled_at = {one.steps: one for one in found if one.rule == "scaled"}
    for constant in (one for one in found if one.rule == "constant"):
        scaled = scaled_at[constant.steps]
        theirs, ours = regrets(constant.losses), regrets(scaled.losses)
        for lam in (lam for lam in theirs if lam > max(constant.best, scaled.best)):
            same_total = loss_at(ours, lam * constant.per_lambda / scaled.per_lambda)
            rows.append(TooLargeLambda(constant, lam, theirs[lam], ours[lam], same_total))
    return rows


def map_tables(results: Results, _scale: Scale) -> list[Table]:
    """Mean final loss by lambda, rule and horizon; the best lambdas; and what a larger one costs."""
    found = optima(results)
    return [_losses_table(results, found), _optima_table(found), _too_large_table(found)]


def _losses_table(results: Results, found: Sequence[Optimum]) -> Table:
    columns = [one for arms in results.values() for one in found if one.steps == first_run(arms).config.steps]
    rows: list[list[Value | Cell]] = [
        ["peak rate", *(f"{one.peak_lr:.3g}" for one in columns)],
        ["epochs", *(f"{one.epochs:.1f}" for one in columns)],
    ]
    lambdas = sorted({lam for one in columns for lam in one.losses})
    rows += [[f"{lam:g}", *(loss_cell(one.losses, lam) for one in columns)] for lam in lambdas]
    fewest, most = (choose(one.seeds for one in columns) for choose in (min, max))
    means = "one seed" if most == 1 else f"means over {f'{fewest} to ' if fewest < most else ''}{most} seeds"
    note = f"Validation loss, {means}; the best of each column is marked."
    headings = [Column("lambda"), *(Column(f"{one.rule}, {one.steps:,} updates", number=True) for one in columns)]
    return Table("regret-map", "Final loss by lambda", headings, rows, note)


def _optima_table(found: Sequence[Optimum]) -> Table:
    names = ("updates", "peak rate", "epochs", "best lambda", "total (Σφ)", f"within {GOOD} nats", "octaves")
    columns = [Column("rule"), *(Column(name, number=True) for name in (*names, "regret at 4 times"))]
    rows: list[list[Value | Cell]] = []
    for one in found:
        low_end, high_end = at_ends(one.losses)
        run = one.rule, one.steps, f"{one.peak_lr:.3g}", f"{one.epochs:.1f}"
        best = f"{one.best:.3g}{'*' * one.at_an_end}", f"{one.best * one.per_lambda:.2f}{'*' * one.at_an_end}"
        good = f"{one.low:.3g}{'*' * low_end} to {one.high:.3g}{'*' * high_end}"
        octaves = f"{octaves_within(one.losses):.1f}{'*' * (low_end or high_end)}"
        costs = loss_at(regrets(one.losses), 4.0 * one.best)
        rows.append([*run, *best, good, octaves, None if costs is None else f"{costs:+.3f}"])
    inside = {rule: [one for one in found if one.rule == rule and not one.at_an_end] for rule in RULES}
    exponents = ", ".join(
        f"{rule} {power([one.best for one in own], [one.steps for one in own]):.2f}"
        for rule, own in inside.items()
        if len(own) > 1
    )
    note = (
        "The best lambda is the vertex of a parabola over its logarithm, through the lowest mean and its neighbours; "
        "the total is what decay takes over the run at that lambda, the sum of phi. Octaves are of all lambdas within "
        f"{GOOD} nats, also of those apart from the range. An asterisk: no smaller or no larger lambda was tried, so "
        "the best one may lie beyond, or the range be wider."
    )
    more = f" The best lambda goes with the horizon to the power: {exponents}." if exponents else ""
    return Table("best-lambda", "The best lambda", columns, rows, note + more)


def _too_large_table(found: Sequence[Optimum]) -> Table:
    names = ("updates", "peak rate", "epochs", "lambda", "constant", "scaled", "scaled of the same total")
    rows: list[list[Value | Cell]] = []
    for row in too_large(found):
        one = row.constant_at
        costs = (None if cost is None else f"{cost:+.3f}" for cost in (row.constant, row.scaled, row.same_total))
        rows.append([one.steps, f"{one.peak_lr:.3g}", f"{one.epochs:.1f}", f"{row.lam:g}", *costs])
    note = (
        "What a lambda above the best one of both rules costs, in nats above the best of its own rule; in the last "
        "column scaled decay with the lambda of the same total as constant decay with this one, by lines "
        "between the lambdas that were tried."
    )
    columns = [Column(name, number=True) for name in names]
    return Table("too-large", "What a larger lambda costs", columns, rows, note)


def map_charts(results: Results, _scale: Scale) -> list[Chart]:
    """Regret over lambda, one panel for each horizon."""
    charts = []
    for arms in results.values():
        steps = first_run(arms).config.steps
        means = {rule: mean_losses(losses_of(arms, rule)) for rule in RULES}
        charts.append(
            Chart(
                f"regret-{steps}",
                f"Regret at {steps:,} updates",
                [Curve(rule, rule, list(losses), excess(losses)) for rule, losses in means.items()],
                x=Axis("lambda", log=2),
                y=Axis("regret", "nats per token"),
                note="Mean final loss over seeds minus the lowest of the same rule.",
                points=True,
                levels=[Level(GOOD, f"{GOOD} nats")],
            )
        )
    return charts


def basins(name: str, results: Results, rules: Sequence[str] = RULES) -> list[Chart]:
    """Mean final loss of every rule over lambda, one panel for each comparison."""
    charts = []
    for key, arms in results.items():
        means = {rule: mean_losses(losses_of(arms, rule)) for rule in rules}
        charts.append(basins_chart(f"{name}-{key.slug}", str(key), means, Axis("lambda", log=2)))
    return charts


def basins_chart(name: str, title: str, means: Mapping[str, Losses], x: Axis) -> Chart:
    """Losses of every rule over something that goes with lambda, above the lowest of all."""
    lowest = min(min(losses.values()) for losses in means.values())
    curves = [Curve(rule, rule, list(losses), excess(losses, lowest)) for rule, losses in means.items()]
    note = "Mean final loss over seeds minus the lowest of all rules."
    return Chart(name, title, curves, x=x, y=Axis("above the lowest", "nats"), note=note, points=True)
