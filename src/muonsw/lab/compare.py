"""Compare decay rules.

`conduct` is the whole story: search for lambda (`tune`), train every arm (`train_all`), summarize the runs (`compare`),
describe them in words (`verdict`), and write numbers and page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

from muonsw import decay
from muonsw.addons.norm_rules import FREE, NORM_RULES
from muonsw.decay import DECAY_RULES
from muonsw.lab.advise import IDLE, Advice, Advise
from muonsw.lab.config import from_data
from muonsw.lab.console import Cell, Column, Table, Value, decimals
from muonsw.lab.errors import UsageError
from muonsw.lab.files import refuse_folder, write_json
from muonsw.lab.launch import Job
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
NUMBERS = "outcome.json"

# ---- Arms: same model, data and seeds, different optimizers


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class Comparison:
    """Arms that differ only in their optimizer, over the same seeds."""

    key: str  # unique within its study, such as "muon, width 256"
    base: RunConfig  # what the arms share
    arms: tuple[Arm, ...]  # the first is the baseline of every pair
    seeds: tuple[int, ...]  # of initial weights and data order
    paired: bool = True  # whether arms are compared with the first; a sweep has no baseline

    def config(self, arm: Arm, seed: int) -> RunConfig:
        return replace(self.base, optimizer=arm.optimizer, seed=seed)

    def configs(self) -> list[RunConfig]:
        """List the config of every run, seed by seed, so pairs complete as early as possible."""
        return [self.config(arm, seed) for seed in self.seeds for arm in self.arms]


def slug(key: str) -> str:
    """Turn the key of a comparison into a word for command lines and file names.

    Examples:
        >>> slug("muon, width 256")
        'muon-width-256'
    """
    return key.replace(", ", "-").replace(" ", "-")


Runs = Mapping[str, Sequence[Run]]  # by name of the arm, one run per seed
Results = Mapping[str, Runs]  # by comparison
Train = Callable[[Sequence[Comparison]], Results]
PlaceJob = Callable[[Comparison, Arm, int], Job]


# ---- From arms to verdict and page


@dataclass(frozen=True)
class Conclusion:
    """The result of a comparison or a study."""

    sentence: str  # the verdict
    tables: Sequence[Table]  # the most important one first
    paths: Sequence[Path]  # files written, the numbers first
    claims: Claims = field(default_factory=dict)  # of a study, by experiment


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
    """Train every arm with every seed, the first as the baseline, and write verdict, numbers and page.

    With `control`, constant decay with the total decay of the first scaled arm is added; with `tune_lambda`, each arm
    is compared at its best lambda, searched on another seed. A run sees its text `epochs` times.
    """
    refuse_folder(folder / NUMBERS)
    tuned = tune(train, base, arms, seed=seeds) if tune_lambda else []
    # The formula of `advise` covers plain Muon, and none of the user's tasks. The scaled arm is judged if there is one.
    covered = [
        arm.optimizer
        for arm in arms
        if arm.optimizer.decay in RULES
        and (arm.optimizer.algorithm, arm.optimizer.norm, arm.optimizer.preset) == ("muon", FREE, "")
    ]
    judged = max(covered, key=attrgetter("decay"), default=None)
    advice = None if tuned or base.task or judged is None else advice_for(base, judged, epochs)

    arms = [result.at(result.best) for result in tuned] or list(arms)
    pairs = [(arm.name, arms[0].name) for arm in arms[1:]]
    if control:
        # The control is the baseline of the scaled arm: they differ in when decay acts, not in how much.
        scaled = next(arm for arm in arms if arm.optimizer.decay == SCALED)
        arms = [*arms, same_total(base, scaled)]
        pairs.append((scaled.name, CONTROL))
    (runs,) = train([Comparison("comparison", base, tuple(arms), tuple(range(seeds)))]).values()

    outcome = compare(runs, pairs)
    sentence = verdict(outcome, tuned, advice)
    tables = [differences_table(outcome.differences), arms_table(outcome), *([sweep_table(tuned)] if tuned else [])]
    numbers = {
        "verdict": sentence,
        **asdict(outcome),
        "search": [
            {
                "arm": result.arm.name,
                "best": result.best,
                "at_edge": result.at_edge,
                "losses": [{"weight_decay": lam, "final": loss} for lam, loss in sorted(result.losses.items())],
            }
            for result in tuned
        ],
    }
    written = write_json(folder / NUMBERS, numbers)
    page = write_report(folder / PAGE, title, list(chain(*runs.values())), verdict=sentence, tables=tables)
    return Conclusion(sentence, tables, [written, page])


# ---- Settings of arms, and what they mean for decay


def parse_arm(text: str, base: OptimizerConfig) -> Arm:
    """Parse `RULE`, `PRESET` or `PRESET/RULE`, optionally followed by `,setting=value,...` of the optimizer.

    A preset without a rule uses the rule of `base`; the name of the arm has both.

    Examples:
        >>> parse_arm("soap/constant", OptimizerConfig()).optimizer.preset, parse_arm("soap", OptimizerConfig()).name
        ('soap', 'soap/scaled')
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
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name in changes:
            raise UsageError(f"arm {text!r}: {setting!r} must be setting=value, with each setting given once")
        try:
            changes[name] = json.loads(re.sub(r"^\.", "0.", value))  # JSON has no .05
        except ValueError:  # a string
            changes[name] = value
    try:
        optimizer = from_data(OptimizerConfig, asdict(base) | changes, "optimizer")
    except ValueError as error:
        raise UsageError(f"arm {text!r}: {error}") from error
    return Arm(", ".join(("/".join(filter(None, (preset, rule))), *settings)), optimizer)


def multiples(value: float, factors: Sequence[float], digits: int = 3) -> list[float]:
    """Multiply a setting by each factor and round it as the names of arms show it.

    Examples:
        >>> multiples(0.07, (0.5, 1.0, 2.0))
        [0.035, 0.07, 0.14]
    """
    return [float(f"{value * factor:.{digits}g}") for factor in factors]


def decay_factors(config: RunConfig, optimizer: OptimizerConfig) -> list[float]:
    """Compute phi at every step of a run, for hidden and expert matrices with the rate that muP gives them.

    Zero under a norm rule that does not decay, NaN under a rule that depends on the gradients.
    """
    if not NORM_RULES[optimizer.norm].decays:
        return [0.0] * config.steps
    if DECAY_RULES[optimizer.decay].uses_gradient:
        return [math.nan] * config.steps
    group = optimizer.lr * hidden_multiplier(config, optimizer)
    peak = group if optimizer.peak == "group" else optimizer.lr
    rates = [group * multiple for multiple in lr_multiples(config)]
    return decay.decay_factors(optimizer.decay, optimizer.weight_decay, rates, peak)


def refuse_too_much_decay(config: RunConfig, optimizer: OptimizerConfig) -> None:
    """Refuse a lambda that would remove more than the entire weight in one step."""
    if (share := max(decay_factors(config, optimizer))) > 1.0:
        settings = f"{optimizer.decay} decay with weight_decay={optimizer.weight_decay:g} at lr={optimizer.lr:g}"
        remedy = "lower lambda or the learning rate"
        raise UsageError(f"{settings} would remove {share:.3g} times the weight in one step: {remedy}")


@lru_cache(maxsize=2)  # every arm of a long run needs it
def lr_multiples(config: RunConfig) -> list[float]:
    """List the learning rate of every step as a multiple of the peak."""
    multiple = config.schedule.multiple(config.steps)
    return [multiple(step) for step in range(config.steps)]


def hidden_multiplier(config: RunConfig, optimizer: OptimizerConfig) -> float:
    """Return muP's multiplier of the learning rate of hidden and expert matrices; 1 for a task, which has no muP."""
    if config.task is not None:
        return 1.0
    if optimizer.algorithm == "adamw":
        return scalings(config.decoder)["hidden"].lr
    return muon_lr_multiplier(config.decoder, optimizer.muon_lr)


def same_total(config: RunConfig, arm: Arm) -> Arm:
    """Build the control: constant decay with the same total decay as an arm.

    It separates less decay from later decay: under a cosine to a tenth, scaled decay has 0.73 times the total decay of
    constant decay at the same lambda.
    """
    constant = replace(arm.optimizer, decay="constant", norm=FREE, peak="group")
    total, target = (math.fsum(decay_factors(config, optimizer)) for optimizer in (constant, arm.optimizer))
    return Arm(CONTROL, replace(constant, weight_decay=constant.weight_decay * (target / total)))


# ---- Training


def train_all(comparisons: Sequence[Comparison], place: PlaceJob, launch: Callable[[Sequence[Job]], None]) -> Results:
    """Train every unfinished run, and return all runs by comparison, arm and seed."""
    jobs = jobs_of(comparisons, place)
    launch(list(jobs.values()))
    loaded = dict(zip(jobs, load_runs(jobs), strict=True))
    return {
        comparison.key: {
            arm.name: [loaded[place(comparison, arm, seed).folder].named(arm.name) for seed in comparison.seeds]
            for arm in comparison.arms
        }
        for comparison in comparisons
    }


def jobs_of(comparisons: Sequence[Comparison], place: PlaceJob) -> dict[Path, Job]:
    """Collect the runs of comparisons by folder, each once, seed by seed."""
    placed = (place(each, arm, seed) for each in comparisons for seed in each.seeds for arm in each.arms)
    jobs: dict[Path, Job] = {}
    for job in sorted(placed, key=lambda job: job.config.seed):
        jobs.setdefault(job.folder, job)
    return jobs


def by_arm(folder: Path) -> PlaceJob:
    """Place each run in a folder named after its arm and seed."""

    def place(comparison: Comparison, arm: Arm, seed: int) -> Job:
        name = f"{re.sub('[^A-Za-z0-9._=]{1,2}', '-', arm.name)}-seed{seed}"
        return Job(f"{arm.name}, seed {seed}", replace(comparison.config(arm, seed), arm=arm.name), folder / name)

    return place


# ---- The search for lambda

FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0)  # multiples of the arm's lambda
MOST_EXTENSIONS = 3


@dataclass(frozen=True)
class TuningResult:
    """The result of a search over lambda for one arm."""

    arm: Arm
    losses: dict[float, float] = field(default_factory=dict)  # final loss by lambda; infinite if the run diverged

    def at(self, lam: float) -> Arm:
        return Arm(f"{self.arm.name}, lambda={lam:g}", replace(self.arm.optimizer, weight_decay=lam))

    @property
    def best(self) -> float:
        return min(sorted(self.losses), key=self.losses.__getitem__)

    @property
    def diverged(self) -> bool:
        """Whether the run diverged at every lambda."""
        return math.isinf(self.losses[self.best])

    @property
    def at_edge(self) -> bool:
        """Whether the best lambda is the smallest or largest tried, so the true best may be outside."""
        return not self.diverged and self.best in (min(self.losses), max(self.losses))

    def untried(self) -> list[float]:
        """Return the lambdas to try first, then one beyond the edge at a time, and none once the best is inside."""
        if not self.losses:
            return sorted({*multiples(self.arm.optimizer.weight_decay, FACTORS, digits=4)})
        if not self.at_edge or len(self.losses) < 2:
            return []
        inner = sorted(self.losses)[1 if self.best == min(self.losses) else -2]  # go on by the same factor
        return multiples(self.best, [self.best / inner], digits=4)


def tune(train: Train, base: RunConfig, arms: Sequence[Arm], *, seed: int) -> list[TuningResult]:
    """Try multiples of each arm's lambda on one seed.

    If the best is the smallest or largest tried, the search extends beyond it, up to three times. Do not use the seed
    for the comparison as well: that would favour the luckier arm.
    """
    results = [TuningResult(arm) for arm in arms]
    for _ in range(1 + MOST_EXTENSIONS):
        new = [(result, lam) for result in results for lam in result.untried()]
        # A step must not remove more than the entire weight.
        new = [(result, lam) for result, lam in new if not max(decay_factors(base, result.at(lam).optimizer)) > 1.0]
        if not new:
            break
        tried = tuple(result.at(lam) for result, lam in new)
        (runs,) = train([Comparison("search", base, tried, (seed,), paired=False)]).values()
        for result, lam in new:
            result.losses[lam] = swept_loss(runs[result.at(lam).name][0])
    return results


def sweep_table(results: Sequence[TuningResult]) -> Table:
    def cell(result: TuningResult, lam: float) -> Cell | None:
        loss = result.losses.get(lam)
        if loss is None or math.isinf(loss):
            return None if loss is None else Cell("diverged")
        return Cell(decimals(loss), tone="holds" if lam == result.best else "")

    lambdas = sorted({lam for result in results for lam in result.losses})
    columns = [Column("lambda"), *(Column(result.arm.name, number=True) for result in results)]
    rows = [(f"{lam:g}", *(cell(result, lam) for result in results)) for lam in lambdas]
    note = "Final validation loss on one seed that is used only for the search; the best of each column is highlighted."
    return Table("sweep", "Search over lambda", columns, rows, note)


# ---- Outcome

Measure = Callable[[Run], float]  # NaN if a run diverged or did not record it
LOSS = "loss"


def completed(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.diverged is None]


def swept_loss(run: Run) -> float:
    """Return the final loss, or infinity for a run without one."""
    return math.inf if math.isnan(run.final_loss) else run.final_loss


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def pairs_by_seed(arm: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair the runs of two arms by the seeds that both completed."""
    by_seed = {run.seed: run for run in completed(baseline)}
    return [(run, by_seed[run.seed]) for run in completed(arm) if run.seed in by_seed]


def paired(arm: Sequence[Run], baseline: Sequence[Run], measure: Measure) -> list[float]:
    """Subtract a measure of the baseline from that of the arm, seed by seed."""
    return [measure(run) - measure(other) for run, other in pairs_by_seed(arm, baseline)]


def metrics_of(runs: Sequence[Run]) -> dict[str, Measure]:
    """Return what a task measures besides its loss, at the last evaluation."""
    return {name: methodcaller("final_metric", name) for run in runs for name in run.metrics}


@dataclass(frozen=True)
class ArmOutcome:
    """One arm over its seeds; values are those of completed runs."""

    name: str
    rule: str
    weight_decay: float
    seeds: tuple[int, ...]  # of the completed runs, in the order of the values below
    final: tuple[float, ...]  # last validation loss of each run
    best: tuple[float, ...]  # lowest validation loss of each run
    norm: tuple[float, ...]  # weight RMS of the decayed matrices at the end of each run
    total_decay: float  # sum of phi; NaN under a rule that depends on the gradients
    diverged: Mapping[int, int]  # by seed, the step at which a run diverged
    skipped: Mapping[int, int] = field(default_factory=dict)  # by seed, the number of steps with non-finite gradients
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by name, at the last evaluation


@dataclass(frozen=True)
class Difference:
    """A measure of one arm minus that of its baseline, seed by seed."""

    arm: str
    baseline: str
    measure: str  # the final loss, or a metric of the task
    seeds: tuple[int, ...]  # that both completed, in the order of the values
    values: tuple[float, ...]
    mean: float  # NaN if there are none
    interval: Interval | None  # of the mean; None with fewer than two seeds


@dataclass(frozen=True)
class Outcome:
    """The arms of a comparison, and the differences between them."""

    arms: tuple[ArmOutcome, ...]
    differences: tuple[Difference, ...]
    unit: str = "nats"  # of the losses; empty if unknown


def compare(runs: Runs, pairs: Sequence[tuple[str, str]] = ()) -> Outcome:
    """Summarize the runs of several arms; by default, the first arm is the baseline of the others."""
    first, *others = runs
    pairs = pairs or [(other, first) for other in others]
    compared = chain(*(differences(runs[arm], runs[baseline]) for arm, baseline in pairs))
    return Outcome(tuple(map(arm_outcome, runs.values())), tuple(compared), runs[first][0].unit)


def arm_outcome(runs: Sequence[Run]) -> ArmOutcome:
    first, ended = runs[0], completed(runs)
    return ArmOutcome(
        name=first.arm,
        rule=first.rule,
        weight_decay=first.config.optimizer.weight_decay,
        seeds=tuple(run.seed for run in ended),
        final=tuple(run.final_loss for run in ended),
        best=tuple(run.best_loss for run in ended),
        # `final_norm` covers all weights if none decay; such a norm is not comparable.
        norm=tuple(run.final_norm if run.scope("decayed").records else math.nan for run in ended),
        total_decay=math.fsum(decay_factors(first.config, first.config.optimizer)),
        diverged={run.seed: run.diverged for run in runs if run.diverged is not None},
        skipped={run.seed: number for run in ended if (number := (run.result or {}).get("skipped"))},
        metrics={name: tuple(map(metric, ended)) for name, metric in metrics_of(runs).items()},
    )


def differences(arm: Sequence[Run], baseline: Sequence[Run]) -> list[Difference]:
    """Compare two arms on the seeds that both completed: first the final loss, then every metric."""
    seeds = tuple(run.seed for run, _ in pairs_by_seed(arm, baseline))
    measures: dict[str, Measure] = {LOSS: attrgetter("final_loss"), **metrics_of([*arm, *baseline])}
    result = []
    for name, measure in measures.items():
        values = tuple(paired(arm, baseline, measure))
        result.append(Difference(arm[0].arm, baseline[0].arm, name, seeds, values, mean(values), interval_of(values)))
    return result


def describe_divergence(steps: Mapping[int, int]) -> str:
    """Name the step at which each run diverged, such as "at step 57 (seed 0) and 60 (seed 2)"."""
    return "at step " + " and ".join(f"{step:,} (seed {seed})" for seed, step in steps.items())


# ---- The verdict


def advice_for(base: RunConfig, optimizer: OptimizerConfig, epochs: float) -> Advice:
    """Apply the formula of `muonsw advise` to constant or scaled decay."""
    schedule = base.schedule
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
    """Describe the outcome: lost runs, whether decay matters, whether lambda fits, the differences, then caveats."""
    lines = []
    for arm in outcome.arms:
        if arm.diverged:
            effect = "the comparison uses its other seeds, which flatters it" if arm.seeds else "it has no final loss"
            lines.append(f"{arm.name!r} diverged {describe_divergence(arm.diverged)}: {effect}.")
        if arm.skipped:
            seeds = ", ".join(f"{counted(number, 'step')} (seed {seed})" for seed, number in arm.skipped.items())
            lines.append(f"{arm.name!r} skipped {seeds} with non-finite gradients: lower its learning rate.")

    known = [arm for arm in outcome.arms if not math.isnan(arm.total_decay)]  # not rules that depend on gradients
    totals = ", ".join(f"{arm.total_decay:.2g} ({arm.name!r})" for arm in known)
    acting = [arm for arm in known if arm.total_decay >= IDLE]
    if acting:
        where = "in this run" if acting == known else f"under {' and '.join(repr(arm.name) for arm in acting)} only"
        lines.append(f"Decay matters {where}: total decay is {totals}.")
    elif known == list(outcome.arms):
        idle = f"Too short for decay to matter: total decay is {totals}, below {IDLE:g}."
        lines.append(f"{idle} Raise lambda or train longer.")
    if advice and advice.verdict and len({arm.weight_decay for arm in outcome.arms if arm.name != CONTROL}) == 1:
        favours = "Too large a lambda favours the rule that decays less." if advice.verdict == "large" else ""
        lines += [advice.answer, favours]

    lines += [_describe(difference, outcome.unit) for difference in outcome.differences]
    # The share of the gain that constant decay with the same total has too.
    losses = [difference for difference in outcome.differences if difference.measure == LOSS]
    for control in (difference for difference in losses if difference.baseline == CONTROL and difference.seeds):
        gain = next((difference for difference in losses if difference.arm == control.arm), control)
        if gain is not control and gain.interval is not None and gain.interval.high < 0:
            share = min(1.0, max(0.0, 1.0 - control.mean / gain.mean))
            lines.append(f"So {share:.0%} of the gain is explained by less total decay.")

    if diverged := " and ".join(result.arm.name for result in tuned if result.diverged):
        lines.append(f"Every lambda tried for {diverged} diverged: lower the learning rate.")
    if edges := " and ".join(f"{result.arm.name} ({result.best:g})" for result in tuned if result.at_edge):
        lines.append(f"The best lambda of {edges} is at the edge of those tried; a better one may lie beyond.")
    rules = {arm.rule for arm in outcome.arms if arm.total_decay >= IDLE}
    if not tuned and len(rules) > 1 and not (advice and advice.verdict == "fine"):
        lines.append("The answer may differ at another lambda: --tune-lambda compares each rule at its best.")
    return " ".join(filter(None, lines))


def _describe(difference: Difference, unit: str) -> str:
    """Describe a difference with its interval; empty for a metric without one number for each seed."""
    arm, baseline, measure = repr(difference.arm), repr(difference.baseline), difference.measure
    if not math.isfinite(difference.mean):
        why = "a run has no final loss" if difference.seeds else "no seed completed in both"
        return f"{arm} and {baseline} cannot be compared: {why}." if measure == LOSS else ""
    size = f"{signed(difference.mean)}{f' {unit}' if unit and measure == LOSS else ''}"
    if difference.interval is None:
        return f"The {measure} of {arm} minus that of {baseline} is {size}; one seed gives no error bar."
    low, high = difference.interval.low, difference.interval.high
    over = f"over {counted(len(difference.seeds), 'seed')} ({size}, 95% t interval {signed(low)} to {signed(high)})"
    if 0.0 in difference.interval:
        return f"No significant difference in {measure} between {arm} and {baseline} {over}."
    return f"{arm} ended with a {'lower' if difference.mean < 0 else 'higher'} {measure} than {baseline} {over}."


# ---- Tables


def arms_table(outcome: Outcome) -> Table:
    """Show the losses and norms of each arm with their intervals over seeds."""
    metrics = list(dict.fromkeys(name for arm in outcome.arms for name in arm.metrics))
    titles = ("lambda", "total decay", "final loss", *metrics, "best loss", "weight RMS at the end")
    columns = [Column("arm"), *(Column(title, number=True) for title in titles)]
    rows = []
    for arm in outcome.arms:
        final: Value | Cell = with_interval(arm.final)
        if arm.diverged:
            text = "diverged" if not arm.seeds else f"{final}, {len(arm.diverged)} diverged"
            final = Cell(text, note=describe_divergence(arm.diverged), tone="fails")
        total = None if math.isnan(arm.total_decay) else f"{arm.total_decay:.3g}"
        measured = [with_interval(arm.metrics.get(name, ())) for name in metrics]
        norm = with_interval(arm.norm, digits=3)
        rows.append((arm.name, arm.weight_decay, total, final, *measured, with_interval(arm.best), norm))
    measure = "validation cross-entropy in nats a token" if outcome.unit else "on validation batches"
    note = (
        f"Losses: {measure}; mean over seeds ± half the 95% t interval. Total decay: the share of a weight that decay "
        "removes in a step, summed over all steps."
    )
    return Table("arms", "Arms", columns, rows, note)


def differences_table(differences: Sequence[Difference]) -> Table:
    """Show the paired differences of each arm from its baseline."""
    titles = ("difference", "95% t interval", "seed by seed")
    columns = [Column("arms"), *(Column(title, number=True) for title in titles)]
    rows = []
    for each in differences:
        interval = each.interval if math.isfinite(each.mean) else None
        between = None if interval is None else f"[{signed(interval.low)}, {signed(interval.high)}]"
        by_seed = ", ".join(map(signed, each.values)) or None
        rows.append((f"{each.measure}: {each.arm} minus {each.baseline}", signed(each.mean), between, by_seed))
    note = "Final values, paired by seed. A negative difference of the loss is better."
    return Table("differences", "Paired difference", columns, rows, note)


def with_interval(values: Sequence[float], digits: int = 4) -> str | None:
    """Format a mean with the half-width of its interval; None if there are no values.

    Examples:
        >>> with_interval([1.0, 2.0, 3.0]), with_interval([]), with_interval([math.nan])
        ('2.0000 ± 2.4841', None, None)
    """
    average, interval = mean(values), interval_of(values)
    half = "" if interval is None else f" ± {decimals((interval.high - interval.low) / 2, digits)}"
    return None if math.isnan(average) else f"{decimals(average, digits)}{half}"


def signed(value: float) -> str:
    """Format a difference with four decimals, or two significant digits if those would be zero.

    Examples:
        >>> signed(0.01234), signed(-3.21e-6), signed(0.0), signed(math.nan)
        ('+0.0123', '-3.2e-06', '+0.0000', '\N{EN DASH}')
    """
    return f"{value:+.2g}" if 0 < abs(value) < 0.00005 else decimals(value, sign="+")
