"""Where decay should matter most: little text, a flat rate, bfloat16 weights; and the forms of AdamW's decay."""

from __future__ import annotations

from dataclasses import replace

from muonsw.lab.studies.arms import Arm, Comparison, Key, Results, lambda_arm
from muonsw.lab.studies.outcome import against_constant
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.best_rules import rules_run
from muonsw.lab.studies.training.regret import RULES
from muonsw.lab.tables import Table
from muonsw.lab.train.config import ScheduleConfig

LITTLE, STRONG = Key("little text"), Key("little text, four times the lambda")
EPOCHS = 16
ADAMW_RATE, ADAMW_LAMBDAS = 1e-2, (0.1, 0.5)


def hard_cases(scale: Scale) -> list[Comparison]:
    """Both rules at constant decay's best lambda in each case; with little text at four times that, and without."""
    run = rules_run(scale)
    lam, base = run.optimizer.weight_decay, run.optimizer
    little = replace(run, data=replace(run.data, train_windows=max(run.batch, run.steps * run.batch // EPOCHS)))
    wsd = replace(run, schedule=ScheduleConfig(shape="wsd", decay_fraction=0.1, final_fraction=0.0))
    cases = {LITTLE: little, Key("wsd"): wsd, Key("bfloat16 weights"): replace(run, weights="bfloat16")}
    pair = tuple(lambda_arm(base, rule, lam) for rule in RULES)
    strong = tuple(lambda_arm(base, rule, 4 * lam) for rule in RULES)
    none = Arm("none", replace(base, decay="none", weight_decay=0.0))
    every = tuple(range(scale.seeds))
    return [
        *(Comparison(key, case, pair, every) for key, case in cases.items()),
        Comparison(STRONG, little, (*strong, none), (0,)),
    ]


def adamw_forms(scale: Scale) -> list[Comparison]:
    """AdamW: constant decay, scaled decay, and AdamC's own form, which scales on normalized layers alone."""
    run = scale.rows[scale.small]
    base = replace(run.optimizer, algorithm="adamw", lr=ADAMW_RATE, peak="group")
    arms = []
    for lam in ADAMW_LAMBDAS:
        arms += [lambda_arm(base, rule, lam) for rule in RULES]
        adamc = replace(base, decay="scaled", unnormalized="constant", weight_decay=lam)
        arms.append(Arm(f"adamc, lambda {lam:g}", adamc))
    return [Comparison(Key("adamw", width=run.model.width), run, tuple(arms), tuple(range(scale.sweep_seeds)))]


def case_tables(results: Results, _scale: Scale) -> list[Table]:
    """Every arm, and constant decay of its settings."""
    return [against_constant(results)]
