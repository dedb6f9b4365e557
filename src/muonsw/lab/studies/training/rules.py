"""Questions beside the paper: the best lambda of each rule, all decay rules side by side, dense against MoE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from muonsw.decay import convert_weight_decay
from muonsw.lab import paper
from muonsw.lab.claims.claim import Claim
from muonsw.lab.claims.claim import Comparison as Held
from muonsw.lab.paper import Tolerance
from muonsw.lab.report.sections import Table
from muonsw.lab.runs import Run
from muonsw.lab.studies.compare.arms import Arm, hidden_multiplier, same_total
from muonsw.lab.studies.compare.tune import Tuned, sweep_table
from muonsw.lab.studies.training.effects import (
    ABOVE,
    BELOW,
    CONSTANT,
    SCALED,
    decay_arms,
    judge_pair,
    limits_at,
)
from muonsw.lab.studies.training.evidence import BEYOND, claim, end_norm, last_loss, paired
from muonsw.lab.studies.training.scales import Scale
from muonsw.lab.studies.training.study import Comparison, Results
from muonsw.lab.train.config import OptimizerConfig, RunConfig

SEARCH, BEST = "search", "best against best"
SAME = Tolerance(0.01, "the same decay, computed another way: training amplifies its rounding")
EQUIVALENT = {"squared": SCALED, "independent": CONSTANT}


def own_peak(run: RunConfig) -> OptimizerConfig:
    """The optimizer with every group's own peak, so that all rules decay alike where the learning rate is highest."""
    return replace(run.optimizer, peak="group") if run.model.relative_width != 1.0 else run.optimizer


def lambda_arms(run: RunConfig, factors: Sequence[float]) -> tuple[Arm, ...]:
    """Both rules at multiples of the run's lambda."""
    return tuple(
        _at(run, rule, float(f"{run.optimizer.weight_decay * factor:.4g}"))
        for rule in (CONSTANT, SCALED)
        for factor in factors
    )


def _at(run: RunConfig, rule: str, weight_decay: float) -> Arm:
    base = own_peak(run)
    peak = "group" if rule == CONSTANT else base.peak
    return Arm(f"{rule}, lambda {weight_decay:g}", replace(base, decay=rule, weight_decay=weight_decay, peak=peak))


def search(scale: Scale) -> list[Comparison]:
    """Every lambda of both rules, on a seed that the comparison itself does not use."""
    run = scale.rows[scale.small]
    return [Comparison(SEARCH, run, lambda_arms(run, scale.factors), (scale.seeds,), paired=False)]


def best_against_best(results: Results, scale: Scale) -> list[Comparison]:
    """Each rule at its best lambda, on the other seeds."""
    run = scale.rows[scale.small]
    chosen = tuned(results[SEARCH]) if results else dict.fromkeys((CONSTANT, SCALED), run.optimizer.weight_decay)
    arms = tuple(Arm(rule, _at(run, rule, lam).optimizer) for rule, lam in chosen.items())
    return [Comparison(BEST, run, arms, tuple(range(scale.seeds)))]


def tuned(arms: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """The lambda with the lowest final loss, by rule."""
    return {rule: min(losses, key=losses.__getitem__) for rule, losses in searched(arms).items()}


def searched(arms: Mapping[str, Sequence[Run]]) -> dict[str, dict[float, float]]:
    """Final loss by rule and lambda."""
    found: dict[str, dict[float, float]] = {CONSTANT: {}, SCALED: {}}
    for runs in arms.values():
        chosen, loss = runs[0].config["optimizer"], last_loss(runs[0])
        found[chosen["decay"]][float(chosen["weight_decay"])] = math.inf if math.isnan(loss) else loss
    return found


def judge_best(results: Results, _scale: Scale) -> list[Claim]:
    """Whether scaled decay is better when constant decay is given its own best lambda."""
    arms = results[BEST]
    claims = [
        claim(
            "best-loss", "scaled decay at its best lambda ends lower than constant decay at its own",
            paired(arms[SCALED], arms[CONSTANT], last_loss), Held.AT_MOST, 0.0, BELOW, reference=BEYOND,
            hypothesis="lambdas chosen on a seed that is used for nothing else",
            limits="the paper compares at one lambda only",
        )
    ]  # fmt: skip
    for rule, losses in searched(results[SEARCH]).items():
        grid = sorted(losses)
        place = grid.index(tuned(results[SEARCH])[rule])
        claims.append(
            claim(
                f"{rule}-inside",
                f"{rule} decay: steps of the grid from its best lambda to the nearest edge",
                [min(place, len(grid) - 1 - place)],
                Held.AT_LEAST,
                1.0,
                Tolerance(0.0, "at an edge a better lambda may lie beyond"),
                reference=BEYOND,
                limits="one seed for the search, used for nothing else",
                derived=True,
            )
        )
    return claims


def search_tables(results: Results, scale: Scale) -> list[Table]:
    """Final loss by lambda and rule."""
    run, chosen = scale.rows[scale.small], tuned(results[SEARCH])
    found = [
        Tuned(Arm(rule, _at(run, rule, chosen[rule]).optimizer), losses, chosen[rule] in (min(losses), max(losses)))
        for rule, losses in searched(results[SEARCH]).items()
    ]
    return [sweep_table(found)]


def all_rules(scale: Scale) -> list[Comparison]:
    """Every decay rule with the same decay at the peak, and constant decay of the scaled rule's total."""
    run = scale.rows[scale.small]
    base = own_peak(run)
    constant = Arm(CONSTANT, replace(base, decay="constant", peak="group"))
    scaled = Arm(SCALED, replace(base, decay="scaled"))
    peak = base.lr * hidden_multiplier(run, base)
    others = [
        Arm(rule, replace(base, decay=rule, peak="group",
                          weight_decay=convert_weight_decay(base.weight_decay, like, rule, peak)))
        for rule, like in EQUIVALENT.items()
    ]  # fmt: skip
    nothing = Arm("none", replace(base, decay="none", weight_decay=0.0, peak="group"))
    control = same_total(run, scaled)
    control = replace(control, optimizer=replace(control.optimizer, peak="group"))
    return [
        Comparison("rules", run, (constant, scaled, *others, nothing, control), tuple(range(scale.seeds)))
    ]  # fmt: skip


def judge_rules(results: Results, scale: Scale) -> list[Claim]:
    """Scaled beats constant, rules that are the same under another name end alike, and norms are ordered."""
    arms = results["rules"]
    claims = judge_pair(
        "rules",
        "at equal decay at the peak",
        arms[CONSTANT],
        arms[SCALED],
        reference=paper.TABLE,
        limits=limits_at(scale),
    )
    claims += [
        claim(
            f"{rule}-is-{like}", f"{rule} decay with a converted lambda ends where {like} decay does",
            paired(arms[rule], arms[like], last_loss), Held.ABSOLUTE, 0.0, SAME, reference=BEYOND,
        )
        for rule, like in EQUIVALENT.items()
    ]  # fmt: skip
    claims.append(
        claim(
            "none-norm",
            "without decay the weights end larger than under scaled decay (logarithm of the ratio)",
            paired(arms["none"], arms[SCALED], lambda run: math.log(end_norm(run))),
            Held.AT_LEAST,
            0.0,
            ABOVE,
            reference=BEYOND,
        )
    )
    return claims


def dense_and_moe(scale: Scale) -> list[Comparison]:
    """The two rules and their control in a mixture of experts, and in the same decoder with one expert."""
    run = scale.rows[scale.small]
    dense = replace(run, model=run.model.dense())
    return [
        Comparison(name, chosen, decay_arms(chosen), tuple(range(scale.seeds)))
        for name, chosen in (("moe", run), ("dense", dense))
    ]


def judge_dense(results: Results, scale: Scale) -> list[Claim]:
    """The effect does not need experts."""
    references, limits = {"moe": paper.TABLE, "dense": BEYOND}, limits_at(scale)
    return [
        one
        for name, arms in results.items()
        for one in judge_pair(name, name, arms[CONSTANT], arms[SCALED], reference=references[name], limits=limits)
    ]
