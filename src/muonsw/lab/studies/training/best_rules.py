"""Every decay and norm rule at its best of three strengths: is anything better than choosing lambda well?

The strength of a rule is its lambda, a factor of two apart around the one that corresponds to the run's; Hyperball has
none, and its learning rate takes the place; it holds the norms of the initialization, or the one of `target`. Claims
were written down before the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from muonsw.decay import convert_weight_decay
from muonsw.lab.claims.claim import Claim, within
from muonsw.lab.claims.statistics import over_seeds
from muonsw.lab.console import Cell, Column, Table, Value
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.arms import Arm, Comparison, Key, Results, Runs, hidden_multiplier, lr_multiples, multiples
from muonsw.lab.studies.outcome import loss_cell
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.regret import BEYOND, at_horizon, best_gaps, best_of_means
from muonsw.lab.studies.training.sweeps import Losses, losses_by_seed, mean_losses
from muonsw.lab.train.config import OptimizerConfig, RunConfig

KEY = Key("best of three")
FACTORS = (0.5, 1.0, 2.0)
# The size of gradients is not known beforehand: a factor of four apart, around what short runs showed.
GRADIENT, GRADIENT_FACTORS = 1e-4, (0.25, 1.0, 4.0)
# Where Muon's weights end under a well-chosen constant decay, as the root mean square of their entries.
TARGET = 0.2
SAME = Tolerance(0.01, "a hundredth of a nat: what two seeds differ by")
AT_BEST = replace(BEYOND, hypothesis="each rule at the best of its strengths")

# By rule: the arms among which its best is chosen.
Candidates = Mapping[str, Sequence[Arm]]


def candidates(run: RunConfig) -> Candidates:
    """Every rule at its strengths; lambda of the run is taken for a good one of constant decay."""
    base, lam = replace(run.optimizer, peak="group"), run.optimizer.weight_decay
    kept = {rule: _lambdas(replace(base, decay=rule), lam) for rule in ("constant", "scaled", "cosine")}
    totals = {rule: _lambdas(replace(base, decay=rule), _equal_total(run, rule, lam)) for rule in ("fixed", "log_time")}
    gradient = _lambdas(replace(base, decay="gradient_norm"), lam * GRADIENT, GRADIENT_FACTORS)
    target = replace(base, decay="constant", norm="target", target_norm=TARGET)
    hyperball = replace(base, norm="hyperball", adam_lr=base.adam_lr or base.lr)
    found = {
        **kept,
        "adamc": _lambdas(replace(base, decay="scaled", unnormalized="constant"), lam),
        **totals,
        "gradient_norm": gradient,
        "target": _lambdas(target, lam),
        "hyperball": _rates(hyperball),
        "hyperball_target": _rates(replace(hyperball, target_norm=TARGET)),
        "none": [replace(base, decay="none", weight_decay=0.0)],
    }
    return {rule: [Arm(_name(rule, one), one) for one in those] for rule, those in found.items()}


def _name(rule: str, optimizer: OptimizerConfig) -> str:
    word = "lr" if _strength(optimizer) == "lr" else "lambda"
    return rule if rule == "none" else f"{rule}, {word} {getattr(optimizer, _strength(optimizer)):g}"


def _strength(optimizer: OptimizerConfig) -> str:
    """The setting by which a rule is made stronger."""
    return "lr" if optimizer.norm == "hyperball" else "weight_decay"


def _lambdas(base: OptimizerConfig, lam: float, factors: Sequence[float] = FACTORS) -> list[OptimizerConfig]:
    return [replace(base, weight_decay=each) for each in multiples(lam, factors)]


def _rates(base: OptimizerConfig) -> list[OptimizerConfig]:
    return [replace(base, lr=each) for each in multiples(base.lr, FACTORS)]


def _equal_total(run: RunConfig, rule: str, lam: float) -> float:
    """The lambda with which a rule takes as much over the run as constant decay."""
    peak = run.optimizer.lr * hidden_multiplier(run, run.optimizer)
    rates = [peak * multiple for multiple in lr_multiples(run)]
    return convert_weight_decay(lam, "constant", rule, peak, schedule=rates)


def best_of_three(scale: Scale) -> list[Comparison]:
    """All of them at the run of the regret map, at its second horizon."""
    run = rules_run(scale)
    arms = tuple(arm for those in candidates(run).values() for arm in those)
    return [Comparison(KEY, run, arms, tuple(range(scale.sweep_seeds)), paired=False)]


def rules_run(scale: Scale) -> RunConfig:
    """The run that all rules share, with a lambda that suits constant decay."""
    steps, lambdas = list(scale.maps.items())[1]
    run, middle = at_horizon(scale.map_run, steps), lambdas[len(lambdas) // 2]
    return replace(run, optimizer=replace(run.optimizer, weight_decay=middle))


def losses_by_rule(arms: Runs, run: RunConfig) -> dict[str, list[dict[float, float]]]:
    """For each rule and seed, final loss by strength."""
    return {
        rule: losses_by_seed({arm.name: arms[arm.name] for arm in those}, _strength(those[0].optimizer))
        for rule, those in candidates(run).items()
    }


def judge_best_rules(results: Results, scale: Scale) -> list[Claim]:
    """No rule at its best differs from constant decay at its own by more than seeds do."""
    return judge_strengths(losses_by_rule(results[KEY], rules_run(scale)))


def judge_strengths(found: Mapping[str, Sequence[Losses]]) -> list[Claim]:
    """The same from losses alone: by rule, by seed, by strength."""
    limits = "chosen on the seeds that it is judged on: a little too good for rules with more strengths"
    claims = []
    for rule in (rule for rule in found if rule != "constant"):
        best = f"{rule} at its best minus constant decay at its best, in nats"
        gap = over_seeds(best_gaps(found[rule], found["constant"]))
        claims.append(within(f"{rule}-is-as-good", best, AT_BEST, gap, 0.0, SAME, limits=limits))
    return claims


def best_rules_tables(results: Results, scale: Scale) -> list[Table]:
    """Mean final loss of each rule at each strength, the best marked."""
    run = rules_run(scale)
    found, arms = losses_by_rule(results[KEY], run), candidates(run)
    columns = [Column("rule"), Column("strength"), Column("seeds", number=True), Column("loss", number=True)]
    rows: list[list[Value | Cell]] = []
    for rule, seeds in found.items():
        means = mean_losses(seeds)
        for arm, strength in zip(arms[rule], means, strict=True):
            shown = arm.name.removeprefix(rule).removeprefix(", ")
            rows.append([rule, shown, len(seeds), loss_cell(means, strength)])
    note = "Validation loss, means over seeds; the best strength of each rule is marked."
    if ends := ", ".join(best_at_an_end(found)):
        note += f" Best at the weakest or strongest that was tried, so perhaps better beyond it: {ends}."
    return [Table("best-rules", "Every rule at three strengths", columns, rows, note)]


def best_at_an_end(found: Mapping[str, Sequence[Losses]]) -> list[str]:
    """The rules whose best strength has no other on one side of it."""
    several = {rule: seeds for rule, seeds in found.items() if len(seeds[0]) > 1}
    return [rule for rule, seeds in several.items() if best_of_means(seeds) in (min(seeds[0]), max(seeds[0]))]
