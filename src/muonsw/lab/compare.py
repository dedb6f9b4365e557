"""A comparison of arms: the search for lambda, the runs, claims, the verdict, and the files that say all of it.

The verdict says first whether decay acts at all, then whether lambda is sensible, then the differences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muonsw.lab import paper
from muonsw.lab.advise import IDLE, RULES, Advice, Advise
from muonsw.lab.arms import (
    CONTROL,
    Arm,
    Comparison,
    Key,
    Results,
    Runs,
    decay_factors,
    hidden_multiplier,
    multiples,
    same_total,
)
from muonsw.lab.console import Column, Table
from muonsw.lab.errors import UsageError
from muonsw.lab.files import numbered, plain, read_object, refuse_folder, reported, write_json
from muonsw.lab.outcome import (
    ArmOutcome,
    Outcome,
    PairOutcome,
    arms_table,
    compare,
    describe_divergence,
    last_loss,
    loss_cell,
    pair_outcome,
    paired,
    pairs_table,
    signed,
    swept_loss,
)
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.page import PAGE, write_report
from muonsw.lab.runs import Run
from muonsw.lab.stats import Claim, Source, above, below, over_seeds
from muonsw.lab.train.config import RunConfig
from muonsw.text import counted

NAME, NUMBERS = "comparison", "outcome.json"
SAME_LAMBDA = "the same weights, batches, learning rate and lambda for both rules"
MAIN_TABLE = Source(paper.TABLE, SAME_LAMBDA)
LOWER = Tolerance(0.0, "the whole interval of the paired difference must lie below zero")
# Norms that differ by less than this did not move, whatever the interval.
MOVED = Tolerance(0.01, "the whole interval of the paired difference must lie above a hundredth: less is no movement")
FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0)  # of lambda, in a search
MOST_EXTENSIONS = 3

Train = Callable[[Sequence[Comparison]], Results]


@dataclass(frozen=True)
class Question:
    """What is to be compared."""

    base: RunConfig  # what the arms share
    arms: tuple[Arm, ...]  # the first is the baseline
    seeds: int  # how many
    title: str  # of the page
    control: bool = False  # whether constant decay of the total of the first scaled arm is added
    tune_lambda: bool = False  # whether each arm is compared at its best lambda, found on a seed of its own
    epochs: float = 1.0  # how often a run sees its text
    claims: bool = False  # whether the paper's claims are judged


@dataclass(frozen=True)
class Answer:
    """What came out."""

    sentence: str  # the verdict
    outcome: Outcome
    claims: Sequence[Claim]
    tables: Sequence[Table]  # arms, pairs, and the search
    paths: Sequence[Path]  # what was written, the numbers first
    seconds: float


def answer(
    asked: Question,
    train: Train,
    folder: Path,
    *,
    images: bool = True,
    note: Callable[[str], None] = lambda _text: None,
) -> Answer:
    """Search for lambda if wanted, train every arm with every seed, judge, and write numbers and page."""
    refuse_folder(folder / NUMBERS)
    start = time.perf_counter()
    tuned = tune(train, asked.base, asked.arms, seed=asked.seeds) if asked.tune_lambda else []
    arms = [one.arm for one in tuned] or list(asked.arms)
    scaled = next((arm for arm in arms if asked.control and arm.optimizer.decay == "scaled"), None)
    if scaled is not None:
        arms.append(same_total(asked.base, scaled))
    key = Key(NAME)
    runs = train([Comparison(key, asked.base, tuple(arms), tuple(range(asked.seeds)))])[key]
    outcome = compare(runs)
    if scaled is not None:
        # The control is the baseline of the scaled arm: what differs is when decay acts, not how much there is.
        others = [pair for pair in outcome.pairs if pair.arm != CONTROL]
        outcome = replace(outcome, pairs=(*others, pair_outcome(runs[CONTROL], runs[scaled.name])))

    # The paper's claims are about one lambda for both rules, and about no task of the user's.
    judged = effects(runs, outcome) if asked.claims and not tuned and asked.base.task is None else []
    advice = None  # about the scaled arm, where there is one, if it is like the runs behind the formula
    for arm in sorted(asked.arms, key=lambda arm: arm.optimizer.decay):
        optimizer = arm.optimizer
        plain_muon = optimizer.algorithm == "muon" and optimizer.norm == "free" and not optimizer.preset
        if plain_muon and optimizer.decay in RULES and not (tuned or asked.base.task):
            advice = advise_arm(asked.base, arm, asked.epochs)
    said = verdict(outcome, tuned, advice)
    tables = [arms_table(outcome), pairs_table(outcome.pairs), *([sweep_table(tuned)] if tuned else [])]
    numbers = {
        "verdict": said,
        **outcome.as_data(),
        "search": [one.as_data() for one in tuned],
        "claims": [claim.as_data() for claim in judged],
    }
    seconds = time.perf_counter() - start
    written = write_numbers(folder / NUMBERS, numbers, note)
    page = write_report(
        folder / PAGE,
        asked.title,
        [run for those in runs.values() for run in those],
        verdict=said,
        claims={NAME: judged} if judged else None,
        tables=tables[1:2],
        details=[tables[0], *tables[2:]],
        images=images,
    )
    return Answer(said, outcome, judged, tables, [written, *page], seconds)


def write_numbers(path: Path, record: Mapping[str, Any], note: Callable[[str], None] = lambda _text: None) -> Path:
    """Write the numbers of a comparison or study; those of another one, or at other settings, are renamed first."""

    def lasting(data: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if key not in ("seconds", "environment")}

    if path.is_file():
        try:
            before = read_object(path)
        except UsageError:
            before = {}
        if lasting(before) != lasting(plain(record)):
            aside = numbered(path)
            with reported(path):
                path.rename(aside)
            note(f"{path} held the numbers of another study, or at other settings: they are now {aside}")
    return write_json(path, record)


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


# The search for lambda.


@dataclass(frozen=True)
class TuningResult:
    """What a search over lambda found for one arm."""

    name: str  # the arm as it was given
    arm: Arm  # the arm at its best lambda
    losses: Mapping[float, float]  # final loss by lambda; infinite where a run diverged

    @property
    def best(self) -> float:
        return self.arm.optimizer.weight_decay

    @property
    def found(self) -> bool:
        """Whether a run with any of the lambdas did not diverge."""
        return math.isfinite(self.losses[self.best])

    @property
    def at_edge(self) -> bool:
        """Whether the best is the smallest or the largest that was tried, so that a better one may lie beyond."""
        return self.found and self.best in (min(self.losses), max(self.losses))

    def as_data(self) -> dict[str, Any]:
        losses = [{"weight_decay": lam, "final": loss} for lam, loss in sorted(self.losses.items())]
        data: dict[str, Any] = plain({"arm": self.name, "best": self.best, "at_edge": self.at_edge, "losses": losses})
        return data


def tune(
    train: Train, base: RunConfig, arms: Sequence[Arm], *, seed: int, factors: Sequence[float] = FACTORS
) -> list[TuningResult]:
    """Try multiples of each arm's lambda on one seed and keep the best of each arm.

    Where the best is the smallest or the largest that was tried, the search goes on beyond it, a few times. The seed is
    for the search alone: a comparison on the same one would favour the arm that was luckier.
    """
    grids = {arm.name: sorted(factors) for arm in arms}
    for extensions in range(MOST_EXTENSIONS + 1):
        candidates: dict[str, list[Arm]] = {}
        for arm in arms:
            lambdas = multiples(arm.optimizer.weight_decay, grids[arm.name], digits=4)
            smallest, *larger = (_with_lambda(arm, f"lambda={lam:g}", lam) for lam in lambdas)
            # A step must not remove more than the whole weight; the smallest lambda was checked before.
            possible = [one for one in larger if not max(decay_factors(base, one.optimizer)) > 1.0]
            candidates[arm.name] = [smallest, *possible]
        key, everyone = Key("search"), tuple(one for those in candidates.values() for one in those)
        runs = train([Comparison(key, base, everyone, (seed,), paired=False)])[key]
        found = []
        for arm in arms:
            losses = {one.optimizer.weight_decay: swept_loss(runs[one.name][0]) for one in candidates[arm.name]}
            best = min(losses, key=losses.__getitem__)
            found.append(TuningResult(arm.name, _with_lambda(arm, f"best lambda={best:g}", best), losses))
        if extensions == MOST_EXTENSIONS or not any(tuned.at_edge for tuned in found):
            break
        for tuned in found:  # one more point beyond the edge that was best, as far from it as its neighbour
            grid = grids[tuned.name]
            if tuned.at_edge and tuned.best == min(tuned.losses):
                grids[tuned.name] = [grid[0] * grid[0] / grid[1], *grid]
            elif tuned.at_edge:
                grids[tuned.name] = [*grid, grid[-1] * grid[-1] / grid[-2]]
    return found


def _with_lambda(arm: Arm, words: str, weight_decay: float) -> Arm:
    return Arm(f"{arm.name}, {words}", replace(arm.optimizer, weight_decay=weight_decay))


def sweep_table(found: Sequence[TuningResult]) -> Table:
    lambdas = sorted({lam for tuned in found for lam in tuned.losses})
    columns = [Column("lambda"), *(Column(tuned.name, number=True) for tuned in found)]
    rows = [(f"{lam:g}", *(loss_cell(tuned.losses, lam) for tuned in found)) for lam in lambdas]
    note = "Final validation loss on one seed that is used for nothing else; the best of each column stands out."
    return Table("sweep", "Search over lambda", columns, rows, " ".join(filter(None, (note, edge_note(found)))))


def edge_note(found: Sequence[TuningResult]) -> str:
    """A sentence about searches that found no lambda, and about those that ended at an edge."""
    lost = " and ".join(tuned.name for tuned in found if not tuned.found)
    edges = " and ".join(tuned.arm.name for tuned in found if tuned.at_edge)
    notes = [f"Every lambda that was tried for {lost} diverged: lower the learning rate."] if lost else []
    if edges:
        notes.append(f"The best lambda of {edges} is at the edge of what was tried; a better one may lie beyond.")
    return " ".join(notes)


# Claims of the paper.


def effects(runs: Runs, outcome: Outcome) -> list[Claim]:
    """The claims that a comparison of scaled with constant decay allows; none where it compares other things."""
    arms = {arm.name: arm for arm in outcome.arms}
    claims = []
    for pair in outcome.pairs:
        one, other = arms[pair.baseline], arms[pair.arm]
        settings, theirs = (runs[name][0].config.optimizer for name in (pair.baseline, pair.arm))
        # The paper compares one optimizer at one learning rate and lambda.
        rule = {name: getattr(theirs, name) for name in ("decay", "unnormalized", "peak", "weight_decay")}
        same = replace(settings, **rule) == theirs and _same_lambda(one, other)
        if (one.rule, other.rule) == ("constant", "scaled") and same and pair.interval is not None:
            statement = f"{pair.arm} ends at a lower validation loss than {pair.baseline}"
            limits = "at this size and length the gain need not be the paper's"
            both = runs[pair.baseline], runs[pair.arm]
            claims.append(lower_loss("loss", statement, *both, limits=limits))
            if not any(map(math.isnan, one.norm_change + other.norm_change)):  # they were recorded
                held = "constant decay shrinks the weights while the learning rate falls, scaled decay holds them"
                claims.append(kept_norm("norm", held, *both))
    return claims


def lower_loss(
    id: str,
    statement: str,
    constant: Sequence[Run],
    scaled: Sequence[Run],
    *,
    source: Source = MAIN_TABLE,
    limits: str = "",
) -> Claim:
    """The scaled arm's final validation loss is lower, seed by seed."""
    return below(id, statement, source, over_seeds(paired(scaled, constant, last_loss)), 0.0, LOWER, limits=limits)


def kept_norm(id: str, statement: str, constant: Sequence[Run], scaled: Sequence[Run]) -> Claim:
    """The scaled arm keeps more of its largest norm, seed by seed."""
    kept = over_seeds(paired(scaled, constant, lambda run: run.norm_change))
    return above(id, statement, Source(paper.HEADLINE, SAME_LAMBDA), kept, 0.0, MOVED)


# The verdict.


def verdict(outcome: Outcome, tuned: Sequence[TuningResult] = (), advice: Advice | None = None) -> str:
    """What came out: whether decay acts, whether lambda is sensible, the differences, then caveats."""
    arms = {arm.name: arm for arm in outcome.arms}
    lines = []
    for arm in outcome.arms:
        if arm.diverged:
            fate = "it is compared on its other seeds, which flatters it"
            fate = fate if arm.seeds else "it cannot be trained with these settings, so it has no final loss to compare"
            lines.append(f"{arm.name!r} diverged {describe_divergence(arm.diverged)}: {fate}.")
    for arm in outcome.arms:
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
        lines.append(_difference(pair, arms, outcome.unit))
        for name, metric in pair.metrics.items():
            if math.isfinite(metric.mean):
                text = f"Difference of {name}: {signed(metric.mean)}"
                if metric.interval is not None:
                    low, high = metric.interval.low, metric.interval.high
                    chance = "not significant" if low <= 0.0 <= high else "significant"
                    text += f", {chance} (95% t interval {signed(low)} to {signed(high)})"
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
    """Whether lambda suits the length of the run; empty where no run of ours tells."""
    lambdas = {arm.weight_decay for arm in arms if arm.name != CONTROL}
    if advice is None or len(lambdas) > 1:
        return ""
    lam, better = f"Lambda {lambdas.pop():g}", ""
    if advice.verdict == "fine":
        return f"{lam} suits its length."
    if advice.low is not None and advice.high is not None:
        better = f" ({advice.low:.2g}{'' if advice.low == advice.high else f' to {advice.high:.2g}'} would suit it)"
    if advice.verdict == "large":
        return f"{lam} is too large for its length{better}, which favours the rule that decays less."
    return f"{lam} is small for its length{better}." if better else ""


def _difference(pair: PairOutcome, arms: Mapping[str, ArmOutcome], unit: str) -> str:
    seeds, unit = counted(len(pair.seeds), "seed"), f" {unit}" if unit else ""
    if not pair.seeds:
        return f"{pair.arm!r} and {pair.baseline!r} cannot be compared: no seed was completed by both."
    if not math.isfinite(pair.mean):
        return f"{pair.arm!r} against {pair.baseline!r}: a run has no final loss."
    if pair.interval is None:
        size = f"{signed(abs(pair.mean))[1:]}{unit} {'below' if pair.mean < 0 else 'above'}"
        where = size if pair.mean else "level with"
        return f"{pair.arm!r} ended {where} {pair.baseline!r}; one seed gives no error bar."
    spread = f"{signed(pair.mean)}{unit}, 95% t interval {signed(pair.interval.low)} to {signed(pair.interval.high)}"
    if pair.interval.low <= 0.0 <= pair.interval.high:
        return f"No significant difference between {pair.arm!r} and {pair.baseline!r} over {seeds} ({spread})."
    if pair.baseline != CONTROL:
        spread += "; same lambda" if _same_lambda(arms[pair.arm], arms[pair.baseline]) else "; different lambda"
    word = "lower" if pair.mean < 0 else "higher"
    text = f"{pair.arm!r} ended {word} than {pair.baseline!r} over {seeds} ({spread})."
    if word == "lower" and pair.mean_match is not None:
        text += f" It matched the best loss of {pair.baseline!r} in {100 * pair.mean_match:.0f}% of the steps."
    return text


def _same_lambda(one: ArmOutcome, other: ArmOutcome) -> bool:
    return math.isclose(one.weight_decay, other.weight_decay)
