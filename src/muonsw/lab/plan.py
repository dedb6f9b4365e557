"""What a run will be before it is started: its size, its cost, its learning rates, and what decay will do to it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from muonsw.decay import decay_factor, decay_factors
from muonsw.lab.model import MUON_LR_POWERS, ModelConfig, count, muon_lr_multiplier, preset, scalings
from muonsw.lab.model.counts import Memory, estimate_memory, orthogonalizer_flops
from muonsw.lab.paper import PAPER_BATCH_TOKENS, PrintedRecipe
from muonsw.lab.scaling import RankPlan, Scenario, plan_ranks
from muonsw.lab.theory.schedule import peak_lr_for_horizon
from muonsw.lab.theory.steady_state import relaxation_number
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Sums over longer runs take this many evenly spaced steps; the curves are smooth, so the error is below 1e-4.
MOST_STEPS = 20_000
# Horizons at which the paper swept the peak learning rate, with AdamW.
TUNED_STEPS = (5_000, 20_000)
DECAYS = (("constant", "group"), ("scaled", "group"), ("scaled", "base"))


@dataclass(frozen=True)
class DecayPlan:
    """What one decay rule does to one group over the run.

    Attributes:
        rule: "constant" or "scaled".
        peak: Whether scaled decay divides by the "group"'s peak or by the undivided "base" peak.
        total: Sum of phi over the run.
        relaxation: N, relaxation times that the run lasts.
        phi_peak: The fraction of a weight that is taken away in a step at the peak.
        phi_final: The same in the last step.
        phi_peak_over_memory: `phi_peak / (1 - beta)`; well under one, or weights shrink while momentum remembers.
    """

    rule: str
    peak: str
    total: float
    relaxation: float
    phi_peak: float
    phi_final: float
    phi_peak_over_memory: float


@dataclass(frozen=True)
class GroupPlan:
    """Hidden and expert matrices under one rule for their learning rate.

    Attributes:
        name: The algorithm with the rule.
        multiplier: Of the base learning rate.
        peak_lr: Highest learning rate of the group.
        product: `lambda * peak_lr * T`.
        decays: For constant decay, and scaled decay with either peak.
    """

    name: str
    multiplier: float
    peak_lr: float
    product: float
    decays: tuple[DecayPlan, ...]


@dataclass(frozen=True)
class RunPlan:
    """A run, computed without running it.

    Attributes:
        model: Its shape.
        parameters: In total.
        active: That one token uses.
        steps: Updates.
        batch_tokens: Tokens in an update.
        tokens: Of the whole run.
        tokens_per_active: Tokens for each active parameter.
        peak_lr: Base learning rate at its highest.
        peak_lr_from: Where it comes from.
        weight_decay: Lambda.
        final_fraction: What is left of the learning rate in the last step.
        warmup_steps: Updates before the peak.
        groups: Hidden and expert matrices under every rule that the lab knows.
        flops_per_token: Forward and backward.
        flops: Of the whole run, without the orthogonalizer.
        orthogonalizer_share: What Newton-Schulz adds to them.
        memory: In bytes.
        micro_batch: Sequences whose activations are held at once.
        tflops: Sustained rate, in units of 1e12 a second.
        hours: At this rate, the orthogonalizer included.
        ranks: An update on several GPUs, where that was asked.
        rank_hours: The whole run, at this update's pace.
    """

    model: ModelConfig
    parameters: int
    active: int
    steps: int
    batch_tokens: int
    tokens: int
    tokens_per_active: float
    peak_lr: float
    peak_lr_from: str
    weight_decay: float
    final_fraction: float
    warmup_steps: int
    groups: tuple[GroupPlan, ...]
    flops_per_token: int
    flops: float
    orthogonalizer_share: float
    memory: Memory
    micro_batch: int
    tflops: float
    hours: float
    ranks: RankPlan | None = None
    rank_hours: float | None = None


@dataclass(frozen=True)
class RecipePlan:
    """What decay does under a printed recipe; None where that needs a number of steps and none is known.

    Attributes:
        recipe: What is printed.
        batch_tokens: Printed, or given by the user.
        steps: Printed, or tokens over batch.
        decay_tokens: `lambda * sum(eta)` times the batch in tokens, which needs no number of steps.
        scaled_over_constant: Total decay of the scaled rule relative to the constant one.
        final_ratio: Decay of the scaled rule relative to the constant one in the last step.
        equal_total_weight_decay: Lambda at which scaled decay takes as much in total as constant decay.
        groups: With steps: the printed learning rate, and for the paper's own runs every rule of the lab.
    """

    recipe: PrintedRecipe
    batch_tokens: int | None
    steps: int | None
    decay_tokens: float
    scaled_over_constant: float
    final_ratio: float
    equal_total_weight_decay: float
    groups: tuple[GroupPlan, ...] | None


def parse_amount(text: str) -> int:
    """A number of tokens as people write it.

    Raises:
        ValueError: If it is not a positive number, with what is understood.

    Examples:
        >>> parse_amount("197B"), parse_amount("1.5e9"), parse_amount("300M"), parse_amount("524,288")
        (197000000000, 1500000000, 300000000, 524288)
    """
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmbt]?)", text.strip().replace(",", "").replace("_", ""), re.I)
    try:
        amount = float(match.group(1)) * UNITS[match.group(2).upper()] if match else 0.0
    except ValueError:
        amount = 0.0
    if not 1.0 <= amount < math.inf:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 197B, 300M, 1.5e9 or 524288")
    return round(amount)


def plan(
    model: ModelConfig,
    steps: int,
    *,
    batch_tokens: int = PAPER_BATCH_TOKENS,
    peak_lr: float | None = None,
    optimizer: OptimizerConfig | None = None,
    schedule: ScheduleConfig | None = None,
    micro_batch: int = 8,
    tflops: float = 400.0,
) -> RunPlan:
    """Compute a run of so many steps.

    Args:
        model: Shape and constants of the decoder.
        steps: Updates.
        batch_tokens: Tokens in an update.
        peak_lr: Base learning rate at its highest; None takes it from the horizon.
        optimizer: For its weight decay and momenta; its learning rate is not read.
        schedule: Shape of the learning rate.
        micro_batch: Sequences whose activations are held at once.
        tflops: Sustained rate of the hardware, not the one on its data sheet.

    Examples:
        >>> result = plan(preset("w256"), 35_000)
        >>> result.parameters, f"{result.peak_lr:.4f}", result.warmup_steps
        (72677632, '0.0105', 1000)
    """
    optimizer, schedule = optimizer or OptimizerConfig(), schedule or ScheduleConfig()
    _require(steps=steps, batch_tokens=batch_tokens, micro_batch=micro_batch, tflops=tflops)
    sizes, tokens = count(model), steps * batch_tokens
    horizon = max(1, round(tokens / PAPER_BATCH_TOKENS))
    chosen = peak_lr_for_horizon(horizon) if peak_lr is None else peak_lr
    _require(peak_lr=chosen)
    flops = float(sizes.flops_per_token) * tokens
    share = orthogonalizer_flops(model) * steps / flops
    multiples = lr_multiples(schedule, steps)
    return RunPlan(
        model=model,
        parameters=sizes.total,
        active=sizes.active,
        steps=steps,
        batch_tokens=batch_tokens,
        tokens=tokens,
        tokens_per_active=tokens / sizes.active,
        peak_lr=chosen,
        peak_lr_from="given" if peak_lr is not None else _horizon_note(horizon),
        weight_decay=optimizer.weight_decay,
        final_fraction=multiples[-1],
        warmup_steps=schedule.warmup(steps),
        groups=plan_groups(model, chosen, steps, multiples, optimizer),
        flops_per_token=sizes.flops_per_token,
        flops=flops,
        orthogonalizer_share=share,
        memory=estimate_memory(model, micro_batch),
        micro_batch=micro_batch,
        tflops=tflops,
        hours=flops * (1.0 + share) / (tflops * 1e12) / 3600.0,
    )


def plan_on(model: ModelConfig, steps: int, scenario: Scenario, **settings: Any) -> RunPlan:
    """Compute a run of so many steps on several GPUs.

    Args:
        model: Shape and constants of the decoder.
        steps: Updates.
        scenario: The GPUs, how the model lies on them, and what an update is.
        settings: Of `plan`.

    Examples:
        >>> from muonsw.lab.scaling import RankLayout
        >>> result = plan_on(preset("w1024"), 375_000, Scenario(RankLayout(8, "ddp"), PAPER_BATCH_TOKENS))
        >>> f"{result.hours:.1f} {result.rank_hours:.1f}"
        '35.0 35.6'
    """
    rate, gpus = scenario.tflops, scenario.layout.gpus
    whole = plan(
        model,
        steps,
        batch_tokens=scenario.batch_tokens,
        micro_batch=scenario.micro_batch,
        tflops=rate * gpus,
        **settings,
    )
    ranks = plan_ranks(model, scenario)
    return replace(whole, ranks=ranks, rank_hours=steps * ranks.step_seconds / 3600.0)


def plan_recipe(
    recipe: PrintedRecipe, *, batch_tokens: int | None = None, schedule: ScheduleConfig | None = None
) -> RecipePlan:
    """Compute what decay does under a printed recipe.

    Args:
        recipe: What is printed.
        batch_tokens: Tokens in an update, where the paper does not say.
        schedule: Its shape and warmup; its final fraction is not read, the recipe prints one.

    Examples:
        >>> from muonsw.lab.paper import RECIPES
        >>> result = plan_recipe(RECIPES["kimi-k2"])
        >>> result.steps, round(result.scaled_over_constant, 2), round(result.final_ratio, 2)
        (None, 0.73, 0.1)
    """
    if recipe.batch_tokens is not None and batch_tokens not in (None, recipe.batch_tokens):
        raise ValueError(f"{recipe.title} has a batch of {recipe.batch_tokens:,} tokens; leave --batch-tokens out")
    batch = recipe.batch_tokens or batch_tokens
    steps = recipe.steps or (None if batch is None else math.ceil(recipe.tokens / batch))
    without_warmup = ScheduleConfig(warmup_steps=None if recipe.steps else 0)
    shape = replace(schedule or without_warmup, final_fraction=recipe.final_fraction)
    multiples = lr_multiples(shape, steps or MOST_STEPS)
    optimizer = OptimizerConfig(weight_decay=recipe.weight_decay)
    mean, mean_square = _mean(multiples), _mean([multiple * multiple for multiple in multiples])
    model = preset(recipe.preset) if recipe.preset else None
    return RecipePlan(
        recipe=recipe,
        batch_tokens=batch,
        steps=steps,
        decay_tokens=recipe.weight_decay * recipe.peak_lr * mean * recipe.tokens,
        scaled_over_constant=mean_square / mean,
        final_ratio=multiples[-1],
        equal_total_weight_decay=recipe.weight_decay * mean / mean_square,
        groups=None if steps is None else plan_groups(model, recipe.peak_lr, steps, multiples, optimizer),
    )


def plan_groups(
    model: ModelConfig | None, peak_lr: float, steps: int, multiples: list[float], optimizer: OptimizerConfig
) -> tuple[GroupPlan, ...]:
    """Learning rates and decay of hidden matrices by every rule; without a model, by the learning rate as it is."""
    muon, adamw = 1.0 - optimizer.momentum, 1.0 - optimizer.betas[0]
    rules = [("Muon", 1.0, muon)]
    if model is not None:
        rules = [(f"Muon, {rule}", muon_lr_multiplier(model, rule), muon) for rule in MUON_LR_POWERS]
        rules.append(("AdamW", scalings(model)["hidden"].lr, adamw))
    lam, stretch = optimizer.weight_decay, steps / len(multiples)
    groups = []
    for name, multiplier, forgets in rules:
        own = peak_lr * multiplier
        decays = [
            _decay(rule, peak, lam, own, own if peak == "group" else peak_lr, multiples, stretch, forgets)
            for rule, peak in DECAYS
        ]
        groups.append(GroupPlan(name, multiplier, own, lam * own * steps, tuple(decays)))
    return tuple(groups)


def _decay(
    rule: str,
    peak: str,
    lam: float,
    own: float,
    eta_max: float,
    multiples: list[float],
    stretch: float,
    forgets: float,
) -> DecayPlan:
    """What a rule takes from a group whose own highest learning rate is `own`; `stretch` steps for each multiple."""
    phis = decay_factors(rule, lam, (own * multiple for multiple in multiples), eta_max)
    relaxation = stretch * relaxation_number(phis)
    at_peak = float(decay_factor(rule, lam, own, eta_max))
    return DecayPlan(rule, peak, relaxation / 2.0, relaxation, at_peak, phis[-1], at_peak / forgets)


def lr_multiples(schedule: ScheduleConfig, steps: int) -> list[float]:
    """Multiples of the peak learning rate over the run, the last step's at the end; at most `MOST_STEPS` of them.

    Examples:
        >>> [round(multiple, 2) for multiple in lr_multiples(ScheduleConfig(warmup_steps=1), 5)]
        [1.0, 0.87, 0.55, 0.23, 0.1]
    """
    kept, multiple = min(steps, MOST_STEPS), schedule.multiple(steps)
    places = [(2 * number + 1) * steps // (2 * kept) for number in range(kept - 1)] + [steps - 1]
    return [multiple(place) for place in places]


def _horizon_note(horizon: int) -> str:
    if horizon < TUNED_STEPS[0]:
        return f"capped: the horizon rule is not known below {TUNED_STEPS[0]:,} steps of {PAPER_BATCH_TOKENS:,} tokens"
    known = "" if horizon <= TUNED_STEPS[1] else f", beyond the {TUNED_STEPS[1]:,} it was tuned for"
    return f"0.02 (T/5000)^(-1/3) with T = {horizon:,} steps of {PAPER_BATCH_TOKENS:,} tokens{known}"


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _require(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")
