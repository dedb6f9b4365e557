"""Advice on weight decay before a run: does it matter, what will norms do under each rule, which lambda to try.

A run's total decay, the sum of phi, says most of it. Norms come from the recursion of
`muonsw.lab.theory.norms_with_memory`; lambdas and what they cost from our own runs: `measured.json` holds what
`make evidence` found. At a length that was measured advice gives back what was measured, between two of them it
interpolates, and beyond them it takes the nearest and says so.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, NamedTuple

from muonsw.decay import DECAY_RULES, Points, decay_factor
from muonsw.lab.recipes import IDLE
from muonsw.lab.theory import NormHistory, norms_with_memory, target_norms
from muonsw.lab.theory.schedule import sampled, schedule_of
from muonsw.lab.theory.tracking import LAG, peak_decay_step
from muonsw.text import counted, text_table

# What was measured of a rule at one length, as `measured.json` has it.
Measurement = Mapping[str, Any]

# Root mean square of an update at learning rate 1: Muon's with its usual scale and Newton-Schulz, AdamW's typical one.
UPDATE = {"muon": 0.2 * 0.88, "adamw": 0.2}
# Beta of Muon, and the first of AdamW, where none is given.
MOMENTUM = {"muon": 0.95, "adamw": 0.9}
# How much of the memory that momentum would have among independent gradients was seen: 33 of 39 at beta 0.95.
REMEMBERED = 33 / 39
# What a step may take of a weight with a lambda to try; one, but for the two digits in which it is shown.
MOST_IN_A_STEP = 0.95
# Of rates and norms: squares of larger ones, summed over a run, would overflow.
LARGEST = 1e100
# Samples of the norm that the theory of its target looks at.
SAMPLES = 200
# The total decay of the paper's runs under the constant rule: lambda 0.1 over 35,000 to 376,000 updates.
PAPER_TOTALS = "19 to 25"
# Rules that differ from a measured one by a constant factor of lambda.
SAME_RULE = {"squared": "scaled", "independent": "constant"}
# A power of width or batch is followed where half of its interval is at most this: over four times the width it then
# tells lambda within a factor of two, about as far as what is nearly as good reaches.
KNOWN_POWER = 0.5
# Totals in `measured.json` have four digits, so the outermost that were tried reach this much further.
ROUNDED = 1e-3
WIDTH = 79
LEGEND = (
    "takes: sum over the run of phi, the share of a weight that decay takes in a step; leaves: exp(-takes), what it "
    "leaves of a weight; RMS: of the weights; cost: nats above the best lambda in our runs of that length; try: a "
    "lambda."
)


@dataclass(frozen=True)
class RuleAdvice:
    """One decay rule in this run.

    Attributes:
        rule: its name.
        total: the total decay at the given lambda, the sum of phi.
        left: what is left of a weight that nothing else moves, exp(-total).
        phi_peak: the largest share of a weight that a step takes.
        highest_norm: the highest RMS of the weights' entries, by the recursion.
        end_norm: the RMS at the end.
        follows: whether the norm comes near its steady state at all.
        weight_decay: the lambda to try.
        low: the smallest lambda that was nearly as good in our runs of this length, in this run's terms.
        high: the largest one.
        cost: what so much decay cost in our runs of this length, in nats above the best lambda; None beyond the lambdas
            that were tried.
        cost_error: half of the 95% t interval of `cost` over seeds; None where `cost` is, or of one seed.
        own: whether this rule was measured itself; else constant decay's numbers stand for it.
    """

    rule: str
    total: float
    left: float
    phi_peak: float
    highest_norm: float
    end_norm: float
    follows: bool
    weight_decay: float
    low: float
    high: float
    cost: float | None
    cost_error: float | None
    own: bool


@dataclass(frozen=True)
class Advice:
    """What to expect of decay in a run; `print` shows it within 80 columns.

    Attributes:
        steps: updates.
        peak_lr: the peak learning rate.
        weight_decay: the lambda that was asked about.
        verdict: "none", "idle", "mild", "good" or "strong", of the first rule.
        rules: each rule in this run.
        sentences: what follows from it.
        basis: what was measured, and how.
        limits: where it may not hold.
    """

    steps: int
    peak_lr: float
    weight_decay: float
    verdict: str
    rules: tuple[RuleAdvice, ...]
    sentences: tuple[str, ...]
    basis: str
    limits: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("rule", "takes", "leaves", "top RMS", "end RMS", "cost", "try", "good from, to")]
        rows += [
            (
                one.rule,
                "<1e-6" if 0 < one.total < 1e-6 else f"{one.total:.3g}",
                f"{one.left:.0%}",
                _rms(one.highest_norm),
                _rms(one.end_norm),
                "-" if one.cost is None else f"{one.cost:.3f}",
                _two_digits(one.weight_decay),
                f"{_two_digits(one.low)}, {_two_digits(one.high)}",
            )
            for one in self.rules
        ]
        run = f"{self.steps:,} updates, peak learning rate {self.peak_lr:g}, lambda {self.weight_decay:g}:"
        said = [_wrapped(sentence, "- ") for sentence in self.sentences]
        known = [_wrapped(f"Measured: {self.basis}", ""), *(_wrapped(limit, "- ") for limit in self.limits)]
        return "\n".join([run, text_table(rows), *_wrapped(LEGEND, "").splitlines(), "", *said, "", *known])


def advise(
    steps: int,
    peak_lr: float,
    weight_decay: float,
    *,
    schedule: str = "cosine",
    warmup_steps: int | None = None,
    final_fraction: float = 0.1,
    decay_fraction: float = 0.2,
    algorithm: str = "muon",
    momentum: float | None = None,
    initial_rms: float = 0.02,
    base_peak_lr: float | None = None,
    rules: Sequence[str] = ("constant", "scaled"),
    decay_points: Points | None = None,
    width: int | None = None,
    batch_tokens: int | None = None,
) -> Advice:
    """What decay will do in a run, and which lambda to try.

    Args:
        steps: updates of the run.
        peak_lr: the peak learning rate of the matrices that decay.
        weight_decay: lambda.
        schedule: "cosine", "wsd" (flat, then falling) or "constant", after a linear warmup.
        warmup_steps: updates of warmup; None is the paper's rule.
        final_fraction: what is left of the peak at the end.
        decay_fraction: the share of the run that falls under "wsd".
        algorithm: "muon" or "adamw".
        momentum: beta of Muon, or AdamW's first; None is 0.95 and 0.9.
        initial_rms: root mean square of the weights' entries at the start.
        base_peak_lr: the undivided peak, where muP divides the learning rate and decay divides by it (`peak="base"`).
        rules: the decay rules to compare, names from `muonsw.DECAY_RULES`; the first gives the verdict.
        decay_points: (fraction of the run, multiple of lambda) of a piecewise decay.
        width: of the model; where it was measured how lambda follows it, the lambda to try does.
        batch_tokens: tokens in an update, likewise.

    Raises:
        ValueError: if a number makes no sense, or a rule follows the gradients, which are not known beforehand.

    Examples:
        >>> advice = advise(1_600, 0.02, 0.1)
        >>> advice.verdict, [round(one.total, 2) for one in advice.rules]
        ('good', [1.74, 1.27])
        >>> [round(one.end_norm, 2) for one in advice.rules]  # measured: 0.22 and 0.30
        [0.23, 0.31]
        >>> advise(100, 0.001, 0.1).verdict
        'idle'
    """
    sizes = {"width": width, "batch": batch_tokens}
    _check(steps, peak_lr, weight_decay, algorithm, initial_rms, base_peak_lr, rules, decay_points, sizes)
    multiple = schedule_of(
        schedule, steps, warmup_steps=warmup_steps, final_fraction=final_fraction, decay_fraction=decay_fraction
    )
    rates = [peak_lr * one for one in sampled(multiple, steps)]
    beta = MOMENTUM[algorithm] if momentum is None else momentum
    if not 0 <= beta < 1:
        raise ValueError(f"momentum={beta!r}: must be at least 0 and below 1")
    memory = max(1.0, REMEMBERED * (1 + beta) / (1 - beta))
    updates = [UPDATE[algorithm] * rate for rate in rates]
    peak = base_peak_lr or peak_lr
    course = _Course(steps, peak_lr, peak, rates, steps / len(rates), updates, memory, initial_rms, decay_points, sizes)
    found = [_of_rule(rule, weight_decay, course) for rule in rules]
    return _advice(found, weight_decay, course, algorithm, forgets=1 - beta)


class _Course(NamedTuple):
    """What a run will do whatever decays: the numbers from which everything else follows."""

    steps: int
    peak_lr: float
    decay_peak: float  # the peak that decay divides by
    rates: Sequence[float]  # learning rates of evenly spaced steps
    stride: float  # for how many steps each of them stands
    updates: Sequence[float]  # root mean square of the update at each of them
    memory: float  # by how much momentum makes successive updates add up
    initial_rms: float  # root mean square of the weights' entries at the start
    points: Points | None = None  # of a piecewise decay
    sizes: Mapping[str, int | None] = {}  # width and tokens of an update, None where they are not given


def _advice(found: list[RuleAdvice], lam: float, course: _Course, algorithm: str, forgets: float) -> Advice:
    """What the rules come to in words; `forgets` is the share of itself that momentum loses in a step."""
    verdict = _verdict(found[0], lam)
    return Advice(
        steps=course.steps,
        peak_lr=course.peak_lr,
        weight_decay=lam,
        verdict=verdict,
        rules=tuple(found),
        sentences=tuple(_sentences(verdict, found, lam, forgets, course)),
        basis=measured()["basis"],
        limits=(*_limits(course, algorithm, found), *_size_limits(found, course)),
    )


@cache
def measured() -> dict[str, Any]:
    """What our own runs found about the best lambda of each rule; `docs/evidence.md` shows the same in full."""
    found: dict[str, Any] = json.loads(
        resources.files("muonsw.lab").joinpath("measured.json").read_text(encoding="utf-8")
    )
    return found


def best_totals(rule: str, steps: int, known: Sequence[Measurement] = ()) -> tuple[float, float, float]:
    """The total decay where a rule was best in runs of this length, and at the ends of what was nearly as good.

    Between the lengths that were measured by lines over logarithms, beyond them the nearest's; a rule without
    measurements of its own has constant decay's. `known` takes the place of all that was measured.
    """
    near = _nearest(steps, sorted(known, key=lambda one: one["steps"]) or _measurements(rule))
    best, low, high = (
        math.exp(math.fsum(weight * math.log(one[key]) for weight, one in near))
        for key in ("total", "low_total", "high_total")
    )
    return best, low, high


def _totals_at(rule: str, course: _Course) -> tuple[float, float, float]:
    """The best total of a run of this width and batch, and the ends of what was nearly as good."""
    best, low, high = best_totals(rule, _length(rule, course))
    for ratio, one in _powers(rule, course.sizes):
        ends = [ratio ** one[key] for key in ("low", "high")]
        best, low, high = best * ratio ** one["power"], low * min(ends), high * max(ends)
    return best, low, high


def _length(rule: str, course: _Course) -> int:
    """Updates of the measured batch that see as many tokens, where it was measured how totals follow the batch."""
    ratios = [ratio for ratio, one in _powers(rule, course.sizes) if one["of"] == "batch"]
    return max(1, round(course.steps * math.prod(ratios)))


def _powers(rule: str, sizes: Mapping[str, int | None]) -> list[tuple[float, Measurement]]:
    """By which power the best total follows each size that is given, with its ratio to what was measured."""
    known = [one for one in _scaling(rule) if one["high"] - one["low"] <= 2 * KNOWN_POWER]
    return [(size / one["from"], one) for one in known if (size := sizes.get(one["of"])) is not None]


def _scaling(rule: str) -> list[Measurement]:
    """What was measured of how a rule's best total follows width and batch; constant decay stands for what was not."""
    name = SAME_RULE.get(rule, rule) if _was_measured(rule) else "constant"
    return [one for one in measured().get("scaling", ()) if one["rule"] == name]


def _size_limits(rules: Sequence[RuleAdvice], course: _Course) -> list[str]:
    """How the lambdas to try follow the width and the batch, or that it is not known."""
    found = []
    for of in (of for of, size in course.sizes.items() if size is not None):
        powers = {one.rule: known for one in rules for known in _scaling(one.rule) if known["of"] == of}
        if not powers:
            found.append(f"How lambda follows the {of} was not measured: the lambdas to try do not depend on it.")
        for rule, one in powers.items():
            power = f"the power {one['power']:.2g} ({one['low']:.2g} to {one['high']:.2g}, 95% t interval over seeds)"
            if any(one is known for _, known in _powers(rule, course.sizes)):
                found.append(f"{rule}: the best total follows the {of}, from {one['from']:,}, by {power}.")
            else:
                found.append(
                    f"{rule}: how the best total follows the {of} is not known well enough, by {power}: the lambda to "
                    "try does not depend on it."
                )
    return found


def _nearest(steps: int, own: Sequence[Measurement]) -> list[tuple[float, Measurement]]:
    """What was measured at the lengths next to this one, with weights that sum to one."""
    for before, after in pairwise(own):
        if before["steps"] < steps < after["steps"]:
            share = math.log(steps / before["steps"]) / math.log(after["steps"] / before["steps"])
            return [(1 - share, before), (share, after)]
    return [(1.0, min(own, key=lambda one: abs(math.log(steps / one["steps"]))))]


def _measurements(rule: str) -> list[Measurement]:
    """What was measured of a rule, by length; constant decay stands for what was not."""
    name = SAME_RULE.get(rule, rule) if _was_measured(rule) else "constant"
    return sorted((one for one in measured()["optima"] if one["rule"] == name), key=lambda one: one["steps"])


def _was_measured(rule: str) -> bool:
    return any(one["rule"] == SAME_RULE.get(rule, rule) for one in measured()["optima"])


def _phis(rule: str, course: _Course) -> list[float]:
    """The decay of every step for lambda 1."""
    steps = ((place + 0.5) * course.stride + 0.5 for place in range(len(course.rates)))
    return [
        float(decay_factor(rule, 1.0, rate, course.decay_peak, step=step, steps=course.steps, points=course.points))
        for rate, step in zip(course.rates, steps, strict=True)
    ]


def _of_rule(rule: str, lam: float, course: _Course) -> RuleAdvice:
    per_lambda = _phis(rule, course)
    phis = [lam * phi for phi in per_lambda]
    if max(phis) > 1:
        raise ValueError(
            f"{rule} decay with weight_decay={lam:g} would take {max(phis):g} times the weight in one step; lower it"
        )
    norms = norms_with_memory(
        course.initial_rms, s=course.updates, phi=phis, memory=course.memory, stride=course.stride
    )
    in_all = course.stride * math.fsum(per_lambda)
    most = MOST_IN_A_STEP / max(per_lambda) if in_all else 0.0
    best, low, high = (min(most, wanted / in_all) if in_all else 0.0 for wanted in _totals_at(rule, course))
    total = lam * in_all
    cost, error = _cost(rule, total, course)
    return RuleAdvice(
        rule=rule,
        total=total,
        left=math.exp(-total),
        phi_peak=max(phis),
        highest_norm=max(norms),
        end_norm=norms[-1],
        follows=total >= 1 and _follows(norms, phis, course),
        weight_decay=best,
        low=low,
        high=high,
        cost=cost,
        cost_error=error,
        own=_was_measured(rule),
    )


def _follows(norms: Sequence[float], phis: Sequence[float], course: _Course) -> bool:
    """Whether the norm comes within a fifth of its steady state after the peak, as `lab.theory.track` means it."""
    updates, memory = course.updates, course.memory
    places = range(0, len(phis), max(1, len(phis) // SAMPLES))
    history = NormHistory.of(
        list(places),
        r=[norms[i] for i in places],
        s=[updates[i] for i in places],
        phi=[phis[i] for i in places],
        a=[max(-1.0, -(memory - 1) * updates[i] / (2 * norms[i])) for i in places],
    )
    lag = (history.r / target_norms(history)).log().abs()
    return bool((lag[history.steps >= peak_decay_step(history)] <= LAG).any())


def _verdict(first: RuleAdvice, lam: float) -> str:
    """What was measured decides; beyond the lambdas that were tried, on which side of them this one is."""
    if lam == 0 or first.total == 0:
        return "none"
    if first.total < IDLE:
        return "idle"
    if first.cost is not None and first.cost <= measured()["good"]:
        return "good"
    return "mild" if lam < first.weight_decay else "strong"


def _sentences(verdict: str, rules: Sequence[RuleAdvice], lam: float, forgets: float, course: _Course) -> list[str]:
    first, where = rules[0], _where(rules[0].rule, course)
    words = {
        "none": "Nothing decays: norms only grow, and no rule can differ from another.",
        "idle": (
            f"Decay hardly acts in this run: it takes {1 - first.left:.0%} of a weight over the run, so the rule "
            f"hardly matters. {_costs(rules, where)} {_as_much(first, lam, where, course)}"
        ),
        "mild": (
            f"Decay acts, but takes less than the best {where}. {_costs(rules, where)} "
            f"{_as_much(first, lam, where, course)}"
        ),
        "good": (
            f"Decay acts, and lambda {lam:g} takes {_times(first, course)} {where}: as much cost at most "
            f"{measured()['good']} nats there."
        ),
        "strong": f"Decay is strong: {_times(first, course)} {where}. {_costs(rules, where)}",
    }
    said = [words[verdict]]
    if verdict != "none":
        said += [_norm_sentence(one) for one in rules]
    fast = [f"{one.phi_peak:.2g} of a weight under {one.rule}" for one in rules if one.phi_peak > 0.2 * forgets]
    if fast:
        said.append(
            f"At the peak a step takes {', '.join(fast)}, which is not slow against what momentum forgets, "
            f"{forgets:.2g}; norms will differ from those of longer runs."
        )
    return said


def _as_much(one: RuleAdvice, lam: float, where: str, course: _Course) -> str:
    """Which lambda takes as much as the best of what was measured, or the highest to try where none can."""
    number, wanted = _two_digits(one.weight_decay), _totals_at(one.rule, course)[0]
    if not lam or one.phi_peak * one.weight_decay < 0.999 * MOST_IN_A_STEP * lam:
        return f"Lambda {number} would take as much as the best {where}."
    return f"In so few updates no lambda takes {wanted:.2g}, the best {where}: {number} nearly all in one step."


def _times(one: RuleAdvice, course: _Course) -> str:
    ratio = one.total / _totals_at(one.rule, course)[0]
    return f"{_two_digits(ratio) if ratio >= 100 else f'{ratio:.1f}'} times what was best"


def _where(rule: str, course: _Course) -> str:
    """Which of our runs are spoken of."""
    lengths = [one["steps"] for _, one in _nearest(_length(rule, course), _measurements(rule))]
    if len(lengths) == 2:
        return f"between our runs of {lengths[0]:,} and {lengths[1]:,} updates"
    return f"in our runs of {lengths[0]:,} updates"


def _norm_sentence(one: RuleAdvice) -> str:
    fall = 1 - one.end_norm / one.highest_norm
    end = _rms(one.end_norm)
    way = f"falls by {fall:.0%} from its highest to {end}" if fall > 0.02 else f"ends at {end}"
    why = "decay and updates come to balance" if one.follows else "the run ends before decay and updates balance"
    return f"{one.rule}: the RMS of the weights {way}; {why}."


def _costs(rules: Sequence[RuleAdvice], where: str) -> str:
    """What as much decay cost, by rule."""
    known = [f"{_cost_text(one)} under {one.rule} decay" for one in rules if one.cost is not None]
    if known:
        return f"The same total cost {' and '.join(known)} {where}, in nats above the best lambda of the rule."
    return f"That is beyond the lambdas that were tried {where}."


def _cost_text(one: RuleAdvice) -> str:
    error = f"{one.cost_error or 0:.3f}"
    return f"{one.cost:.3f}" if float(error) == 0 else f"{one.cost:.3f}±{error}"


def _cost(rule: str, total: float, course: _Course) -> tuple[float | None, float | None]:
    """What as many times the best total cost above the best lambda of a rule, and half of its interval."""
    if not _was_measured(rule):
        return None, None
    total /= math.prod(ratio ** one["power"] for ratio, one in _powers(rule, course.sizes))
    near = _nearest(_length(rule, course), _measurements(rule))
    found = [(weight, *_cost_at(one["costs"], total)) for weight, one in near]
    cost, error = (
        None if any(one[column] is None for one in found) else math.fsum(one[0] * one[column] for one in found)
        for column in (1, 2)
    )
    return cost, error


def _cost_at(costs: Sequence[Sequence[Any]], total: float) -> tuple[Any, Any]:
    """Cost and error at one length, by lines over the logarithm of the total; None beyond what was tried."""
    for (low, *before), (high, *after) in pairwise(costs):
        if low * (1 - ROUNDED) <= total <= high * (1 + ROUNDED):
            share = min(1.0, max(0.0, math.log(total / low) / math.log(high / low)))
            cost, error = (
                None if None in pair else pair[0] + (pair[1] - pair[0]) * share
                for pair in zip(before, after, strict=True)
            )
            return cost, error
    return None, None


def _limits(course: _Course, algorithm: str, rules: Sequence[RuleAdvice]) -> list[str]:
    limits = [_lengths(one.rule) for one in rules if one.own and one.rule not in SAME_RULE]
    limits += [limit for one in rules if (limit := _beyond(one, _length(one.rule, course)))]
    limits += [
        f"The paper's runs have a total of {PAPER_TOTALS}, far more; the best lambda there is not known.",
        *_repeated(),
        "Norms assume updates whose alignment with the weights only momentum makes; in our runs of width 128 that gave "
        "end norms within an eighth of the measured ones, where lambda times the rate was below 1 - beta.",
    ]
    if algorithm != "muon":
        limits.append("None of this was measured for AdamW: sums are exact, lambdas and norms are guesses.")
    unmeasured = [one.rule for one in rules if not one.own and one.weight_decay]
    if unmeasured:
        limits.append(f"Lambdas of {', '.join(unmeasured)} are those with the total of constant decay's best.")
    return limits


def _repeated() -> list[str]:
    """How much more decay was better on repeated text."""
    return [
        f"Where text was seen {one['epochs']} times, {one['times']:g} times{' or more' * one['at_an_end']} the lambda "
        f"of fresh text was best under {one['rule']} decay."
        for one in measured().get("repeated", ())
    ]


def _lengths(rule: str) -> str:
    """The totals that were best by length, how often the text was seen, and whether less or more may be better."""
    own = _measurements(rule)
    totals = ", ".join(
        f"{one['total']:.2g}{'*' * one['at_an_end']} at {one['steps']:,} ({one['epochs']:.1f} epochs)" for one in own
    )
    ends = " *: the smallest or largest that was tried, so the best may lie beyond." if "*" in totals else ""
    fewest, most = (choose(one["seeds"] for one in own) for choose in (min, max))
    seeds = f"{fewest} to {most} seeds" if fewest < most else counted(most, "seed")
    return f"{rule}: total decay of the best lambda, by updates: {totals}; {seeds}.{ends}"


def _beyond(one: RuleAdvice, steps: int) -> str:
    """How far a run is from what was measured, and what lambda would be if totals went on growing with the length."""
    own = _measurements(one.rule)
    first, last = own[0], own[-1]
    ratio, way = max((steps / last["steps"], "longer"), (first["steps"] / steps, "shorter"))
    if ratio <= 1:
        return ""
    beyond = f"{one.rule}: this run is {_two_digits(ratio)} times {way} than what was measured."
    if len(own) == 1 or not one.weight_decay or first["at_an_end"] or last["at_an_end"]:
        return beyond
    power = math.log(last["total"] / first["total"]) / math.log(last["steps"] / first["steps"])
    other = one.weight_decay * (steps / (last if steps > last["steps"] else first)["steps"]) ** power
    if not math.isfinite(other):
        return beyond
    return (
        f"{beyond} The lambda to try takes what was best at the nearest length; if that goes on changing with the "
        f"length to the power {power:.2f}, it is {_two_digits(other)}: try both."
    )


def _check(
    steps: Any,
    peak_lr: float,
    lam: float,
    algorithm: str,
    initial: float,
    base: float | None,
    rules: Sequence[str],
    points: Points | None,
    sizes: Mapping[str, int | None],
) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: must be a whole number of at least 1")
    for name, value in (("peak_lr", peak_lr), ("initial_rms", initial), ("base_peak_lr", base or peak_lr)):
        if not 0 < value <= LARGEST:
            raise ValueError(f"{name}={value!r}: must be a positive number of at most {LARGEST:g}")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size!r}: must be at least 1")
    if not 0 <= lam < math.inf:
        raise ValueError(f"weight_decay={lam!r}: must be a number of at least 0")
    if algorithm not in UPDATE:
        raise ValueError(f"algorithm={algorithm!r}: must be one of {', '.join(UPDATE)}")
    if not rules:
        raise ValueError("rules: name at least one")
    for rule in rules:
        if DECAY_RULES[rule].uses_gradient:
            raise ValueError(f"decay rule {rule!r} follows the gradients, which are not known before the run")
        if DECAY_RULES[rule].uses_points and points is None:
            raise ValueError(f"decay rule {rule!r} goes through points: pass decay_points= to muonsw.lab.advice.advise")


def _two_digits(number: float) -> str:
    """A number in two digits, without a power of ten below a million.

    Examples:
        >>> [_two_digits(number) for number in (0.0212, 4.75, 99.7, 233.1, 156250.0, 3e7)]
        ['0.021', '4.8', '100', '230', '160,000', '3e+07']
    """
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if 100 <= rounded < 1e6 else f"{rounded:g}"


def _rms(norm: float) -> str:
    return f"{norm:.3f}" if norm < 1000 else f"{norm:.0f}" if norm < 1e6 else f"{norm:.3g}"


def _wrapped(text: str, bullet: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet))
