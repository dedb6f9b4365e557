"""Where decay should matter most: little text, a flat rate, bfloat16 weights; and the forms of AdamW's decay.

What is claimed of repeated text was written down before its runs.
"""

from __future__ import annotations

from dataclasses import replace

from muonsw.lab.claims.claim import Claim, Source, at_least, below
from muonsw.lab.console import Table
from muonsw.lab.report.sections import Chart
from muonsw.lab.studies.arms import RULES, Arm, Comparison, Key, Results, lambda_arm
from muonsw.lab.studies.outcome import against_constant
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.training.best_rules import rules_run
from muonsw.lab.studies.training.regret import EXACT, basins, best_against_best
from muonsw.lab.train.config import RunConfig, ScheduleConfig

LITTLE, STRONG = Key("little text"), Key("little text, four times the lambda")
EPOCHS = 16
# Reported to win over many epochs: decay that falls in the first half and then rises above where it began.
RISING = ((0.0, 0.8), (0.5, 0.1), (1.0, 1.25))
# Of the three that were planned the largest was best under every rule, so two more were added; of these the larger was
# best under scaled decay, which has one more.
REPEATED, REPEATED_FACTORS, MOST_SCALED = Key("repeated text"), (4.0, 8.0, 16.0, 32.0, 64.0), 96.0
SLOWRUN = Source(
    "slowrun, pull request 38; claims written down before the runs", "text seen 16 times, cosine to a tenth"
)
ADAMW_RATE, ADAMW_LAMBDAS = 1e-2, (0.1, 0.5)


def hard_cases(scale: Scale) -> list[Comparison]:
    """Both rules at constant decay's best lambda in each case; with little text at four times that, and without."""
    run = rules_run(scale)
    lam, base = run.optimizer.weight_decay, run.optimizer
    little = little_text(run)
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


def little_text(run: RunConfig) -> RunConfig:
    """The run on so little text that it is seen `EPOCHS` times."""
    return replace(run, data=replace(run.tokens, train_windows=max(run.batch, run.steps * run.batch // EPOCHS)))


def repeated_text(scale: Scale) -> list[Comparison]:
    """Constant, scaled and rising decay at lambdas above the best one of fresh text."""
    run = little_text(rules_run(scale))
    base, lambdas = run.optimizer, [factor * run.optimizer.weight_decay for factor in REPEATED_FACTORS]
    rising = replace(base, decay_points=RISING)
    arms = [lambda_arm(base, rule, lam) for lam in lambdas for rule in RULES]
    arms += [lambda_arm(rising, "piecewise", lam) for lam in lambdas]
    arms.append(lambda_arm(base, "scaled", MOST_SCALED * base.weight_decay))
    return [Comparison(REPEATED, run, tuple(arms), tuple(range(scale.seeds)), paired=False)]


def judge_repeated(results: Results, _scale: Scale) -> list[Claim]:
    """Each at the best of its lambdas: rising decay ends below constant decay, scaled decay does not."""
    rising, scaled = (best_against_best(results[REPEATED], rule) for rule in ("piecewise", "scaled"))
    lower = "rising decay minus constant decay, each at its best lambda, in nats"
    higher = "scaled decay minus constant decay, each at its best lambda, in nats"
    return [
        below("rising-is-better", lower, SLOWRUN, rising, 0.0, EXACT),
        at_least("scaled-is-not", higher, SLOWRUN, scaled, 0.0, EXACT),
    ]


def repeated_charts(results: Results, _scale: Scale) -> list[Chart]:
    """The three rules over lambda."""
    return basins("repeated", results, (*RULES, "piecewise"))


def adamw_forms(scale: Scale) -> list[Comparison]:
    """AdamW: constant decay, scaled decay, and AdamC's own form, which scales on normalized layers alone."""
    run = scale.rows[scale.small]
    base = replace(run.optimizer, algorithm="adamw", lr=ADAMW_RATE, peak="group")
    arms = []
    for lam in ADAMW_LAMBDAS:
        arms += [lambda_arm(base, rule, lam) for rule in RULES]
        adamc = replace(base, decay="scaled", unnormalized="constant", weight_decay=lam)
        arms.append(Arm(f"adamc, lambda {lam:g}", adamc))
    return [Comparison(Key("adamw", width=run.decoder.width), run, tuple(arms), tuple(range(scale.sweep_seeds)))]


def case_tables(results: Results, _scale: Scale) -> list[Table]:
    """Every arm, and constant decay of its settings."""
    return [against_constant(results)]
