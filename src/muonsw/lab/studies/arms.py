"""What is compared: arms that share everything but their optimizer, over the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
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

    name: str  # how it is called everywhere
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class Key:
    """What sets a comparison apart within its study: a name, a width, a number of updates, or several of these.

    Examples:
        >>> str(Key(width=256)), str(Key("muon", steps=1600)), Key("muon", steps=1600).slug
        ('width 256', 'muon, 1600 updates', 'muon-1600-updates')
    """

    name: str = ""
    width: int | None = None
    steps: int | None = None

    def __str__(self) -> str:
        width = "" if self.width is None else f"width {self.width}"
        steps = "" if self.steps is None else f"{self.steps} updates"
        return ", ".join(filter(None, (self.name, width, steps)))

    @property
    def slug(self) -> str:
        """The same for ids and names of files."""
        return str(self).replace(", ", "-").replace(" ", "-")


@dataclass(frozen=True)
class Comparison:
    """Arms that share everything but their optimizer, seed by seed."""

    key: Key
    base: RunConfig  # what the arms share
    arms: tuple[Arm, ...]  # the first is the baseline of every pair
    seeds: tuple[int, ...]  # of initial weights and data order, the same for every arm
    paired: bool = True  # whether arms are held against the first one; a sweep has no baseline

    def config(self, arm: Arm, seed: int) -> RunConfig:
        """One run."""
        return replace(self.base, optimizer=arm.optimizer, seed=seed)

    def members(self) -> list[tuple[Arm, int]]:
        """Every arm with every seed; seed by seed, so that a pair is complete as early as possible."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]

    def configs(self) -> list[RunConfig]:
        """Every run."""
        return [self.config(arm, seed) for arm, seed in self.members()]


# By the name of the arm: one run for each seed. By comparison: its arms.
Runs = Mapping[str, Sequence[Run]]
Results = Mapping[Key, Runs]


def parse_arm(text: str, base: OptimizerConfig) -> Arm:
    """An arm from `RULE`, `PRESET` or `PRESET/RULE`, perhaps with `,setting=value,...` of the optimizer behind.

    A preset without a rule takes the one of `base`, and its arm is called after both.

    Raises:
        UsageError: If a name or a setting is unknown, or a value does not fit.

    Examples:
        >>> parse_arm("soap/constant", OptimizerConfig()).optimizer.preset, parse_arm("soap", OptimizerConfig()).name
        ('soap', 'soap/scaled')
        >>> parse_arm("constant,weight_decay=0.3", OptimizerConfig()).optimizer.weight_decay
        0.3
        >>> parse_arm("scaled,algorithm=adamw", OptimizerConfig()).name
        'scaled, algorithm=adamw'
    """
    first, *settings = (part.strip() for part in text.split(","))
    changes: dict[str, Any] = _preset_and_rule(text, first, base)
    name = "/".join(filter(None, (changes["preset"], changes["decay"])))
    for setting in settings:
        key, _, value = setting.partition("=")
        changes[key] = _value(text, key, value)
    try:
        data = {field.name: getattr(base, field.name) for field in fields(base)} | changes
        return Arm(", ".join((name, *settings)), from_data(OptimizerConfig, data, "optimizer"))
    except ValueError as error:
        raise UsageError(f"arm {text!r}: {error}") from error


def _preset_and_rule(text: str, first: str, base: OptimizerConfig) -> dict[str, str]:
    """What an arm begins with: a rule, a preset, or both with a slash between them."""
    preset, slash, rule = first.partition("/")
    if not slash:
        preset, rule = (base.preset, first) if first in DECAY_RULES else (first, base.decay)
    known = list(PRESETS) if slash else [*DECAY_RULES, *PRESETS]
    if (preset or not first) and preset not in PRESETS:
        raise UsageError(f"arm {text!r}: {unknown('preset' if slash else 'decay rule or preset', preset, known)}")
    if rule not in DECAY_RULES:
        raise UsageError(f"arm {text!r}: {unknown('decay rule', rule, list(DECAY_RULES))}")
    return {"preset": preset, "decay": rule}


def _value(text: str, key: str, value: str) -> Any:
    known = {field.name: getattr(OptimizerConfig(), field.name) for field in fields(OptimizerConfig)}
    # Those with which an arm begins; and lists, as commas separate its settings.
    for name in ("preset", "decay", "betas", "decay_points"):
        known.pop(name)
    if key not in known or not value:
        raise UsageError(
            f"arm {text!r}: after its first word come setting=value pairs, with settings {', '.join(known)}"
        )
    if isinstance(known[key], bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    if known[key] is None or isinstance(known[key], float):
        try:
            return float(value)
        except ValueError as error:
            raise UsageError(f"arm {text!r}: {key} must be a number, not {value!r}") from error
    return value


def multiples(value: float, factors: Sequence[float], digits: int = 3) -> list[float]:
    """A setting at several multiples, rounded to what the names of arms show.

    Examples:
        >>> multiples(0.07, (0.5, 1.0, 2.0))
        [0.035, 0.07, 0.14]
    """
    return [float(f"{value * factor:.{digits}g}") for factor in factors]


def lambda_arm(base: OptimizerConfig, rule: str, lam: float) -> Arm:
    """A rule at one lambda, called after both."""
    return Arm(f"{rule}, lambda {lam:g}", replace(base, decay=rule, weight_decay=lam))


def with_lambda(arm: Arm, name: str, weight_decay: float) -> Arm:
    """The arm at another lambda, under another name."""
    return Arm(name, replace(arm.optimizer, weight_decay=weight_decay))


def decay_factors(config: RunConfig, optimizer: OptimizerConfig) -> list[float]:
    """The decay factor phi of every update of a run, for hidden and expert matrices as muP divides their rate.

    Zero under a norm rule that does not decay, not a number under a rule that follows the gradients.
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
    """Refuse a lambda with which an update would take more than the whole weight.

    Raises:
        UsageError: With the share, the learning rate and lambda.
    """
    if (share := max(decay_factors(config, optimizer))) > 1.0:
        settings = f"{optimizer.decay} decay with weight_decay={optimizer.weight_decay:g} at lr={optimizer.lr:g}"
        raise UsageError(f"{settings} would take {share:.3g} times the weight in one update: lower one of them")


@lru_cache(maxsize=2)
def lr_multiples(config: RunConfig) -> list[float]:
    """The learning rate of every update as a multiple of the peak, kept because every arm of a long run asks for it."""
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
    """Constant decay whose factors add up to those of an arm: the control that tells less decay from later decay.

    Under a cosine to a tenth, scaled decay applies 0.73 of what constant decay at the same lambda does; less, by
    the factor that muP divides a group's rate by, where it divides by the undivided peak.

    Raises:
        UsageError: If the arm does not decay at all.
    """
    constant = replace(arm.optimizer, decay="constant", norm=FREE)
    total = math.fsum(decay_factors(config, constant))
    if total == 0.0:
        raise UsageError(f"arm {arm.name!r} has no decay, so there is no total to take: choose a lambda above zero")
    wanted = math.fsum(decay_factors(config, arm.optimizer))
    if math.isnan(wanted):
        raise UsageError(f"arm {arm.name!r} follows the gradients, so its total is not known before the run")
    weight_decay = constant.weight_decay * (wanted / total)
    return Arm(CONTROL, replace(constant, weight_decay=weight_decay))


@cache
def decay_arms(run: RunConfig) -> tuple[Arm, ...]:
    """Constant decay, scaled decay, and constant decay of the same total.

    Where muP divides the group's learning rate, scaled decay with the group's own peak beside it.
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


def own_peak(run: RunConfig) -> OptimizerConfig:
    """The optimizer with every group's own peak, so that all rules decay alike where the learning rate is highest."""
    return replace(run.optimizer, peak="group") if run.decoder.relative_width != 1.0 else run.optimizer


def rule_arm(run: RunConfig, rule: str, weight_decay: float) -> Arm:
    """A rule at one lambda, with every group's own peak."""
    base = own_peak(run)
    return lambda_arm(replace(base, peak="group" if rule == CONSTANT else base.peak), rule, weight_decay)
