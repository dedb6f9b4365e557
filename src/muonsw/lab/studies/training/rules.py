"""Questions beside the paper: the best lambda of each rule, all decay rules side by side, dense against MoE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from muonsw.decay import convert_weight_decay
from muonsw.lab import paper
from muonsw.lab.claims.claim import Claim, Stated, at_least, within
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.diagnose import open_history
from muonsw.lab.paper import Tolerance
from muonsw.lab.runs import Run
from muonsw.lab.studies.arms import (
    CONSTANT,
    SCALED,
    Arm,
    Comparison,
    Key,
    Results,
    Runs,
    control_arm,
    decay_arms,
    hidden_multiplier,
    own_peak,
    rule_arm,
)
from muonsw.lab.studies.compare import lower_loss
from muonsw.lab.studies.outcome import last_loss, paired
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.rows import (
    BEYOND,
    SAME_RUNS,
    judge_pair,
    larger_norm,
    limits_at,
)
from muonsw.lab.studies.tuning import SEARCH, Tuned, best_of, sweep_table
from muonsw.lab.tables import Table
from muonsw.lab.train.config import RunConfig

BEST, RULES = Key("best against best"), Key("rules")
SAME = Tolerance(0.01, "the same decay, computed another way: training amplifies its rounding")
EQUIVALENT = {"squared": SCALED, "independent": CONSTANT}


def lambda_arms(run: RunConfig, rule: str, factors: Sequence[float]) -> list[Arm]:
    """A rule at multiples of the run's lambda."""
    lambdas = [float(f"{run.optimizer.weight_decay * factor:.4g}") for factor in factors]
    return [rule_arm(run, rule, lam, named=True) for lam in lambdas]


def search(scale: Scale) -> list[Comparison]:
    """Every lambda of both rules, on a seed that the comparison itself does not use."""
    run = scale.rows[scale.small]
    arms = (arm for rule in (CONSTANT, SCALED) for arm in lambda_arms(run, rule, scale.factors))
    return [Comparison(SEARCH, run, tuple(arms), (scale.seeds,), paired=False)]


def best_against_best(results: Results, scale: Scale) -> list[Comparison]:
    """Each rule at its best lambda, on the other seeds."""
    run = scale.rows[scale.small]
    chosen = {one.name: one.best for one in tuned(results[SEARCH], scale)} if results else {}
    lambdas = {rule: chosen.get(rule, run.optimizer.weight_decay) for rule in (CONSTANT, SCALED)}
    arms = tuple(rule_arm(run, rule, lam) for rule, lam in lambdas.items())
    return [Comparison(BEST, run, arms, tuple(range(scale.seeds)))]


def tuned(runs: Runs, scale: Scale) -> list[Tuned]:
    """What the search found for each rule."""
    run = scale.rows[scale.small]
    return [
        best_of(
            rule_arm(run, rule, run.optimizer.weight_decay), lambda_arms(run, rule, scale.factors), runs, name="{arm}"
        )
        for rule in (CONSTANT, SCALED)
    ]


def judge_best(results: Results, scale: Scale) -> list[Claim]:
    """Whether scaled decay is better when constant decay is given its own best lambda."""
    claims = []
    if BEST in results:
        claims.append(
            lower_loss(
                "best-loss",
                "scaled decay at its best lambda ends lower than constant decay at its own",
                results[BEST][CONSTANT],
                results[BEST][SCALED],
                source=Stated(BEYOND, "lambdas chosen on a seed that is used for nothing else"),
                limits="the paper compares at one lambda only",
            )
        )
    for one in tuned(results[SEARCH], scale):
        grid = sorted(one.losses)
        place = grid.index(one.best)
        claims.append(
            at_least(
                f"{one.name}-inside",
                f"{one.name} decay: steps of the grid from its best lambda to the nearest edge",
                Stated(BEYOND, SAME_RUNS),
                float(min(place, len(grid) - 1 - place)),
                1.0,
                Tolerance(0.0, "at an edge a better lambda may lie beyond"),
                limits="one seed for the search, used for nothing else",
            )
        )
    return claims


def search_tables(results: Results, scale: Scale) -> list[Table]:
    """Final loss by lambda and rule."""
    return [sweep_table(tuned(results[SEARCH], scale))]


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
    return [Comparison(RULES, run, arms, tuple(range(scale.seeds)))]


def judge_rules(results: Results, scale: Scale) -> list[Claim]:
    """Scaled beats constant, rules that are the same under another name end alike, and norms are ordered."""
    arms, source = results[RULES], Stated(BEYOND, SAME_RUNS)
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
    dense = replace(run, model=run.model.dense())
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
