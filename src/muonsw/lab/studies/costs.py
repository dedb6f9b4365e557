"""What a study would cost before anything is trained: runs, tokens, FLOPs, hours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from muonsw.lab.model import ModelConfig, count
from muonsw.lab.model.counts import orthogonalizer_flops
from muonsw.lab.studies.study import TrainingStudy
from muonsw.lab.tables import Column, Table, Value
from muonsw.lab.train.config import RunConfig


@dataclass(frozen=True)
class Cost:
    """Runs and what they take.

    Attributes:
        runs: How many.
        tokens: Trained on.
        flops: Training, Newton-Schulz and evaluation together.
    """

    runs: int
    tokens: int
    flops: float

    def hours(self, tflops: float, workers: int) -> float:
        """At a sustained rate for each run, with so many runs at a time."""
        return self.flops / (tflops * 1e12) / 3600.0 / max(1, min(workers, self.runs))


def run_flops(config: RunConfig) -> float:
    """FLOPs of one run: three passes a trained token, one a validated token, and Newton-Schulz in every update.

    Examples:
        >>> from muonsw.lab.train.presets import preset_run
        >>> f"{run_flops(preset_run('w256', '')):.2g}"
        '4e+18'
    """
    each, orthogonalizer = _sizes(config.model)
    evaluations = 1 + math.ceil(config.steps / config.eval_every)
    validated = evaluations * (config.data.eval_windows or 0) * config.model.sequence
    muon = orthogonalizer if config.optimizer.algorithm == "muon" else 0.0
    return config.steps * (config.tokens_per_step * each + muon) + validated * each / 3.0


@cache
def _sizes(model: ModelConfig) -> tuple[int, float]:
    return count(model).flops_per_token, orthogonalizer_flops(model)


def cost(configs: Iterable[RunConfig]) -> Cost:
    """Of runs, equal ones counted once."""
    distinct = list(dict.fromkeys(configs))
    tokens = sum(config.steps * config.tokens_per_step for config in distinct)
    return Cost(len(distinct), tokens, math.fsum(map(run_flops, distinct)))


def cost_table(study: TrainingStudy, tflops: float, workers: int) -> Table:
    """One row for each comparison, and the whole."""
    columns = (
        "comparison",
        Column("arms", rank=2),
        Column("seeds", number=True),
        Column("updates", number=True),
        Column("runs", number=True, rank=0),
        Column("tokens", number=True),
        Column("FLOPs", number=True),
        Column("hours", number=True, rank=0),
    )
    rows: list[Sequence[Value]] = [
        (
            str(one.key),
            "; ".join(arm.name for arm in one.arms),
            len(one.seeds),
            one.base.steps,
            *_numbers(cost(one.configs()), tflops, workers),
        )
        for one in study.planned()
    ]
    rows.append(("all, shared runs once", "", None, None, *_numbers(cost(study.runs()), tflops, workers)))
    at_once = "one run at a time" if workers == 1 else f"{workers} runs at a time"
    note = (
        f"Hours at {tflops:g} TFLOP/s sustained by each run, {at_once}. Runs are kept and shared between studies of "
        "a scale: what is complete is not trained again."
    )
    return Table("cost", "What it takes", columns, rows, note)


def _numbers(total: Cost, tflops: float, workers: int) -> Sequence[str | int]:
    return total.runs, amount(total.tokens), f"{total.flops:.3g}", hours_text(total.hours(tflops, workers))


def amount(tokens: int) -> str:
    """A number of tokens as people write it.

    Examples:
        >>> amount(18_350_080_000), amount(962_560)
        ('18.4B', '963K')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)


def hours_text(hours: float) -> str:
    """Hours in two or three digits, never as a power of ten.

    Examples:
        >>> hours_text(1630.4), hours_text(12.34), hours_text(0.0512)
        ('1,630', '12.3', '0.051')
    """
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 1 else f"{hours:.2g}"
