"""Worked tasks under both rules: does the rule carry over to other models, other data and later stages of training?

`muonsw compare --task FILE --control --record evidence/tasks.jsonl` makes the records. The claims were written
when `vision.py`, `bandit.py`, and `finetune.py` from one model of each rule had been run, and before all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from muonsw.lab.claims.claim import Claim, Estimate, Interval, Source, at_most, below
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs import Run
from muonsw.lab.runs.records import Records
from muonsw.lab.studies.arms import CONSTANT, CONTROL, RULES, SCALED, Key, Results, Runs
from muonsw.lab.studies.compare import LOWER
from muonsw.lab.studies.outcome import Measure, arm_outcome, last_loss, mean, metric_names, paired
from muonsw.lab.train.config import RunConfig

NAME = "tasks"
ARMS = (*RULES, CONTROL)
SOURCE = Source("its outlook: other architectures, modalities and stages of training", "the worked tasks as they stand")
BY_CHANCE = Tolerance(0.0, "of a dozen comparisons one may lie beyond its 95% interval by chance")
# The fine-tuning of models that were pre-trained under each rule.
TUNED = {rule: f"finetune.py start={rule}-seed{{seed}} text=new.txt" for rule in RULES}


def described(config: RunConfig) -> str:
    """A task with its options, without the folders of files.

    Examples:
        >>> from muonsw.lab.tasks import TaskConfig
        >>> described(RunConfig(task=TaskConfig("examples/tasks/audio.py", ("depth=2", "folder=sounds/digits"))))
        'audio.py depth=2 folder=digits'
    """
    assert config.task is not None
    options = (one.partition("=") for one in config.task.options)
    return " ".join([config.task.name, *(f"{name}={Path(value).name}" for name, _, value in options)])


def comparison_key(config: RunConfig) -> str:
    """What the runs of a comparison share, as its records say it."""
    chosen = config.optimizer
    return f"{described(config)}, {config.steps} updates, lr {chosen.lr:g}, lambda {chosen.weight_decay:g}"


def recorded(records: Records) -> Results:
    """The comparisons of a file that have both rules; arms besides those of `ARMS` are left out."""
    found: defaultdict[str, dict[str, list[Run]]] = defaultdict(lambda: {name: [] for name in ARMS})
    for line, run in zip(records.lines, records.runs.values(), strict=True):
        if run.arm in ARMS:
            found[line["comparison"]][run.arm].append(run)
    both = {Key(name): arms for name, arms in found.items() if arms[CONSTANT] and arms[SCALED]}
    return {key: {name: runs for name, runs in arms.items() if runs} for key, arms in both.items()}


def difference(runs: Runs, other: str, measure: Measure = last_loss) -> Estimate | None:
    """Scaled decay minus another arm, paired by seed; None where there is nothing to compare."""
    found = paired(runs[SCALED], runs[other], measure) if other in runs else []
    return over_seeds(found) if found else None


def metric(name: str) -> Measure:
    """What was measured beside the loss at the last evaluation."""
    return lambda run: run.final_metric(name)


def tasks_table(results: Results) -> Table:
    """One row for each comparison: how much decay there was, and the differences of loss and metrics."""
    numbers = ("updates", "lambda", "sum of phi", "loss", "difference", "at the same total", "of the metric")
    columns = [Column("task"), *(Column(name, number=True) for name in numbers)]
    note = (
        "Sum of phi and loss are constant decay's; differences are scaled minus constant decay at one lambda, then at "
        "the lambda at which constant decay takes the same total, with 95% t intervals over seeds. Bold is beyond "
        "chance."
    )
    return Table(NAME, "Other models and other tasks", columns, [_row(runs) for runs in results.values()], note)


def _row(runs: Runs) -> list[Value | Cell]:
    constant, config = arm_outcome(runs[CONSTANT]), runs[CONSTANT][0].config
    metrics = [_cell(difference(runs, CONSTANT, metric(name)), name) for name in metric_names(runs[SCALED])]
    return [
        f"`{described(config)}`",
        config.steps,
        config.optimizer.weight_decay,
        f"{constant.total_decay:.2g}",
        f"{mean(constant.final):.3f}",
        _cell(difference(runs, CONSTANT)),
        _cell(difference(runs, CONTROL)),
        metrics[0] if metrics else None,
    ]


def _cell(found: Estimate | None, name: str = "") -> Cell | None:
    if found is None:
        return None
    text, interval = f"{name} {found.value:+.3f}".strip(), found.interval
    if interval is None:
        return Cell(f"{text} (one seed)")
    beyond = 0.0 not in interval
    return Cell(f"{text} ({interval.low:+.3f} to {interval.high:+.3f})", tone="holds" if beyond else "")


def summary(results: Results) -> str:
    """In how many comparisons the rules differ beyond chance."""
    same, total = (_intervals(results, other) for other in (CONSTANT, CONTROL))
    return (
        f"At one lambda scaled decay ended lower in {_below(same)} of {len(same)} comparisons beyond chance, and "
        f"higher in {_above(same)}; than constant decay of the same total it ended lower in {_below(total)}, and "
        f"higher in {_above(total)}. Chance alone would make {0.05 * len(same):.1f} of {len(same)}."
    )


def _intervals(results: Results, other: str) -> list[Interval]:
    gaps = (difference(runs, other) for runs in results.values())
    return [gap.interval for gap in gaps if gap and gap.interval]


def _below(intervals: Sequence[Interval]) -> int:
    return sum(one.high < 0 for one in intervals)


def _above(intervals: Sequence[Interval]) -> int:
    return sum(one.low > 0 for one in intervals)


def judge_tasks(results: Results) -> list[Claim]:
    """Nowhere worse beyond chance; and models that were pre-trained with scaled decay are easier to fine-tune."""
    found = []
    for id, other, words in (
        ("same-lambda", CONSTANT, "constant decay at the same lambda"),
        ("same-total", CONTROL, "constant decay of the same total"),
    ):
        gaps = _intervals(results, other)
        statement = f"of {len(gaps)} comparisons, scaled decay ends above {words}, beyond chance, in at most one"
        if gaps:
            found.append(at_most(id, statement, SOURCE, _above(gaps), 1.0, BY_CHANCE))
    return found + _judge_pre_training(results)


def _judge_pre_training(results: Results) -> list[Claim]:
    """Models of both rules, fine-tuned with scaled decay, seed by seed."""
    by_task = {described(runs[SCALED][0].config): runs[SCALED] for runs in results.values()}
    if not set(TUNED.values()) <= set(by_task):
        return []
    scaled, constant = (by_task[TUNED[rule]] for rule in (SCALED, CONSTANT))
    statement = (
        "models pre-trained with scaled decay end lower after fine-tuning than those with constant decay, on the"
    )
    return [
        below(id, f"{statement} {id} text", SOURCE, over_seeds(paired(scaled, constant, measure)), 0.0, LOWER)
        for id, measure in (("new", last_loss), ("old", metric("old")))
    ]
