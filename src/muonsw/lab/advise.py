"""`muonsw advise`: choose lambda so that total decay, the sum of phi over the run, is about 1.

The formula and its exceptions come from the runs in `research/runs.jsonl`; tests check it against them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rich.console import Console

from muonsw.decay import decay_factors
from muonsw.lab.console import paragraph
from muonsw.lab.errors import UsageError
from muonsw.lab.options import unset
from muonsw.lab.theory.schedule import sampled, schedule_of

# The best total in our runs; with a rate that is flat for most of the run, as in WSD, it was lower.
BEST, BEST_FLAT = 1.0, 0.35
# Total decay below this removes less than a quarter of a weight: exp(-0.3) = 0.74.
IDLE = 0.3
# Text seen 16 times needed this much more decay; text seen up to 4 times needed no more than fresh text.
REPEATED = {"constant": 20.0, "scaled": 40.0}
FEW_EPOCHS, MANY_EPOCHS = 4.0, 16.0
# A total within this factor of the best cost at most about 0.01 nats.
FINE = 2.0
# The shortest and longest of our runs, and the most tokens per active parameter. Within a factor of two of these we
# give one lambda, beyond it a range.
SHORTEST, LONGEST, TOKENS_PER_PARAMETER = 400, 34_800, 300
RANGE = (0.5, 4.0)
MEASURED = (
    f"In our runs (Muon, cosine, {SHORTEST:,} to {LONGEST:,} steps, widths 64 to 512, up to {TOKENS_PER_PARAMETER} "
    "tokens per parameter) total decay 1 ended 0.004 nats above the best lambda in the median, and at most 0.05."
)
FLAT = "In our runs, a rate that stays flat for most of the run needed at most a quarter of the lambda of a cosine."
ADAMW = "A range: we searched AdamW's lambda at one size and length only, where totals of 1 to 4 were best."
FAR = "A range, because this run is far from ours: {}."
REPEATS = (
    f"But text seen {MANY_EPOCHS:g} times needed {REPEATED['constant']:g} (constant) or {REPEATED['scaled']:g} "
    f"(scaled) times as much. We interpolate below {MANY_EPOCHS:g} and measured nothing above."
)


@dataclass(frozen=True)
class Advice:
    """An answer for one run."""

    answer: str  # in words
    verdict: str  # on the given lambda: "small", "fine" or "large"; empty if unknown
    total: float | None  # total decay at the given lambda
    low: float | None  # the smallest lambda to try; None if we recommend none
    high: float | None  # the largest lambda to try, equal to `low` if the formula gives one lambda
    notes: tuple[str, ...]  # the evidence


@dataclass(frozen=True)
class Advise:
    """Predict whether decay matters in a run, and which lambda to try.

    Nothing is trained. The lambda gives total decay 1, about the best in our runs.
    """

    steps: int
    """Steps of the run."""
    lr: float = 0.02
    """Peak learning rate of the matrices that decay."""
    weight_decay: Annotated[float | None, unset(metavar="LAMBDA")] = None
    """The lambda you plan to use."""
    decay: Literal["scaled", "constant"] = "scaled"
    """The decay rule."""
    schedule: str = "cosine"
    """Learning rate after warmup: cosine, wsd or constant."""
    final_fraction: float = 0.1
    """The learning rate at the end, as a share of the peak."""
    decay_fraction: float = 0.2
    """The share of the run in which the learning rate falls under wsd."""
    warmup_steps: Annotated[int | None, unset(metavar="N")] = None
    """Steps of warmup. Default: the paper's rule."""
    base_lr: Annotated[float | None, unset(metavar="LR")] = None
    """The peak before muP divides it, if scaled decay divides by that one (`--arm scaled,peak=base`)."""
    algorithm: Literal["muon", "adamw"] = "muon"
    """The optimizer of these matrices."""
    training: Literal["pretraining", "finetuning", "lora", "dpo", "bert"] = "pretraining"
    """What kind of run it is; we recommend a lambda only for pretraining."""
    epochs: float = 1.0
    """How many times the run sees its text."""
    tokens_per_parameter: Annotated[float | None, unset(metavar="NUMBER")] = None
    """Tokens of the run over active parameters of the model."""

    def run(self) -> int:
        try:
            advice = self.advice()
        except (ValueError, OverflowError) as error:
            raise UsageError(str(error)) from error
        for line in (advice.answer, *advice.notes):
            paragraph(Console(), line)
        return 0

    def advice(self) -> Advice:
        """Compute the answer.

        Raises:
            ValueError: If a number makes no sense.

        Examples:
            >>> Advise(25_600, lr=0.0116, weight_decay=0.1).advice().answer
            'Try lambda 0.0084 (total decay 1 instead of 12).'
        """
        for name in ("steps", "lr", "base_lr", "epochs", "tokens_per_parameter"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be a positive number")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay!r}: must be at least 0")

        # Total decay is proportional to lambda; `per` is the total at lambda 1.
        multiple = schedule_of(
            self.schedule,
            self.steps,
            warmup_steps=self.warmup_steps,
            final_fraction=self.final_fraction,
            decay_fraction=self.decay_fraction,
        )
        rates = [self.lr * share for share in sampled(multiple, self.steps)]  # a long run at evenly spaced steps
        per = self.steps / len(rates) * math.fsum(decay_factors(self.decay, 1.0, rates, self.base_lr or self.lr))
        total = None if self.weight_decay is None else self.weight_decay * per

        # The best total: one number, or a range if our runs do not support a single one.
        flat = self.schedule == "constant" or (self.schedule == "wsd" and self.decay_fraction < 0.5)
        fresh = BEST_FLAT if flat else BEST
        low = high = fresh * more_decay(self.decay, self.epochs)
        basis = FLAT if flat else MEASURED
        far = []
        if not SHORTEST / 2 <= self.steps <= LONGEST * 2:
            far.append(f"{self.steps:,} steps (ours: {SHORTEST:,} to {LONGEST:,})")
        if (tokens := self.tokens_per_parameter) is not None and tokens > 2 * TOKENS_PER_PARAMETER:
            far.append(f"{tokens:,.0f} tokens per parameter (ours: up to {TOKENS_PER_PARAMETER})")
        if far or self.algorithm == "adamw":
            low, high = RANGE[0] * low, RANGE[1] * high
            basis = ADAMW if self.algorithm == "adamw" else FAR.format(" and ".join(far))

        # No lambda: we measured none, it would have to be above 1 (our best were below 0.3), or one step at it would
        # remove the entire weight.
        if self.training != "pretraining" or fresh > per or high * self.lr >= per:
            return self._without_lambda(total)

        # Compare the given lambda with the range, or with the best total and some slack.
        slack = 1.0 if low < high else FINE
        totals, lambdas = (
            f"{low / unit:.2g}" if low == high else f"{low / unit:.2g} to {high / unit:.2g}" for unit in (1.0, per)
        )
        if total is None:
            verdict, answer = "", f"Try lambda {lambdas} (total decay {totals})."
        elif low / slack <= total <= high * slack:
            verdict = "fine"
            answer = f"Your lambda is {'fine' if low == high else 'plausible'} (total decay {total:.2g})."
        else:
            verdict = "large" if total > high else "small"
            answer = f"Try lambda {lambdas} (total decay {totals} instead of {total:.2g})."
        removes = f"{per:{',.0f' if per >= 100 else '.3g'}} times lambda under {self.decay} decay"
        notes = [f"Total decay, the sum of the shares of a weight that each step removes, is {removes}.", basis]
        if self.epochs > FEW_EPOCHS:
            notes.append(REPEATS)
        return Advice(answer, verdict, total, low / per, high / per, tuple(notes))

    def _without_lambda(self, total: float | None) -> Advice:
        if self.training == "pretraining":
            note = "With so few steps at such a low rate, no usual lambda removes much of a weight."
            if total is None or total < IDLE:
                verdict, answer = "", "Decay is too weak to matter in this run at any usual lambda."
            elif total <= FINE * BEST:
                verdict, answer = "fine", f"Your total decay of {total:.2g} is fine."
            else:
                verdict, answer = "large", f"Your total decay of {total:.2g} is large: about {BEST:g} is best."
        else:
            note = "Our runs trained language models from scratch; we tuned no lambda for other training."
            limit = f"keep total decay below {IDLE:g}"
            if total is None:
                verdict, answer = "", f"We have no lambda to recommend for {self.training}; {limit}."
            elif total < IDLE:
                verdict, answer = "", "Decay is too weak to matter in this run; leave lambda as it is."
            else:
                verdict, answer = "large", f"Lower your lambda: {limit} (now {total:.2g})."
        return Advice(answer, verdict, total, None, None, (note,))


def more_decay(rule: str, epochs: float) -> float:
    """The best total decay on repeated text, as a multiple of that on fresh text.

    Examples:
        >>> [round(more_decay("constant", epochs), 1) for epochs in (1, 4, 8, 16, 100)]
        [1.0, 1.0, 4.5, 20.0, 20.0]
    """
    share = math.log(epochs / FEW_EPOCHS) / math.log(MANY_EPOCHS / FEW_EPOCHS)
    return float(REPEATED[rule] ** min(1.0, max(0.0, share)))
