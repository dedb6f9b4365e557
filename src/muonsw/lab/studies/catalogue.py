"""The studies that `muonsw reproduce` knows, one entry each: what they run, what they claim, how scales change them."""

from __future__ import annotations

from muonsw.lab import paper, theory
from muonsw.lab.report.study_figures import draw_convergence, draw_coordinates
from muonsw.lab.studies import mup
from muonsw.lab.studies.study import ExperimentStudy, TrainingStudy
from muonsw.lab.studies.training import (
    best_rules,
    cases,
    dynamics,
    family,
    frontier_models,
    gradient_growth,
    lambda_scaling,
    long,
    paper_regime,
    rate_drift,
    regret,
    rows,
    rules,
    schedules,
    sweeps,
)
from muonsw.registry import Registry

THEORY = ExperimentStudy(
    name="theory",
    title="the convergence theory: every proposition, theorem and lemma, run on two CPU cores",
    experiments=theory.EXPERIMENTS,
    picture=draw_convergence,
)
COORDINATES = ExperimentStudy(
    name="coordinates",
    title="the coordinate check of muP: which sizes depend on the width, run on two CPU cores",
    experiments=mup.EXPERIMENTS,
    picture=draw_coordinates,
)

RELAXED = (
    "Runs are relaxation-matched: lambda is raised so that decay acts within a short run as it does in a long one, and "
    "gains of the loss need not be the paper's."
)
ROWS = {
    "cpu": f"{RELAXED} Lambda times learning rate times updates is 8.4 instead of the paper's 35. What cannot be "
    "seen at this size: the steps saved, and limits of the norm.",
    "mini": f"{RELAXED} Lambda times learning rate times updates is 35 at every width.",
    "paper": "Nothing is scaled; above width 256 scaled decay is run with both readings of eta_max, and constant decay "
    "of the same total beside it, which the paper does not have.",
}

TRAINING_STUDIES: tuple[TrainingStudy, ...] = (
    TrainingStudy(
        name="main-table",
        title="the main table: constant against scaled decay at every width, both readings of eta_max, and a control",
        reference=paper.TABLE,
        comparisons=rows.all_rows,
        claims=rows.judge_rows,
        own_tables=rows.row_tables,
        figures=rows.draw_figures,
        notes=ROWS,
    ),
    TrainingStudy(
        name="headline",
        title="the headline figure: loss and weight norm of both rules",
        reference=paper.HEADLINE,
        comparisons=rows.headline_row,
        claims=rows.judge_rows,
        own_tables=rows.control_tables,
        figures=rows.draw_figures,
        notes=ROWS,
    ),
    TrainingStudy(
        name="steady-state",
        title="the steady-state figure: alignment, and the norm beside its target and its recursion",
        reference=paper.STEADY,
        comparisons=rows.sampled_row,
        claims=dynamics.judge_steady_state,
        charts=dynamics.norm_charts,
        figures=rows.draw_figures,
        notes=ROWS,
    ),
    TrainingStudy(
        name="diagnostics",
        title="the three diagnostic figures: orthogonality, gradient and momentum, late alignment",
        reference="appendix with additional data",
        comparisons=rows.sampled_row,
        claims=dynamics.judge_diagnostics,
        figures=rows.draw_figures,
        notes=ROWS,
    ),
    TrainingStudy(
        name="widths",
        title="the headline figure at the other widths (512 and 768 in the paper)",
        reference="appendix with additional data",
        comparisons=rows.other_rows,
        claims=rows.judge_rows,
        own_tables=rows.control_tables,
        figures=rows.draw_figures,
        notes=ROWS,
    ),
    TrainingStudy(
        name="recipes",
        title="the recipe table of the frontier models, as inputs of the planner",
        reference="appendix on frontier models",
        comparisons=frontier_models.no_runs,
        claims=frontier_models.judge_recipes,
        own_tables=frontier_models.recipe_tables,
    ),
    TrainingStudy(
        name="width-transfer",
        title="muP: the best learning rate of AdamW at three widths",
        reference=sweeps.WIDTH_FIGURE.reference,
        comparisons=sweeps.width_sweep,
        claims=sweeps.judge_widths,
        own_tables=sweeps.sweep_tables,
        charts=sweeps.width_charts,
        notes={
            "cpu": "At so few tokens the best rate is set by the length of the run as much as by the model.",
            "mini": "Under Muon with scaled decay too.",
            "paper": "The paper does not print the decay of these runs; constant decay with lambda 0.1 is assumed.",
        },
    ),
    TrainingStudy(
        name="horizon-transfer",
        title="the best learning rate of AdamW against the horizon, and the cube-root rule",
        reference=sweeps.HORIZON_FIGURE.reference,
        comparisons=sweeps.horizon_sweep,
        claims=sweeps.judge_horizons,
        own_tables=sweeps.sweep_tables,
        charts=sweeps.horizon_charts,
        notes={
            "cpu": "The rule is the paper's for 5,000 to 20,000 updates; a tenth of so short a run is warmup.",
            "mini": "The rule is the paper's for 5,000 to 20,000 updates; under Muon with scaled decay too.",
            "paper": "The paper does not print its rates here; those of its width sweep are taken.",
        },
    ),
    TrainingStudy(
        name="rate-drift",
        title="how far Muon's best learning rate moves with the width, under constant and scaled decay and Hyperball",
        reference=rate_drift.HYPERBALL.reference,
        comparisons=rate_drift.rate_drift,
        claims=rate_drift.judge_drift,
        own_tables=rate_drift.drift_tables,
        charts=rate_drift.drift_charts,
        notes={"cpu": "So short that decay hardly acts."},
    ),
    TrainingStudy(
        name="regret",
        title="the regret map: what a wrong lambda costs under each rule, and whether one lambda serves every horizon",
        reference=regret.BEYOND.reference,
        comparisons=regret.maps,
        claims=regret.judge_map,
        own_tables=regret.map_tables,
        charts=regret.map_charts,
        notes={"cpu": "So short that decay hardly acts."},
    ),
    TrainingStudy(
        name="long",
        title="long horizons on fresh text: does what scaled decay gains grow with the length of the run?",
        reference=regret.BEYOND.reference,
        comparisons=long.long_runs,
        claims=long.judge_long,
        own_tables=regret.map_tables,
        charts=regret.map_charts,
        notes={"cpu": "Decay hardly acts in the shorter runs."},
    ),
    TrainingStudy(
        name="tokens-per-parameter",
        title="300 tokens per parameter: where is the best total decay, and what does the paper's own total cost?",
        reference=regret.BEYOND.reference,
        comparisons=paper_regime.longest,
        claims=paper_regime.judge_longest,
        own_tables=paper_regime.longest_tables,
        charts=regret.map_charts,
    ),
    TrainingStudy(
        name="adamw-lambda",
        title="AdamW: constant and scaled decay, each at its best of six lambdas",
        reference=regret.BEYOND.reference,
        comparisons=paper_regime.adamw_search,
        then=paper_regime.adamw_lambdas,
        claims=paper_regime.judge_adamw,
        own_tables=paper_regime.adamw_tables,
        charts=paper_regime.adamw_charts,
    ),
    TrainingStudy(
        name="which-peak",
        title="scaled decay by the group's own peak and by the undivided one, each beside the same total",
        reference=rows.BEYOND,
        comparisons=paper_regime.peaks,
        claims=paper_regime.judge_peaks,
        own_tables=paper_regime.peak_tables,
        notes=ROWS,
    ),
    TrainingStudy(
        name="lambda-scaling",
        title="how the best lambda follows width, batch and size: three exponents under both rules",
        reference=regret.BEYOND.reference,
        comparisons=lambda_scaling.lambda_scaling,
        claims=lambda_scaling.judge_scaling,
        own_tables=lambda_scaling.scaling_tables,
        charts=lambda_scaling.scaling_charts,
        notes={"cpu": "So short that decay hardly acts."},
    ),
    TrainingStudy(
        name="family",
        title="each member of the family at its best learning rate and lambda, under constant and scaled decay",
        reference=regret.BEYOND.reference,
        comparisons=family.search,
        then=family.family,
        claims=family.judge_family,
        own_tables=family.family_tables,
        charts=family.family_charts,
        notes={"cpu": "So short that decay acts only where lambda is large."},
    ),
    TrainingStudy(
        name="hard-cases",
        title="where decay should matter most: little text seen many times, a flat learning rate, bfloat16 weights",
        reference=rows.BEYOND,
        comparisons=cases.hard_cases,
        own_tables=cases.case_tables,
    ),
    TrainingStudy(
        name="repeated-text",
        title="constant, scaled and rising decay on text that is seen many times, each at its best lambda",
        reference=cases.SLOWRUN.reference,
        comparisons=cases.repeated_text,
        claims=cases.judge_repeated,
        own_tables=cases.case_tables,
        charts=cases.repeated_charts,
    ),
    TrainingStudy(
        name="schedules",
        title="cosine, linear and WSD, to zero and to a tenth: where does the rule matter most?",
        reference=regret.BEYOND.reference,
        comparisons=schedules.schedules,
        claims=schedules.judge_schedules,
        own_tables=schedules.schedule_tables,
        charts=schedules.schedule_charts,
        notes={"cpu": "Decay hardly acts."},
    ),
    TrainingStudy(
        name="adamw",
        title="AdamW with constant decay, with scaled decay, and with AdamC's own form",
        reference=rows.BEYOND,
        comparisons=cases.adamw_forms,
        own_tables=cases.case_tables,
    ),
    TrainingStudy(
        name="gradient-growth",
        title="AdamC's claim: gradients of matrices that a normalization follows rise under constant decay alone",
        reference=gradient_growth.ADAMC.reference,
        comparisons=gradient_growth.growth_runs,
        claims=gradient_growth.judge_growth,
        own_tables=gradient_growth.growth_tables,
        charts=gradient_growth.growth_charts,
        notes=ROWS,
    ),
    TrainingStudy(
        name="decay-sweep",
        title="the best lambda of scaled decay against the best lambda of constant decay",
        reference=rows.BEYOND,
        comparisons=rules.lambda_sweep,
        claims=rules.judge_best,
        own_tables=regret.map_tables,
        charts=regret.map_charts,
    ),
    TrainingStudy(
        name="decay-rules",
        title="all decay rules side by side, with the same decay at the peak",
        reference=rows.BEYOND,
        comparisons=rules.all_rules,
        claims=rules.judge_rules,
        own_tables=rows.control_tables,
        notes=ROWS,
    ),
    TrainingStudy(
        name="best-rules",
        title="every decay and norm rule at its best of three strengths",
        reference=regret.BEYOND.reference,
        comparisons=best_rules.best_of_three,
        claims=best_rules.judge_best_rules,
        own_tables=best_rules.best_rules_tables,
        notes={"cpu": "Decay acts only where lambda is large."},
    ),
    TrainingStudy(
        name="dense-moe",
        title="both rules in a dense decoder and in a mixture of experts",
        reference=rows.BEYOND,
        comparisons=rules.dense_and_moe,
        claims=rules.judge_dense,
        own_tables=rows.control_tables,
        notes=ROWS,
    ),
)

ALL: tuple[ExperimentStudy | TrainingStudy, ...] = (THEORY, COORDINATES, *TRAINING_STUDIES)
STUDIES: Registry[ExperimentStudy | TrainingStudy] = Registry("study")
for _study in ALL:
    STUDIES.register(_study.name, _study)


def find_study(name: str) -> ExperimentStudy | TrainingStudy:
    """The study of that name, or `STUDY/EXPERIMENT` for one experiment of a study that has several.

    Raises:
        ValueError: If there is none, with what there is.

    Examples:
        >>> [experiment.name for experiment in find_study("theory/matrix").experiments]
        ['matrix']
    """
    study, _, experiment = name.partition("/")
    found = STUDIES[study]
    if not experiment:
        return found
    if isinstance(found, TrainingStudy):
        raise ValueError(f"{study} is one experiment and has no part {experiment!r}; leave it out")
    return found.select(experiment)
