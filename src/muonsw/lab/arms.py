"""What is compared: arms that share everything but their optimizer, over the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any

from muonsw import decay
from muonsw.addons.norm_rules import FREE, NORM_RULES
from muonsw.decay import DECAY_RULES
from muonsw.lab.config import from_data
from muonsw.lab.errors import UsageError
from muonsw.lab.model import muon_lr_multiplier, scalings
from muonsw.lab.runs import Run
from muonsw.lab.train.config import OptimizerConfig, RunConfig
from muonsw.presets import PRESETS
from muonsw.registry import unknown

CONSTANT, SCALED, GROUP = "constant", "scaled", "scaled, group peak"
CONTROL = "constant, same total"
RULES = (CONSTANT, SCALED)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class Key:
    """Identifies a comparison within its study: a name, a width, a number of steps, or several of these.

    Examples:
        >>> str(Key(width=256)), str(Key("muon", steps=1600)), Key("muon", steps=1600).slug
        ('width 256', 'muon, 1600 steps', 'muon-1600-steps')
    """

    name: str = ""
    width: int | None = None
    steps: int | None = None

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}"
        steps = "" if self.steps is None else f"{self.steps} steps"
        return ", ".join(filter(None, (self.name, width, steps)))

    @property
    def slug(self) -> str:
        return str(self).replace(", ", "-").replace(" ", "-")


@dataclass(frozen=True)
class Comparison:
    """Arms that share everything but their optimizer, seed by seed."""

    key: Key
    base: RunConfig  # what the arms share
    arms: tuple[Arm, ...]  # the first is the baseline of every pair
    seeds: tuple[int, ...]  # of initial weights and data order, the same for every arm
    paired: bool = True  # whether arms are compared with the first one; a sweep has no baseline

    def config(self, arm: Arm, seed: int) -> RunConfig:
        return replace(self.base, optimizer=arm.optimizer, seed=seed)

    def members(self) -> list[tuple[Arm, int]]:
        """Every arm with every seed, seed by seed: pairs are complete as early as possible."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]

    def configs(self) -> list[RunConfig]:
        return [self.config(arm, seed) for arm, seed in self.members()]


# By the name of the arm: one run for each seed. By comparison: its arms.
Runs = Mapping[str, Sequence[Run]]
Results = Mapping[Key, Runs]


def parse_arm(text: str, base: OptimizerConfig) -> Arm:
    """Parse `RULE`, `PRESET` or `PRESET/RULE`, optionally followed by `,setting=value,...` of the optimizer.

    A preset without a rule takes the one of `base`, and its arm is named after both.

    Raises:
        UsageError: If a name or a setting is unknown, or a value does not fit.

    Examples:
        >>> parse_arm("soap/constant", OptimizerConfig()).optimizer.preset, parse_arm("soap", OptimizerConfig()).name
        ('soap', 'soap/scaled')
        >>> parse_arm("constant,weight_decay=0.3", OptimizerConfig()).optimizer.weight_decay
        0.3
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
    # Not those with which an arm begins, and no lists, because commas separate the settings.
    reserved = (*changes, "betas")
    settable = {field.name: field.default for field in fields(base) if field.name not in reserved}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in settable or not value:
            wanted = f"after its first word come setting=value pairs, with settings {', '.join(settable)}"
            raise UsageError(f"arm {text!r}: {wanted}")
        changes[key] = value
        if isinstance(settable[key], bool):
            changes[key] = {"true": True, "false": False}.get(value.lower(), value)
        elif settable[key] is None or isinstance(settable[key], float):
            try:
                changes[key] = float(value)
            except ValueError as error:
                raise UsageError(f"arm {text!r}: {key} must be a number, not {value!r}") from error
    try:
        optimizer = from_data(OptimizerConfig, asdict(base) | changes, "optimizer")
    except ValueError as error:
        raise UsageError(f"arm {text!r}: {error}") from error
    return Arm(", ".join(("/".join(filter(None, (preset, rule))), *settings)), optimizer)


def multiples(value: float, factors: Sequence[float], digits: int = 3) -> list[float]:
    """A setting at several multiples, rounded to what the names of arms show.

    Examples:
        >>> multiples(0.07, (0.5, 1.0, 2.0))
        [0.035, 0.07, 0.14]
    """
    return [float(f"{value * factor:.{digits}g}") for factor in factors]


def decay_factors(config: RunConfig, optimizer: OptimizerConfig) -> list[float]:
    """The decay factor phi of every step of a run, for hidden and expert matrices as muP divides their rate.

    Zero under a norm rule that does not decay, NaN under a rule that follows the gradients.
    """
    if not NORM_RULES[optimizer.norm].decays:
        return [0.0] * config.steps
    if optimizer.decay not in DECAY_RULES or DECAY_RULES[optimizer.decay].uses_gradient:
        return [math.nan] * config.steps
    group = optimizer.lr * hidden_multiplier(config, optimizer)
    peak = group if optimizer.peak == "group" else optimizer.lr
    rates = [group * multiple for multiple in lr_multiples(config)]
    return decay.decay_factors(optimizer.decay, optimizer.weight_decay, rates, peak)


def refuse_too_much_decay(config: RunConfig, optimizer: OptimizerConfig) -> None:
    """Refuse a lambda with which a step would remove more than the whole weight."""
    if (share := max(decay_factors(config, optimizer))) > 1.0:
        settings = f"{optimizer.decay} decay with weight_decay={optimizer.weight_decay:g} at lr={optimizer.lr:g}"
        raise UsageError(f"{settings} would take {share:.3g} times the weight in one step: lower one of them")


@lru_cache(maxsize=2)  # every arm of a long run asks for it
def lr_multiples(config: RunConfig) -> list[float]:
    """The learning rate of every step as a multiple of the peak."""
    multiple = config.schedule.multiple(config.steps)
    return [multiple(step) for step in range(config.steps)]


def hidden_multiplier(config: RunConfig, optimizer: OptimizerConfig) -> float:
    """What muP multiplies the base learning rate of hidden and expert matrices by; a task has no muP."""
    if config.task is not None:
        return 1.0
    if optimizer.algorithm == "adamw":
        return scalings(config.decoder)["hidden"].lr
    return muon_lr_multiplier(config.decoder, optimizer.muon_lr)


def same_total(config: RunConfig, arm: Arm) -> Arm:
    """Constant decay with the total decay of an arm: the control that tells less decay from later decay.

    Under a cosine to a tenth, scaled decay applies 0.73 of what constant decay at the same lambda does; less, by
    the factor that muP divides a group's rate by, where it divides by the undivided peak.

    Raises:
        UsageError: If the arm does not decay, or its total is not known before the run.
    """
    constant = replace(arm.optimizer, decay="constant", norm=FREE)
    total, wanted = (math.fsum(decay_factors(config, optimizer)) for optimizer in (constant, arm.optimizer))
    if total == 0.0:
        raise UsageError(f"arm {arm.name!r} has no decay, so there is no total to take: choose a lambda above zero")
    if math.isnan(wanted):
        raise UsageError(f"arm {arm.name!r} follows the gradients, so its total is not known before the run")
    return Arm(CONTROL, replace(constant, weight_decay=constant.weight_decay * (wanted / total)))


@cache
def decay_arms(run: RunConfig) -> tuple[Arm, ...]:
    """Constant decay, scaled decay, and constant decay of the same total.

    Where muP divides the group's learning rate, also scaled decay with the group's own peak.
    """
    scaled = Arm(SCALED, replace(run.optimizer, decay="scaled"))
    arms = [Arm(CONSTANT, replace(run.optimizer, decay="constant", peak="group")), scaled]
    if run.decoder.relative_width != 1.0 and run.optimizer.peak == "base":
        arms.append(Arm(GROUP, replace(scaled.optimizer, peak="group")))
    return (*arms, control_arm(run, scaled))


def control_arm(run: RunConfig, scaled: Arm) -> Arm:
    """Constant decay of the scaled arm's total; its peak is the group's, which constant decay does not use."""
    control = same_total(run, scaled)
    return replace(control, optimizer=replace(control.optimizer, peak="group"))


def rule_arm(run: RunConfig, rule: str, weight_decay: float) -> Arm:
    """A rule at one lambda, with every group's own peak: all rules decay alike where the learning rate is highest."""
    own = rule == CONSTANT or run.decoder.relative_width != 1.0
    peak = "group" if own else run.optimizer.peak
    return Arm(
        f"{rule}, lambda {weight_decay:g}", replace(run.optimizer, decay=rule, weight_decay=weight_decay, peak=peak)
    )
