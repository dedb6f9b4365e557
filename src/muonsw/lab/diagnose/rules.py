"""The rules of `muonsw diagnose`: each is a function from a history to what is to be said, or None.

That is a severity, a sentence or two that a reader can act on, and the numbers they rest on. `RULES` has them in the
order in which they stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from muonsw.lab.base.tables import norm_text
from muonsw.lab.diagnose.history import LINEAR, QUADRATIC, History, ratio
from muonsw.lab.diagnose.live import COLLAPSE, HALVED, LATE_LOSS, MANY_SKIPPED, NEARLY_ALWAYS, ROUNDING
from muonsw.lab.recipes import IDLE
from muonsw.text import counted

# Samples of telemetry: fewer than the first say nothing at all, fewer than the second are too few for fits and slopes.
MIN_SAMPLES, ENOUGH_SAMPLES = 5, 20
# Share of the records that one average of the loss covers, and share of the progress that may be given back.
AVERAGED, GIVEN_BACK = 0.05, 0.1
# Standard errors of such an average by which chance alone does not lift the last one above the lowest.
CHANCE = 6.0
HELD = 0.15
# exp(-3) = 0.05: the squared norm has forgotten 95% of its start.
RELAXED = 3.0
# Sampled updates miss the very peak of a schedule by a few percent.
REACHED = 0.95
UNEXPLAINED = 0.1
# Five Newton-Schulz steps map singular values from 1.5e-3 of the largest on into this range (rounding added).
DEFECT_RANGE = (0.68, 1.21)
# Decay should be slow against momentum: a fifth is 0.01 per step at beta 0.95, twice that is a warning.
SLOW, TOO_FAST = 0.2, 0.4
RADIAL = 0.05


class Severity(StrEnum):
    """How serious a finding is: a problem ruins the run, a warning costs something, a note explains."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found."""

    rule: str  # name of the rule, as in the guide
    severity: Severity  # how serious it is
    scope: str  # which weights it is about
    text: str  # what was found, and what to do
    numbers: Mapping[str, float] = field(default_factory=dict)  # what the text rests on
    also: tuple[str, ...] = ()  # further scopes in which the same rule found the same


Answer = tuple[Severity, str, Mapping[str, float]] | None


@dataclass(frozen=True)
class Rule:
    """A question that is put to a history."""

    name: str  # as in the guide and in the findings
    answer: Callable[[History], Answer]  # severity, text and numbers of what is found, or None
    parts: bool = False  # whether it is put to every role as well as to the chosen scope
    samples: int = 0  # with fewer it is not put at all

    def check(self, history: History) -> Finding | None:
        """What the rule finds."""
        found = self.answer(history) if len(history.steps) >= self.samples else None
        return found and Finding(self.name, found[0], history.scope, *found[1:])


RULES: list[Rule] = []


def rule(
    name: str, *, parts: bool = False, samples: int = 0
) -> Callable[[Callable[[History], Answer]], Callable[[History], Answer]]:
    """Put a function on the list of rules."""

    def keep(answer: Callable[[History], Answer]) -> Callable[[History], Answer]:
        RULES.append(Rule(name, answer, parts, samples))
        return answer

    return keep


def examine(history: History, parts: Iterable[History] = ()) -> list[Finding]:
    """Put every rule to a history and its parts; the most serious findings come first, otherwise as they came.

    What holds for the whole is said once, with the parts it also holds for. What holds for parts alone is said of each.
    """
    known, findings = [part for part in parts if part.scope != history.scope], []
    for each in RULES:
        whole = each.check(history)
        found = [finding for part in known if each.parts and (finding := each.check(part))]
        findings += [replace(whole, also=tuple(finding.scope for finding in found))] if whole else found
    return ordered(findings)


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """The most serious first, otherwise as they came."""
    return sorted(findings, key=lambda finding: tuple(Severity).index(finding.severity))


def words(scope: str) -> str:
    """A scope in words.

    Examples:
        >>> words("role:experts"), words("decayed")
        ('the weights of role experts', 'the decayed weights')
    """
    kind, _, name = scope.partition(":")
    return {"all": "all weights", "decayed": "the decayed weights"}.get(scope) or f"the weights of {kind} {name}"


def subject(scope: str) -> str:
    """A scope in words, to begin a sentence with."""
    return words(scope)[0].upper() + words(scope)[1:]


def percent(share: float) -> str:
    """A share with two digits at most.

    Examples:
        >>> percent(0.6), percent(0.0123), percent(0.0004)
        ('60%', '1.2%', '0.04%')
    """
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


@rule("unfinished")
def unfinished(history: History) -> Answer:
    """The run has not written its result, or its records end before it."""
    step, planned = history.run.steps, history.planned_steps
    if history.run.in_progress:
        text = f"The run is not complete: step {step:,} of {planned:,}. Everything below describes it so far."
    elif (lost := history.run.lost_records) > 0:
        step = planned - lost
        text = f"The run is complete, and its records end at step {step:,} of {planned:,}: part of its file is lost."
    else:
        return None
    return Severity.NOTE, text, {"step": step, "planned": planned}


@rule("too-few-samples")
def too_few_samples(history: History) -> Answer:
    """There is too little telemetry for fits and slopes."""
    n = history.complete
    if n >= ENOUGH_SAMPLES:
        return None
    every = max(history.planned_steps // 100, 1)
    more = f"Sample every {f'{every} steps' if every > 1 else 'step'} (--telemetry-every)."
    if not np.isfinite(history.column("decay")).any():
        more = f"The decay of {words(history.scope)} is not known: a norm rule acts, or the optimizer does not tell it."
    elif history.planned_steps < ENOUGH_SAMPLES:
        more = f"A run of {counted(history.planned_steps, 'step')} has no more of them."
    text = (
        f"Only {counted(n, 'telemetry sample')} with norm, update, decay and alignment: too few for fits and slopes, "
        f"so some rules cannot say anything. {more}"
    )
    return Severity.NOTE, text, {"samples": n}


@rule("skipped")
def skipped_steps(history: History) -> Answer:
    """Updates were left out because gradients were not finite."""
    known = history.run.telemetry.skipped
    known = known[np.isfinite(known)]
    # A run that was resumed counts from zero again.
    skipped = int(known[-1] + known[:-1][np.diff(known) < 0].sum()) if len(known) else 0
    if not skipped:
        return None
    share = skipped / max(int(history.steps[-1]), 1)
    severity = Severity.WARNING if share > MANY_SKIPPED else Severity.NOTE
    text = (
        f"{skipped:,} of {int(history.steps[-1]):,} updates ({percent(share)}) were skipped because a gradient was not "
        "finite. Look for overflow: loss scale, data, attention logits, learning rate."
    )
    return severity, text, {"skipped": skipped, "share": share}


@rule("diverging")
def diverging(history: History) -> Answer:
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
        return Severity.PROBLEM, text, {"since": since}
    steps, losses = steps[known], recorded[known]
    width = max(int(AVERAGED * len(losses)), 5)
    if len(losses) < 2 * width:
        return None
    averages = np.convolve(losses, np.full(width, 1.0 / width), mode="valid")
    best = int(averages.argmin())
    progress, back = float(averages[0] - averages[best]), float(averages[-1] - averages[best])
    noise = float(np.median(np.abs(np.diff(losses)))) / width**0.5
    if not back > max(GIVEN_BACK * progress, CHANCE * noise, 1e-12):
        return None
    step = int(steps[best + width // 2])
    text = (
        f"The training loss has risen from {averages[best]:.4f} around step {step:,} to {averages[-1]:.4f}: the run is "
        "diverging. Lower the learning rate, or go back to a checkpoint."
    )
    numbers = {"best": float(averages[best]), "now": float(averages[-1]), "best_step": float(step)}
    return Severity.PROBLEM, text, numbers


@rule("collapsing", parts=True)
def collapsing(history: History) -> Answer:
    """Decay in proportion to the learning rate takes the norm down with it."""
    fall = _fall(history)
    if history.run.rule not in LINEAR or fall is None or fall.lost < COLLAPSE or fall.lost_late < LATE_LOSS:
        return None
    held = history.held_norm()
    hope = f" Scaled decay would hold it at about {norm_text(held)}." if held > fall.end else ""
    text = (
        f"{subject(history.scope)} have lost {percent(fall.lost)} of the norm that they had at step {fall.top_step:,} "
        f"({norm_text(fall.top)} to {norm_text(fall.end)}), and the learning rate is at {percent(history.lr_left)} of "
        f"its peak: {history.run.rule} decay makes the norm fall with the learning rate.{hope} Try "
        'decay="scaled", or a smaller lambda.'
    )
    top = {"peak_norm": fall.top, "peak_step": float(fall.top_step)}
    return Severity.WARNING, text, {"lost": fall.lost, **top, "held_norm": held, "lr_left": history.lr_left}


@rule("norm-held", parts=True)
def norm_held(history: History) -> Answer:
    """Scaled decay keeps the norm where it is while the learning rate falls."""
    fall = _fall(history)
    if history.run.rule not in QUADRATIC or fall is None or abs(fall.lost_late) > HELD:
        return None
    text = (
        f"{subject(history.scope)} keep their norm: {norm_text(fall.halved)} when the learning rate had halved, "
        f"{norm_text(fall.end)} when {percent(history.lr_left)} of it was left. Scaled decay works as intended."
    )
    return Severity.GOOD, text, {"change": -fall.lost_late, "lr_left": history.lr_left}


class Fall(NamedTuple):
    """How the norm fell once its start was forgotten: from its top, and since the learning rate had halved."""

    top: float
    top_step: int
    halved: float
    end: float
    lost: float
    lost_late: float


def _fall(history: History) -> Fall | None:
    """None before the learning rate has halved, and where the initial norm is not forgotten before that."""
    r = history.column("weight_rms")
    halved = np.flatnonzero((history.column("lr") <= HALVED * history.highest("lr")) & np.isfinite(r))
    halved = halved[halved > history.peak_at]
    forgotten = np.flatnonzero((history.relaxations_so_far >= RELAXED) & np.isfinite(r))
    if len(halved) < 2 or not len(forgotten) or forgotten[0] > halved[0]:
        return None
    place = int(forgotten[r[forgotten].argmax()])
    top, middle, end = float(r[place]), float(r[halved[0]]), history.last("weight_rms")
    return Fall(top, int(history.steps[place]), middle, end, lost=1.0 - end / top, lost_late=1.0 - end / middle)


@rule("decay-idle")
def decay_idle(history: History) -> Answer:
    """All decay of the run together changes nothing that matters."""
    total = history.relaxations / 2.0
    if not 0.0 <= total < IDLE or _still_rising(history):
        return None
    numbers = {"decay_total": total, "kept": float(np.exp(-total))}
    if total == 0.0:
        text = f"No decay acts on {words(history.scope)}: lambda is 0, or their decay rule takes nothing."
        return Severity.NOTE, text, numbers
    if history.run.in_progress:
        return None
    times = f"{1.0 / total:.0f} times"
    more = f"raise lambda about {times}, or train longer"
    if _decay_speed(history) / total > SLOW:  # such a lambda would be too large
        more = f"train about {times} as long"
    text = (
        f"Decay has hardly any effect on {words(history.scope)} in a run of this length: the sum of its factors phi is "
        f"{total:.2g}, so decay alone would have kept {percent(numbers['kept'])} of them. Here it does not matter "
        f"which rule is used. For decay to act, {more}."
    )
    return Severity.WARNING, text, numbers


@rule("partly-relaxed")
def partly_relaxed(history: History) -> Answer:
    """The norm still depends on the initial weights."""
    n = history.relaxations
    if not 2.0 * IDLE <= n < RELAXED:
        return None
    text = (
        f"The norm of {words(history.scope)} still depends on the initial weights: the run lasts {n:.2g} relaxation "
        f"times (2*sum(phi)), so {percent(float(np.exp(-n)))} of the initial square is left. Compare it only with runs "
        "of the same number."
    )
    return Severity.NOTE, text, {"relaxations": n}


@rule("peak-not-reached", parts=True)
def peak_not_reached(history: History) -> Answer:
    """The peak that scaled decay divides by is higher than any learning rate that was used."""
    used, peak = history.highest("lr"), history.highest("peak_lr")
    # With the undivided peak for all groups a divided learning rate stays below it on purpose.
    if not used < REACHED * peak or history.setting("peak") == "base" or _still_rising(history):
        return None
    if _reached_between_samples(history):
        return None
    text = (
        f"The learning rate of {words(history.scope)} never reached the peak that decay divides by: the peak is "
        f"{peak:.3g}, the highest learning rate was {used:.3g}. Decay is therefore {percent(used / peak)} of what "
        "lambda says. Set peak_lr to the peak of the schedule."
    )
    return Severity.WARNING, text, {"highest_lr": used, "peak_lr": peak}


def _reached_between_samples(history: History) -> bool:
    """Whether all param groups that divide by a peak have been near it, as their summaries in the records say."""
    records = history.run.telemetry.scope("")
    peaks = [key for key in records if key.startswith("groups.") and key.endswith(".peak_lr")]
    highest = [records.get(key.replace(".peak_lr", ".highest_lr"), np.full(records.records, np.nan)) for key in peaks]
    return bool(peaks) and all(top[-1] >= REACHED * records[key][-1] for key, top in zip(peaks, highest, strict=True))


def _still_rising(history: History) -> bool:
    return history.peak_at == len(history.steps) - 1 and not history.run.complete


@rule("tracking-broke")
def tracking_broke(history: History) -> Answer:
    """From some step on the steady state no longer says where the norm is."""
    tracking = history.tracking
    if tracking is None or tracking.broke_at is None or history.complete < MIN_SAMPLES:
        return None
    side = "above" if float(tracking.lag[tracking.lag.isfinite()][-1]) > 0 else "below"
    numbers = {"broke_at": float(tracking.broke_at), "followed": float(tracking.followed)}
    if not tracking.followed:
        text = (
            f"The norm of {words(history.scope)} never came within a fifth of its steady state, and ends {side} it. "
            "Use the recursion to explain this norm, not the steady state."
        )
    else:
        text = (
            f"The norm of {words(history.scope)} follows its steady state until step {tracking.broke_at:,}. After that "
            f"it stays more than a fifth {side} it, because decay has become too slow to move it: from there on the "
            "norm reflects the earlier part of the run."
        )
    return Severity.NOTE, text, numbers


@rule("unexplained-norm")
def unexplained_norm(history: History) -> Answer:
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
    return Severity.WARNING, text, {"error": float(error[worst]), "step": float(norm.steps[worst])}


@rule("large-updates", parts=True, samples=MIN_SAMPLES)
def large_updates(history: History) -> Answer:
    """Momentum replaces the weights within its own memory."""
    size, bound = history.typical(history.relative_update), 1.0 - history.momentum
    if not size > bound:
        return None
    text = (
        f"Updates are {percent(size)} of {words(history.scope)}. From {percent(bound)} on, momentum with coefficient "
        f"{history.momentum:g} replaces the weights within the {1.0 / bound:.0f} steps that it remembers. Lower the "
        "learning rate, or lower lambda if decay has made the weights this small."
    )
    return Severity.WARNING, text, {"relative_update": size, "bound": bound}


@rule("fast-decay")
def fast_decay(history: History) -> Answer:
    """Decay is not slow against momentum, as the theory of the norm assumes."""
    peak, forgetting, ratio = history.highest("decay"), 1.0 - history.momentum, _decay_speed(history)
    # At the limit itself rounding must not decide.
    if not ratio > SLOW * (1.0 + 1e-6):
        return None
    severity = Severity.WARNING if ratio > TOO_FAST else Severity.NOTE
    text = (
        f"Decay of {words(history.scope)} is not slow against momentum: its largest factor phi is {peak:.2g} per step, "
        f"{percent(ratio)} of 1 - beta = {forgetting:.2g}. Norms will differ from those of runs with slower decay; use "
        "a smaller lambda and more steps."
    )
    return severity, text, {"phi_peak": peak, "ratio": ratio}


def _decay_speed(history: History) -> float:
    """The largest decay factor of a step, as a share of what momentum forgets in one."""
    return history.highest("decay") / (1.0 - history.momentum)


@rule("defect", parts=True, samples=MIN_SAMPLES)
def defect_out_of_range(history: History) -> Answer:
    """Muon's direction is further from orthogonal than its iteration allows."""
    defect = history.typical(history.column("defect"))
    low, high = DEFECT_RANGE
    if not (defect < low or defect > high):
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
    return Severity.WARNING, text, {"defect": defect}


@rule("rounding", parts=True, samples=MIN_SAMPLES)
def lost_in_rounding(history: History) -> Answer:
    """The weights moved by something else than was intended."""
    r, s, phi, a = (history.column(key) for key in ("weight_rms", "update_rms", "decay", "alignment_update"))
    intended = np.sqrt((phi * r + a * s) ** 2 + (1.0 - a**2) * s**2)
    arrived = history.typical(ratio(history.column("applied_rms"), intended))
    if not abs(arrived - 1.0) > ROUNDING:
        return None
    text = f"{subject(history.scope)} move by {percent(arrived)} of what decay and update intend: "
    if arrived > 1.0:
        text += (
            "rounding adds to it, which averages out if it is stochastic, or decay is cautious, which takes more where "
            "updates do."
        )
        return Severity.NOTE, text, {"arrived": arrived}
    text += "the rest is lost in rounding. Keep these weights in float32, or round stochastically."
    return Severity.WARNING, text, {"arrived": arrived}


@rule("radial-gradient", samples=MIN_SAMPLES)
def radial_gradient(history: History) -> Answer:
    """The loss depends on the size of the weights, not on their direction alone."""
    cosine = history.typical(np.abs(history.column("alignment_gradient")))
    if not cosine > RADIAL:
        return None
    text = (
        f"The gradient of {words(history.scope)} is not orthogonal to them (size of the cosine: {cosine:.2f}). The "
        "loss depends on their norm, as it does where no normalization follows, so the alignment of the update comes "
        "from the loss as well as from momentum."
    )
    return Severity.NOTE, text, {"cosine": cosine}


@rule("clipping")
def always_clipped(history: History) -> Answer:
    """Gradient clipping acts on nearly every update."""
    share = _clipped_share(history)
    if not share > NEARLY_ALWAYS:
        return None
    text = (
        f"Gradient clipping acts on {percent(share)} of the updates. Then it is no guard against outliers: it divides "
        "every gradient by its norm, so "
    )
    if history.setting("algorithm") == "muon":
        text += "all batches count alike in the momentum. Muon's steps stay the same size. Clip what AdamW trains only."
        return Severity.NOTE, text, {"share": share}
    text += "the size of the gradient no longer matters. Raise the limit to a few times the usual norm."
    return Severity.WARNING, text, {"share": share}


def _clipped_share(history: History) -> float:
    """By the norms that the trainer recorded, or as telemetry has counted; not a number where neither is known."""
    limit, norms = history.setting("clip"), history.run.train.get("grad_norm")
    if isinstance(limit, int | float) and limit and norms is not None:
        clipped = (norms[np.isfinite(norms)] > limit).astype(float)
    else:
        counted = history.run.telemetry.scope("").get("clipped", np.full(0, np.nan))
        clipped = counted[np.isfinite(counted)]
    return float(clipped.mean()) if len(clipped) >= MIN_SAMPLES else float("nan")
