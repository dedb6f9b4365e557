"""Questions beside the paper: the best lambda of each rule, all decay rules side by side, dense against MoE."""

from __future__ import annotations

import math
from dataclasses import replace

from muonsw.decay import convert_weight_decay
from muonsw.lab import paper
from muonsw.lab.arms import (
    CONSTANT,
    RULES,
    SCALED,
    Arm,
    Comparison,
    Key,
    Results,
    control_arm,
    decay_arms,
    hidden_multiplier,
    multiples,
    own_peak,
    rule_arm,
)
from muonsw.lab.claims.claim import Claim, Source, at_least, below, within
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.compare import LOWER
from muonsw.lab.diagnose import open_history
from muonsw.lab.outcome import last_loss, paired
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs import Run
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.regret import best_against_best, best_of_means, losses_of
from muonsw.lab.studies.training.rows import (
    BEYOND,
    SAME_RUNS,
    judge_pair,
    larger_norm,
    limits_at,
)

LAMBDAS, EVERY_RULE = Key("lambdas"), Key("rules")
EDGE = Tolerance(0.0, "at an edge a better lambda may lie beyond")
SAME = Tolerance(0.01, "the same decay, computed another way: training amplifies its rounding")
EQUIVALENT = {"squared": SCALED, "independent": CONSTANT}


def lambda_sweep(scale: Scale) -> list[Comparison]:
    """Both rules at multiples of the run's lambda."""
    run = scale.rows[scale.small]
    lambdas = multiples(run.optimizer.weight_decay, scale.factors, digits=4)
    arms = tuple(rule_arm(run, rule, lam) for lam in lambdas for rule in RULES)
    return [Comparison(LAMBDAS, run, arms, tuple(range(scale.sweep_seeds)), paired=False)]


def judge_best(results: Results, _scale: Scale) -> list[Claim]:
    """Whether scaled decay is better when constant decay is given its own best lambda."""
    losses = {rule: losses_of(results[LAMBDAS], rule) for rule in RULES}
    lower = "scaled decay at its best lambda minus constant decay at its own, in nats"
    gap = best_against_best(results[LAMBDAS])
    beyond = Source(BEYOND, "each the best of means over seeds")
    claims = [below("best-loss", lower, beyond, gap, 0.0, LOWER, limits="the paper compares at one lambda only")]
    for rule, seeds in losses.items():
        grid = sorted(seeds[0])
        place = grid.index(best_of_means(seeds))
        inside = f"{rule} decay: steps of the grid from its best lambda to the nearest edge"
        steps = float(min(place, len(grid) - 1 - place))
        claims.append(at_least(f"{rule}-inside", inside, Source(BEYOND, SAME_RUNS), steps, 1.0, EDGE))
    return claims


def all_rules(scale: Scale) -> list[Comparison]:
    """Every decay rule with the same decay at the peak, and constant decay of the scaled rule's total."""
    run = scale.rows[scale.small]
    base = own_peak(run)
    constant = Arm(CONSTANT, replace(base, decay="constant", peak="group"))
    scaled = Arm(SCALED, replace(base, decay="scaled"))
    peak = base.lr * hidden_multiplier(run, base)
    others = []
    for rule, like in EQUIVALENT.items():
        weight_decay = convert_weight_decay(base.weight_decay, like, rule, peak)
        others.append(Arm(rule, replace(base, decay=rule, peak="group", weight_decay=weight_decay)))
    no_decay = Arm("none", replace(base, decay="none", weight_decay=0.0, peak="group"))
    arms = (constant, scaled, *others, no_decay, control_arm(run, scaled))
    return [Comparison(EVERY_RULE, run, arms, tuple(range(scale.seeds)))]


def judge_rules(results: Results, scale: Scale) -> list[Claim]:
    """Scaled beats constant, rules that are the same under another name end alike, and norms are ordered."""
    arms, source = results[EVERY_RULE], Source(BEYOND, SAME_RUNS)
    claims = judge_pair("rules", "at equal decay at the peak", arms, paper.TABLE, limits_at(scale))
    for rule, like in EQUIVALENT.items():
        statement = f"{rule} decay with a converted lambda ends where {like} decay does"
        gap = over_seeds(paired(arms[rule], arms[like], last_loss))
        claims.append(within(f"{rule}-is-{like}", statement, source, gap, 0.0, SAME))
    statement = "without decay all weights together end larger than under scaled decay (logarithm of the ratio)"
    return [*claims, larger_norm("none-norm", statement, arms[SCALED], arms["none"], source, log_norm_of_all)]


def log_norm_of_all(run: Run) -> float:
    """The logarithm of the last norm of all weights: where nothing decays, none is recorded of those that do."""
    return math.log(open_history(run, "all").last("weight_rms"))


def dense_and_moe(scale: Scale) -> list[Comparison]:
    """The two rules and their control in a mixture of experts, and in the same decoder with one expert."""
    run = scale.rows[scale.small]
    dense = replace(run, model=run.decoder.dense())
    return [
        Comparison(Key(name), chosen, decay_arms(chosen), tuple(range(scale.seeds)))
        for name, chosen in (("moe", run), ("dense", dense))
    ]


def judge_dense(results: Results, scale: Scale) -> list[Claim]:
    """The effect does not need experts."""
    references = {"moe": paper.TABLE, "dense": BEYOND}
    return [
        claim
        for key, arms in results.items()
        for claim in judge_pair(key.name, key.name, arms, references[key.name], limits_at(scale))
    ]
