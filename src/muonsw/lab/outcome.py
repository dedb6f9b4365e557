"""What the runs of a comparison say: losses and norms of each arm, paired differences, and their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from muonsw.lab.arms import Results, Runs, decay_factors
from muonsw.lab.console import MISSING, Cell, Column, Table, Value, change_text, decimals, loss_text, norm_text
from muonsw.lab.files import plain
from muonsw.lab.runs import Run
from muonsw.lab.stats import Estimate, Interval, interval_of, over_seeds

Measure = Callable[[Run], float]  # NaN where a run diverged, or did not record it


def diverged_at(run: Run) -> int | None:
    step = (run.result or {}).get("diverged")
    return step if isinstance(step, int) else None


def completed(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if diverged_at(run) is None]


def last_loss(run: Run) -> float:
    return run.final_loss if diverged_at(run) is None else math.nan


def lowest_loss(run: Run) -> float:
    return run.best_loss if diverged_at(run) is None else math.nan


def swept_loss(run: Run) -> float:
    """The last validation loss for a sweep, where a run without one is infinitely bad."""
    loss = last_loss(run)
    return math.inf if math.isnan(loss) else loss


def log_end_norm(run: Run) -> float:
    """The logarithm of the last norm, so that differences are ratios; NaN where none was recorded."""
    return math.log(run.final_norm) if run.final_norm > 0 else math.nan


def over_runs(runs: Sequence[Run], measure: Measure) -> Estimate:
    return over_seeds([measure(run) for run in runs])


def both_completed(one: Sequence[Run], other: Sequence[Run]) -> dict[int, tuple[Run, Run]]:
    """The runs of two arms by seed, for the seeds that both completed."""
    theirs = {run.seed: run for run in completed(other)}
    return {run.seed: (run, theirs[run.seed]) for run in completed(one) if run.seed in theirs}


def paired(one: Sequence[Run], other: Sequence[Run], measure: Measure) -> list[float]:
    return [measure(ours) - measure(theirs) for ours, theirs in both_completed(one, other).values()]


@dataclass(frozen=True)
class ArmOutcome:
    """One arm over its seeds; runs that diverged have no other values."""

    name: str
    rule: str
    weight_decay: float
    seeds: tuple[int, ...]  # of the completed runs, in the order of the values below
    final: tuple[float, ...]  # last validation loss of each run
    best: tuple[float, ...]  # lowest validation loss of each run
    norm: tuple[float, ...]  # weight RMS of the decayed matrices at the end of each run
    norm_change: tuple[float, ...]  # the same relative to its largest value, minus one
    total_decay: float  # sum of phi; NaN under a rule that follows the gradients
    diverged: Mapping[int, int]  # by seed, the step at which a run diverged
    skipped: Mapping[int, int] = field(default_factory=dict)  # by seed, steps whose gradients were not finite
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
    mean: float  # their mean; NaN where there is none
    interval: Interval | None  # of their mean; None with fewer than two seeds
    # The step at which the arm reaches the baseline's best loss, over the step at which the baseline did.
    steps_to_match: tuple[float | None, ...]  # None where it never does
    match_interval: Interval | None  # of the mean of those; None where one is missing or with fewer than two seeds
    metrics: Mapping[str, MetricOutcome] = field(default_factory=dict)

    @property
    def mean_match(self) -> float | None:
        """Mean of the steps to match; None where one is missing."""
        known = [value for value in self.steps_to_match if value is not None]
        return mean(known) if known and len(known) == len(self.steps_to_match) else None


@dataclass(frozen=True)
class Outcome:
    """A whole comparison; the first arm is the baseline of every pair."""

    arms: tuple[ArmOutcome, ...]
    pairs: tuple[PairOutcome, ...]
    unit: str = "nats"  # of the losses; empty where it is not known

    def as_data(self) -> dict[str, Any]:
        """Everything as JSON data; metrics only where there are some."""
        data: dict[str, Any] = plain(asdict(self))
        del data["unit"]
        for one in (*data["arms"], *data["pairs"]):
            if not one["metrics"]:
                del one["metrics"]
        return data


def compare(runs: Runs) -> Outcome:
    """What the runs of several arms say; the first arm is the baseline."""
    arms, (baseline, *others) = [], runs.values()
    for those in runs.values():
        first, ended = those[0], completed(those)
        optimizer = first.config.optimizer
        # Without weights that decay, a run's norm is that of all weights, which is something else.
        decaying = [run.telemetry.scope("decayed").records or "end_norm" in (run.result or {}) for run in ended]
        arm = ArmOutcome(
            name=first.arm,
            rule=first.rule,
            weight_decay=optimizer.weight_decay,
            seeds=tuple(run.seed for run in ended),
            final=tuple(map(last_loss, ended)),
            best=tuple(map(lowest_loss, ended)),
            norm=tuple(run.final_norm if decays else math.nan for run, decays in zip(ended, decaying, strict=True)),
            norm_change=tuple(run.norm_change for run in ended),
            total_decay=math.fsum(decay_factors(first.config, optimizer)),
            diverged=divergence_steps(those),
            skipped={run.seed: number for run in ended if (number := (run.result or {}).get("skipped"))},
            metrics={name: tuple(run.final_metric(name) for run in ended) for name in metric_names(those)},
        )
        arms.append(arm)
    return Outcome(tuple(arms), tuple(pair_outcome(baseline, those) for those in others), baseline[0].unit)


def metric_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def pair_outcome(baseline: Sequence[Run], arm: Sequence[Run]) -> PairOutcome:
    """An arm against the baseline, for the seeds that both completed."""
    both = both_completed(baseline, arm)
    differences = tuple(paired(arm, baseline, last_loss))
    matches = tuple(steps_to_match(theirs, ours) for theirs, ours in both.values())
    known = [match for match in matches if match is not None]
    metrics = {}
    for name in metric_names([*baseline, *arm]):
        values = tuple(ours.final_metric(name) - theirs.final_metric(name) for theirs, ours in both.values())
        metrics[name] = MetricOutcome(values, mean(values), interval_of(values))
    return PairOutcome(
        baseline=baseline[0].arm,
        arm=arm[0].arm,
        seeds=tuple(both),
        differences=differences,
        mean=mean(differences),
        interval=interval_of(differences),
        steps_to_match=matches,
        match_interval=interval_of(known) if len(known) == len(matches) else None,
        metrics=metrics,
    )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def steps_to_match(baseline: Run, arm: Run) -> float | None:
    """The step at which the arm first has the baseline's best loss, over the step at which the baseline had it.

    Between evaluations the loss is a straight line; None where it never falls so far.
    """
    steps, losses = baseline.evals.known("loss")
    best = int(losses.argmin()) if len(losses) else 0
    if not len(losses) or steps[best] == 0:
        return None
    level, before = float(losses[best]), None
    for step, loss in zip(*arm.evals.known("loss"), strict=True):
        if loss <= level:
            share = 1.0 if before is None else (before[1] - level) / (before[1] - loss)
            start = step if before is None else before[0]
            return float((start + share * (step - start)) / steps[best])
        before = step, loss
    return None


def divergence_steps(runs: Sequence[Run]) -> dict[int, int]:
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
    """Say at which step runs diverged, by seed.

    Examples:
        >>> describe_divergence({0: 57, 2: 60})
        'at step 57 (seed 0) and 60 (seed 2)'
    """
    return "at step " + " and ".join(f"{step:,} (seed {seed})" for seed, step in where.items())


def arms_table(outcome: Outcome) -> Table:
    """One row for each arm: losses and norms with their intervals over seeds."""
    metrics = list(dict.fromkeys(name for arm in outcome.arms for name in arm.metrics))
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
    rows = []
    for arm in outcome.arms:
        final: Value | Cell = with_interval(arm.final)
        if arm.diverged:
            lost = "diverged" if not arm.seeds else f"{final}, {len(arm.diverged)} diverged"
            final = Cell(lost, note=describe_divergence(arm.diverged), tone="fails")
        rows.append(
            (
                arm.name,
                *(None if math.isnan(value) else value for value in (arm.weight_decay, arm.total_decay)),
                len(arm.seeds),
                final,
                *(with_interval(arm.metrics.get(name, ())) for name in metrics),
                with_interval(arm.best),
                with_interval(arm.norm, digits=3),
                change_text(mean(arm.norm_change)),
            )
        )
    losses = "validation cross-entropy in nats a token" if outcome.unit else "on validation batches"
    note = (
        f"Losses: {losses}; means over seeds ± half a 95% t interval. Total decay: the sum over all steps of the share "
        "of a weight that decay removes."
    )
    return Table("arms", "Arms", columns, rows, note)


def pairs_table(pairs: Sequence[PairOutcome]) -> Table:
    """One row for each arm against the baseline: paired differences and steps to match."""
    metrics = list(dict.fromkeys(name for pair in pairs for name in pair.metrics))
    columns = (
        Column("arm"),
        Column("against", rank=2),
        Column("difference of final loss", number=True, rank=0),
        Column("95% t interval", number=True),
        Column("seed by seed", number=True, rank=3),
        Column("steps to match", number=True, rank=2),
        *(Column(f"difference of {name}", number=True) for name in metrics),
    )

    def between(interval: Interval | None) -> str:
        return f"[{signed(interval.low)}, {signed(interval.high)}]" if interval else ""

    rows = []
    for pair in pairs:
        matches = "never" if pair.mean_match is None else f"{100 * pair.mean_match:.0f}%"
        if pair.match_interval is not None:
            matches += f" [{100 * pair.match_interval.low:.0f}, {100 * pair.match_interval.high:.0f}]"
        found = [pair.metrics.get(name) for name in metrics]
        rows.append(
            (
                pair.arm,
                pair.baseline,
                signed(pair.mean) if pair.seeds else None,
                (between(pair.interval) or None) if math.isfinite(pair.mean) else None,
                ", ".join(map(signed, pair.differences)) or None,
                matches if pair.seeds else None,
                *(
                    f"{signed(one.mean)} {between(one.interval)}".strip() if one and math.isfinite(one.mean) else None
                    for one in found
                ),
            )
        )
    note = (
        "Differences are paired by seed; negative is better. Steps to match: the step at which the arm reaches the "
        "other's best loss, over the step at which the other did; it compares the middle of one schedule with the "
        "end of another, so read it together with the final losses."
    )
    return Table("pairs", "Paired difference", columns, rows, note)


def signed(value: float) -> str:
    """A difference: four decimals, or two digits where those would be zeros; a dash where there is none.

    Examples:
        >>> signed(0.01234), signed(-3.21e-6), signed(0.0), signed(math.nan)
        ('+0.0123', '-3.2e-06', '+0.0000', '\N{EN DASH}')
    """
    if not math.isfinite(value):
        return MISSING
    return decimals(value, 4, sign="+") if value == 0 or abs(value) >= 0.00005 else f"{value:+.2g}"


def against_constant(results: Results) -> Table:
    """One row for each arm of every comparison: its settings, its loss, and how far it ends from constant decay."""
    numbers = ("lambda", "peak rate", "epochs", "loss", "end norm (RMS)", "minus constant", "95% t interval", "seeds")
    columns = [Column("run"), Column("arm"), *(Column(name, number=True) for name in numbers)]
    rows: list[tuple[Value | Cell, ...]] = []
    for key, runs in results.items():
        for arm, those in runs.items():
            config, ended = those[0].config.optimizer, completed(those)
            # Constant decay that differs in the rule alone.
            wanted = replace(config, decay="constant", unnormalized="", peak="group")
            same = (other for other in runs if replace(runs[other][0].config.optimizer, peak="group") == wanted)
            constant = next((other for other in same if other != arm), None)
            gaps = paired(those, runs[constant], last_loss) if constant else []
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
