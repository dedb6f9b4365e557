"""Sentences about a comparison that claim no more than its numbers carry."""

from __future__ import annotations

import math
from collections.abc import Sequence

from muonsw.lab.studies.compare.outcome import ArmOutcome, Outcome, PairOutcome

# Below this total decay no rule does much to the weights.
NO_DECAY = 0.2


def verdict(outcome: Outcome, *, tuned: bool = False) -> str:
    """What came out, in a few sentences."""
    arms = {arm.name: arm for arm in outcome.arms}
    lines = [_loss(pair, arms) for pair in outcome.pairs]
    lines += [_norms(outcome.arms)]
    lines += _caveats(outcome, tuned)
    return " ".join(line for line in lines if line)


def _loss(pair: PairOutcome, arms: dict[str, ArmOutcome]) -> str:
    seeds = f"{len(pair.seeds)} seed{'s' if len(pair.seeds) != 1 else ''}"
    size = f"{abs(pair.mean):.4f} nats"
    if not math.isfinite(pair.mean):
        return f"{pair.arm!r} against {pair.baseline!r}: a run has no final loss."
    if pair.interval is None:
        direction = "below" if pair.mean < 0 else "above"
        return f"{pair.arm!r} ended {size} {direction} {pair.baseline!r}; one seed says nothing about chance."
    spread = (
        f"{pair.mean:+.4f} nats, {pair.interval.method} interval {pair.interval.low:+.4f} to {pair.interval.high:+.4f}"
    )
    if pair.interval.low <= 0.0 <= pair.interval.high:
        both = f"{pair.arm!r} and {pair.baseline!r}"
        return f"The final losses of {both} do not differ beyond chance over {seeds} ({spread})."
    word = "lower" if pair.mean < 0 else "higher"
    same = "same lambda" if _same_lambda(arms[pair.arm], arms[pair.baseline]) else "different lambda"
    text = f"{pair.arm!r} ended {word} than {pair.baseline!r} over {seeds} ({spread}; {same})."
    match = pair.mean_match
    if word == "lower" and match is not None:
        text += f" It reached the other's best loss after {100 * match:.0f}% of its updates."
    return text


def _same_lambda(one: ArmOutcome, other: ArmOutcome) -> bool:
    return math.isclose(one.weight_decay, other.weight_decay)


def _norms(arms: Sequence[ArmOutcome]) -> str:
    known = [(arm.name, _mean(arm.norm), _mean(arm.norm_change)) for arm in arms]
    shown = [
        f"{name!r} ends at {norm:.3f} ({100 * change:+.0f}%)" for name, norm, change in known if math.isfinite(norm)
    ]
    return f"Weight RMS, and its change since its largest value: {', '.join(shown)}." if shown else ""


def _caveats(outcome: Outcome, tuned: bool) -> list[str]:
    notes = []
    if max(arm.total_decay for arm in outcome.arms) < NO_DECAY:
        notes.append("Decay hardly acts at this length (its factors add up to less than 0.2): no rule could matter.")
    if not tuned and len({arm.rule for arm in outcome.arms}) > 1:
        notes.append(
            "A comparison at one lambda answers the paper's question; constant decay may do better at a smaller "
            "lambda, which --tune-lambda looks for."
        )
    return notes


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
