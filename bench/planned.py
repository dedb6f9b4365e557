"""The runs behind docs/evidence.md, in named groups; each ends within minutes on one GPU, most important runs first.

`bench/gather.py` trains them. A run that one group has made is not made again for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from muonsw.lab.studies.arms import Arm, decay_arms, rule_arm
from muonsw.lab.studies.scales import MINI, adamw_sweep, at_width
from muonsw.lab.studies.training import best_rules, regret
from muonsw.lab.train.config import RunConfig, ScheduleConfig

SEEDS = (0, 1, 2)
# The best lambda of constant decay in the regret map at 1,600 updates.
BEST, BEST_STEPS = 0.1, 1_600
# Windows of the little text: 16 epochs in 1,600 updates of 16 sequences.
LITTLE = 1_600
RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
# Long runs want less decay: one lambda more, so that the best one of a rule has neighbours on both sides.
SMALLER = {6_400: (0.00625,)}
# The main table's runs, shorter than `muonsw reproduce main-table --scale mini` so that three seeds fit.
TABLE_STEPS, TABLE_BATCH = 1_600, 16
ADAMW_RATE, ADAMW_LAMBDAS = 1e-2, (0.1, 0.5)


@dataclass(frozen=True)
class Planned:
    """A run to make: what its arm is called, its settings, and whether its telemetry is kept."""

    arm: str
    config: RunConfig
    dynamics: bool = False


@dataclass(frozen=True)
class Group:
    """Runs that answer one question.

    Attributes:
        question: What is asked.
        file: Where in evidence/ its records are.
        runs: The runs, the most important first.
    """

    question: str
    file: str
    runs: Callable[[], Sequence[Planned]]


def of_map(steps: int) -> list[Planned]:
    """One horizon of the regret map, seed by seed, outwards from the lambda that should be best.

    That is the one which takes as much over the run as the best one of 1,600 updates does over its own.
    """
    run = regret.at_horizon(MINI.map_run, steps)
    middle = BEST * BEST_STEPS / steps
    lambdas = (*SMALLER.get(steps, ()), *MINI.map_lambdas)
    outwards = sorted(lambdas, key=lambda lam: (max(lam / middle, middle / lam), lam))
    return [
        Planned(f"{rule}, lambda {lam:g}", _with(run, seed, decay=rule, weight_decay=lam))
        for seed in SEEDS
        for lam in outwards
        for rule in regret.RULES
    ]


def all_rules() -> list[Planned]:
    """Every rule at its middle strength first, then at the two others; seed by seed."""
    run = best_rules.rules_run(MINI)
    found = best_rules.candidates(run)
    arms = [arms[place] for place in (1, 0, 2) for arms in found.values() if place < len(arms)]
    return [Planned(arm.name, replace(run, optimizer=arm.optimizer, seed=seed)) for seed in SEEDS[:2] for arm in arms]


def hard_cases() -> list[Planned]:
    """Where decay should matter most, each a pair at constant decay's best lambda; without decay beside little text."""
    run = regret.at_horizon(MINI.map_run, 1_600)
    little = replace(run, data=replace(run.data, train_windows=LITTLE))
    wsd = replace(run, schedule=ScheduleConfig(shape="wsd", decay_fraction=0.1, final_fraction=0.0))
    cases = {"little text": little, "wsd": wsd, "bfloat16 weights": replace(run, weights="bfloat16")}
    pairs = [
        Planned(f"{name}: {rule}", _with(case, seed, decay=rule, weight_decay=BEST))
        for seed in SEEDS
        for name, case in cases.items()
        for rule in regret.RULES
    ]
    strong = [_with(little, 0, decay=rule, weight_decay=4 * BEST) for rule in regret.RULES]
    without = Planned("little text: none", _with(little, 0, decay="none", weight_decay=0.0))
    return [*pairs[:6], without, *(Planned(f"little text: {one.optimizer.decay}", one) for one in strong), *pairs[6:]]


def table(width: int, seeds: Sequence[int]) -> list[Planned]:
    """A width of the main table: relaxation-matched, both readings of the peak, the control, then good lambdas."""
    run = _row(width)
    return [
        Planned(arm.name, replace(run, optimizer=arm.optimizer, seed=seed))
        for seed in seeds
        for arm in (*decay_arms(run), *_good(run))
    ]


def _row(width: int) -> RunConfig:
    """A row of the table in fewer updates, with more decay in each: as much over the run."""
    row = MINI.rows[width]
    lam = float(f"{row.optimizer.weight_decay * row.steps / TABLE_STEPS:.3g}")
    optimizer = replace(row.optimizer, weight_decay=lam)
    return _lean(replace(row, steps=TABLE_STEPS, batch=TABLE_BATCH, optimizer=optimizer))


def _good(run: RunConfig) -> list[Arm]:
    """Both rules near the best lambda of each, a tenth and a fifth of the relaxation-matched one."""
    return [
        replace(rule_arm(run, rule, lam), name=f"{rule}, lambda {lam:g}")
        for lam in (0.1 * run.optimizer.weight_decay, 0.2 * run.optimizer.weight_decay)
        for rule in regret.RULES
    ]


def adamw() -> list[Planned]:
    """AdamW at width 256: constant, scaled, and AdamC's own form."""
    run = _row(256)
    base = replace(run.optimizer, algorithm="adamw", lr=ADAMW_RATE, peak="group")
    forms = {
        "constant": replace(base, decay="constant"),
        "scaled": replace(base, decay="scaled"),
        "adamc": replace(base, decay="scaled", unnormalized="constant"),
    }
    return [
        Planned(f"adamw {name}, lambda {lam:g}", replace(run, optimizer=replace(one, weight_decay=lam), seed=seed))
        for seed in SEEDS[:2]
        for lam in ADAMW_LAMBDAS
        for name, one in forms.items()
    ]


def dynamics() -> list[Planned]:
    """Both rules at width 256, sampled by telemetry 160 times."""
    run = replace(_row(256), telemetry_every=TABLE_STEPS // 160)
    arms = [arm for arm in decay_arms(run) if arm.name in regret.RULES]
    return [Planned(arm.name, replace(run, optimizer=arm.optimizer), dynamics=True) for arm in arms]


def width_transfer() -> list[Planned]:
    """The same learning rates at three widths, for Muon (scaled) and AdamW (constant)."""
    return [
        Planned(f"{algorithm}, lr {rate:g}", _rate(at_width(_short(), width), algorithm, rate))
        for width in (128, 256, 512)
        for algorithm in ("muon", "adamw")
        for rate in RATES
    ]


def horizon_transfer() -> list[Planned]:
    """The same learning rates for two lengths at width 128, for Muon (scaled) and AdamW (constant)."""
    return [
        Planned(f"{algorithm}, lr {rate:g}", _rate(_short(steps), algorithm, rate))
        for steps in (400, 1_600)
        for algorithm in ("muon", "adamw")
        for rate in RATES
    ]


def _short(steps: int = 400) -> RunConfig:
    return replace(_lean(adamw_sweep(MINI.rows[128], steps)), batch=16)


def _rate(run: RunConfig, algorithm: str, rate: float) -> RunConfig:
    rule = "scaled" if algorithm == "muon" else "constant"
    return replace(run, optimizer=replace(run.optimizer, algorithm=algorithm, decay=rule, lr=rate, weight_decay=BEST))


def _with(run: RunConfig, seed: int, **changes: object) -> RunConfig:
    return replace(run, seed=seed, optimizer=replace(run.optimizer, **changes))  # type: ignore[arg-type]


def _lean(run: RunConfig) -> RunConfig:
    """Evaluated and sampled by telemetry ten times, saved at the end alone."""
    tenth = max(1, run.steps // 10)
    return replace(run, eval_every=tenth, checkpoint_every=run.steps, telemetry_every=tenth, log_every=tenth, keep=1)


GROUPS: Mapping[str, Group] = {
    "regret-6400": Group("what a wrong lambda costs in 6,400 updates", "regret-mini.jsonl", lambda: of_map(6_400)),
    "rules": Group("is any rule better than choosing lambda well", "rules-mini.jsonl", all_rules),
    "hard": Group("little text, WSD, bfloat16 weights", "hard-mini.jsonl", hard_cases),
    "dynamics": Group("norms, alignments and the recursion at width 256", "table-mini.jsonl", dynamics),
    "table-128": Group("the main table at width 128", "table-mini.jsonl", lambda: table(128, SEEDS)),
    "table-256": Group("the main table at width 256", "table-mini.jsonl", lambda: table(256, SEEDS)),
    "table-512": Group("the main table at width 512", "table-mini.jsonl", lambda: table(512, SEEDS[:1])),
    "adamw": Group("AdamW constant, scaled and AdamC at width 256", "table-mini.jsonl", adamw),
    "widths": Group("does the learning rate transfer over widths", "transfer-mini.jsonl", width_transfer),
    "horizons": Group("does it transfer over horizons", "transfer-mini.jsonl", horizon_transfer),
    "regret-1600": Group("what a wrong lambda costs in 1,600 updates", "regret-mini.jsonl", lambda: of_map(1_600)),
    "regret-400": Group("what a wrong lambda costs in 400 updates", "regret-mini.jsonl", lambda: of_map(400)),
}
