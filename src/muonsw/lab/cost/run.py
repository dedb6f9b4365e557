"""A run, computed without running it: tokens, FLOPs, hours, and what decay does under every rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muonsw.decay import decay_factors
from muonsw.lab.cost.parts import orthogonalizer_flops
from muonsw.lab.cost.update import Setup, UpdateCost, plan_update, require
from muonsw.lab.model import MUON_LR_POWERS, ModelConfig, count, muon_lr_multiplier, preset, scalings
from muonsw.lab.paper import PAPER_BATCH_TOKENS, PrintedRecipe
from muonsw.lab.theory.schedule import MOST_STEPS, peak_lr_for_horizon, sampled
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig

# Horizons at which the paper swept the peak learning rate, with AdamW.
TUNED_STEPS = (5_000, 20_000)
# Decay rules that are planned, and the peak that they divide by: the group's, or the undivided one.
DECAYS = {"constant": ("constant", "group"), "scaled": ("scaled", "group"), "scaled, base": ("scaled", "base")}


@dataclass(frozen=True)
class GroupPlan:
    """Hidden and expert matrices under one rule for their learning rate."""

    name: str  # the algorithm with the rule
    peak_lr: float  # highest learning rate of the group
    totals: Mapping[str, float]  # total decay, the sum of phi over the run, by `DECAYS`
    phi_peak: float  # the share of a weight that a step at the peak takes, under both rules with the group's peak
    phi_peak_over_memory: float  # phi_peak / (1 - beta); well under one, or weights shrink while momentum remembers


def plan_groups(
    model: ModelConfig | None, peak_lr: float, steps: int, multiples: list[float], optimizer: OptimizerConfig
) -> tuple[GroupPlan, ...]:
    """Learning rates and decay of hidden matrices by every rule; without a model, by the learning rate as it is."""
    muon, adamw = 1.0 - optimizer.momentum, 1.0 - optimizer.betas[0]
    rules = [("Muon", 1.0, muon)]
    if model is not None:
        rules = [(f"Muon, {rule}", muon_lr_multiplier(model, rule), muon) for rule in MUON_LR_POWERS]
        rules.append(("AdamW", scalings(model)["hidden"].lr, adamw))
    groups = []
    for name, multiplier, forgets in rules:
        own, totals = peak_lr * multiplier, {}
        for title, (rule, peak) in DECAYS.items():
            lrs = (own * multiple for multiple in multiples)
            phis = decay_factors(rule, optimizer.weight_decay, lrs, own if peak == "group" else peak_lr)
            totals[title] = steps * math.fsum(phis) / len(multiples)
        phi = optimizer.weight_decay * own
        groups.append(GroupPlan(name, own, totals, phi, phi / forgets))
    return tuple(groups)


@dataclass(frozen=True)
class RunPlan:
    """A run, computed without running it."""

    model: ModelConfig
    parameters: int
    active: int  # parameters that one token uses
    steps: int
    batch_tokens: int  # tokens in an update
    tokens: int  # of the whole run
    tokens_per_active: float
    peak_lr: float  # base learning rate at its highest
    peak_lr_from: str
    weight_decay: float
    final_fraction: float  # what is left of the learning rate in the last step
    warmup_steps: int
    groups: tuple[GroupPlan, ...]  # hidden and expert matrices under every rule that the lab knows
    flops_per_token: int  # forward and backward
    flops: float  # of the whole run, without the orthogonalizer
    orthogonalizer_share: float  # what Newton-Schulz adds to them
    update: UpdateCost  # memory and times of one update
    hours: float  # of all updates


def plan(
    model: ModelConfig,
    steps: int,
    *,
    batch_tokens: int = PAPER_BATCH_TOKENS,
    peak_lr: float | None = None,
    optimizer: OptimizerConfig | None = None,
    schedule: ScheduleConfig | None = None,
    setup: Setup | None = None,
) -> RunPlan:
    """Compute a run of so many steps, on one GPU unless `setup` has more.

    Without a peak learning rate the horizon gives one. Of the optimizer weight decay and momenta are read.

    Examples:
        >>> result = plan(preset("w256"), 35_000)
        >>> result.parameters, f"{result.peak_lr:.4f}", result.warmup_steps
        (72677632, '0.0105', 1000)
    """
    optimizer, schedule = optimizer or OptimizerConfig(), schedule or ScheduleConfig()
    require(steps=steps, batch_tokens=batch_tokens)
    sizes, tokens = count(model), steps * batch_tokens
    horizon = max(1, round(tokens / PAPER_BATCH_TOKENS))
    chosen = peak_lr_for_horizon(horizon) if peak_lr is None else peak_lr
    require(peak_lr=chosen)
    flops = float(sizes.flops_per_token) * tokens
    multiples = sampled(schedule.multiple(steps), steps)
    update = plan_update(model, setup or Setup(), batch_tokens)
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
        orthogonalizer_share=orthogonalizer_flops(model) * steps / flops,
        update=update,
        hours=steps * update.seconds / 3600.0,
    )


def _horizon_note(horizon: int) -> str:
    if horizon < TUNED_STEPS[0]:
        return f"capped: the horizon rule is not known below {TUNED_STEPS[0]:,} steps of {PAPER_BATCH_TOKENS:,} tokens"
    known = "" if horizon <= TUNED_STEPS[1] else f", beyond the {TUNED_STEPS[1]:,} it was tuned for"
    return f"0.02 (T/5000)^(-1/3) with T = {horizon:,} steps of {PAPER_BATCH_TOKENS:,} tokens{known}"


@dataclass(frozen=True)
class RecipePlan:
    """What decay does under a printed recipe; None where that needs a number of steps and none is known."""

    recipe: PrintedRecipe
    batch_tokens: int | None  # printed, or given by the user
    steps: int | None  # printed, or tokens over batch
    decay_tokens: float  # total of constant decay times the batch in tokens, which needs no number of steps
    scaled_over_constant: float  # total decay of the scaled rule relative to the constant one
    final_ratio: float  # the same in the last step
    equal_total_weight_decay: float  # lambda at which scaled decay takes as much in total as constant decay
    groups: tuple[GroupPlan, ...] | None  # the printed learning rate; for the paper's own runs every rule of the lab


def plan_recipe(
    recipe: PrintedRecipe, *, batch_tokens: int | None = None, schedule: ScheduleConfig | None = None
) -> RecipePlan:
    """Compute what decay does under a printed recipe; the batch is needed where the paper does not print one.

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
    updates = steps or MOST_STEPS
    multiples = sampled(shape.multiple(updates), updates)
    optimizer = OptimizerConfig(weight_decay=recipe.weight_decay)
    mean, mean_square = (math.fsum(one**power for one in multiples) / len(multiples) for power in (1, 2))
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
