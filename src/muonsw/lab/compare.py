"""Compare decay rules: arms, what their runs show, the search for lambda, and the verdict.

The verdict says first whether decay acts at all, then whether lambda is sensible, then the differences.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from muonsw import decay
from muonsw.addons.norm_rules import FREE, NORM_RULES
from muonsw.decay import DECAY_RULES
from muonsw.lab import launch
from muonsw.lab.advise import IDLE, Advice, Advise
from muonsw.lab.config import from_data
from muonsw.lab.console import MISSING, Cell, Column, Table, Value, change_text, decimals, loss_text
from muonsw.lab.errors import UsageError
from muonsw.lab.files import plain, refuse_folder, write_json
from muonsw.lab.launch import Cluster, Job
from muonsw.lab.model import muon_lr_multiplier, scalings
from muonsw.lab.report import PAGE, write_report
from muonsw.lab.runs import Run, load_runs
from muonsw.lab.stats import Claims, Interval, interval_of
from muonsw.lab.train.config import OptimizerConfig, RunConfig
from muonsw.presets import PRESETS
from muonsw.registry import unknown
from muonsw.text import counted

CONSTANT, SCALED = "constant", "scaled"
CONTROL = "constant, same total"
RULES = (CONSTANT, SCALED)
NAME, NUMBERS = "comparison", "outcome.json"

# ---- Arms: they share everything but their optimizer, over the same seeds


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class Key:
    """Identifies a comparison within its study: a name, a width, a number of steps, or several of these.

    Examples:
        >>> str(Key(width=256)), str(Key("muon", steps=1600)), Key("muon", steps=1600).slug
        ('width 256', 'muon, 1600 steps', 'muon-1600-steps')
    """

    name: str = ""
    width: int | None = None
    steps: int | None = None

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}"
        steps = "" if self.steps is None else f"{self.steps} steps"
        return ", ".join(filter(None, (self.name, width, steps)))

    @property
    def slug(self) -> str:
        return str(self).replace(", ", "-").replace(" ", "-")


@dataclass(frozen=True)
class Comparison:
    """Arms that share everything but their optimizer, seed by seed."""

    key: Key
    base: RunConfig  # what the arms share
    arms: tuple[Arm, ...]  # the first is the baseline of every pair
    seeds: tuple[int, ...]  # of initial weights and data order, the same for every arm
    paired: bool = True  # whether arms are compared with the first one; a sweep has no baseline

    def config(self, arm: Arm, seed: int) -> RunConfig:
        return replace(self.base, optimizer=arm.optimizer, seed=seed)

    def configs(self) -> list[RunConfig]:
        """The config of every run, seed by seed: pairs are complete as early as possible."""
        return [self.config(arm, seed) for seed in self.seeds for arm in self.arms]


# By the name of the arm: one run for each seed. By comparison: its arms.
Runs = Mapping[str, Sequence[Run]]
Results = Mapping[Key, Runs]
Train = Callable[[Sequence[Comparison]], Results]
PlaceJob = Callable[[Comparison, Arm, int], Job]


def parse_arm(text: str, base: OptimizerConfig) -> Arm:
    """Parse `RULE`, `PRESET` or `PRESET/RULE`, optionally followed by `,setting=value,...` of the optimizer.

    A preset without a rule takes the one of `base`, and its arm is named after both.

    Raises:
        UsageError: If a name or a setting is unknown, or a value does not fit.

    Examples:
        >>> parse_arm("soap/constant", OptimizerConfig()).optimizer.preset, parse_arm("soap", OptimizerConfig()).name
        ('soap', 'soap/scaled')
        >>> parse_arm("constant,weight_decay=0.3", OptimizerConfig()).optimizer.weight_decay
        0.3
    """
    first, *settings = (part.strip() for part in text.split(","))
    preset, slash, rule = first.partition("/")
    if not slash:
        preset, rule = (base.preset, first) if first in DECAY_RULES else (first, base.decay)
    known = list(PRESETS) if slash else [*DECAY_RULES, *PRESETS]
    if (preset or not first) and preset not in PRESETS:
        raise UsageError(f"arm {text!r}: {unknown('preset' if slash else 'decay rule or preset', preset, known)}")
    if rule not in DECAY_RULES:
        raise UsageError(f"arm {text!r}: {unknown('decay rule', rule, list(DECAY_RULES))}")

    changes: dict[str, Any] = {"preset": preset, "decay": rule}
    # No lists, because commas separate the settings.
    settable = [field.name for field in fields(base) if field.name not in (*changes, "betas")]
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in settable or not value:
            wanted = f"after its first word come setting=value pairs, with settings {', '.join(settable)}"
            raise UsageError(f"arm {text!r}: {wanted}")
        try:
            changes[name] = json.loads(value)
        except ValueError:  # a word
            changes[name] = value
    try:
        optimizer = from_data(OptimizerConfig, asdict(base) | changes, "optimizer")
    except ValueError as error:
        raise UsageError(f"arm {text!r}: {error}") from error
    return Arm(", ".join(("/".join(filter(None, (preset, rule))), *settings)), optimizer)


def multiples(value: float, factors: Sequence[float], digits: int = 3) -> list[float]:
    """A setting at several multiples, rounded to what the names of arms show.

    Examples:
        >>> multiples(0.07, (0.5, 1.0, 2.0))
        [0.035, 0.07, 0.14]
    """
    return [float(f"{value * factor:.{digits}g}") for factor in factors]


def decay_factors(config: RunConfig, optimizer: OptimizerConfig) -> list[float]:
    """The decay factor phi of every step of a run, for hidden and expert matrices as muP divides their rate.

    Zero under a norm rule that does not decay, NaN under a rule that follows the gradients.
    """
    if not NORM_RULES[optimizer.norm].decays:
        return [0.0] * config.steps
    if optimizer.decay not in DECAY_RULES or DECAY_RULES[optimizer.decay].uses_gradient:
        return [math.nan] * config.steps
    group = optimizer.lr * hidden_multiplier(config, optimizer)
    peak = group if optimizer.peak == "group" else optimizer.lr
    rates = [group * multiple for multiple in lr_multiples(config)]
    return decay.decay_factors(optimizer.decay, optimizer.weight_decay, rates, peak)


def refuse_too_much_decay(config: RunConfig, optimizer: OptimizerConfig) -> None:
    """Refuse a lambda with which a step would remove more than the whole weight."""
    if (share := max(decay_factors(config, optimizer))) > 1.0:
        settings = f"{optimizer.decay} decay with weight_decay={optimizer.weight_decay:g} at lr={optimizer.lr:g}"
        raise UsageError(f"{settings} would take {share:.3g} times the weight in one step: lower one of them")


@lru_cache(maxsize=2)  # every arm of a long run asks for it
def lr_multiples(config: RunConfig) -> list[float]:
    """The learning rate of every step as a multiple of the peak."""
    multiple = config.schedule.multiple(config.steps)
    return [multiple(step) for step in range(config.steps)]


def hidden_multiplier(config: RunConfig, optimizer: OptimizerConfig) -> float:
    """What muP multiplies the base learning rate of hidden and expert matrices by; a task has no muP."""
    if config.task is not None:
        return 1.0
    if optimizer.algorithm == "adamw":
        return scalings(config.decoder)["hidden"].lr
    return muon_lr_multiplier(config.decoder, optimizer.muon_lr)


def same_total(config: RunConfig, arm: Arm) -> Arm:
    """Constant decay with the total decay of an arm: the control that tells less decay from later decay.

    Under a cosine to a tenth, scaled decay applies 0.73 of what constant decay at the same lambda does; less, by
    the factor that muP divides a group's rate by, where it divides by the undivided peak.

    Raises:
        UsageError: If the arm does not decay, or its total is not known before the run.
    """
    constant = replace(arm.optimizer, decay="constant", norm=FREE, peak="group")
    total, wanted = (math.fsum(decay_factors(config, optimizer)) for optimizer in (constant, arm.optimizer))
    if total == 0.0:
        raise UsageError(f"arm {arm.name!r} has no decay, so there is no total to take: choose a lambda above zero")
    if math.isnan(wanted):
        raise UsageError(f"arm {arm.name!r} follows the gradients, so its total is not known before the run")
    return Arm(CONTROL, replace(constant, weight_decay=constant.weight_decay * (wanted / total)))


# ---- Training


def train_all(
    comparisons: Sequence[Comparison],
    place: PlaceJob,
    console: Console,
    workers: int,
    *,
    cluster: Cluster | None = None,
    retry_diverged: bool = False,
) -> Results:
    """Train every run that has not ended, and return all by comparison, arm and seed.

    Raises:
        UsageError: If a run cannot start, or a folder holds a run with other settings.
        Interrupted: If the process was asked to stop; all runs were saved.
    """
    jobs = jobs_of(comparisons, place)
    launch.run(list(jobs.values()), console=console, workers=workers, cluster=cluster, retry_diverged=retry_diverged)
    loaded = dict(zip(jobs, load_runs(jobs), strict=True))

    def runs(one: Comparison, arm: Arm) -> list[Run]:
        return [loaded[place(one, arm, seed).folder].named(arm.name) for seed in one.seeds]

    return {one.key: {arm.name: runs(one, arm) for arm in one.arms} for one in comparisons}


def jobs_of(comparisons: Sequence[Comparison], place: PlaceJob) -> dict[Path, Job]:
    """The runs of comparisons by folder, equal ones once, seed by seed."""
    members = ((one, arm, seed) for one in comparisons for seed in one.seeds for arm in one.arms)
    jobs: dict[Path, Job] = {}
    for member in sorted(members, key=lambda member: member[-1]):
        job = place(*member)
        jobs.setdefault(job.folder, job)
    return jobs


def by_arm(folder: Path) -> PlaceJob:
    """Place each run in a folder that is named after its arm and seed."""

    def place(comparison: Comparison, arm: Arm, seed: int) -> Job:
        letters = (letter if letter.isalnum() or letter in "._=" else "-" for letter in arm.name)
        name = f"{''.join(letters).replace('--', '-')}-seed{seed}"
        return Job(f"{arm.name}, seed {seed}", replace(comparison.config(arm, seed), arm=arm.name), folder / name)

    return place


# ---- Outcome

Measure = Callable[[Run], float]  # NaN where a run diverged, or did not record it


def completed(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.diverged is None]


def swept_loss(run: Run) -> float:
    """The final loss for a sweep, where a run without one is infinitely bad."""
    return math.inf if math.isnan(run.final_loss) else run.final_loss


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def pairs_by_seed(arm: Sequence[Run], baseline: Sequence[Run]) -> dict[int, tuple[Run, Run]]:
    """The runs of two arms, for the seeds that both completed."""
    others = {run.seed: run for run in completed(baseline)}
    return {run.seed: (run, others[run.seed]) for run in completed(arm) if run.seed in others}


def paired(arm: Sequence[Run], baseline: Sequence[Run], measure: Measure) -> list[float]:
    """A measure of one arm minus that of another, seed by seed."""
    return [measure(run) - measure(other) for run, other in pairs_by_seed(arm, baseline).values()]


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
        for part in (*data["arms"], *data["pairs"]):
            if not part["metrics"]:
                del part["metrics"]
        return data


def compare(runs: Runs) -> Outcome:
    """What the runs of several arms show; the first arm is the baseline."""
    arms, (baseline, *others) = [], runs.values()
    for every in runs.values():
        first, ended = every[0], completed(every)
        # Without weights that decay, a run's norm is that of all weights, which is something else.
        arm = ArmOutcome(
            name=first.arm,
            rule=first.rule,
            weight_decay=first.config.optimizer.weight_decay,
            seeds=tuple(run.seed for run in ended),
            final=tuple(run.final_loss for run in ended),
            best=tuple(run.best_loss for run in ended),
            norm=tuple(run.final_norm if run.telemetry.scope("decayed").records else math.nan for run in ended),
            norm_change=tuple(run.norm_change for run in ended),
            total_decay=math.fsum(decay_factors(first.config, first.config.optimizer)),
            diverged={run.seed: run.diverged for run in every if run.diverged is not None},
            skipped={run.seed: number for run in ended if (number := (run.result or {}).get("skipped"))},
            metrics={name: tuple(run.final_metric(name) for run in ended) for name in metric_names(every)},
        )
        arms.append(arm)
    return Outcome(tuple(arms), tuple(pair_outcome(baseline, arm) for arm in others), baseline[0].unit)


def metric_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def pair_outcome(baseline: Sequence[Run], arm: Sequence[Run]) -> PairOutcome:
    """An arm against the baseline, for the seeds that both completed."""
    differences = tuple(paired(arm, baseline, lambda run: run.final_loss))
    both = pairs_by_seed(arm, baseline)
    metrics = {}
    for name in metric_names([*baseline, *arm]):
        values = tuple(run.final_metric(name) - other.final_metric(name) for run, other in both.values())
        metrics[name] = MetricOutcome(values, mean(values), interval_of(values))
    return PairOutcome(
        baseline=baseline[0].arm,
        arm=arm[0].arm,
        seeds=tuple(both),
        differences=differences,
        mean=mean(differences),
        interval=interval_of(differences),
        steps_to_match=tuple(steps_to_match(other, run) for run, other in both.values()),
        metrics=metrics,
    )


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


def describe_divergence(steps: Mapping[int, int]) -> str:
    """Say at which step runs diverged, by seed.

    Examples:
        >>> describe_divergence({0: 57, 2: 60})
        'at step 57 (seed 0) and 60 (seed 2)'
    """
    return "at step " + " and ".join(f"{step:,} (seed {seed})" for seed, step in steps.items())


# ---- Tables


def arms_table(outcome: Outcome) -> Table:
    """One row for each arm: losses and norms with their intervals over seeds."""
    metrics = list(dict.fromkeys(name for arm in outcome.arms for name in arm.metrics))
    columns = (
        Column("arm"),
        Column("lambda", number=True),
        Column("total decay", number=True, digits=3),
        Column("seeds", number=True),
        Column("final loss", number=True),
        *(Column(name, number=True) for name in metrics),
        Column("best loss", number=True),
        Column("weight RMS at the end", number=True),
        Column("change since largest", number=True),
    )
    rows = []
    for arm in outcome.arms:
        final: Value | Cell = with_interval(arm.final)
        if arm.diverged:
            lost = "diverged" if not arm.seeds else f"{final}, {len(arm.diverged)} diverged"
            final = Cell(lost, note=describe_divergence(arm.diverged), tone="fails")
        total = None if math.isnan(arm.total_decay) else arm.total_decay
        measured = [with_interval(arm.metrics.get(name, ())) for name in metrics]
        norm = with_interval(arm.norm, digits=3), change_text(mean(arm.norm_change))
        rows.append(
            (arm.name, arm.weight_decay, total, len(arm.seeds), final, *measured, with_interval(arm.best), *norm)
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
        Column("against"),
        Column("difference of final loss", number=True),
        Column("95% t interval", number=True),
        Column("seed by seed", number=True),
        Column("steps to match", number=True),
        *(Column(f"difference of {name}", number=True) for name in metrics),
    )

    def between(interval: Interval | None) -> str:
        return f"[{signed(interval.low)}, {signed(interval.high)}]" if interval else ""

    rows = []
    for pair in pairs:
        matches = "never" if pair.mean_match is None else f"{100 * pair.mean_match:.0f}%"
        loss = signed(pair.mean) if pair.seeds else None
        interval = (between(pair.interval) or None) if math.isfinite(pair.mean) else None
        by_seed = ", ".join(map(signed, pair.differences)) or None
        measured = [pair.metrics.get(name) for name in metrics]
        others = [
            f"{signed(metric.mean)} {between(metric.interval)}".strip()
            if metric and math.isfinite(metric.mean)
            else None
            for metric in measured
        ]
        rows.append((pair.arm, pair.baseline, loss, interval, by_seed, matches if pair.seeds else None, *others))
    note = (
        "Differences are paired by seed; negative is better. Steps to match: the step at which the arm reaches the "
        "other's best loss, over the step at which the other did; it compares the middle of one schedule with the "
        "end of another, so read it together with the final losses."
    )
    return Table("pairs", "Paired difference", columns, rows, note)


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


def signed(value: float) -> str:
    """A difference: four decimals, or two digits where those would be zeros; a dash where there is none.

    Examples:
        >>> signed(0.01234), signed(-3.21e-6), signed(0.0), signed(math.nan)
        ('+0.0123', '-3.2e-06', '+0.0000', '\N{EN DASH}')
    """
    if not math.isfinite(value):
        return MISSING
    return decimals(value, 4, sign="+") if value == 0 or abs(value) >= 0.00005 else f"{value:+.2g}"


# ---- The search for lambda

FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0)  # of the lambda that was given
MOST_EXTENSIONS = 3


@dataclass(frozen=True)
class TuningResult:
    """What a search over lambda gave for one arm."""

    name: str  # the arm as it was given
    arm: Arm  # the arm at its best lambda
    losses: Mapping[float, float]  # final loss by lambda, ascending; infinite where a run diverged

    @property
    def best(self) -> float:
        return self.arm.optimizer.weight_decay

    @property
    def diverged(self) -> bool:
        """Whether the runs with all of the lambdas diverged."""
        return math.isinf(self.losses[self.best])

    @property
    def at_edge(self) -> bool:
        """Whether the best is the smallest or the largest that was tried, so that a better one may lie beyond."""
        return not self.diverged and self.best in (min(self.losses), max(self.losses))

    def as_data(self) -> dict[str, Any]:
        losses = [{"weight_decay": lam, "final": loss} for lam, loss in self.losses.items()]
        data: dict[str, Any] = plain({"arm": self.name, "best": self.best, "at_edge": self.at_edge, "losses": losses})
        return data


def tune(
    train: Train, base: RunConfig, arms: Sequence[Arm], *, seed: int, factors: Sequence[float] = FACTORS
) -> list[TuningResult]:
    """Try multiples of each arm's lambda on one seed and keep the best of each arm.

    Where the best is the smallest or the largest that was tried, the search goes on beyond it, a few times. The seed is
    for the search alone: a comparison on the same one would favour the arm that was luckier.
    """

    def at(arm: Arm, words: str, lam: float) -> Arm:
        return Arm(f"{arm.name}, {words}={lam:g}", replace(arm.optimizer, weight_decay=lam))

    key, tried = Key("search"), {arm.name: dict[float, float]() for arm in arms}
    wanted = {arm.name: multiples(arm.optimizer.weight_decay, sorted(factors), digits=4) for arm in arms}
    found: list[TuningResult] = []
    for _ in range(1 + MOST_EXTENSIONS):
        new = {(arm.name, lam): at(arm, "lambda", lam) for arm in arms for lam in wanted[arm.name]}
        # A step must not remove more than the whole weight.
        new = {place: arm for place, arm in new.items() if not max(decay_factors(base, arm.optimizer)) > 1.0}
        if not new:
            break
        runs = train([Comparison(key, base, tuple(new.values()), (seed,), paired=False)])[key]
        for (name, lam), candidate in new.items():
            tried[name][lam] = swept_loss(runs[candidate.name][0])
        found, wanted = [], {arm.name: [] for arm in arms}
        for arm in arms:
            losses = dict(sorted(tried[arm.name].items()))
            best = min(losses, key=losses.__getitem__)
            found.append(result := TuningResult(arm.name, at(arm, "best lambda", best), losses))
            if result.at_edge and len(losses) > 1:
                # One more point, as far beyond the edge as its neighbour is within it.
                inner = list(losses)[1 if best == min(losses) else -2]
                wanted[arm.name] = multiples(best, [best / inner], digits=4)
    return found


def sweep_table(found: Sequence[TuningResult]) -> Table:
    lambdas = sorted({lam for tuned in found for lam in tuned.losses})
    columns = [Column("lambda"), *(Column(tuned.name, number=True) for tuned in found)]
    rows = [(f"{lam:g}", *(loss_cell(tuned.losses, lam) for tuned in found)) for lam in lambdas]
    note = "Final validation loss on one seed that is used for nothing else; the best of each column stands out."
    return Table("sweep", "Search over lambda", columns, rows, " ".join(filter(None, (note, edge_note(found)))))


def edge_note(found: Sequence[TuningResult]) -> str:
    """A sentence about searches without a usable lambda, and about those that ended at an edge."""
    diverged = " and ".join(tuned.name for tuned in found if tuned.diverged)
    edges = " and ".join(tuned.arm.name for tuned in found if tuned.at_edge)
    notes = [f"Every lambda that was tried for {diverged} diverged: lower the learning rate."] if diverged else []
    if edges:
        notes.append(f"The best lambda of {edges} is at the edge of what was tried; a better one may lie beyond.")
    return " ".join(notes)


# ---- The verdict


def advise_arm(base: RunConfig, arm: Arm, epochs: float) -> Advice:
    """What the formula says about the lambda of an arm with constant or scaled decay."""
    optimizer, schedule = arm.optimizer, base.schedule
    rule: Any = optimizer.decay
    algorithm: Any = optimizer.algorithm
    return Advise(
        base.steps,
        lr=optimizer.lr * hidden_multiplier(base, optimizer),
        weight_decay=optimizer.weight_decay,
        decay=rule,
        schedule=schedule.shape,
        final_fraction=schedule.final_fraction,
        decay_fraction=schedule.decay_fraction,
        warmup_steps=schedule.warmup_steps,
        base_lr=optimizer.lr if optimizer.peak == "base" else None,
        algorithm=algorithm,
        epochs=epochs,
    ).advice()


def verdict(outcome: Outcome, tuned: Sequence[TuningResult] = (), advice: Advice | None = None) -> str:
    """What came out: lost runs, whether decay acts, whether lambda is sensible, the differences, then caveats."""
    arms = {arm.name: arm for arm in outcome.arms}
    lines = []
    for arm in outcome.arms:
        if arm.diverged:
            fate = "it is compared on its other seeds, which flatters it"
            fate = fate if arm.seeds else "it cannot be trained with these settings, so it has no final loss to compare"
            lines.append(f"{arm.name!r} diverged {describe_divergence(arm.diverged)}: {fate}.")
        if arm.skipped:
            seeds = ", ".join(f"{counted(number, 'step')} (seed {seed})" for seed, number in arm.skipped.items())
            lines.append(f"{arm.name!r} skipped {seeds}, whose gradients were not finite: lower its learning rate.")

    known = [arm for arm in outcome.arms if not math.isnan(arm.total_decay)]  # not rules that follow the gradients
    totals = ", ".join(f"{arm.total_decay:.2g} ({arm.name!r})" for arm in known)
    if known and all(arm.total_decay < IDLE for arm in outcome.arms):
        idle = f"Too short for decay to matter: total decay is below {IDLE:g}, {totals}."
        lines.append(f"{idle} Raise lambda or train longer.")
    elif known:
        lines.append(f"Decay acts in this run: total decay is {totals}.")
    lines.append(_sensible(outcome.arms, advice))

    for pair in outcome.pairs:
        lines.append(_difference(pair, _same_lambda(arms[pair.arm], arms[pair.baseline]), outcome.unit))
        for name, metric in pair.metrics.items():
            if math.isfinite(metric.mean):
                text = f"Difference of {name}: {signed(metric.mean)}"
                if metric.interval is not None:
                    chance = "not significant" if 0.0 in metric.interval else "significant"
                    text += f", {chance} ({_t_interval(metric.interval)})"
                lines.append(f"{text}.")
    # How much of a gain constant decay of the same total has too.
    control = next((pair for pair in outcome.pairs if pair.baseline == CONTROL and pair.seeds), None)
    gains = [pair for pair in outcome.pairs if control and pair.arm == control.arm and pair is not control]
    if control and gains and gains[0].interval is not None and gains[0].interval.high < 0:
        share = min(1.0, max(0.0, 1.0 - control.mean / gains[0].mean))
        lines.append(f"So {share:.0%} of the gain is explained by less total decay.")
    lines.append(edge_note(tuned))
    rules = {arm.rule for arm in outcome.arms if arm.total_decay >= IDLE}
    if not tuned and len(rules) > 1 and not (advice and advice.verdict == "fine"):
        lines.append("At another lambda the answer may differ: --tune-lambda compares each rule at its best.")
    return " ".join(line for line in lines if line)


def _sensible(arms: Sequence[ArmOutcome], advice: Advice | None) -> str:
    """Whether lambda suits the length of the run; empty where our records do not tell."""
    lambdas = {arm.weight_decay for arm in arms if arm.name != CONTROL}
    if advice is None or len(lambdas) > 1:
        return ""
    subject, better = f"Lambda {lambdas.pop():g}", ""
    if advice.verdict == "fine":
        return f"{subject} suits its length."
    if advice.low is not None and advice.high is not None:
        better = f" ({advice.low:.2g}{'' if advice.low == advice.high else f' to {advice.high:.2g}'} would suit it)"
    if advice.verdict == "large":
        return f"{subject} is too large for its length{better}, which favours the rule that decays less."
    return f"{subject} is small for its length{better}." if better else ""


def _difference(pair: PairOutcome, same_lambda: bool, unit: str) -> str:
    seeds, unit = counted(len(pair.seeds), "seed"), f" {unit}" if unit else ""
    if not pair.seeds:
        return f"{pair.arm!r} and {pair.baseline!r} cannot be compared: no seed was completed by both."
    if not math.isfinite(pair.mean):
        return f"{pair.arm!r} against {pair.baseline!r}: a run has no final loss."
    if pair.interval is None:
        size = f"{signed(abs(pair.mean))[1:]}{unit} {'below' if pair.mean < 0 else 'above'}"
        place = size if pair.mean else "level with"
        return f"{pair.arm!r} ended {place} {pair.baseline!r}; one seed gives no error bar."
    spread = f"{signed(pair.mean)}{unit}, {_t_interval(pair.interval)}"
    if 0.0 in pair.interval:
        return f"No significant difference between {pair.arm!r} and {pair.baseline!r} over {seeds} ({spread})."
    if pair.baseline != CONTROL:
        spread += "; same lambda" if same_lambda else "; different lambda"
    word = "lower" if pair.mean < 0 else "higher"
    text = f"{pair.arm!r} ended {word} than {pair.baseline!r} over {seeds} ({spread})."
    if word == "lower" and pair.mean_match is not None:
        text += f" It matched the best loss of {pair.baseline!r} in {100 * pair.mean_match:.0f}% of the steps."
    return text


def _t_interval(interval: Interval) -> str:
    return f"95% t interval {signed(interval.low)} to {signed(interval.high)}"


def _same_lambda(one: ArmOutcome, other: ArmOutcome) -> bool:
    return math.isclose(one.weight_decay, other.weight_decay)


# ---- The whole comparison


@dataclass(frozen=True)
class Conclusion:
    """What came out of a comparison or a study."""

    sentence: str
    tables: Sequence[Table]  # the most telling one first
    paths: Sequence[Path]  # what was written, the numbers first
    seconds: float
    claims: Claims = field(default_factory=dict)  # of a study, by the experiment that makes them


def conduct(
    base: RunConfig,
    arms: Sequence[Arm],
    train: Train,
    folder: Path,
    *,
    seeds: int,
    title: str,
    control: bool = False,
    tune_lambda: bool = False,
    epochs: float = 1.0,
) -> Conclusion:
    """Search for lambda if wanted, train every arm with every seed, judge, and write numbers and page.

    Args:
        base: What the arms share.
        arms: The first is the baseline.
        train: Trains runs, or finds those that have ended.
        folder: Where numbers and page go.
        seeds: How many.
        title: Of the page.
        control: Whether to add constant decay of the total of the first scaled arm.
        tune_lambda: Whether to compare each arm at its best lambda, found on another seed.
        epochs: How often a run sees its text.
    """
    refuse_folder(folder / NUMBERS)
    start, given = time.perf_counter(), arms
    tuned = tune(train, base, given, seed=seeds) if tune_lambda else []
    arms = [result.arm for result in tuned] or list(given)
    scaled = next((arm for arm in arms if control and arm.optimizer.decay == "scaled"), None)
    if scaled is not None:
        arms = [*arms, same_total(base, scaled)]
    key = Key(NAME)
    runs = train([Comparison(key, base, tuple(arms), tuple(range(seeds)))])[key]
    outcome = compare(runs)
    if scaled is not None:
        # The control is the baseline of the scaled arm: what differs is when decay acts, not how much there is.
        others = [pair for pair in outcome.pairs if pair.arm != CONTROL]
        outcome = replace(outcome, pairs=(*others, pair_outcome(runs[CONTROL], runs[scaled.name])))

    advice = None  # about the scaled arm, if it is like the runs behind the formula
    for arm in sorted(given, key=lambda arm: arm.optimizer.decay):
        optimizer = arm.optimizer
        plain_muon = optimizer.algorithm == "muon" and optimizer.norm == FREE and not optimizer.preset
        if plain_muon and optimizer.decay in RULES and not (tuned or base.task):
            advice = advise_arm(base, arm, epochs)
    sentence = verdict(outcome, tuned, advice)
    tables = [arms_table(outcome), pairs_table(outcome.pairs), *([sweep_table(tuned)] if tuned else [])]
    numbers = {
        "verdict": sentence,
        **outcome.as_data(),
        "search": [result.as_data() for result in tuned],
    }
    seconds = time.perf_counter() - start
    written = write_json(folder / NUMBERS, numbers)
    page = write_report(
        folder / PAGE,
        title,
        [run for arm_runs in runs.values() for run in arm_runs],
        verdict=sentence,
        tables=tables[1:2],
        details=[tables[0], *tables[2:]],
    )
    return Conclusion(sentence, tables, [written, page], seconds)
