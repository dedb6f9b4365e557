"""What the evidence comes to, in sentences with numbers; what they say follows from the numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from muonsw.lab.arms import RULES, Key, Results
from muonsw.lab.claims.claim import Claim, Estimate, Verdict
from muonsw.lab.claims.statistics import ONE_SEED, over_seeds
from muonsw.lab.outcome import last_loss, over_runs, paired
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training import (
    best_rules,
    cases,
    family,
    gradient_growth,
    lambda_scaling,
    rate_drift,
    regret,
    untuned,
)
from muonsw.lab.studies.training.regret import GOOD

if TYPE_CHECKING:
    from muonsw.lab.studies.evidence import EvidencePage

ADVISE = "[`muonsw advise`](guide/which-rule.md#which-lambda)"


def conclusion(evidence: EvidencePage) -> str:
    """What the page begins with."""
    sentences = [
        said
        for about in (_untuned, _map, _too_large, _totals, _length, _rules, _relatives, _little_text)
        if (said := about(evidence))
    ]
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, start=1))


def _untuned(evidence: EvidencePage) -> str:
    """What the highest price of each choice was."""
    if not (found := evidence.prices()):
        return ""

    def most(choice: str) -> str:
        costs = [one for one in untuned.highest(found) if one.choice == choice]
        return " and ".join(
            f"{one.cost.value:.3f}{_half(one.cost)}{' or more' if one.beyond else ''} under {one.rule} decay"
            for one in costs
        )

    kept = "; ".join(f"{choice} for every run cost up to {most(choice)}" for choice in untuned.CHOICES[:-1])
    price = f"Never tuning lambda has a price, in nats: {kept}."
    if not (advised := [one for one in found if one.choice == untuned.ADVICE]):
        return price
    worst = max(advised, key=lambda one: one.cost.value)
    usual = statistics.median(one.cost.value for one in advised)
    return (
        f"{price} The lambda that {ADVISE} gives cost up to {most(untuned.ADVICE)} (the highest with width "
        f"{worst.width} and {worst.steps:,} updates), {usual:.3f} in the median of all kinds of runs."
    )


def _map(evidence: EvidencePage) -> str:
    if not (found := evidence.optima()):
        return ""
    one = max(found, key=lambda one: one.steps)
    gap = regret.best_against_best(evidence.results["regret"][Key(steps=one.steps)])
    return (
        f"{_difference(gap)}: each at the lambda with the lowest mean over seeds, scaled decay ends {_nats(gap)} from "
        f"constant decay, at {one.steps:,} updates, a peak rate of {one.peak_lr:.3g} and {one.epochs:.1f} epochs."
    )


def _difference(gap: Estimate) -> str:
    """What a gap at the best lambdas says: that it is small, that there is one, or neither.

    Examples:
        >>> _difference(over_seeds([0.001, 0.003, -0.002]))
        'Choose lambda well and the rule matters by less than 0.02 nats'
        >>> _difference(over_seeds([0.1, 0.11, 0.12]))
        'The rule matters'
        >>> _difference(over_seeds([0.1, 0.3, -0.2]))
        'At the best lambdas no difference of the rules was seen'
    """
    if gap.interval is not None and max(-gap.interval.low, gap.interval.high) <= 2 * GOOD:
        return f"Choose lambda well and the rule matters by less than {2 * GOOD} nats"
    if gap.interval is not None and 0.0 not in gap.interval:
        return "The rule matters"
    return "At the best lambdas no difference of the rules was seen"


def _too_large(evidence: EvidencePage) -> str:
    """What the lambdas above both best ones cost at the longest horizon; and at all of them, one over the other."""
    costly = [row for row in regret.too_large(evidence.optima()) if row.constant > GOOD]
    if not costly:
        return ""
    longest = max(row.constant_at.steps for row in costly)
    last = [row for row in costly if row.constant_at.steps == longest]
    shares = sorted(row.scaled / row.constant for row in costly)
    known = [(row.same_total, row.constant) for row in last if row.same_total is not None]
    less = all(ours < theirs for ours, theirs in known)
    how = "so it matters when decay acts, not only how much there is" if less else "so it is the amount that matters"
    total = ", ".join(f"{ours:.3f}" for ours, _ in known)
    return (
        f"Too large a lambda costs scaled decay {shares[0]:.2f} to {shares[-1]:.2f} of what it costs constant decay, "
        f"in the means of all horizons: at {longest:,} updates constant and scaled end {_costs_of(last)} above their "
        f"best. Scaled decay of the same total ends {total} above, {how}."
    )


def _totals(evidence: EvidencePage) -> str:
    """How far best lambdas lie apart over all lengths, and how far what they take over the run."""
    every = [*evidence.optima(), *regret.optima(evidence.results["long"])]
    found, ends = ([one for one in every if one.at_an_end is at_an_end] for at_an_end in (False, True))
    if not found:
        return ""
    totals = sorted(one.best * one.per_lambda for one in found)
    lambdas = [[one.best for one in found if one.rule == rule] for rule in RULES]
    others = ", ".join(f"{one.best * one.per_lambda:.1f} ({one.rule}, {one.steps:,} updates)" for one in ends)
    beyond = f"; where the best was the smallest or largest tried and may lie beyond, {others}" if others else ""
    apart, far = max(max(own) / min(own) for own in lambdas if own), totals[-1] / totals[0]
    took = (
        f"from {min(one.steps for one in found):,} to {max(one.steps for one in found):,} updates the best lambdas of "
        f"a rule lie up to {apart:.2g} times apart, and what they take over the whole run, the sum of phi, {far:.1f} "
        f"times ({totals[0]:.1f} to {totals[-1]:.1f}{beyond})"
    )
    if 2 * far > apart:
        return f"Counting what decay takes over a run does not settle lambda: {took}."
    return f"Count what decay takes, not lambda: {took}. So lambda should fall as the run gets longer; {ADVISE} sums."


def _length(evidence: EvidencePage) -> str:
    """Whether the gap at the best lambda grows with the length, on text that is hardly repeated."""
    if not (results := evidence.results["long"]):
        return ""
    ends = [f"{_nats(regret.best_against_best(arms))} at {key.steps:,} updates" for key, arms in results.items()]
    found = regret.optima(results)
    longest = max(one.steps for one in found)
    last = [row for row in regret.too_large(found) if row.constant_at.steps == longest and row.constant > GOOD]
    large = f" At {longest:,} updates too large a lambda costs them, constant decay first, {_costs_of(last)}."
    more = large if last else ""
    return f"On fresh text, each at its best lambda, scaled decay ends {' and '.join(ends)} from constant decay.{more}"


def _costs_of(rows: Sequence[regret.TooLargeLambda]) -> str:
    return ", ".join(f"{row.constant:.3f} and {row.scaled:.3f} at {row.lam:g}" for row in rows)


def _rules(evidence: EvidencePage) -> str:
    """Whether anything was better than choosing lambda well."""
    results = evidence.results["best-rules"]
    claims = best_rules.judge_best_rules(results, evidence.studies["best-rules"].scale) if results else []
    gaps = {claim.id.removesuffix("-is-as-good"): Estimate(claim.measured, claim.interval) for claim in claims}
    if not gaps:
        return ""
    better = [f"`{rule}`" for rule, gap in gaps.items() if gap.interval is not None and gap.interval.high < 0]
    near = {f"`{rule}`": gap for rule, gap in gaps.items() if abs(gap.value) <= GOOD}
    first = f"Better: {', '.join(better)}" if better else "No rule was better beyond chance than choosing lambda well"
    none = f", no decay at all {gaps['none'].value:+.3f}{_half(gaps['none'])} from it" if "none" in gaps else ""
    halves = [gap.interval.high - gap.value for gap in near.values() if gap.interval is not None]
    wide = f" (means; intervals of ±{min(halves):.3f} to ±{max(halves):.3f})" if halves else ""
    ends = f"at the best of three strengths {', '.join(near)} end within {GOOD} nats of constant decay{wide}{none}."
    return f"{first}: {ends}"


def _relatives(evidence: EvidencePage) -> str:
    """How far apart the rules end for each member of the family, and which members end below Muon under both."""
    found = family.tuned_members(evidence.results["family"], evidence.studies["family"].scale)
    if not found:
        return ""
    gaps = {member: over_seeds(family.gaps_of(rules["scaled"], rules["constant"])) for member, rules in found.items()}
    beyond = [member for member, gap in gaps.items() if gap.interval is not None and 0.0 not in gap.interval]
    names = f" ({', '.join(beyond)})" if beyond else ""
    values = [gap.value for gap in gaps.values()]
    below = [member for member, rules in found.items() if family.MUON in found and _below(rules, found[family.MUON])]
    muon = found.get(family.MUON, {}).values()
    more = " (Muon at the end of the rates or lambdas tried, so perhaps better beyond)"
    at_an_end = more if any(one.edge or one.optimum.at_an_end for one in muon) else ""
    better = f" Below Muon beyond chance under both rules: {', '.join(below)}{at_an_end}." if below else ""
    return (
        f"Muon and its [relatives](#the-family), each at its best: scaled decay ends {min(values):+.3f} to "
        f"{max(values):+.3f} nats from constant decay; zero is outside {len(beyond)} of {len(gaps)} intervals{names}, "
        f"and by chance alone would be outside {0.05 * len(gaps):.1f}.{better}"
    )


def _below(ours: Mapping[str, family.Best], muon: Mapping[str, family.Best]) -> bool:
    intervals = [over_seeds(family.gaps_of(ours[rule], muon[rule])).interval for rule in RULES]
    return all(interval is not None and interval.high < 0 for interval in intervals)


def _little_text(evidence: EvidencePage) -> str:
    """What happens where text is repeated."""
    if not (little := evidence.results["hard-cases"].get(cases.LITTLE)):
        return ""
    constant, scaled = little.values()
    gap = over_seeds(paired(scaled, constant, last_loss))
    advice = ", as its total is smaller and its end smallest: use more decay there" if gap.value > 0 else ""
    repeated, scale = evidence.results["repeated-text"], evidence.studies["repeated-text"].scale
    best = _repeated(repeated, scale) if repeated else "The best lambda of each was not searched."
    return (
        f"Where text is seen {constant[0].epochs:.0f} times decay is what keeps a model from memorizing it, and there "
        f"scaled decay ends {_nats(gap)} from constant decay at the same lambda{advice}. {best}"
    )


def _repeated(results: Results, _scale: Scale) -> str:
    arms = results[cases.REPEATED]
    rising, scaled = (_nats(regret.best_against_best(arms, rule)) for rule in ("piecewise", "scaled"))
    ends = best_rules.best_at_an_end({rule: regret.losses_of(arms, rule) for rule in (*RULES, "piecewise")})
    beyond = f" The best lambda may lie beyond those that were tried: {', '.join(ends)}." if ends else ""
    return (
        f"Each at its best lambda, rising decay ends {rising} from constant decay, and scaled decay {scaled}.{beyond}"
    )


def _schedules(results: Results, _scale: Scale) -> str:
    """How far apart the rules end under every schedule."""
    gaps = "; ".join(f"{_nats(regret.best_against_best(arms))} under {key}" for key, arms in results.items())
    return f"Each at its best lambda, scaled decay ends {gaps} from constant decay."


def _drift(results: Results, _scale: Scale) -> str:
    """How far the best rate moves under every rule."""
    found = rate_drift.by_rule(results)
    moves = ", ".join(f"{rate_drift.moved(sweeps)} under {rule}" for rule, sweeps in found.items())
    widths = [key.width for sweeps in found.values() for key in sweeps]
    return f"From width {widths[0]} to {widths[-1]} the best learning rate moves {moves}." if moves else ""


def _scaling(results: Results, _scale: Scale) -> str:
    """The powers that the best lambda follows."""
    said = []
    for axis in lambda_scaling.AXES:
        found = {rule: lambda_scaling.exponent(axis, results, rule) for rule in RULES}
        powers = " and ".join(
            f"{lambda_scaling.exponent_text(one)} under {rule} decay" for rule, one in found.items() if one is not None
        )
        if powers:
            said.append(f"{axis.grows} to the power {powers}")
    if not said:
        return ""
    totals = {rule: each for rule in RULES if (each := lambda_scaling.known_totals(results, rule))}
    took = " and ".join(f"{min(each):.2f} to {max(each):.2f} under {rule} decay" for rule, each in totals.items())
    known = "Where it is not at an end of those tried, the best lambda takes"
    return f"The best lambda goes with {'; with '.join(said)}. {known} {took} in a run."


def _gradients(results: Results, _scale: Scale) -> str:
    """By how much gradients grow, over all optimizers and rates."""
    grown = {
        rule: sorted(
            math.exp(over_runs(arms[rule], gradient_growth.gradient_growth).value) for arms in results.values()
        )
        for rule in RULES
    }
    ends = " and ".join(f"{values[0]:.2f} to {values[-1]:.2f} under {rule} decay" for rule, values in grown.items())
    gaps = [
        over_seeds(paired(arms["constant"], arms["scaled"], gradient_growth.gradient_growth))
        for arms in results.values()
    ]
    ratios = [math.exp(gap.value) for gap in gaps]
    beyond = sum(gap.interval is not None and gap.interval.low > 0 for gap in gaps)
    return (
        f"Over the second half of a run gradients grow by factors of {ends}, over all optimizers and peak rates: "
        f"{min(ratios):.2f} to {max(ratios):.2f} times as far under constant decay, beyond chance in {beyond} of "
        f"{len(gaps)}."
    )


def _family(results: Results, scale: Scale) -> str:
    """What the search says of a large lambda; and for which members the two claims hold."""
    claims = family.judge_family(results, scale)
    asked = {
        "forgives": "The largest lambda costs scaled decay at most 0.6 of what it costs constant decay",
        "lambda": "The best lambda, counted as a total, is within a factor of two of Muon's",
    }
    said = [
        f"{text}: {_members(own)}."
        for suffix, text in asked.items()
        if (own := [claim for claim in claims if claim.id.endswith(suffix)])
    ]
    return " ".join(filter(None, (_searched(results, scale), *said)))


def _searched(results: Results, scale: Scale) -> str:
    """What the largest lambda cost each rule at its best rate in the search."""
    steps = family.family_run(scale).steps
    searches = {key: arms for key, arms in results.items() if key.steps != steps}
    costs = []
    for arms in searches.values():
        found = [family.best_of(arms, rule).larger for rule in RULES]
        costs += [tuple(one[0] for one in found if one is not None)] if None not in found else []
    if not costs:
        return ""
    ranges = [f"{min(own):.3f} to {max(own):.3f}" for own in zip(*costs, strict=True)]
    less = sum(scaled < constant for constant, scaled in costs)
    few = sum(scaled <= family.FORGIVEN * constant for constant, scaled in costs)
    return (
        f"In the search, on one seed and in {next(iter(searches)).steps:,} updates, the largest lambda cost constant "
        f"decay {ranges[0]} and scaled decay {ranges[1]} nats above their best; scaled decay less for {less} of "
        f"{len(costs)} members, and at most {family.FORGIVEN} as much for {few}."
    )


def _members(claims: Sequence[Claim]) -> str:
    """Members by verdict, and how much the verdicts rest on."""
    found: dict[Verdict, list[str]] = {}
    for claim in claims:
        member, *rule = claim.id.split("-")[:-1]
        found.setdefault(claim.verdict, []).append(f"{member}{f' ({rule[0]})' if rule else ''}")
    words = {Verdict.HOLDS: "holds for", Verdict.FAILS: "fails for", Verdict.UNDECIDED: "undecided for"}
    said = "; ".join(f"{words[verdict]} {', '.join(found[verdict])}" for verdict in Verdict if verdict in found)
    return f"{said} (one seed)" if any(ONE_SEED in claim.limits for claim in claims) else said


# By study, what its section begins with.
SENTENCES: Mapping[str, Callable[[Results, Scale], str]] = {
    "repeated-text": _repeated,
    "schedules": _schedules,
    "rate-drift": _drift,
    "lambda-scaling": _scaling,
    "gradient-growth": _gradients,
    "family": _family,
}


def _half(found: Estimate) -> str:
    """Half of an interval, as it follows a number."""
    return " (one seed)" if found.interval is None else f" ± {found.interval.high - found.value:.3f}"


def _nats(gap: Estimate) -> str:
    interval = gap.interval
    chance = "one seed" if interval is None else f"95% t interval {interval.low:+.3f} to {interval.high:+.3f}"
    return f"{gap.value:+.3f} nats ({chance})"
