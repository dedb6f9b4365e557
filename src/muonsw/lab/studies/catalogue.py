"""The studies that `muonsw reproduce` knows: the paper's own, and grids beyond it as data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from muonsw.decay import convert_weight_decay
from muonsw.lab.arms import RULES, Key, decay_factors, lr_multiples, multiples
from muonsw.lab.report.study_figures import draw_convergence, draw_coordinates
from muonsw.lab.studies import mup
from muonsw.lab.studies.dynamics import DIAGNOSTICS, STEADY_STATE
from muonsw.lab.studies.frontier import RECIPES_STUDY
from muonsw.lab.studies.grid import Cell, grid, over_lambda, over_rate
from muonsw.lab.studies.main_table import MAIN_TABLE
from muonsw.lab.studies.scales import NEVER, Scale, at_horizon, at_width, lean, of_same_total
from muonsw.lab.studies.study import ExperimentStudy, TrainingStudy
from muonsw.lab.studies.transfer import HORIZON_TRANSFER, WIDTH_TRANSFER
from muonsw.lab.theory.matrix import FIXED_RATE, MATRIX, MATRIX_FIGURE
from muonsw.lab.theory.muon import DETERMINISTIC, MUON
from muonsw.lab.theory.noise_equilibrium import EQUILIBRIUM
from muonsw.lab.theory.scalar import SCALAR, SCALAR_FIGURE
from muonsw.lab.theory.sgd import NONCONVEX, STRONGLY_CONVEX
from muonsw.lab.train.config import RunConfig, ScheduleConfig
from muonsw.registry import Registry

THEORY = ExperimentStudy(
    name="theory",
    title="the convergence theory: every proposition, theorem and lemma, run on two CPU cores",
    experiments=(
        SCALAR,
        SCALAR_FIGURE,
        MATRIX,
        MATRIX_FIGURE,
        NONCONVEX,
        STRONGLY_CONVEX,
        MUON,
        DETERMINISTIC,
        FIXED_RATE,
        EQUILIBRIUM,
    ),
    picture=draw_convergence,
)
COORDINATES = ExperimentStudy(
    name="coordinates",
    title="the coordinate check of muP: which sizes depend on the width, run on two CPU cores",
    experiments=mup.EXPERIMENTS,
    picture=draw_coordinates,
)

OCTAVES = (0.25, 0.5, 1.0, 2.0, 4.0)
# Where Muon's weights end under a well-chosen constant decay, as the root mean square of their elements.
TARGET = 0.2
BOTH: dict[str, dict[str, Any]] = {rule: {"decay": rule} for rule in RULES}
ADAMC: dict[str, Any] = {"decay": "scaled", "unnormalized": "constant"}
HYPERBALL: dict[str, Any] = {"norm": "hyperball", "target_norm": TARGET}
EPOCHS = 16
ADAMW_RATE = 1e-2
# By member of the family, its best learning rate over that of the run, from a search in 200 steps on another seed.
MEMBERS = {
    "muon": 2.0,
    **dict.fromkeys(("normuon", "muon2", "aurora", "soap_muon", "dion2"), 5.0),
    "adamuon": 2.0,
    "asgo": 1.0,
    "soap": 0.5,
    "kl_shampoo": 8.0,
    "lion": 0.1,
}


def middle_run(scale: Scale) -> RunConfig:
    """The run of the regret map at its second length, with a lambda that suits constant decay."""
    steps, lambdas = list(scale.maps.items())[1]
    run = at_horizon(scale.map_run, steps)
    return replace(run, optimizer=replace(run.optimizer, weight_decay=lambdas[len(lambdas) // 2]))


def half_batch(scale: Scale, steps: int) -> RunConfig:
    """The run of the regret map with half its batch, evaluated ten times."""
    return replace(lean(at_horizon(scale.map_run, steps)), batch=scale.map_run.batch // 2, log_every=20)


def with_totals(run: RunConfig, totals: tuple[float, ...]) -> list[float]:
    """The lambdas with which constant decay at the run's rate has these totals.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> with_totals(at_width(half_batch(MINI, 34_800), 64), (0.6, 1.3, 4.0, 10.0, 20.0))
        [0.003, 0.0065, 0.02, 0.05, 0.1]
    """
    unit = math.fsum(decay_factors(run, replace(run.optimizer, decay="constant", weight_decay=1.0)))
    return [float(f"{total / unit:.2g}") for total in totals]


def regret(scale: Scale) -> list[Cell]:
    """Every lambda at every length."""
    return [over_lambda(Key(steps=n), at_horizon(scale.map_run, n), lambdas) for n, lambdas in scale.maps.items()]


def long(scale: Scale) -> list[Cell]:
    """The longest runs of the regret map with half the batch, and runs four times as long.

    Examples:
        >>> from muonsw.lab.studies.scales import MINI
        >>> [(cell.run.steps, list(cell.arms["scaled"])) for cell in long(MINI)][1]
        (25600, [0.005, 0.01, 0.02, 0.04, 0.08])
    """
    steps, lambdas = list(scale.maps.items())[-1]
    middle = lambdas[(len(lambdas) - 1) // 2]
    grids = {steps: multiples(middle, (0.125, *OCTAVES)), 4 * steps: multiples(0.4 * middle, OCTAVES)}
    return [over_lambda(Key(steps=length), half_batch(scale, length), values) for length, values in grids.items()]


def tokens_per_parameter(scale: Scale) -> list[Cell]:
    """The narrowest model for so long that it has 300 tokens per active parameter at scale mini."""
    steps = 34_800 if scale.name == "mini" else list(scale.maps)[-1] // 2
    run = at_width(half_batch(scale, steps), scale.widths[0])
    run = replace(run, eval_every=max(1, steps // 40))  # to see at which step one rule reaches the other's loss
    return [over_lambda(Key(steps=steps), run, with_totals(run, (0.6, 1.3, 4.0, 10.0, 20.0)))]


def adamw_lambda(scale: Scale) -> list[Cell]:
    """AdamW at six lambdas and the best of three rates (0.005, 0.01, 0.02), searched in shorter runs."""
    steps = list(scale.maps)[-1]
    run = replace(half_batch(scale, steps), eval_every=max(1, steps // 40))
    run = replace(run, optimizer=replace(run.optimizer, algorithm="adamw", lr=ADAMW_RATE))
    return [over_lambda(Key("adamw"), run, with_totals(run, (0.35, 0.7, 1.4, 2.8, 5.6, 11.2)))]


def adamw_forms(scale: Scale) -> list[Cell]:
    """AdamW: constant decay, scaled decay, and AdamC's own form, which scales on normalized layers alone."""
    run = scale.rows.get(256, scale.rows[scale.headline])
    run = replace(run, optimizer=replace(run.optimizer, algorithm="adamw", lr=ADAMW_RATE, peak="group"))
    return [over_lambda(Key("adamw", width=run.decoder.width), run, (0.1, 0.5), {**BOTH, "adamc": ADAMC})]


def lambda_scaling(scale: Scale) -> list[Cell]:
    """Along the width, along the batch at the same tokens, and along the size at the same tokens per weight."""
    run, widths = drift_run(scale), scale.widths[1:]
    # At half the rate each width ends near its best, which falls with the width.
    slower = replace(run, optimizer=replace(run.optimizer, lr=0.5 * run.optimizer.lr, adam_lr=run.optimizer.lr))
    points = {Key("width", width=width): at_width(slower, width) for width in widths}
    shared = at_width(run, widths[0])
    for factor in (0.5, 1.0, 2.0):
        batch = int(factor * run.batch)
        points[Key(f"batch {batch}")] = of_same_total(replace(shared, batch=batch), round(run.steps / factor))
    for factor in (0.5, 1.5):
        width = int(factor * widths[0])
        points[Key("size", width=width)] = of_same_total(at_width(shared, width), round(run.steps * factor**2))
    return [over_lambda(key, one, multiples(one.optimizer.weight_decay, OCTAVES)) for key, one in points.items()]


def drift_run(scale: Scale) -> RunConfig:
    """The middle run with half its batch and a lambda of the same total; nothing is divided by the width."""
    run = of_same_total(middle_run(scale), scale.drift_steps)
    return replace(run, optimizer=replace(run.optimizer, muon_lr="none", peak="group"), batch=run.batch // 2)


def rate_drift(scale: Scale) -> list[Cell]:
    """The same learning rates at every width; half of the lowest too at the widest, where that was the best."""
    rates, found = scale.rates[-5:], []
    for width in scale.widths:
        own = (rates[0] / 2, *rates) if width == max(scale.widths) else rates
        run = at_width(drift_run(scale), width)
        found.append(over_rate(Key(width=width), run, own, {**BOTH, "hyperball": HYPERBALL}))
    return found


def family(scale: Scale) -> list[Cell]:
    """Every member at its best rate, with total decays a factor of four apart."""
    run = at_horizon(scale.map_run, next(iter(scale.maps)))
    run = replace(run, batch=max(1, run.batch // 2), eval_every=run.steps, telemetry_every=0, diverged=NEVER)
    base, found = replace(run.optimizer, muon_lr="none", peak="group", adam_lr=run.optimizer.lr), []
    for member, factor in MEMBERS.items():
        optimizer = replace(base, preset="" if member == "muon" else member, lr=factor * base.lr)
        own = replace(run, optimizer=optimizer)
        found.append(over_lambda(Key(member), own, with_totals(own, (0.25, 1.0, 4.0, 16.0))))
    return found


def little_text(run: RunConfig) -> RunConfig:
    """The run on so little text that it is seen `EPOCHS` times."""
    return replace(run, data=replace(run.tokens, train_windows=max(run.batch, run.steps * run.batch // EPOCHS)))


def repeated_text(scale: Scale) -> list[Cell]:
    """Both rules at lambdas above the best one of fresh text."""
    run = little_text(middle_run(scale))
    return [over_lambda(Key("repeated text"), run, multiples(run.optimizer.weight_decay, (4, 8, 16, 32, 64)))]


def hard_cases(scale: Scale) -> list[Cell]:
    """Little text, a flat rate and bfloat16 weights at the best lambda of fresh text."""
    run = middle_run(scale)
    wsd = replace(run, schedule=ScheduleConfig(shape="wsd", decay_fraction=0.1, final_fraction=0.0))
    cases = {"little text": little_text(run), "wsd": wsd, "bfloat16 weights": replace(run, weights="bfloat16")}
    return [over_lambda(Key(name), case, (run.optimizer.weight_decay,)) for name, case in cases.items()]


def schedules(scale: Scale) -> list[Cell]:
    """Cosine, a straight line and WSD, to a tenth and to zero; a flat rate wants less decay."""
    run = at_horizon(middle_run(scale), scale.horizons[1])
    lam, warmup = run.optimizer.weight_decay, run.schedule.warmup(run.steps)
    found = []
    for final in (0.1, 0.0):
        straight = ScheduleConfig(shape="wsd", final_fraction=final, decay_fraction=(run.steps - warmup) / run.steps)
        shapes = {
            "cosine": (ScheduleConfig(final_fraction=final), OCTAVES[1:4]),
            "linear": (straight, OCTAVES[1:4]),
            "WSD": (ScheduleConfig(shape="wsd", final_fraction=final), (0.125, *OCTAVES[:3])),
        }
        for shape, (schedule, factors) in shapes.items():
            key = Key(f"{shape} to {final:g}")
            found.append(over_lambda(key, replace(run, schedule=schedule), multiples(lam, factors)))
    return found


def best_rules(scale: Scale) -> list[Cell]:
    """Every decay and norm rule at three strengths; where a rule has no lambda, at three learning rates."""
    run, three = middle_run(scale), OCTAVES[1:4]
    base = replace(run.optimizer, peak="group")
    lam, rates = base.weight_decay, [base.lr * multiple for multiple in lr_multiples(run)]
    changes: dict[str, tuple[dict[str, Any], float, tuple[float, ...]]] = {
        **{rule: ({"decay": rule}, lam, three) for rule in ("constant", "scaled", "cosine")},
        "adamc": (ADAMC, lam, three),
        # As much over the run as constant decay.
        **{
            rule: ({"decay": rule}, convert_weight_decay(lam, "constant", rule, base.lr, schedule=rates), three)
            for rule in ("fixed", "log_time")
        },
        # The size of gradients is not known beforehand: a factor of four apart, around what short runs showed.
        "gradient_norm": ({"decay": "gradient_norm"}, 1e-4 * lam, (0.25, 1.0, 4.0)),
        "target": ({"decay": "constant", "norm": "target", "target_norm": TARGET}, lam, three),
    }
    arms = {
        rule: {one: replace(base, **{**own, "weight_decay": one}) for one in multiples(middle, factors)}
        for rule, (own, middle, factors) in changes.items()
    }
    for rule, target in (("hyperball", None), ("hyperball_target", TARGET)):
        held = replace(base, norm="hyperball", target_norm=target, adam_lr=base.lr)
        arms[rule] = {lr: replace(held, lr=lr) for lr in multiples(base.lr, three)}
    arms["none"] = {0.0: replace(base, decay="none", weight_decay=0.0)}
    return [Cell(Key("strengths"), run, arms)]


def gradient_growth(scale: Scale) -> list[Cell]:
    """AdamW and Muon without clipping at three peak rates, sampled often; lambda as in the main table."""
    run = scale.rows[min(scale.rows)]
    run = replace(run, telemetry_every=scale.sampled_every or run.telemetry_every)
    muon = replace(run.optimizer, peak="group", clip=0.0)
    # AdamW with the decay that Muon has in a step at its peak.
    lam = float(f"{muon.weight_decay * muon.lr / ADAMW_RATE:.3g}")
    found = []
    for optimizer in (replace(muon, algorithm="adamw", lr=ADAMW_RATE, weight_decay=lam), muon):
        for lr in multiples(optimizer.lr, OCTAVES[1:4]):
            one = replace(run, optimizer=replace(optimizer, lr=lr))
            found.append(over_lambda(Key(f"{one.optimizer.algorithm} lr {lr:g}"), one, (optimizer.weight_decay,)))
    return found


SHORT = {"cpu": "So short that decay hardly acts."}
GRIDS = (
    grid("regret", "what a wrong lambda costs under each rule, at several lengths", regret, SHORT),
    grid("long", "long runs on fresh text: does the gain of scaled decay grow with the length?", long, SHORT),
    grid("tokens-per-parameter", "300 tokens per parameter: where is the best total decay?", tokens_per_parameter),
    grid("adamw-lambda", "AdamW: constant and scaled decay, each at its best of six lambdas", adamw_lambda),
    grid("adamw", "AdamW with constant decay, with scaled decay, and with AdamC's own form", adamw_forms),
    grid("lambda-scaling", "how the best lambda follows width, batch and size", lambda_scaling, SHORT),
    grid("rate-drift", "how far Muon's best learning rate moves with the width", rate_drift, SHORT),
    grid("family", "each member of the family at its best rate, under both rules", family, SHORT),
    grid("repeated-text", "constant and scaled decay on text that is seen 16 times", repeated_text),
    grid("hard-cases", "little text, a flat learning rate, bfloat16 weights", hard_cases),
    grid("schedules", "cosine, linear and WSD, to zero and to a tenth", schedules, SHORT),
    grid("best-rules", "every decay and norm rule at its best of three strengths", best_rules),
    grid("gradient-growth", "both rules without clipping, gradients sampled often (AdamC's claim)", gradient_growth),
)
TRAINING_STUDIES: tuple[TrainingStudy, ...] = (
    MAIN_TABLE,
    STEADY_STATE,
    DIAGNOSTICS,
    RECIPES_STUDY,
    WIDTH_TRANSFER,
    HORIZON_TRANSFER,
    *GRIDS,
)

STUDIES: Registry[ExperimentStudy | TrainingStudy] = Registry("study")
ALL: tuple[ExperimentStudy | TrainingStudy, ...] = (THEORY, COORDINATES, *TRAINING_STUDIES)
for _study in ALL:
    STUDIES.register(_study.name, _study)


def find_study(name: str) -> ExperimentStudy | TrainingStudy:
    """The study of that name, or `STUDY/PART` for one of its experiments or settings.

    Raises:
        ValueError: If there is none, with what there is.

    Examples:
        >>> [experiment.name for experiment in find_study("theory/matrix").experiments]
        ['matrix']
    """
    study, _, part = name.partition("/")
    return STUDIES[study].select(part) if part else STUDIES[study]
