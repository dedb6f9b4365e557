"""What is compared: arms with a name, seeds, and the runs that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from muonsw.decay import DECAY_RULES, decay_factor
from muonsw.lab.errors import UsageError
from muonsw.lab.model import muon_lr_multiplier, scalings
from muonsw.lab.settings import from_data
from muonsw.lab.train.config import OptimizerConfig, RunConfig
from muonsw.lab.train.state import schedule_multiple

CONTROL_SUFFIX = "same total"


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        name: How it is called everywhere.
        optimizer: All settings of its optimizer.
    """

    name: str
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class Job:
    """One run of a comparison: an arm with a seed, and its folder."""

    name: str
    config: RunConfig
    folder: Path


def parse_arm(text: str, base: OptimizerConfig) -> Arm:
    """An arm from `RULE` or `RULE,setting=value,...`, the settings being those of the optimizer.

    Raises:
        UsageError: If a rule or a setting is unknown, or a value does not fit.

    Examples:
        >>> parse_arm("constant,weight_decay=0.3", OptimizerConfig()).optimizer.weight_decay
        0.3
        >>> parse_arm("scaled,algorithm=adamw", OptimizerConfig()).name
        'scaled, algorithm=adamw'
    """
    rule, *settings = (part.strip() for part in text.split(","))
    if rule not in DECAY_RULES:
        raise UsageError(f"arm {text!r}: an arm starts with a decay rule, one of {', '.join(DECAY_RULES)}")
    changes: dict[str, Any] = {"decay": rule}
    for setting in settings:
        key, _, value = setting.partition("=")
        changes[key] = _value(text, key, value)
    try:
        data = {field.name: getattr(base, field.name) for field in fields(base)} | changes
        return Arm(", ".join((rule, *settings)), from_data(OptimizerConfig, data, "optimizer"))
    except ValueError as error:
        raise UsageError(f"arm {text!r}: {error}") from error


def _value(text: str, key: str, value: str) -> Any:
    known = {field.name: getattr(OptimizerConfig(), field.name) for field in fields(OptimizerConfig)}
    if key not in known or not value:
        raise UsageError(f"arm {text!r}: after the rule come setting=value pairs, with settings {', '.join(known)}")
    if isinstance(known[key], bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(known[key], float):
        try:
            return float(value)
        except ValueError as error:
            raise UsageError(f"arm {text!r}: {key} must be a number, not {value!r}") from error
    return value


def jobs(base: RunConfig, arms: Sequence[Arm], seeds: Sequence[int], folder: Path) -> list[Job]:
    """The runs of a comparison, seed by seed, so that a pair is complete as early as possible."""
    return [
        Job(
            f"{arm.name}, seed {seed}",
            replace(base, optimizer=arm.optimizer, arm=arm.name, seed=seed),
            folder / f"{_slug(arm.name)}-seed{seed}",
        )
        for seed in seeds
        for arm in arms
    ]


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._=" else "-" for letter in name).replace("--", "-")


def decay_factors(config: RunConfig, optimizer: OptimizerConfig) -> list[float]:
    """The decay factor phi of every update of a run, for hidden and expert matrices as muP divides their rate."""
    group = optimizer.lr * hidden_multiplier(config, optimizer)
    peak = group if optimizer.peak == "group" else optimizer.lr
    rule, lam = optimizer.decay, optimizer.weight_decay
    return [float(decay_factor(rule, lam, group * multiple, peak)) for multiple in _multiples(config)]


@lru_cache(maxsize=2)
def _multiples(config: RunConfig) -> list[float]:
    """The schedule, kept because every arm of a long run asks for it."""
    multiple = schedule_multiple(config)
    return [multiple(step) for step in range(config.steps)]


def hidden_multiplier(config: RunConfig, optimizer: OptimizerConfig) -> float:
    """What muP multiplies the base learning rate of hidden and expert matrices by."""
    if optimizer.algorithm == "adamw":
        return scalings(config.model)["hidden"].lr
    return muon_lr_multiplier(config.model, optimizer.muon_lr)


def same_total(config: RunConfig, arm: Arm) -> Arm:
    """Constant decay whose factors add up to those of an arm: the control that tells less decay from later decay.

    Under a cosine to a tenth, scaled decay applies 0.73 of what constant decay at the same lambda does; less, by
    the factor that muP divides a group's rate by, where it divides by the undivided peak.
    """
    constant = replace(arm.optimizer, decay="constant")
    ratio = math.fsum(decay_factors(config, arm.optimizer)) / math.fsum(decay_factors(config, constant))
    weight_decay = constant.weight_decay * ratio
    return Arm(f"constant, {CONTROL_SUFFIX}", replace(constant, weight_decay=weight_decay))
