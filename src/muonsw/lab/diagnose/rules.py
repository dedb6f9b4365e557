"""The rules of `muonsw diagnose`: each is a function from a history to a finding, or to None if nothing is to be said.

A finding is a sentence or two that a reader can act on, with the numbers it rests on. `RULES`, at the end, is the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from muonsw.lab.diagnose.history import LINEAR, QUADRATIC, Array, History
from muonsw.lab.tables import norm_text

# Samples of telemetry: fewer than the first say nothing at all, fewer than the second are too few for fits and slopes.
MIN_SAMPLES, ENOUGH_SAMPLES = 5, 20
MANY_SKIPPED = 0.01
# Share of the records that one average of the loss covers, and share of the progress that may be given back.
AVERAGED, GIVEN_BACK = 0.05, 0.1
# Where the norm follows sqrt(lr), it is down by this much when the learning rate has halved.
COLLAPSE = 0.29
HALVED = 0.5
# Part of the fall must come after the learning rate has halved: a norm that started too large falls before that.
LATE_LOSS = 0.1
HELD = 0.15
# exp(-0.3) = 0.74: all decay of the run together takes a quarter.
IDLE = 0.3
# exp(-3) = 0.05: the squared norm has forgotten 95% of its start.
RELAXED = 3.0
# Sampled updates miss the very peak of a schedule by a few percent.
REACHED = 0.95
UNEXPLAINED = 0.1
# Five Newton-Schulz steps map singular values from 1.5e-3 of the largest on into this range (rounding added).
DEFECT_RANGE = (0.68, 1.21)
# Decay should be slow against momentum: a fifth is 0.01 per step at beta 0.95, twice that is a warning.
SLOW, TOO_FAST = 0.2, 0.4
ROUNDING = 0.05
RADIAL = 0.05


class Severity(StrEnum):
    """How serious a finding is: a problem ruins the run, a warning costs something, a note explains."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found.

    Attributes:
        rule: Name of the rule, as in the guide.
        severity: How serious it is.
        scope: Which weights it is about.
        text: What was found, and what to do.
        numbers: What the text rests on.
        also: Further scopes in which the same rule found the same.
    """

    rule: str
    severity: Severity
    scope: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """The most serious first, otherwise as they came."""
    order = tuple(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def words(scope: str) -> str:
    """A scope in words.

    Examples:
        >>> words("role:experts"), words("decayed")
        ('the weights of role experts', 'the decayed weights')
    """
    kind, _, name = scope.partition(":")
    return {"all": "all weights", "decayed": "the decayed weights"}.get(scope) or f"the weights of {kind} {name}"


def subject(scope: str) -> str:
    """A scope in words, to begin a sentence with.

    Examples:
        >>> subject("layer:3")
        'The weights of layer 3'
    """
    return words(scope)[0].upper() + words(scope)[1:]


def percent(share: float) -> str:
    """A share with two digits at most.

    Examples:
        >>> percent(0.6), percent(0.0123), percent(0.0004)
        ('60%', '1.2%', '0.04%')
    """
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def unfinished(history: History) -> Finding | None:
    """The run has not written its result, or its records end before it."""
    step, planned = history.run.steps, history.planned_steps
    if history.run.in_progress:
        text = f"The run is not complete: step {step:,} of {planned:,}. Everything below describes it so far."
    elif (lost := history.run.lost_records) > 0:
        step = planned - lost
        text = f"The run is complete, and its records end at step {step:,} of {planned:,}: part of its file is lost."
    else:
        return None
    return Finding("unfinished", Severity.NOTE, history.scope, text, {"step": step, "planned": planned})


def too_few_samples(history: History) -> Finding | None:
    """There is too little telemetry for fits and slopes."""
    n = int(history.complete.sum())
    if n >= ENOUGH_SAMPLES:
        return None
    text = (
        f"Only {n} telemetry samples have norm, update, decay and alignment. That is too few for fits and slopes, so "
        f"some rules cannot say anything. Sample every {max(history.planned_steps // 100, 1)} steps "
        "(--telemetry-every)."
    )
    return Finding("too-few-samples", Severity.NOTE, history.scope, text, {"samples": n})


def skipped_steps(history: History) -> Finding | None:
    """Updates were left out because gradients were not finite."""
    known = history.run.telemetry.skipped
    skipped = int(np.nanmax(known)) if np.isfinite(known).any() else 0
    if not skipped:
        return None
    share = skipped / max(int(history.steps[-1]), 1)
    severity = Severity.WARNING if share > MANY_SKIPPED else Severity.NOTE
    text = (
        f"{skipped:,} of {int(history.steps[-1]):,} updates ({percent(share)}) were skipped because a gradient was not "
        "finite. Look for overflow: loss scale, data, attention logits, learning rate."
    )
    return Finding("skipped", severity, history.scope, text, {"skipped": skipped, "share": share})


def diverging(history: History) -> Finding | None:
    """The training loss is not a number, or has given back part of what was learned."""
    recorded, steps = history.run.train.get("loss"), history.run.train.step
    if recorded is None or not len(recorded):
        return None
    known = np.isfinite(recorded)
    if not known[-1]:
        last = np.flatnonzero(known)
        since = int(steps[last[-1] + 1]) if len(last) else int(steps[0])
        text = (
            f"The training loss is not a number since step {since:,}. Restart from a checkpoint before that step, with "
            "a lower learning rate."
        )
        return Finding("diverging", Severity.PROBLEM, history.scope, text, {"since": since})
    steps, (averages, width) = steps[known], _averages(recorded[known])
    if len(averages) < 2:
        return None
    best = int(averages.argmin())
    progress, back = float(averages[0] - averages[best]), float(averages[-1] - averages[best])
    if not back > GIVEN_BACK * max(progress, 1e-12):
        return None
    step = int(steps[best + width // 2])
    text = (
        f"The training loss has risen from {averages[best]:.4f} around step {step:,} to {averages[-1]:.4f}: the run is "
        "diverging. Lower the learning rate, or go back to a checkpoint."
    )
    numbers = {"best": float(averages[best]), "now": float(averages[-1]), "best_step": float(step)}
    return Finding("diverging", Severity.PROBLEM, history.scope, text, numbers)


def _averages(loss: Array) -> tuple[Array, int]:
    """Moving averages of the loss, and how many records each covers."""
    width = max(int(AVERAGED * len(loss)), 5)
    if len(loss) < 2 * width:
        return loss[:0], width
    return np.convolve(loss, np.full(width, 1.0 / width), mode="valid"), width


def collapsing(history: History) -> Finding | None:
    """Decay in proportion to the learning rate takes the norm down with it."""
    fall = _fall(history)
    if history.run.rule not in LINEAR or fall is None or fall.lost < COLLAPSE or fall.lost_late < LATE_LOSS:
        return None
    held = history.held_norm()
    hope = f" Scaled decay would hold it at about {norm_text(held)}." if held > fall.end else ""
    text = (
        f"{subject(history.scope)} have lost {percent(fall.lost)} of their peak norm since step {fall.top_step:,} "
        f"({norm_text(fall.top)} to {norm_text(fall.end)}), and the learning rate is at {percent(history.lr_left)} of "
        f'its peak: {history.run.rule} decay makes the norm fall with the learning rate.{hope} Try decay="scaled".'
    )
    numbers = {"lost": fall.lost, "peak_norm": fall.top, "peak_step": float(fall.top_step), "held_norm": held}
    return Finding("collapsing", Severity.WARNING, history.scope, text, numbers | {"lr_left": history.lr_left})


def norm_held(history: History) -> Finding | None:
    """Scaled decay keeps the norm where it is while the learning rate falls."""
    fall = _fall(history)
    if history.run.rule not in QUADRATIC or fall is None or abs(fall.lost_late) > HELD:
        return None
    text = (
        f"{subject(history.scope)} keep their norm: {norm_text(fall.halved)} when the learning rate had halved, "
        f"{norm_text(fall.end)} when {percent(history.lr_left)} of it was left. Scaled decay works as intended."
    )
    numbers = {"change": -fall.lost_late, "lr_left": history.lr_left}
    return Finding("norm-held", Severity.GOOD, history.scope, text, numbers)


@dataclass(frozen=True)
class Fall:
    """How the norm fell once its start was forgotten: top, value when the learning rate had halved, end."""

    top: float
    top_step: int
    halved: float
    end: float

    @property
    def lost(self) -> float:
        """Share lost since the top."""
        return 1.0 - self.end / self.top

    @property
    def lost_late(self) -> float:
        """Share lost since the learning rate halved."""
        return 1.0 - self.end / self.halved


def _fall(history: History) -> Fall | None:
    """None before the learning rate has halved, and where the initial norm is not forgotten before that."""
    r = history.column("weight_rms")
    halved = np.flatnonzero((history.column("lr") <= HALVED * history.highest("lr")) & np.isfinite(r))
    halved = halved[halved > history.peak_at]
    forgotten = np.flatnonzero((history.relaxations_so_far >= RELAXED) & np.isfinite(r))
    if len(halved) < 2 or not len(forgotten) or forgotten[0] > halved[0]:
        return None
    top = int(forgotten[r[forgotten].argmax()])
    return Fall(float(r[top]), int(history.steps[top]), float(r[halved[0]]), history.last("weight_rms"))


def decay_idle(history: History) -> Finding | None:
    """All decay of the run together changes nothing that matters."""
    total = history.relaxations / 2.0
    if not total < IDLE or _still_rising(history):
        return None
    numbers = {"decay_total": total, "kept": float(np.exp(-total))}
    if total == 0.0:
        text = f"{subject(history.scope)} are not decayed: lambda is 0 for them."
        return Finding("decay-idle", Severity.NOTE, history.scope, text, numbers)
    text = (
        f"Decay has hardly any effect on {words(history.scope)} in a run of this length: the sum of its factors phi is "
        f"{total:.2g}, so decay alone would have kept {percent(numbers['kept'])} of them. Here it does not matter "
        f"which rule is used. For decay to act, raise lambda about {1.0 / total:.0f} times, or train longer."
    )
    return Finding("decay-idle", Severity.WARNING, history.scope, text, numbers)


def partly_relaxed(history: History) -> Finding | None:
    """The norm still depends on the initial weights."""
    n = history.relaxations
    if not 2.0 * IDLE <= n < RELAXED:
        return None
    text = (
        f"The norm of {words(history.scope)} still depends on the initial weights: the run lasts {n:.2g} relaxation "
        f"times (2*sum(phi)), so {percent(float(np.exp(-n)))} of the initial square is left. Compare it only with runs "
        "of the same number."
    )
    return Finding("partly-relaxed", Severity.NOTE, history.scope, text, {"relaxations": n})


def peak_not_reached(history: History) -> Finding | None:
    """The peak that scaled decay divides by is higher than any learning rate that was used."""
    used, peak = history.highest("lr"), history.highest("peak_lr")
    # With the undivided peak for all groups a divided learning rate stays below it on purpose.
    if not used < REACHED * peak or history.setting("peak") == "base" or _still_rising(history):
        return None
    text = (
        f"The learning rate of {words(history.scope)} never reached the peak that decay divides by: the peak is "
        f"{peak:.3g}, the highest learning rate was {used:.3g}. Decay is therefore {percent(used / peak)} of what "
        "lambda says. Set peak_lr to the peak of the schedule."
    )
    numbers = {"highest_lr": used, "peak_lr": peak}
    return Finding("peak-not-reached", Severity.WARNING, history.scope, text, numbers)


def _still_rising(history: History) -> bool:
    return history.peak_at == len(history.steps) - 1 and not history.run.complete


def tracking_broke(history: History) -> Finding | None:
    """From some step on the steady state no longer says where the norm is."""
    tracking = history.tracking
    if tracking is None or tracking.broke_at is None or int(history.complete.sum()) < MIN_SAMPLES:
        return None
    side = "above" if float(tracking.lag[tracking.lag.isfinite()][-1]) > 0 else "below"
    numbers = {"broke_at": float(tracking.broke_at), "followed": float(tracking.followed)}
    if not tracking.followed:
        text = (
            f"The norm of {words(history.scope)} never came within a fifth of its steady state, and ends {side} it. "
            "Use the recursion to explain this norm, not the steady state."
        )
        return Finding("tracking-broke", Severity.NOTE, history.scope, text, numbers)
    text = (
        f"The norm of {words(history.scope)} follows its steady state until step {tracking.broke_at:,}. After that it "
        f"stays more than a fifth {side} it, because decay has become too slow to move it: from there on the norm "
        "reflects the earlier part of the run."
    )
    return Finding("tracking-broke", Severity.NOTE, history.scope, text, numbers)


def unexplained_norm(history: History) -> Finding | None:
    """The recorded updates do not add up to the recorded norm."""
    tracking, norm = history.tracking, history.norm
    if tracking is None or norm is None or len(norm) < MIN_SAMPLES:
        return None
    error = tracking.predicted / norm.r - 1.0
    worst = int(error.abs().argmax())
    if float(error[worst].abs()) < UNEXPLAINED:
        return None
    text = (
        f"The recorded updates of {words(history.scope)} do not add up to their norm: the recursion is off by "
        f"{percent(float(error[worst].abs()))} at step {int(norm.steps[worst]):,}. Either something else changes the "
        "weights (a constraint, a cautious mask, rounding, groups with different decay), or there are too few samples: "
        "sample more often."
    )
    numbers = {"error": float(error[worst]), "step": float(norm.steps[worst])}
    return Finding("unexplained-norm", Severity.WARNING, history.scope, text, numbers)


def large_updates(history: History) -> Finding | None:
    """Momentum replaces the weights within its own memory."""
    size, bound = history.typical(history.relative_update), 1.0 - history.momentum
    if not size > bound or _few(history):
        return None
    text = (
        f"Updates are {percent(size)} of {words(history.scope)}. From {percent(bound)} on, momentum with coefficient "
        f"{history.momentum:g} replaces the weights within the {1.0 / bound:.0f} steps that it remembers. Lower the "
        "learning rate, or lower lambda if decay has made the weights this small."
    )
    return Finding("large-updates", Severity.WARNING, history.scope, text, {"relative_update": size, "bound": bound})


def fast_decay(history: History) -> Finding | None:
    """Decay is not slow against momentum, as the theory of the norm assumes."""
    peak, forgetting = history.highest("decay"), 1.0 - history.momentum
    ratio = peak / forgetting
    # At the limit itself rounding must not decide.
    if not ratio > SLOW * (1.0 + 1e-6):
        return None
    severity = Severity.WARNING if ratio > TOO_FAST else Severity.NOTE
    text = (
        f"Decay of {words(history.scope)} is not slow against momentum: its largest factor phi is {peak:.2g} per step, "
        f"{percent(ratio)} of 1 - beta = {forgetting:.2g}. Norms will differ from those of runs with slower decay; use "
        "a smaller lambda and more steps."
    )
    return Finding("fast-decay", severity, history.scope, text, {"phi_peak": peak, "ratio": ratio})


def defect_out_of_range(history: History) -> Finding | None:
    """Muon's direction is further from orthogonal than its iteration allows."""
    defect = history.typical(history.column("defect"))
    low, high = DEFECT_RANGE
    if not (defect < low or defect > high) or _few(history):
        return None
    cause = (
        "many singular values of the momentum are below 1.5e-3 of the largest, so that whole directions hardly move "
        "(dead experts, unused rows)"
        if defect < low
        else "the iteration overshoots; check ns_dtype and the coefficients"
    )
    text = (
        f"Muon's direction for {words(history.scope)} has size {defect:.2f}, where 1 is orthogonal and {low} to {high} "
        f"is normal: {cause}."
    )
    return Finding("defect", Severity.WARNING, history.scope, text, {"defect": defect})


def lost_in_rounding(history: History) -> Finding | None:
    """The weights moved by something else than was intended."""
    r, s, phi, a = (history.column(key) for key in ("weight_rms", "update_rms", "decay", "alignment_update"))
    with np.errstate(divide="ignore", invalid="ignore"):
        intended = np.sqrt((phi * r + a * s) ** 2 + (1.0 - a**2) * s**2)
        arrived = history.typical(history.column("applied_rms") / intended)
    if not abs(arrived - 1.0) > ROUNDING or _few(history):
        return None
    cause = (
        "the rest is lost in rounding. Keep these weights in float32, or round stochastically"
        if arrived < 1.0
        else "rounding adds to it. Under stochastic rounding that averages out"
    )
    text = f"{subject(history.scope)} move by {percent(arrived)} of what decay and update intend: {cause}."
    return Finding("rounding", Severity.WARNING, history.scope, text, {"arrived": arrived})


def radial_gradient(history: History) -> Finding | None:
    """The loss depends on the size of the weights, not on their direction alone."""
    cosine = history.typical(np.abs(history.column("alignment_gradient")))
    if not cosine > RADIAL or _few(history):
        return None
    text = (
        f"The gradient of {words(history.scope)} is not orthogonal to them (size of the cosine: {cosine:.2f}). The "
        "loss depends on their norm, as it does where no normalization follows, so the alignment of the update comes "
        "from the loss as well as from momentum."
    )
    return Finding("radial-gradient", Severity.NOTE, history.scope, text, {"cosine": cosine})


def _few(history: History) -> bool:
    return len(history.steps) < MIN_SAMPLES


@dataclass(frozen=True)
class Rule:
    """A question that is put to a history.

    Attributes:
        name: As in the guide and in the findings.
        check: The question.
        parts: Whether it is put to every role as well as to the chosen scope.
    """

    name: str
    check: Callable[[History], Finding | None]
    parts: bool = False


RULES = (
    Rule("unfinished", unfinished),
    Rule("too-few-samples", too_few_samples),
    Rule("skipped", skipped_steps),
    Rule("diverging", diverging),
    Rule("collapsing", collapsing, parts=True),
    Rule("norm-held", norm_held, parts=True),
    Rule("decay-idle", decay_idle),
    Rule("partly-relaxed", partly_relaxed),
    Rule("peak-not-reached", peak_not_reached, parts=True),
    Rule("tracking-broke", tracking_broke),
    Rule("unexplained-norm", unexplained_norm),
    Rule("large-updates", large_updates, parts=True),
    Rule("fast-decay", fast_decay),
    Rule("defect", defect_out_of_range, parts=True),
    Rule("rounding", lost_in_rounding, parts=True),
    Rule("radial-gradient", radial_gradient),
)


def examine(history: History, parts: Iterable[History] = ()) -> list[Finding]:
    """Put every rule to a history and its parts; the most serious findings come first.

    What holds for the whole is said once, with the parts it also holds for. What holds for parts alone is said of each.
    """
    known, findings = list(parts), []
    for rule in RULES:
        whole = rule.check(history)
        within = [part for part in known if part.scope != history.scope] if rule.parts else []
        found = [finding for part in within if (finding := rule.check(part))]
        if whole is None:
            findings += found
        else:
            findings.append(replace(whole, also=tuple(finding.scope for finding in found)))
    return ordered(findings)
