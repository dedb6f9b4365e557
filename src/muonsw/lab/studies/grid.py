"""A grid: settings x rules x values of lambda (or of the learning rate) x seeds, judged and shown in one way.

The best value of a rule is the one with the lowest mean loss over seeds (best of means). A best value at an edge of
what was tried is marked: a better one may lie beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muonsw.lab.arms import CONSTANT, RULES, SCALED, Arm, Comparison, Key, Results, Runs, decay_factors
from muonsw.lab.console import Cell as TableCell
from muonsw.lab.console import Column, Table, Value
from muonsw.lab.outcome import swept_loss, with_interval
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.charts import Axis, Chart, Curve
from muonsw.lab.stats import Claim, Source, below, over_seeds, within
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.study import TrainingStudy
from muonsw.lab.train.config import OptimizerConfig, RunConfig

BEYOND = Source("beyond the paper; claims written before the runs", "each rule at its best value")
EXACT = Tolerance(0.0, "the bound itself was stated before the runs")
OCTAVE = Tolerance(1.0, "a factor of two")
WANTED = 1.0  # the total decay that advice aims at

# By value, ascending: the loss of each seed; infinite where a run diverged.
Losses = Mapping[float, Sequence[float]]


@dataclass(frozen=True)
class Cell:
    """One setting of a grid."""

    key: Key
    run: RunConfig  # what all its runs share but the optimizer
    arms: Mapping[str, Mapping[float, OptimizerConfig]]  # by rule, by the value that is tried
    over: str = "weight_decay"  # what the values are of: lambda or the learning rate

    def comparison(self, seeds: int) -> Comparison:
        """Its runs."""
        arms = [Arm(name, one) for own in self._names().values() for name, one in own.values()]
        return Comparison(self.key, self.run, tuple(arms), tuple(range(seeds)), paired=False)

    def losses(self, runs: Runs) -> dict[str, dict[float, list[float]]]:
        """By rule, the final losses of each value."""
        return {
            rule: {value: [swept_loss(run) for run in runs[name]] for value, (name, _) in own.items()}
            for rule, own in self._names().items()
        }

    def total(self, rule: str, value: float) -> float:
        """Total decay of a rule at one of its values."""
        return math.fsum(decay_factors(self.run, self.arms[rule][value]))

    def _names(self) -> dict[str, dict[float, tuple[str, OptimizerConfig]]]:
        word = "lr" if self.over == "lr" else "lambda"
        return {
            rule: {value: (f"{rule}, {word} {value:g}", own[value]) for value in sorted(own)}
            for rule, own in self.arms.items()
        }


def over_lambda(
    key: Key, run: RunConfig, lambdas: Sequence[float], rules: Mapping[str, Mapping[str, Any]] | None = None
) -> Cell:
    """A cell in which each rule, given as changes of the optimizer, is tried at these lambdas."""
    chosen = rules or {rule: {"decay": rule} for rule in RULES}
    arms = {
        rule: {lam: replace(run.optimizer, **{**changes, "weight_decay": lam}) for lam in lambdas}
        for rule, changes in chosen.items()
    }
    return Cell(key, run, arms)


def over_rate(key: Key, run: RunConfig, rates: Sequence[float], rules: Mapping[str, Mapping[str, Any]]) -> Cell:
    """The same over learning rates of the matrices; what AdamW owns keeps the rate of the run."""
    base = replace(run.optimizer, adam_lr=run.optimizer.adam_lr or run.optimizer.lr)
    arms = {rule: {lr: replace(base, **{**changes, "lr": lr}) for lr in rates} for rule, changes in rules.items()}
    return Cell(key, run, arms, over="lr")


def means(losses: Losses) -> dict[float, float]:
    """The mean over seeds of each value."""
    return {value: math.fsum(own) / len(own) for value, own in losses.items()}


def best_of_means(losses: Losses) -> float:
    """The value with the lowest mean loss over seeds: the lowest loss of each seed would be too good by chance.

    Examples:
        >>> best_of_means({0.1: [3.0, 3.3], 0.2: [3.1, 3.1]})
        0.2
    """
    found = means(losses)
    return min(found, key=found.__getitem__)


def at_edge(losses: Losses) -> bool:
    """Whether the best value is the smallest or the largest of several."""
    return len(losses) > 1 and best_of_means(losses) in (min(losses), max(losses))


def vertex(losses: Losses) -> float:
    """The best value: the vertex of the parabola over its logarithm through the lowest mean and its neighbours.

    A basin rises more steeply towards large values, so that points far out would pull a parabola through all of them.

    Examples:
        >>> round(vertex({0.01: [1.0], 0.02: [0.5], 0.04: [1.0]}), 6)
        0.02
        >>> vertex({0.01: [1.0], 0.02: [2.0]})
        0.01
    """
    found, best = means(losses), best_of_means(losses)
    values = sorted(found)
    place = values.index(best)
    near = values[max(0, place - 1) : place + 2]
    if len(near) < 3 or math.inf in map(found.__getitem__, near):
        return best
    x, y = [math.log(value) for value in near], [found[value] for value in near]
    left, right = ((y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in (0, 1))
    return math.exp((x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / (right - left)) if right > left else best


def by_seed(losses: Losses) -> list[dict[float, list[float]]]:
    """The losses of each seed alone."""
    seeds = min(len(own) for own in losses.values())
    return [{value: [own[seed]] for value, own in losses.items()} for seed in range(seeds)]


def best_gaps(ours: Losses, theirs: Losses) -> list[float]:
    """By seed, one rule at its best minus another at its own."""
    return [a - b for a, b in zip(ours[best_of_means(ours)], theirs[best_of_means(theirs)], strict=False)]


def judge_cell(cell: Cell, runs: Runs) -> list[Claim]:
    """Best against best, the largest lambda, and the total decay of the best lambda."""
    losses, slug, claims = cell.losses(runs), cell.key.slug, []
    constant = losses[CONSTANT]
    for rule in (rule for rule in losses if rule != CONSTANT):
        words = f"{cell.key}: {rule} minus constant decay, each at its best, in nats"
        gap = over_seeds(best_gaps(losses[rule], constant))
        claims.append(below(f"{slug}-{rule}-best", words, BEYOND, gap, 0.0, EXACT))
    if cell.over != "weight_decay":
        return claims
    if SCALED in losses and len(shared := sorted(losses[SCALED].keys() & constant.keys())) > 1:
        words = f"{cell.key}: scaled minus constant decay at lambda {shared[-1]:g}, the largest of both, in nats"
        gaps = [a - b for a, b in zip(losses[SCALED][shared[-1]], constant[shared[-1]], strict=False)]
        claims.append(below(f"{slug}-largest", words, BEYOND, over_seeds(gaps), 0.0, EXACT))
    for rule in (rule for rule in RULES if rule in losses):
        best = best_of_means(losses[rule])
        if len(losses[rule]) > 2 and not at_edge(losses[rule]):
            unit = cell.total(rule, best) / best
            octaves = [math.log2(vertex(own) * unit / WANTED) for own in by_seed(losses[rule])]
            words = f"{cell.key}: total decay of {rule} decay's best lambda, in octaves from {WANTED:g}"
            claims.append(within(f"{slug}-{rule}-total", words, BEYOND, over_seeds(octaves), 0.0, OCTAVE))
    return claims


def grid_table(cells: Sequence[Cell], results: Results) -> Table:
    """One row for each setting and rule: its best value, total decay, loss, and how far it ends from constant decay."""
    heads = ("best", "total decay", "loss at the best", "minus constant decay", "cost of the largest", "tried")
    columns = [Column("setting"), Column("rule"), *(Column(head, number=True) for head in heads)]
    rows: list[list[Value | TableCell]] = []
    for cell in cells:
        losses = cell.losses(results[cell.key])
        for rule, own in losses.items():
            best, mark = best_of_means(own), "*" * at_edge(own)
            total = cell.total(rule, best) * (vertex(own) / best if cell.over == "weight_decay" and best else 1.0)
            gap = with_interval(best_gaps(own, losses[CONSTANT])) if rule != CONSTANT else None
            cost = (
                with_interval([a - b for a, b in zip(own[max(own)], own[best], strict=True)])
                if best < max(own)
                else None
            )
            shown = f"{vertex(own):.3g}{mark}", None if math.isnan(total) else f"{total:.2f}{mark}"
            tried = ", ".join(f"{value:.3g}" for value in own)
            rows.append([str(cell.key), rule, *shown, with_interval(own[best]), gap, cost, tried])
    note = (
        "Best: the vertex of a parabola through the lowest mean and its neighbours; a star marks an edge of what was "
        "tried. Loss and differences are at the best value tried, paired by seed, ± half a 95% t interval."
    )
    return Table("grid", "Each rule at its best", columns, rows, note)


def grid_charts(cells: Sequence[Cell], results: Results) -> list[Chart]:
    """Mean loss of every rule over the values, above the lowest of all, one panel for each setting."""
    charts = []
    for cell in cells:
        found = {rule: means(own) for rule, own in cell.losses(results[cell.key]).items()}
        lowest = min(min(own.values()) for own in found.values())
        curves = [
            Curve(rule, rule, list(own), [loss - lowest if loss < math.inf else math.nan for loss in own.values()])
            for rule, own in found.items()
            if len(own) > 1
        ]
        x = Axis("learning rate" if cell.over == "lr" else "lambda", log=2)
        y, note = Axis("above the lowest", "nats"), "Mean final loss over seeds minus the lowest of all rules."
        charts += (
            [Chart(f"grid-{cell.key.slug}", str(cell.key), curves, x=x, y=y, note=note, points=True)] if curves else []
        )
    return charts


def grid(
    name: str, title: str, cells: Callable[[Scale], Sequence[Cell]], notes: Mapping[str, str] | None = None
) -> TrainingStudy:
    """The study of a grid."""

    def own(results: Results, scale: Scale) -> list[Cell]:
        return [cell for cell in cells(scale) if cell.key in results]

    return TrainingStudy(
        name=name,
        title=title,
        reference=BEYOND.reference,
        comparisons=lambda scale: [cell.comparison(scale.sweep_seeds) for cell in cells(scale)],
        claims=lambda results, scale: [
            claim for cell in own(results, scale) for claim in judge_cell(cell, results[cell.key])
        ],
        own_tables=lambda results, scale: [grid_table(own(results, scale), results)],
        charts=lambda results, scale: grid_charts(own(results, scale), results),
        notes=notes or {},
    )
