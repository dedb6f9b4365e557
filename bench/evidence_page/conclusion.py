"""What to conclude, in sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evidence_page.groups import gaps_to_constant, hard_gaps, strengths
from evidence_page.records import Evidence, chance, mean
from evidence_page.regret_map import Map, optima, peak_of, too_large
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.studies.training.regret import GOOD, RULES, best_against_best
from planned import BEST

# Totals of the best lambdas within this factor count as one: basins are flatter than that.
SAME_TOTAL = 3.0


def conclusion(evidence: Evidence, found: Map) -> str:
    """A few sentences with the numbers of the longest horizon; what they say follows from the numbers."""
    epochs = evidence.epochs()
    totals = sorted(one["total"] for rule in RULES for one in optima(found[rule], rule, epochs))
    sentences = (
        _best_against_best(found, epochs),
        _too_large(found),
        _in_all(totals),
        _other_rules(evidence),
        _little_text(evidence),
    )
    told = [sentence for sentence in sentences if sentence]
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(told, start=1))


def _best_against_best(found: Map, epochs: Mapping[int, float]) -> str:
    steps = list(found["constant"])[-1]
    gap = best_against_best(found["scaled"][steps], found["constant"][steps])
    close = "Choose lambda well and the rule hardly matters" if abs(gap.value) <= GOOD else "The rule matters"
    run = f"at {steps:,} updates, a peak rate of {peak_of(steps):.3g} and {epochs[steps]:.1f} epochs"
    told = f"scaled decay ends {gap.value:+.3f} nats from constant decay ({run}; 95% t interval {chance(gap)})"
    return f"{close}: each at the lambda with the lowest mean over seeds, {told}."


def _too_large(found: Map) -> str:
    """What the lambdas above both best ones cost, at the longest horizon; and at all of them, one over the other."""
    last = list(found["constant"])[-1]
    costly = [row for row in too_large(found) if row.constant > GOOD]
    rows = [row for row in costly if row.steps == last]
    if not rows:
        return "What too large a lambda costs lies beyond the lambdas that were tried."
    milder = "scaled" if sum(row.constant - row.scaled for row in rows) > 0 else "constant"
    cost = ", ".join(f"{row.constant:.3f} and {row.scaled:.3f} at {row.lam:g}" for row in rows)
    known = [row for row in rows if row.same_total is not None]
    shares = sorted(row.scaled / row.constant for row in costly)
    told = (
        f"Too large a lambda costs less under {milder} decay, {shares[0]:.2f} to {shares[-1]:.2f} of what it costs "
        f"under constant decay over all horizons: constant and scaled end {cost} above their best"
    )
    if not known:
        return f"{told}."
    less = all(row.same_total < row.constant for row in known)
    how = "so it matters when decay acts, not only how much there is" if less else "so it is the amount that matters"
    total = ", ".join(f"{row.same_total:.3f}" for row in known)
    return f"{told} ({rows[0].steps:,} updates). Scaled decay of the same total ends {total} above, {how}."


def _in_all(totals: Sequence[float]) -> str:
    took = f"the best lambdas took {totals[0]:.1f} to {totals[-1]:.1f}, over all horizons and both rules"
    if totals[-1] > SAME_TOTAL * totals[0]:
        return f"What decay takes over the whole run, the sum of phi, does not settle lambda: {took}."
    return (
        f"Count what decay takes over the whole run, the sum of phi: {took}, so lambda should fall as the run gets "
        f"longer. [`muonsw advise`](guide/which-rule.md#which-lambda) does the sum."
    )


def _other_rules(evidence: Evidence) -> str:
    """Whether anything was better than choosing lambda well, among the rules that have all their strengths."""
    gaps = gaps_to_constant(strengths(evidence))
    if "none" not in gaps:
        return ""
    best = {rule: mean(gap) for rule, gap in gaps.items()}
    lowest = min(best, key=lambda rule: best[rule])
    better = (
        f"One rule is better, `{lowest}`" if best[lowest] < -GOOD else "No rule is better than choosing lambda well"
    )
    near = [rule for rule in best if rule != "constant" and abs(best[rule]) <= GOOD]
    close = ", ".join(f"`{rule}`" + (" (one seed)" if len(gaps[rule]) == 1 else "") for rule in near)
    return (
        f"{better}: at the best of three strengths {close} end within {GOOD} nats of constant decay, no decay at all "
        f"{best['none']:+.3f} from it (1,600 updates, {len(gaps['constant'])} seeds)."
    )


def _little_text(evidence: Evidence) -> str:
    """What happens where decay is needed against overfitting."""
    gaps = [gap for (case, lam), gap in hard_gaps(evidence).items() if case == "little text" and lam == BEST]
    if not gaps or len(gaps[0]) < 2:
        return ""
    gap = over_seeds(gaps[0])
    worse = "costs" if gap.value > 0 else "gains"
    return (
        f"Where text is seen many times decay is what keeps a model from memorizing it, and there scaled decay "
        f"{worse} {abs(gap.value):.2f} nats at the same lambda (95% t interval {chance(gap)}, {len(gaps[0])} "
        f"seeds), as it takes less in all and least at the end: use constant decay there, and more of it."
    )
