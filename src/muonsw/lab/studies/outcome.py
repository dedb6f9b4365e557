"""What comparisons found: each arm's losses and norms, paired differences with their uncertainty, and their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from muonsw.lab.claims.claim import Estimate, Interval
from muonsw.lab.claims.statistics import interval_of, over_seeds
from muonsw.lab.console import MISSING, Cell, Column, Table, Value, change_text, decimals, loss_text, norm_text
from muonsw.lab.files import plain
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import Results, Runs, decay_factors

Measure = Callable[[Run], float]


def diverged_at(run: Run) -> int | None:
    """The update at which a run diverged; None if it did not."""
    step = (run.result or {}).get("diverged")
    return step if isinstance(step, int) else None


def completed(runs: Sequence[Run]) -> list[Run]:
    """The runs that did not diverge."""
    return [run for run in runs if diverged_at(run) is None]


def last_loss(run: Run) -> float:
    """The last validation loss, not a number where there is none or the run diverged."""
    return run.final_loss if diverged_at(run) is None else math.nan


def lowest_loss(run: Run) -> float:
    """The best validation loss, not a number where there is none or the run diverged."""
    return run.best_loss if diverged_at(run) is None else math.nan


def swept_loss(run: Run) -> float:
    """The last validation loss for a sweep, where a run without one is infinitely bad."""
    loss = last_loss(run)
    return math.inf if math.isnan(loss) else loss


def log_end_norm(run: Run) -> float:
    """The logarithm of the last norm, so that differences are ratios; not a number where none was recorded."""
    return math.log(run.final_norm) if run.final_norm > 0 else math.nan


def over_runs(runs: Sequence[Run], measure: Measure) -> Estimate:
    """The mean of a measure over the seeds of an arm, with its interval."""
    return over_seeds([measure(run) for run in runs])


def both_completed(one: Sequence[Run], other: Sequence[Run]) -> dict[int, tuple[Run, Run]]:
    """By seed, the runs of two arms, on the seeds that both completed."""
    theirs = {run.seed: run for run in completed(other)}
    return {run.seed: (run, theirs[run.seed]) for run in completed(one) if run.seed in theirs}


def paired(one: Sequence[Run], other: Sequence[Run], measure: Measure) -> list[float]:
    """A measure of one arm minus that of the other, on the seeds that both completed."""
    return [measure(ours) - measure(theirs) for ours, theirs in both_completed(one, other).values()]


@dataclass(frozen=True)
class ArmOutcome:
    """One arm over its seeds; runs that diverged have no other values."""

    name: str
    rule: str
    weight_decay: float
    seeds: tuple[int, ...]  # of the runs that were completed, in the order of the values below
    final: tuple[float, ...]  # last validation loss of each run
    best: tuple[float, ...]  # lowest validation loss of each run
    norm: tuple[float, ...]  # weight RMS of the decayed matrices at the end of each run
    norm_change: tuple[float, ...]  # the same relative to its largest value, minus one
    total_decay: float  # sum of phi; not a number where only the user's own loop knew it
    diverged: Mapping[int, int]  # by seed, the update at which a run diverged
    skipped: Mapping[int, int] = field(default_factory=dict)  # by seed, updates whose gradients were not finite
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by name, at the last evaluation


@dataclass(frozen=True)
class MetricOutcome:
    """A metric of one arm minus that of the baseline, seed by seed."""

    differences: tuple[float, ...]
    mean: float
    interval: Interval | None  # of their mean; None with fewer than two seeds


@dataclass(frozen=True)
class PairOutcome:
    """One arm against the baseline, seed by seed."""

    baseline: str
    arm: str
    seeds: tuple[int, ...]  # those that both completed, in the order of the values below
    differences: tuple[float, ...]  # final loss of the arm minus the baseline's; negative where the arm is better
    mean: float  # their mean; not a number where there is none
    interval: Interval | None  # of their mean; None with fewer than two seeds
    # The update at which the arm reaches the baseline's best loss, over the update at which the baseline did.
    steps_to_match: tuple[float | None, ...]  # None where it never does
    match_interval: Interval | None  # of the mean of those; None where one is missing or with fewer than two seeds
    metrics: Mapping[str, MetricOutcome] = field(default_factory=dict)  # what was measured besides the loss

    @property
    def mean_match(self) -> float | None:
        """Mean of the steps to match; None where one is missing."""
        known = [value for value in self.steps_to_match if value is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(self.steps_to_match) else None


@dataclass(frozen=True)
class Outcome:
    """A whole comparison; the first arm is the baseline of every pair."""

    arms: tuple[ArmOutcome, ...]
    pairs: tuple[PairOutcome, ...]
    unit: str = "nats"  # of the losses; empty where it is not known

    def as_data(self) -> dict[str, Any]:
        """Everything as JSON data; metrics and a unit only where they say something."""
        data: dict[str, Any] = plain(asdict(self))
        del data["unit"]
        for one in (*data["arms"], *data["pairs"]):
            if not one["metrics"]:
                del one["metrics"]
        return data


def compare(runs: Runs) -> Outcome:
    """What the runs of several arms say; the first arm is the baseline."""
    first, *others = runs.values()
    arms = tuple(arm_outcome(those) for those in runs.values())
    return Outcome(arms, tuple(pair_outcome(first, those) for those in others), first[0].unit)


def arm_outcome(runs: Sequence[Run]) -> ArmOutcome:
    """What the runs of one arm found; they differ in the seed alone."""
    first, ended = runs[0], completed(runs)
    weight_decay, total_decay = _decay_of(first)
    return ArmOutcome(
        name=first.arm,
        rule=first.rule,
        weight_decay=weight_decay,
        seeds=tuple(run.seed for run in ended),
        final=tuple(map(last_loss, ended)),
        best=tuple(map(lowest_loss, ended)),
        norm=tuple(run.final_norm if _decays(run) else math.nan for run in ended),
        norm_change=tuple(run.norm_change for run in ended),
        total_decay=total_decay,
        diverged=divergence_steps(runs),
        skipped={run.seed: number for run in ended if (number := (run.result or {}).get("skipped"))},
        metrics={name: tuple(run.final_metric(name) for run in ended) for name in metric_names(runs)},
    )


def _decay_of(run: Run) -> tuple[float, float]:
    """Lambda and total decay of a run; not numbers where only the user's own loop knew them."""
    if "optimizer" not in run.settings:
        return math.nan, math.nan
    optimizer = run.config.optimizer
    return optimizer.weight_decay, math.fsum(decay_factors(run.config, optimizer))


def metric_names(runs: Sequence[Run]) -> list[str]:
    """What any of the runs measured besides the loss."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def _decays(run: Run) -> bool:
    """Whether telemetry, or the record of an exported run, has norms of weights that decay."""
    return bool(run.telemetry.scope("decayed").records) or "end_norm" in (run.result or {})


def pair_outcome(baseline: Sequence[Run], arm: Sequence[Run]) -> PairOutcome:
    """An arm against the baseline, on the seeds that both completed."""
    both = both_completed(baseline, arm)
    differences = tuple(last_loss(ours) - last_loss(theirs) for theirs, ours in both.values())
    matches = tuple(steps_to_match(theirs, ours) for theirs, ours in both.values())
    known = [match for match in matches if match is not None]
    return PairOutcome(
        baseline=baseline[0].arm,
        arm=arm[0].arm,
        seeds=tuple(both),
        differences=differences,
        mean=mean(differences),
        interval=interval_of(differences),
        steps_to_match=matches,
        match_interval=interval_of(known) if len(known) == len(matches) else None,
        metrics={name: _metric_outcome(name, list(both.values())) for name in metric_names([*baseline, *arm])},
    )


def _metric_outcome(name: str, both: Sequence[tuple[Run, Run]]) -> MetricOutcome:
    values = tuple(ours.final_metric(name) - theirs.final_metric(name) for theirs, ours in both)
    return MetricOutcome(values, mean(values), interval_of(values))


def mean(values: Sequence[float]) -> float:
    """The mean; not a number where there is nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def steps_to_match(baseline: Run, arm: Run) -> float | None:
    """The update at which the arm first has the baseline's best loss, over the update at which the baseline had it."""
    steps, losses = baseline.evals.known("loss")
    best = int(losses.argmin()) if len(losses) else 0
    if not len(losses) or steps[best] == 0:
        return None
    reached = first_crossing(*arm.evals.known("loss"), level=float(losses[best]))
    return None if reached is None else reached / float(steps[best])


def first_crossing(steps: Any, losses: Any, level: float) -> float | None:
    """The step at which a loss first falls to a level, between evaluations by a straight line; None if never.

    Examples:
        >>> first_crossing([0, 10, 20], [5.0, 4.0, 3.0], 3.5)
        15.0
        >>> first_crossing([0, 10], [5.0, 4.0], 3.5) is None
        True
    """
    for place, loss in enumerate(losses):
        if loss <= level:
            if place == 0:
                return float(steps[0])
            before = losses[place - 1]
            share = (before - level) / (before - loss)
            return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))
    return None


def divergence_steps(runs: Sequence[Run]) -> dict[int, int]:
    """By seed, the update at which a run diverged."""
    return {run.seed: step for run in runs if (step := diverged_at(run)) is not None}


def divergences(results: Results) -> list[str]:
    """Every arm with runs that diverged, in words."""
    return [
        f"{(f'{key}: {arm}' if len(results) > 1 else arm)!r} diverged {describe_divergence(where)}"
        for key, arms in results.items()
        for arm, runs in arms.items()
        if (where := divergence_steps(runs))
    ]


def describe_divergence(where: Mapping[int, int]) -> str:
    """At which update runs diverged, by seed.

    Examples:
        >>> describe_divergence({0: 57, 2: 60})
        'at update 57 (seed 0) and 60 (seed 2)'
    """
    return "at update " + " and ".join(f"{step:,} (seed {seed})" for seed, step in where.items())


def arms_table(outcome: Outcome) -> Table:
    """One row for each arm: losses and norms with their intervals over seeds."""
    metrics = _measured(outcome.arms)
    columns = (
        Column("arm", rank=0),
        Column("lambda", number=True, rank=0),
        Column("total decay", number=True, digits=3, rank=1),
        Column("seeds", number=True, rank=2),
        Column("final loss", number=True, rank=0),
        *(Column(name, number=True, rank=0) for name in metrics),
        Column("best loss", number=True, rank=2),
        Column("weight RMS at the end", number=True, rank=1),
        Column("change since largest", number=True, rank=1),
    )
    losses = "validation cross-entropy in nats a token" if outcome.unit else "on validation batches"
    note = (
        f"Losses: {losses}; means over seeds ± half a 95% t interval. Total decay: the sum over all steps of the share "
        "of a weight that decay removes."
    )
    return Table("arms", "Arms", columns, [_arm_row(arm, metrics) for arm in outcome.arms], note)


def _measured(outcomes: Sequence[ArmOutcome | PairOutcome]) -> list[str]:
    return list(dict.fromkeys(name for one in outcomes for name in one.metrics))


def _arm_row(arm: ArmOutcome, metrics: Sequence[str]) -> tuple[Value | Cell, ...]:
    final: Value | Cell = with_interval(arm.final)
    if arm.diverged:
        lost = "diverged" if not arm.seeds else f"{final}, {len(arm.diverged)} diverged"
        final = Cell(lost, note=describe_divergence(arm.diverged), tone="fails")
    return (
        arm.name,
        *(None if math.isnan(value) else value for value in (arm.weight_decay, arm.total_decay)),
        len(arm.seeds),
        final,
        *(with_interval(arm.metrics.get(name, ())) for name in metrics),
        with_interval(arm.best),
        with_interval(arm.norm, digits=3),
        change_text(mean(arm.norm_change)),
    )


def pairs_table(pairs: Sequence[PairOutcome]) -> Table:
    """One row for each arm against the baseline: paired differences and steps to match."""
    metrics = _measured(pairs)
    columns = (
        Column("arm"),
        Column("against", rank=2),
        Column("difference of final loss", number=True, rank=0),
        Column("95% t interval", number=True),
        Column("seed by seed", number=True, rank=3),
        Column("steps to match", number=True, rank=2),
        *(Column(f"difference of {name}", number=True) for name in metrics),
    )
    note = (
        "Differences are paired by seed; negative is better. Steps to match: the update at which the arm reaches the "
        "other's best loss, over the update at which the other did; it compares the middle of one schedule with the "
        "end of another, so read it beside the final losses."
    )
    return Table("pairs", "Paired difference", columns, [_pair_row(pair, metrics) for pair in pairs], note)


def _pair_row(pair: PairOutcome, metrics: Sequence[str]) -> tuple[Value, ...]:
    interval = pair.interval
    matches = "never" if pair.mean_match is None else f"{100 * pair.mean_match:.0f}%"
    if pair.match_interval is not None:
        matches += f" [{100 * pair.match_interval.low:.0f}, {100 * pair.match_interval.high:.0f}]"
    return (
        pair.arm,
        pair.baseline,
        signed(pair.mean) if pair.seeds else None,
        f"[{signed(interval.low)}, {signed(interval.high)}]" if interval and math.isfinite(pair.mean) else None,
        ", ".join(map(signed, pair.differences)) or None,
        matches if pair.seeds else None,
        *(_metric_cell(pair.metrics.get(name)) for name in metrics),
    )


def _metric_cell(found: MetricOutcome | None) -> str | None:
    if found is None or not math.isfinite(found.mean):
        return None
    interval = found.interval
    return signed(found.mean) + (f" [{signed(interval.low)}, {signed(interval.high)}]" if interval else "")


def signed(value: float) -> str:
    """A difference: four decimals, or two digits where those would be zeros; a dash where there is none.

    Examples:
        >>> signed(0.01234), signed(-3.21e-6), signed(0.0), signed(math.nan)
        ('+0.0123', '-3.2e-06', '+0.0000', '\N{EN DASH}')
    """
    if not math.isfinite(value):
        return MISSING
    return decimals(value, 4, sign="+") if value == 0 or abs(value) >= 0.00005 else f"{value:+.2g}"


def constant_of(runs: Runs, arm: str) -> str | None:
    """The arm of constant decay that an arm differs from in its rule alone; None where there is none."""
    wanted = replace(runs[arm][0].config.optimizer, decay="constant", unnormalized="", peak="group")
    found = (name for name, those in runs.items() if replace(those[0].config.optimizer, peak="group") == wanted)
    return next((name for name in found if name != arm), None)


def against_constant(results: Results) -> Table:
    """One row for each arm of every comparison: its settings, its loss, and how far it ends from constant decay."""
    numbers = ("lambda", "peak rate", "epochs", "loss", "end norm (RMS)", "minus constant", "95% t interval", "seeds")
    columns = [Column("run"), Column("arm"), *(Column(name, number=True) for name in numbers)]
    rows: list[tuple[Value | Cell, ...]] = []
    for key, runs in results.items():
        for arm, those in runs.items():
            config, ended, other = those[0].config.optimizer, completed(those), constant_of(runs, arm)
            gaps = paired(those, runs[other], last_loss) if other else []
            interval = interval_of(gaps)
            measured = (
                f"{mean([last_loss(run) for run in ended]):.3f}" if ended else "diverged",
                norm_text(mean([run.final_norm for run in ended])),
                f"{mean(gaps):+.3f}" if gaps else None,
                None if interval is None else f"{interval.low:+.3f} to {interval.high:+.3f}",
            )
            epochs = f"{those[0].epochs:.1f}"
            rows.append((str(key), arm, f"{config.weight_decay:.3g}", f"{config.lr:g}", epochs, *measured, len(ended)))
    note = "Means over seeds; differences are paired by seed, to constant decay with the same settings."
    return Table("against-constant", "Every arm, and constant decay of its settings", columns, rows, note)


def loss_cell(losses: Mapping[float, float], setting: float) -> Cell | None:
    """The loss of one setting in the column of a sweep, whose lowest one stands out; None where it was not tried."""
    if setting not in losses:
        return None
    loss = losses[setting]
    if not math.isfinite(loss):
        return Cell("diverged")
    return Cell(loss_text(loss), tone="holds" if loss == min(losses.values()) else "")


def with_interval(values: Sequence[float], digits: int = 4) -> str | None:
    """A mean with the half-width of its interval; None where there is nothing.

    Examples:
        >>> with_interval([1.0, 2.0, 3.0]), with_interval([]), with_interval([math.nan])
        ('2.0000 ± 2.4841', None, None)
    """
    average, interval = mean(values), interval_of(values)
    half = "" if interval is None else f" ± {decimals((interval.high - interval.low) / 2, digits)}"
    return None if math.isnan(average) else f"{decimals(average, digits)}{half}"
