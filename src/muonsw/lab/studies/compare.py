"""The study behind `muonsw compare`: one comparison, and a verdict that says first whether decay acts at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from muonsw.lab import paper
from muonsw.lab.advise import RULES, Advice, Advise
from muonsw.lab.claims.claim import Claim, Source, above, below
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.claims.table import Claims
from muonsw.lab.console import Table
from muonsw.lab.paper import Tolerance
from muonsw.lab.recipes import IDLE
from muonsw.lab.report.report import write_report
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import CONTROL, Arm, Comparison, Key, Runs, hidden_multiplier, same_total
from muonsw.lab.studies.outcome import (
    ArmOutcome,
    Outcome,
    PairOutcome,
    arms_table,
    compare,
    describe_divergence,
    last_loss,
    pair_outcome,
    paired,
    pairs_table,
    signed,
)
from muonsw.lab.studies.study import PAGE, Conclusion, Study
from muonsw.lab.studies.tuning import TuningResult, edge_note, sweep_table, tune
from muonsw.lab.studies.workshop import Workshop
from muonsw.lab.train.config import RunConfig
from muonsw.text import counted

NAME = "comparison"
KEY = Key(NAME)
SAME_LAMBDA = "the same weights, batches, learning rate and lambda for both rules"
MAIN_TABLE = Source(paper.TABLE, SAME_LAMBDA)
LOWER = Tolerance(0.0, "the whole interval of the paired difference must lie below zero")
# Norms that differ by less than this did not move, whatever the interval.
MOVED = Tolerance(0.01, "the whole interval of the paired difference must lie above a hundredth: less is no movement")


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison trained, and what a search for lambda found before."""

    runs: Runs
    outcome: Outcome
    tuned: Sequence[TuningResult]


@dataclass(frozen=True)
class CompareStudy(Study[ComparisonResult]):
    """Arms against a baseline, on the same weights and batches."""

    base: RunConfig  # what the arms share
    arms: tuple[Arm, ...]  # the first is the baseline
    seeds: int  # how many
    title: str  # of the page
    control: bool = False  # whether constant decay of the total of the first scaled arm is added
    tune_lambda: bool = False  # whether each arm is compared at its best lambda, found on a seed of its own
    epochs: float = 1.0  # how often a run sees its text
    claims: bool = False  # whether the paper's claims are judged
    name: str = field(default="compare", init=False)
    numbers: ClassVar[str] = "outcome.json"

    def run(self, workshop: Workshop) -> ComparisonResult:
        """Search for lambda where that is asked, then train every arm with every seed."""
        tuned = tune(workshop.train, self.base, self.arms, seed=self.seeds) if self.tune_lambda else []
        arms = [one.arm for one in tuned] or list(self.arms)
        scaled = next((arm for arm in arms if arm.optimizer.decay == "scaled"), None)
        if self.control and scaled is not None:
            arms.append(same_total(self.base, scaled))
        runs = workshop.train([Comparison(KEY, self.base, tuple(arms), tuple(range(self.seeds)))])[KEY]
        outcome = compare(runs)
        if self.control and scaled is not None:
            # The control is the baseline of the scaled arm: what differs is when decay acts, not how much there is.
            others = [pair for pair in outcome.pairs if pair.arm != CONTROL]
            outcome = replace(outcome, pairs=(*others, pair_outcome(runs[CONTROL], runs[scaled.name])))
        return ComparisonResult(runs, outcome, tuned)

    def judge(self, found: ComparisonResult) -> Claims:
        """The paper's claims, which are about one lambda for both rules; none where each has its own."""
        own_task = self.base.task is not None  # the paper claims nothing about it
        return {NAME: effects(found.runs, found.outcome)} if self.claims and not (self.tune_lambda or own_task) else {}

    def sentence(self, found: ComparisonResult, claims: Claims) -> str:  # noqa: ARG002
        """The verdict."""
        measured = [arm for arm in self.arms if _like_our_runs(arm) and not (found.tuned or self.base.task)]
        judged = max(measured, key=lambda arm: arm.optimizer.decay, default=None)  # the scaled arm, where there is one
        advice = advise_arm(self.base, judged, self.epochs) if judged else None
        return verdict(found.outcome, found.tuned, advice)

    def record(self, found: ComparisonResult, claims: Claims, seconds: float) -> dict[str, Any]:  # noqa: ARG002 (see its runs)
        """The verdict, every arm, every pair, the search over lambda, the claims."""
        judged = [claim.as_data() for claim in claims.get(NAME, ())]
        search = [one.as_data() for one in found.tuned]
        return {"verdict": self.sentence(found, claims), **found.outcome.as_data(), "search": search, "claims": judged}

    def tables(self, found: ComparisonResult) -> list[Table]:
        """Arms, pairs, and the search."""
        search = [sweep_table(found.tuned)] if found.tuned else []
        return [arms_table(found.outcome), pairs_table(found.outcome.pairs), *search]

    def draw(self, found: ComparisonResult, conclusion: Conclusion, folder: Path, *, images: bool) -> list[Path]:
        """The page: the paired difference before the curves, everything else after them."""
        arms, pairs, *search = conclusion.tables
        return write_report(
            folder / PAGE,
            self.title,
            [run for those in found.runs.values() for run in those],
            verdict=conclusion.sentence,
            claims=conclusion.claims if any(conclusion.claims.values()) else None,
            tables=[pairs],
            details=[arms, *search],
            images=images,
        )


def advise_arm(base: RunConfig, arm: Arm, epochs: float) -> Advice:
    """What the formula says about the lambda of an arm with constant or scaled decay."""
    optimizer, schedule = arm.optimizer, base.schedule
    rule: Any = optimizer.decay
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
        epochs=epochs,
    ).advice()


def _like_our_runs(arm: Arm) -> bool:
    optimizer = arm.optimizer
    plain = optimizer.algorithm == "muon" and optimizer.norm == "free" and not optimizer.preset
    return plain and optimizer.decay in RULES


def effects(runs: Runs, outcome: Outcome) -> list[Claim]:
    """The claims that a comparison of scaled with constant decay allows; none where it compares other things."""
    arms = {arm.name: arm for arm in outcome.arms}
    found = []
    for pair in outcome.pairs:
        one, other = arms[pair.baseline], arms[pair.arm]
        rules = (one.rule, other.rule) == ("constant", "scaled") and _same_but_rule(runs, pair)
        if rules and _same_lambda(one, other) and pair.interval is not None:
            statement = f"{pair.arm} ends at a lower validation loss than {pair.baseline}"
            limits = "at this size and length the gain need not be the paper's"
            both = runs[pair.baseline], runs[pair.arm]
            found.append(lower_loss("loss", statement, *both, limits=limits))
            if not any(map(math.isnan, one.norm_change + other.norm_change)):  # they were recorded
                found.append(kept_norm("norm", HELD, *both))
    return found


HELD = "constant decay shrinks the weights while the learning rate falls, scaled decay holds them"


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


def verdict(outcome: Outcome, tuned: Sequence[TuningResult] = (), advice: Advice | None = None) -> str:
    """What came out: whether decay acts, whether lambda is sensible, the differences, then what to be careful about."""
    arms = {arm.name: arm for arm in outcome.arms}
    lines = [_diverged(arm) for arm in outcome.arms if arm.diverged]
    lines += [_skipped(arm) for arm in outcome.arms if arm.skipped]
    lines += [_acts(outcome.arms), _sensible(outcome.arms, advice)]
    for pair in outcome.pairs:
        lines += [_loss(pair, arms, outcome.unit), *(_metric(pair, name) for name in pair.metrics)]
    lines += [_less_decay(outcome.pairs), edge_note(tuned)]
    rules = {arm.rule for arm in outcome.arms if arm.total_decay >= IDLE}
    if not tuned and len(rules) > 1 and not (advice and advice.verdict == "fine"):
        lines.append("At another lambda the answer may differ: --tune-lambda compares each rule at its best.")
    return " ".join(line for line in lines if line)


def _diverged(arm: ArmOutcome) -> str:
    where = f"{arm.name!r} diverged {describe_divergence(arm.diverged)}"
    if not arm.seeds:
        return f"{where}: it cannot be trained with these settings, so it has no final loss to compare."
    return f"{where}; it is compared on its other seeds, which flatters it."


def _skipped(arm: ArmOutcome) -> str:
    seeds = ", ".join(f"{counted(number, 'update')} (seed {seed})" for seed, number in arm.skipped.items())
    return f"{arm.name!r} skipped {seeds}, whose gradients were not finite: lower its learning rate."


def _acts(arms: Sequence[ArmOutcome]) -> str:
    """Whether decay acts; empty where no total is known before the run."""
    known = [arm for arm in arms if not math.isnan(arm.total_decay)]
    totals = ", ".join(f"{arm.total_decay:.2g} ({arm.name!r})" for arm in known)
    if known and all(arm.total_decay < IDLE for arm in arms):  # never where a total is not known
        return f"Too short for decay to matter: total decay is below {IDLE:g}, {totals}. Raise lambda or train longer."
    return f"Decay acts in this run: total decay is {totals}." if known else ""


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


def _loss(pair: PairOutcome, arms: dict[str, ArmOutcome], unit: str) -> str:
    seeds, unit = counted(len(pair.seeds), "seed"), f" {unit}" if unit else ""
    size = f"{signed(abs(pair.mean))[1:]}{unit}"
    if not pair.seeds:
        return f"{pair.arm!r} and {pair.baseline!r} cannot be compared: no seed was completed by both."
    if not math.isfinite(pair.mean):
        return f"{pair.arm!r} against {pair.baseline!r}: a run has no final loss."
    if pair.interval is None:
        where = f"{size} {'below' if pair.mean < 0 else 'above'} {pair.baseline!r}"
        where = where if pair.mean else f"at the same loss as {pair.baseline!r}"
        return f"{pair.arm!r} ended {where}; one seed gives no error bar."
    spread = f"{signed(pair.mean)}{unit}, 95% t interval {signed(pair.interval.low)} to {signed(pair.interval.high)}"
    if pair.interval.low <= 0.0 <= pair.interval.high:
        return f"No significant difference between {pair.arm!r} and {pair.baseline!r} over {seeds} ({spread})."
    word = "lower" if pair.mean < 0 else "higher"
    text = f"{pair.arm!r} ended {word} than {pair.baseline!r} over {seeds} ({spread}"
    if pair.baseline != CONTROL and not math.isnan(arms[pair.arm].weight_decay):
        text += "; same lambda" if _same_lambda(arms[pair.arm], arms[pair.baseline]) else "; different lambda"
    text += ")."
    match = pair.mean_match
    if word == "lower" and match is not None:
        text += f" It matched the best loss of {pair.baseline!r} in {100 * match:.0f}% of the steps."
    return text


def _less_decay(pairs: Sequence[PairOutcome]) -> str:
    """How much of a gain constant decay of the same total has too; empty without a control or a gain."""
    control = next((pair for pair in pairs if pair.baseline == CONTROL), None)
    gain = next((pair for pair in pairs if control and pair.arm == control.arm and pair.baseline != CONTROL), None)
    if control is None or gain is None or gain.interval is None or not gain.interval.high < 0 or not control.seeds:
        return ""
    share = min(1.0, max(0.0, 1.0 - control.mean / gain.mean))
    return f"So {share:.0%} of the gain is explained by less total decay."


def _metric(pair: PairOutcome, name: str) -> str:
    found = pair.metrics[name]
    if found.interval is None or not math.isfinite(found.mean):
        return f"Difference of {name}: {signed(found.mean)}." if math.isfinite(found.mean) else ""
    low, high = found.interval.low, found.interval.high
    chance = "not significant" if low <= 0.0 <= high else "significant"
    return f"Difference of {name}: {signed(found.mean)}, {chance} (95% t interval {signed(low)} to {signed(high)})."


def _same_but_rule(runs: Runs, pair: PairOutcome) -> bool:
    """Whether two arms share learning rate and optimizer: the paper claims nothing about others."""
    one, other = (runs[name][0].config.optimizer for name in (pair.baseline, pair.arm))
    rule = {name: getattr(other, name) for name in ("decay", "unnormalized", "peak", "weight_decay")}
    return replace(one, **rule) == other


def _same_lambda(one: ArmOutcome, other: ArmOutcome) -> bool:
    return math.isclose(one.weight_decay, other.weight_decay)
