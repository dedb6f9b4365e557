"""From an AdamW recipe to a Muon-SW one, with the reason for every number. A start, not a tuned result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from muonsw.algorithms.adamw import ADAMW
from muonsw.decay import convert_weight_decay, decay_factors
from muonsw.lab.theory.schedule import warmup_cosine

# All decay of a run together below this takes less than a quarter of a weight: exp(-0.3) = 0.74.
IDLE = 0.3
# Fine-tuning should not shrink what was learned before: at most this share of a weight over the run.
FORGOTTEN = 0.05
# Decay should be slow against momentum (beta 0.95): a fifth of 1 - beta for each step.
FASTEST = 0.2 * (1 - 0.95)
# Rules for another batch are extrapolations: beyond this factor the rate should be tuned again.
FURTHEST = 8.0


@dataclass(frozen=True)
class Recipe:
    """Options for `MuonSW.for_model`, and why they are what they are; `print` shows both.

    Attributes:
        lr: the peak, for Muon and AdamW alike.
        weight_decay: lambda under scaled decay.
        equal_total: the lambda with which scaled decay takes as much over the run as the AdamW recipe did.
        decayed: the share of a weight that decay alone takes over the run.
        adamw: options of what stays with AdamW.
        reasons: one sentence for each decision.
        steps: updates of the run.
        warmup_steps: updates of its warmup.
        batch: what an update sees, in the units of the recipe that was given; None if it did not say.
    """

    lr: float
    weight_decay: float
    equal_total: float
    decayed: float
    adamw: dict[str, Any]
    reasons: tuple[str, ...]
    steps: int
    warmup_steps: int = 0
    batch: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for `MuonSW.for_model`.

        `adamw` has what AdamW does not get anyway, most often nothing: a model of matrices alone would refuse it.
        """
        usual = {**ADAMW.defaults, "lr": self.lr}
        own = {key: value for key, value in self.adamw.items() if value != usual[key]}
        fixed = {"decay": "scaled", "scale": "match_rms_adamw", "adamw": own}
        return {"lr": self.lr, "weight_decay": self.weight_decay, **fixed}

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return "\n".join([f"MuonSW.for_model(model, {settings})", *(f"- {reason}" for reason in self.reasons)])


def recipe(
    lr: float,
    weight_decay: float,
    steps: int,
    *,
    batch: int | None = None,
    new_batch: int | None = None,
    warmup_steps: int = 0,
    final_fraction: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    finetuning: bool = False,
) -> Recipe:
    """Turn an AdamW recipe into a Muon-SW one for the same model, data and schedule.

    Args:
        lr: AdamW's peak learning rate.
        weight_decay: AdamW's lambda, as torch means it.
        steps: updates of the run.
        batch: what an update of the recipe sees, in tokens or samples.
        new_batch: what an update shall see instead, over the same data in all; None keeps the batch.
        warmup_steps: updates of linear warmup.
        final_fraction: where the cosine ends, as a fraction of the peak.
        betas: AdamW's, for the parameters that stay with it.
        finetuning: the weights are trained already, and decay should not undo that.

    Examples:
        >>> found = recipe(lr=3e-3, weight_decay=0.1, steps=10_000)
        >>> found.lr, found.weight_decay, round(found.equal_total, 3)
        (0.003, 0.1, 0.136)
        >>> round(recipe(lr=1e-4, weight_decay=0.1, steps=50_000, finetuning=True).decayed, 3)
        0.05
        >>> four = recipe(lr=3e-3, weight_decay=0.1, steps=10_000, batch=2**18, new_batch=2**20)
        >>> four.lr, four.weight_decay, four.steps
        (0.006, 0.2, 2500)
    """
    _check(lr, weight_decay, steps)
    factor = _batch_factor(batch, new_batch)
    lr, weight_decay = lr * math.sqrt(factor), weight_decay * math.sqrt(factor)
    steps, warmup_steps = max(1, round(steps / factor)), round(warmup_steps / factor)
    settings: dict[str, Any] = {"warmup_steps": warmup_steps, "final_fraction": final_fraction}
    rates = [lr * warmup_cosine(step, total_steps=steps, **settings) for step in range(steps)]
    per_lambda = sum(decay_factors("scaled", 1.0, rates, lr))
    equal_total = convert_weight_decay(weight_decay, "constant", "scaled", lr, schedule=rates)
    lam, why = _decay(lr, weight_decay, per_lambda, finetuning)
    if lr * lam > 1:
        raise ValueError(
            f"new_batch={new_batch}: lr * weight_decay grows to {lr * lam:g}, so decay would take more than the whole "
            f"weight in a step; such rules do not reach so far: choose a smaller batch, or tune rate and decay for it"
        )
    reasons = (
        *_of_the_batch(lr, weight_decay, steps, batch, factor),
        f"lr stays {lr:g}: the shape scale gives Muon's updates the RMS that AdamW's typically have, 0.2 lr, so the "
        f"rate carries over; Muon often stands a higher one, so try twice and four times it",
        *why,
        f"lambda {equal_total:.3g} would take as much over the whole run as constant decay with {weight_decay:g} did; "
        f"the best lambda of each rule is found by trying, not by a rule",
        "embeddings, heads, norms and biases stay with AdamW at the same rate and its betas, without decay",
    )
    decayed = 1 - math.exp(-lam * per_lambda)
    adamw = {"lr": lr, "betas": tuple(betas)}
    return Recipe(lr, lam, equal_total, decayed, adamw, reasons, steps, warmup_steps, new_batch or batch)


def _batch_factor(batch: Any, new_batch: Any) -> float:
    """By how much the batch grows."""
    for name, value in (("batch", batch), ("new_batch", new_batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1, in tokens or samples")
    if new_batch is None:
        return 1.0
    if batch is None:
        raise ValueError("new_batch needs batch=...: what an update of the AdamW recipe saw, in the same units")
    return float(new_batch / batch)


def _of_the_batch(lr: float, weight_decay: float, steps: int, batch: int | None, factor: float) -> list[str]:
    """What became of batch and steps; AdamW's recipe is carried over to another batch first."""
    if factor == 1.0:
        seen = "" if batch is None else f" at {batch:,} an update, {batch * steps:,} in all"
        return [
            f"batch and steps stay{seen}: the noise in a gradient is the same, and so is what momentum averages away"
        ]
    said = [
        f"{factor:g} times the batch and {steps:,} steps see the same data. AdamW's recipe for it is lr {lr:.3g} and "
        f"lambda {weight_decay:.3g} first: both times the square root of {factor:g}, the rate because updates of a "
        f"fixed size average less noise, lambda so that decay takes as much over the run",
        "that rule is AdamW's; how far it holds for Muon, which is said to stand larger batches, was not measured here",
    ]
    if not 1 / FURTHEST <= factor <= FURTHEST:
        said.append(f"{factor:g} times is further than such rules are trusted: tune the rate again")
    return said


def _decay(lr: float, weight_decay: float, per_lambda: float, finetuning: bool) -> tuple[float, list[str]]:
    """Lambda, and what is to be said of it; `per_lambda` is the sum of phi over the run for lambda 1."""
    lam = weight_decay
    why = [f"lambda stays {weight_decay:g}: decay at the peak is the same, and less after it"]
    most = -math.log(1 - FORGOTTEN) / per_lambda
    if finetuning and lam > most:
        lam = most
        why = [
            f"lambda is {lam:.3g} instead of {weight_decay:g}: decay pulls trained weights towards zero, not towards "
            f"where they started, and this one takes {FORGOTTEN:.0%} of them over the run"
        ]
    elif lam * per_lambda < IDLE:
        why.append(
            f"decay hardly acts in so short a run: it takes "
            f"{1 - math.exp(-lam * per_lambda):.2g} of a weight over the run, so the rule makes little difference"
        )
    if lam * lr > FASTEST:
        why.append(
            f"decay of {lam * lr:.2g} a step at the peak is not slow against momentum 0.95; from {FASTEST:g} on expect "
            f"norms that differ from those of slower runs, and try a smaller lambda"
        )
    return lam, why


def _check(lr: float, weight_decay: float, steps: Any) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"lr={lr!r}: must be a positive number, AdamW's peak learning rate")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay={weight_decay!r}: must be a number of at least 0")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: must be a whole number of at least 1")
    if lr * weight_decay > 1:
        raise ValueError(f"lr * weight_decay = {lr * weight_decay:g}: decay would take more than the whole weight")
