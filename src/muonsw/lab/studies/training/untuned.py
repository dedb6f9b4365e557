"""The price of never tuning: what one lambda kept for every run costs under each rule, beside the lambda of advice.

Costs are in nats above the better rule at its best lambda in runs of the same kind, seed by seed, so that rules can be
compared; between the lambdas that were tried by lines over log lambda, and beyond them that of the last, because what
little decay costs levels off at the cost of none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from muonsw.lab.advise import WANTED
from muonsw.lab.claims.claim import Claim, Estimate, at_most
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.report.sections import Axis, Chart, Curve, Level
from muonsw.lab.studies.arms import RULES, Results, Runs
from muonsw.lab.studies.outcome import divergence_steps
from muonsw.lab.studies.training.regret import (
    BEYOND,
    EXACT,
    GOOD,
    best_of_means,
    first_run,
    loss_at,
    losses_of,
    optimum,
)
from muonsw.lab.studies.training.sweeps import mean_losses

# What recipes for language models have, and torch's default.
KEPT = (0.1, 0.01)
ADVICE = "advice"
CHOICES = (*(f"{lam:g}" for lam in KEPT), ADVICE)
# How far beyond the lambdas that were tried, in octaves, a lambda is priced as the last of them.
REACH = 1.0


@dataclass(frozen=True)
class Price:
    """What a choice of lambda costs in runs of one kind."""

    over: str  # what the runs of this study differ in: updates, width, batch or size
    text: str  # what was read
    width: int  # of the model
    batch: int  # sequences in an update
    steps: int
    peak_lr: float
    rule: str
    choice: str  # how lambda was chosen, one of `CHOICES`
    lam: float
    costs: tuple[float, ...]  # in nats, by seed
    # Whether this lambda lies beyond those that were tried; it costs at least what the last of them did.
    beyond: bool

    @property
    def cost(self) -> Estimate:
        """Their mean with its interval."""
        return over_seeds(self.costs)


def prices(text: str, results: Results, *, over: str = "updates") -> list[Price]:
    """The price of every choice under both rules in runs of every kind.

    Kinds of runs of which some diverged are left out: there chance decides what a lambda costs.
    """
    found: list[Price] = []
    for arms in results.values():
        if not any(divergence_steps(runs) for runs in arms.values()):
            found += _of_kind(over, text, arms)
    return found


def _of_kind(over: str, text: str, arms: Runs) -> Iterator[Price]:
    losses, run = {rule: losses_of(arms, rule) for rule in RULES}, first_run(arms)
    # By seed, the loss of the better rule at its best lambda.
    best = {rule: best_of_means(seeds) for rule, seeds in losses.items()}
    better = min(RULES, key=lambda rule: mean_losses(losses[rule])[best[rule]])
    lowest = [one[best[better]] for one in losses[better]]
    for rule in RULES:
        chosen = dict(zip(CHOICES, (*KEPT, WANTED / optimum(arms, rule).per_lambda), strict=True))
        tried = losses[rule][0]
        for choice, lam in chosen.items():
            nearest = min(max(lam, min(tried)), max(tried))
            if abs(math.log2(lam / nearest)) <= REACH:
                ends = [loss_at(one, nearest) for one in losses[rule]]
                costs = tuple(end - low for end, low in zip(ends, lowest, strict=True) if end is not None)
                config = run.config
                kind = text, config.decoder.width, config.batch, config.steps, config.optimizer.lr, rule
                yield Price(over, *kind, choice, lam, costs, beyond=nearest != lam)


def price_table(found: Sequence[Price]) -> Table:
    """Costs by kind of run and rule; below them the highest of each choice."""
    sizes = ("width", "batch", "updates", "peak rate")
    columns = [Column("text"), *(Column(name, number=True) for name in sizes), Column("rule")]
    columns += [Column("as advised" if choice == ADVICE else f"always {choice}", number=True) for choice in CHOICES]
    rows: list[list[Value | Cell]] = []
    for kind in dict.fromkeys(_kind(one) for one in found):
        own = {one.choice: one for one in found if _kind(one) == kind}
        text, width, batch, steps, peak_lr, rule = kind
        costs = (_cell(own.get(choice)) for choice in CHOICES)
        rows.append([text, width, batch, steps, f"{peak_lr:.3g}", rule, *costs])
    most = {(one.rule, one.choice): one for one in highest(found)}
    rows += [
        ["the highest", *(None for _ in sizes), rule, *(_cell(most.get((rule, choice))) for choice in CHOICES)]
        for rule in RULES
    ]
    note = (
        "In nats above the better rule at its best lambda, with 95% t intervals over seeds (none of one seed, and none "
        "of that best lambda itself); in brackets the lambda that advice gives for such a run, "
        "whose total decay is 1. By lines between the lambdas that were tried; ≥ where one "
        "lies beyond them, with the cost of the last that was tried. Kinds of runs of which some diverged are left out."
    )
    return Table("never-tuned", "The price of never tuning", columns, rows, note)


def _kind(one: Price) -> tuple[str, int, int, int, float, str]:
    return one.text, one.width, one.batch, one.steps, one.peak_lr, one.rule


def highest(found: Sequence[Price]) -> list[Price]:
    """The highest price of each choice under each rule."""
    kinds = dict.fromkeys((one.rule, one.choice) for one in found)
    by_kind = ([one for one in found if (one.rule, one.choice) == kind] for kind in kinds)
    return [max(own, key=lambda one: one.cost.value) for own in by_kind]


def _cell(one: Price | None) -> str | None:
    if one is None:
        return None
    half = f" ± {one.cost.interval.high - one.cost.value:.3f}" if one.cost.interval and any(one.costs) else ""
    advised = f" ({one.lam:.2g})" if one.choice == ADVICE else ""
    return f"{'≥ ' if one.beyond else ''}{one.cost.value:.3f}{half}{advised}"


def price_charts(found: Sequence[Price]) -> list[Chart]:
    """Costs over the length, one panel for each choice; then over the width."""
    texts = list(dict.fromkeys(one.text for one in found))
    lengths, widths = ([one for one in found if one.over == over] for over in ("updates", "width"))
    costs = [one.cost.value for one in found]
    limits = min(0.0, *costs), 1.1 * max(costs)
    charts = [_price_chart(choice, lengths, "updates", texts, limits) for choice in _chosen(lengths)]
    return charts + [_price_chart(choice, widths, "width", texts, limits) for choice in _chosen(widths)]


def _chosen(found: Sequence[Price]) -> list[str]:
    return [choice for choice in CHOICES if any(one.choice == choice for one in found)]


def _price_chart(
    choice: str, found: Sequence[Price], over: str, texts: Sequence[str], limits: tuple[float, float]
) -> Chart:
    """Costs of a choice over updates or width; of all texts but the first they are dashed, in every panel."""
    where, curves = attrgetter("steps" if over == "updates" else over), []
    for text in dict.fromkeys(one.text for one in found):
        for rule in RULES:
            own = [one for one in found if (one.text, one.rule, one.choice) == (text, rule, choice)]
            points = sorted((where(one), one.cost.value) for one in own)
            x, y = [x for x, _ in points], [y for _, y in points]
            curves.append(Curve(f"{rule}, {text}", rule, x, y, dashed=text != texts[0]))
    each = "run" if over == "updates" else over
    title = "Lambda as advised" if choice == ADVICE else f"Lambda {choice} for every {each}"
    return Chart(
        f"never-tuned-{over}-{choice}",
        title,
        curves,
        x=Axis(over, log=2, ticks=sorted({where(one) for one in found})),
        y=Axis("cost", "nats per token", limits=limits),
        points=True,
        levels=[Level(GOOD)],
        key=[("solid", texts[0]), ("dashed", texts[1])] if len(texts) > 1 else (),
    )


def judge_prices(found: Sequence[Price], text: str) -> list[Claim]:
    """Written down before the runs on fresh text: what an untuned lambda costs there, at the longest length."""
    lengths = [one for one in found if (one.text, one.over) == (text, "updates")]
    longest = max((one.steps for one in lengths), default=0)
    own = {(one.rule, one.choice): one for one in lengths if one.steps == longest}
    claims = []
    for rule in RULES:
        if (price := own.get((rule, ADVICE))) is not None:
            costs = f"cost of {rule} decay with the lambda that advice gives for {longest:,} updates, in nats"
            claims.append(at_most(f"{rule}-advice", costs, BEYOND, price.cost, 2 * GOOD, EXACT))
    usual = [one.costs for rule in ("scaled", "constant") if (one := own.get((rule, CHOICES[0])))]
    if len(usual) == 2:
        lam = f"lambda {CHOICES[0]}, or of the last that was tried,"
        share = f"cost of {lam} at {longest:,} updates: scaled minus 0.6 of constant decay's, in nats"
        more = over_seeds([scaled - 0.6 * constant for scaled, constant in zip(*usual, strict=True)])
        claims.append(at_most("usual-lambda", share, BEYOND, more, 0.0, EXACT))
    return claims
