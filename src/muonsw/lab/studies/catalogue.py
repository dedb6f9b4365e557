"""The studies that `muonsw reproduce` knows: the paper's own, and grids beyond it as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from muonsw.decay import convert_weight_decay
from muonsw.lab.compare import decay_factors, lr_multiples, multiples
from muonsw.lab.model import preset
from muonsw.lab.studies import mup
from muonsw.lab.studies.figures import draw_convergence, draw_coordinates
from muonsw.lab.studies.grid import HORIZON_TRANSFER, RULE_CHANGES, WIDTH_TRANSFER, GridCell, grid, sweep
from muonsw.lab.studies.main_table import DIAGNOSTICS, MAIN_TABLE, STEADY_STATE
from muonsw.lab.studies.scales import MINI, NEVER, NO_DATA, at_width, lean, with_optimizer
from muonsw.lab.studies.study import Study
from muonsw.lab.theory import matrix, muon, scalar, sgd
from muonsw.lab.theory.schedule import peak_lr_for_horizon, warmup_steps_for_horizon
from muonsw.lab.train.config import RunConfig, ScheduleConfig, preset_run

THEORY = Study(
    name="theory",
    title="the convergence theory: every proposition, theorem and lemma, run on two CPU cores",
    experiments=(
        scalar.Scalar(),
        scalar.ScalarFigure(),
        matrix.MatrixQuadratic(),
        matrix.MatrixFigure(),
        sgd.Nonconvex(),
        sgd.StronglyConvex(),
        muon.MuonNoise(),
        muon.MuonDeterministic(),
        matrix.FixedRate(),
    ),
    picture=draw_convergence,
)
COORDINATES = Study(
    name="coordinates",
    title="the coordinate check of muP: which sizes depend on the width, run on two CPU cores",
    experiments=mup.EXPERIMENTS,
    picture=draw_coordinates,
)

# ---- Grids beyond the paper, at the size of docs/evidence.md.

OCTAVES = (0.25, 0.5, 1.0, 2.0, 4.0)
LAMBDAS = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
# The RMS of Muon's weights at the end of a run with well-chosen constant decay.
TARGET = 0.2
ADAMC: dict[str, Any] = {"decay": "scaled", "unnormalized": "constant"}
EPOCHS = 16
WIDTHS = (64, 128, 256, 512)
ADAMW_RATE = 1e-2
# By member of the family, its best learning rate as a multiple of the run's, from 200-step runs with another seed.
MEMBERS = {
    "muon": 2.0,
    **dict.fromkeys(("normuon", "muon2", "aurora", "soap_muon", "dion2"), 5.0),
    "adamuon": 2.0,
    "asgo": 1.0,
    "soap": 0.5,
    "kl_shampoo": 8.0,
    "lion": 0.1,
}
# The run of most grids, at the smallest width that trains stably.
RUN = replace(preset_run("mini", NO_DATA), model=replace(preset("mini"), width=128), batch=16)


def at_horizon(steps: int, run: RunConfig = RUN) -> RunConfig:
    """The run at another length, with the peak of the horizon rule; evaluated four times and saved once."""
    run = with_optimizer(run, lr=min(run.optimizer.lr, peak_lr_for_horizon(steps)))
    every = max(1, steps // 4)
    return replace(run, steps=steps, eval_every=every, checkpoint_every=steps, telemetry_every=every, keep=1)


def middle_run() -> RunConfig:
    """The run at 1,600 steps, with a lambda that suits constant decay."""
    return with_optimizer(at_horizon(1_600), weight_decay=0.1)


def half_batch(steps: int) -> RunConfig:
    """The run with half its batch, evaluated ten times."""
    return replace(lean(at_horizon(steps)), batch=8, log_every=20)


def of_same_total(run: RunConfig, steps: int) -> RunConfig:
    """The run at another length, with lambda adjusted to the same total decay; evaluated only at the end."""
    run = with_optimizer(run, weight_decay=run.optimizer.weight_decay * run.steps / steps)
    return replace(at_horizon(steps, run), eval_every=steps, log_every=20)


def with_totals(run: RunConfig, totals: tuple[float, ...]) -> list[float]:
    """The lambdas that give constant decay these totals in this run.

    Examples:
        >>> with_totals(at_width(half_batch(34_800), 64), (0.6, 1.3, 4.0, 10.0, 20.0))
        [0.003, 0.0065, 0.02, 0.05, 0.1]
    """
    unit = math.fsum(decay_factors(run, replace(run.optimizer, decay="constant", weight_decay=1.0)))
    return [float(f"{total / unit:.2g}") for total in totals]


def regret() -> list[GridCell]:
    """Every lambda at every length; long runs need less decay, so the longest tries one more lambda."""
    maps = {400: LAMBDAS, 1_600: LAMBDAS, 6_400: (0.00625, *LAMBDAS)}
    return [sweep(f"{steps} steps", at_horizon(steps), lambdas) for steps, lambdas in maps.items()]


def long() -> list[GridCell]:
    """The longest runs of the regret map with half the batch, and runs four times as long."""
    maps = {6_400: (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2), 25_600: (0.005, 0.01, 0.02, 0.04, 0.08)}
    return [sweep(f"{steps} steps", half_batch(steps), lambdas) for steps, lambdas in maps.items()]


def tokens_per_parameter() -> list[GridCell]:
    """The narrowest model, trained to 300 tokens per active parameter."""
    run = at_width(half_batch(34_800), 64)
    run = replace(run, eval_every=870)  # shows at which step one rule reaches the other's loss
    return [sweep(f"{run.steps} steps", run, (0.003, 0.0065, 0.02, 0.05, 0.1))]


def adamw_lambda() -> list[GridCell]:
    """AdamW at six lambdas and the best of three rates (0.005, 0.01, 0.02), searched in shorter runs."""
    run = with_optimizer(replace(half_batch(6_400), eval_every=160), algorithm="adamw", lr=ADAMW_RATE)
    return [sweep("adamw", run, with_totals(run, (0.35, 0.7, 1.4, 2.8, 5.6, 11.2)))]


def adamw_forms() -> list[GridCell]:
    """AdamW with constant decay, scaled decay, and AdamC, which scales decay only on normalized layers."""
    run = with_optimizer(MINI.rows[256], algorithm="adamw", lr=ADAMW_RATE, peak="group")
    return [sweep("adamw, width 256", run, (0.1, 0.5), {**RULE_CHANGES, "adamc": ADAMC})]


def drift_run() -> RunConfig:
    """The middle run with half its batch; nothing is divided by the width.

    In half as many steps the loss still falls steeply, and seeds differ more than lambdas.
    """
    run = with_optimizer(middle_run(), muon_lr="none", peak="group")
    return replace(run, batch=run.batch // 2, eval_every=run.steps, log_every=20)


def lambda_scaling() -> list[GridCell]:
    """Vary the width, the batch at the same tokens, and the size at the same tokens per weight."""
    run, lr = drift_run(), RUN.optimizer.lr
    # Half the rate is near the best of each width; the best falls with the width.
    slower = with_optimizer(run, lr=0.5 * lr, adam_lr=lr)
    points = {f"width, width {width}": at_width(slower, width) for width in WIDTHS[1:]}
    shared = at_width(run, WIDTHS[1])
    for factor in (0.5, 1.0, 2.0):
        batch = int(factor * run.batch)
        points[f"batch {batch}"] = of_same_total(replace(shared, batch=batch), round(run.steps / factor))
    for factor in (0.5, 1.5):
        width = int(factor * WIDTHS[1])
        points[f"size, width {width}"] = of_same_total(at_width(shared, width), round(run.steps * factor**2))
    return [sweep(key, point, multiples(point.optimizer.weight_decay, OCTAVES)) for key, point in points.items()]


def rate_drift() -> list[GridCell]:
    """The same learning rates at every width; the widest also tries half the lowest, where it was best."""
    run = drift_run()
    run = with_optimizer(run, adam_lr=run.optimizer.lr)
    rules = {**RULE_CHANGES, "hyperball": {"norm": "hyperball", "target_norm": TARGET}}
    cells = []
    for width in WIDTHS:
        rates = (0.0025, *MINI.rates) if width == max(WIDTHS) else MINI.rates
        cells.append(sweep(f"width {width}", at_width(run, width), rates, rules, over="lr"))
    return cells


def family() -> list[GridCell]:
    """Every member at its best rate, with total decays a factor of four apart."""
    run = replace(at_horizon(400), batch=8, eval_every=400, telemetry_every=0, diverged=NEVER)
    lr, cells = run.optimizer.lr, []
    run = with_optimizer(run, muon_lr="none", peak="group", adam_lr=lr)
    for member, factor in MEMBERS.items():
        tried = with_optimizer(run, preset="" if member == "muon" else member, lr=factor * lr)
        cells.append(sweep(member, tried, with_totals(tried, (0.25, 1.0, 4.0, 16.0))))
    return cells


def little_text(run: RunConfig) -> RunConfig:
    """The run on little text, repeated `EPOCHS` times."""
    return replace(run, data=replace(run.tokens, train_windows=run.steps * run.batch // EPOCHS))


def repeated_text() -> list[GridCell]:
    """Both rules at lambdas above the best one of fresh text."""
    return [sweep("repeated text", little_text(middle_run()), (0.4, 0.8, 1.6, 3.2, 6.4))]


def hard_cases() -> list[GridCell]:
    """Little text, a flat rate and bfloat16 weights at the best lambda of fresh text."""
    run = middle_run()
    wsd = replace(run, schedule=ScheduleConfig(shape="wsd", decay_fraction=0.1, final_fraction=0.0))
    cases = {"little text": little_text(run), "wsd": wsd, "bfloat16 weights": replace(run, weights="bfloat16")}
    return [sweep(name, case, (run.optimizer.weight_decay,)) for name, case in cases.items()]


def schedules() -> list[GridCell]:
    """Cosine, linear and WSD, to a tenth and to zero; a flat rate needs less decay."""
    run, cells = middle_run(), []
    lam, warmup = run.optimizer.weight_decay, warmup_steps_for_horizon(run.steps)
    for final in (0.1, 0.0):
        straight = ScheduleConfig(shape="wsd", final_fraction=final, decay_fraction=(run.steps - warmup) / run.steps)
        shapes = {
            "cosine": (ScheduleConfig(final_fraction=final), OCTAVES[1:4]),
            "linear": (straight, OCTAVES[1:4]),
            "WSD": (ScheduleConfig(shape="wsd", final_fraction=final), (0.125, *OCTAVES[:3])),
        }
        for shape, (schedule, factors) in shapes.items():
            cells.append(sweep(f"{shape} to {final:g}", replace(run, schedule=schedule), multiples(lam, factors)))
    return cells


def best_rules() -> list[GridCell]:
    """Every decay and norm rule at three strengths; rules without lambda at three learning rates."""
    run, three = middle_run(), OCTAVES[1:4]
    base = replace(run.optimizer, peak="group")
    lam, rates = base.weight_decay, [base.lr * multiple for multiple in lr_multiples(run)]
    changes: dict[str, tuple[dict[str, Any], float, tuple[float, ...]]] = {
        **{rule: ({"decay": rule}, lam, three) for rule in ("constant", "scaled", "cosine")},
        "adamc": (ADAMC, lam, three),
        # With the total decay of constant decay.
        **{
            rule: ({"decay": rule}, convert_weight_decay(lam, "constant", rule, base.lr, schedule=rates), three)
            for rule in ("fixed", "log_time")
        },
        # Gradient norms are not known in advance: factors of four around what short runs showed.
        "gradient_norm": ({"decay": "gradient_norm"}, 1e-4 * lam, (0.25, 1.0, 4.0)),
        "target": ({"decay": "constant", "norm": "target", "target_norm": TARGET}, lam, three),
    }
    arms = {
        rule: {strength: replace(base, **change, weight_decay=strength) for strength in multiples(middle, factors)}
        for rule, (change, middle, factors) in changes.items()
    }
    for rule, target in (("hyperball", None), ("hyperball_target", TARGET)):
        held = replace(base, norm="hyperball", target_norm=target, adam_lr=base.lr)
        arms[rule] = {lr: replace(held, lr=lr) for lr in multiples(base.lr, three)}
    arms["none"] = {0.0: replace(base, decay="none", weight_decay=0.0)}
    return [GridCell("strengths", run, arms)]


def gradient_growth() -> list[GridCell]:
    """AdamW and Muon without clipping at three peak rates, sampled often; lambda as in the main table."""
    run = MINI.rows[128]
    with_muon = with_optimizer(run, peak="group", clip=0.0)
    # At the peak, AdamW decays as much per step as Muon.
    lam = float(f"{run.optimizer.weight_decay * run.optimizer.lr / ADAMW_RATE:.3g}")
    adamw = with_optimizer(with_muon, algorithm="adamw", lr=ADAMW_RATE, weight_decay=lam)
    return [
        sweep(f"{tried.optimizer.algorithm} lr {lr:g}", with_optimizer(tried, lr=lr), (tried.optimizer.weight_decay,))
        for tried in (adamw, with_muon)
        for lr in multiples(tried.optimizer.lr, OCTAVES[1:4])
    ]


def beyond(name: str, title: str, cells: Callable[[], Sequence[GridCell]]) -> Study:
    """A grid of one size."""
    return grid(name, title, lambda _scale: cells())


GRIDS = (
    beyond("regret", "what a wrong lambda costs under each rule, at several lengths", regret),
    beyond("long", "long runs on fresh text: does the gain of scaled decay grow with the length?", long),
    beyond("tokens-per-parameter", "300 tokens per parameter: where is the best total decay?", tokens_per_parameter),
    beyond("adamw-lambda", "AdamW: constant and scaled decay, each at its best of six lambdas", adamw_lambda),
    beyond("adamw", "AdamW with constant decay, with scaled decay, and with AdamC's own form", adamw_forms),
    beyond("lambda-scaling", "how the best lambda follows width, batch and size", lambda_scaling),
    beyond("rate-drift", "how far Muon's best learning rate moves with the width", rate_drift),
    beyond("family", "each member of the family at its best rate, under both rules", family),
    beyond("repeated-text", "constant and scaled decay on text that is seen 16 times", repeated_text),
    beyond("hard-cases", "little text, a flat learning rate, bfloat16 weights", hard_cases),
    beyond("schedules", "cosine, linear and WSD, to zero and to a tenth", schedules),
    beyond("best-rules", "every decay and norm rule at its best of three strengths", best_rules),
    beyond("gradient-growth", "both rules without clipping, gradients sampled often (AdamC's claim)", gradient_growth),
)

PAPERS_OWN = (THEORY, COORDINATES, MAIN_TABLE, STEADY_STATE, DIAGNOSTICS, WIDTH_TRANSFER, HORIZON_TRANSFER)
STUDIES = {study.name: study for study in (*PAPERS_OWN, *GRIDS)}
