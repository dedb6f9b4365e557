"""The studies that `muonsw reproduce` knows, one entry each: what they run, what they claim, how scales change them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from muonsw.lab import paper
from muonsw.lab.report.study_figures import draw_convergence, draw_coordinates
from muonsw.lab.studies import mup, theory
from muonsw.lab.studies.study import ExperimentStudy, TrainingStudy
from muonsw.lab.studies.training import best_rules, cases, dynamics, long, recipes, regret, rows, rules, sweeps
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

SHORT = "runs are relaxation-matched: lambda is raised so that decay acts within a short run as it does in a long one"
CPU_BODY = (
    "4 layers, 8 experts, muP base width 64, Python source with a BPE of 1,024, 420 updates of 1,536 tokens. The decay "
    "of a step is at its cap of 0.02, so lambda times learning rate times updates is 8.4 instead of the paper's 35"
)
CPU_BLIND = "What cannot be seen at this size: the paper's gains, the steps saved, and limits of the norm"
MINI_BODY = (
    "6 layers, 8 experts, muP base width 128, a BPE of 4,096 on Python source unless text is given, 1,600 updates of "
    "16,384 tokens, lambda times learning rate times updates 35 at every width"
)
LOSS_AND_NORM = partial(rows.draw_figures, figures=("loss-and-norm",))
PAPER_BODY = "Nothing is scaled; one seed, as in the paper"


def _scaled(cpu: str, mini: str, paper: str) -> Mapping[str, str]:
    return {"cpu": cpu, "mini": mini, "paper": paper}


def _rows(cpu: str, mini: str, paper: str) -> Mapping[str, str]:
    """How the runs of the main table were scaled."""
    return _scaled(
        f"{cpu}; {SHORT}: {CPU_BODY}. {CPU_BLIND}.",
        f"{mini}; {SHORT}: {MINI_BODY}. Gains of the loss need not be the paper's.",
        f"{paper}. {PAPER_BODY}; above width 256 scaled decay is run with both readings of eta_max, and constant "
        "decay of the same total beside it, which the paper does not have.",
    )


TRAINING_STUDIES: tuple[TrainingStudy, ...] = (
    TrainingStudy(
        name="main-table",
        title="the main table: constant against scaled decay at every width, both readings of eta_max, and a control",
        reference=paper.TABLE,
        scaled=_rows("Widths 64 and 96", "Widths 128, 256 and 512", "Widths 256, 512, 768 and 1024"),
        comparisons=rows.all_rows,
        claims=rows.judge_rows,
        own_tables=rows.row_tables,
        figures=LOSS_AND_NORM,
    ),
    TrainingStudy(
        name="headline",
        title="the headline figure: loss and weight norm of both rules",
        reference=paper.HEADLINE,
        scaled=_rows("Width 64", "Width 256", "Width 1024"),
        comparisons=rows.headline_row,
        claims=rows.judge_rows,
        own_tables=rows.control_tables,
        figures=LOSS_AND_NORM,
    ),
    TrainingStudy(
        name="steady-state",
        title="the steady-state figure: alignment, and the norm beside its target and its recursion",
        reference=paper.STEADY,
        scaled=_rows("Width 64", "Width 256", "Width 1024"),
        comparisons=rows.sampled_row,
        claims=dynamics.judge_steady_state,
        charts=dynamics.norm_charts,
        figures=partial(rows.draw_figures, figures=("alignment-and-prediction", "tracking")),
    ),
    TrainingStudy(
        name="diagnostics",
        title="the three diagnostic figures: orthogonality, gradient and momentum, late alignment",
        reference="appendix with additional data",
        scaled=_rows("Width 64", "Width 256", "Width 1024"),
        comparisons=rows.sampled_row,
        claims=dynamics.judge_diagnostics,
        figures=partial(rows.draw_figures, figures=("orthogonality", "gradient-and-momentum", "late-alignment")),
    ),
    TrainingStudy(
        name="widths",
        title="the headline figure at the other widths (512 and 768 in the paper)",
        reference="appendix with additional data",
        scaled=_rows("Width 96", "Widths 128 and 512", "Widths 512 and 768"),
        comparisons=rows.other_rows,
        claims=rows.judge_rows,
        own_tables=rows.control_tables,
        figures=LOSS_AND_NORM,
    ),
    TrainingStudy(
        name="recipes",
        title="the recipe table of the frontier models, as inputs of the planner",
        reference="appendix on frontier models",
        scaled=dict.fromkeys(("cpu", "mini", "paper"), "Nothing is trained, so nothing is scaled."),
        comparisons=recipes.no_runs,
        claims=recipes.judge_recipes,
        own_tables=recipes.recipe_tables,
    ),
    TrainingStudy(
        name="width-transfer",
        title="muP: the best learning rate of AdamW at three widths",
        reference=sweeps.WIDTH_FIGURE.reference,
        scaled=_scaled(
            "Widths 32, 64 and 128, 240 updates of 1,536 tokens instead of 5,000 of 524,288, six rates, two seeds. At "
            "so few tokens the best rate is set by the length of the run as much as by the model.",
            "Widths 128, 256 and 512 of 6 layers, 400 updates of 16,384 tokens, five rates a factor of two apart, "
            "two seeds; under Muon with scaled decay too.",
            "The table of the paper's source: widths 128, 256, 512, eight rates, 5,000 updates, one seed. The paper "
            "does not print the decay of these runs; constant decay with lambda 0.1 is assumed.",
        ),
        comparisons=sweeps.width_sweep,
        claims=sweeps.judge_widths,
        own_tables=sweeps.sweep_tables,
        charts=sweeps.width_charts,
    ),
    TrainingStudy(
        name="horizon-transfer",
        title="the best learning rate of AdamW against the horizon, and the cube-root rule",
        reference=sweeps.HORIZON_FIGURE.reference,
        scaled=_scaled(
            "Width 64; 120, 240 and 480 updates of 1,536 tokens, six rates, two seeds. The rule is the paper's for "
            "5,000 to 20,000 updates; a tenth of so short a run is warmup.",
            "Width 128 of 6 layers; 400 and 1,600 updates of 16,384 tokens, five rates, two seeds; under Muon with "
            "scaled decay too. The rule is the paper's for 5,000 to 20,000 updates.",
            "Width 256; 5,000, 10,000 and 20,000 updates, one seed. The paper does not print its rates here; those "
            "of its width sweep are taken, and its constant decay.",
        ),
        comparisons=sweeps.horizon_sweep,
        claims=sweeps.judge_horizons,
        own_tables=sweeps.sweep_tables,
        charts=sweeps.horizon_charts,
    ),
    TrainingStudy(
        name="regret",
        title="the regret map: what a wrong lambda costs under each rule, and whether one lambda serves every horizon",
        reference=regret.BEYOND.reference,
        scaled=_scaled(
            "Width 64; 105 and 420 updates of 1,536 tokens, six lambdas, two seeds; so short that decay hardly acts.",
            "Width 128 of 6 layers; 400, 1,600 and 6,400 updates of 16,384 tokens, seven lambdas (eight at the last), "
            "three seeds.",
            "Width 256; 2,500 to 40,000 updates, seven lambdas, one seed.",
        ),
        comparisons=regret.maps,
        claims=regret.judge_map,
        own_tables=regret.map_tables,
        charts=regret.map_charts,
    ),
    TrainingStudy(
        name="long",
        title="long horizons on fresh text: does what scaled decay gains grow with the length of the run?",
        reference=regret.BEYOND.reference,
        scaled=_scaled(
            "Width 64; 1,680 and 420 updates of 768 tokens, five lambdas, two seeds; decay hardly acts in the shorter.",
            "Width 128 of 6 layers; 25,600 and 6,400 updates of 8,192 tokens, five lambdas, three seeds.",
            "Width 256; 160,000 and 40,000 updates of half the paper's batch, five lambdas, one seed.",
        ),
        comparisons=long.long_runs,
        claims=long.judge_long,
        own_tables=regret.map_tables,
        charts=regret.map_charts,
    ),
    TrainingStudy(
        name="hard-cases",
        title="where decay should matter most: little text seen many times, a flat learning rate, bfloat16 weights",
        reference="beyond the paper",
        scaled=_scaled(
            "Width 64, 420 updates of 1,536 tokens, three seeds.",
            "Width 128 of 6 layers, 1,600 updates of 16,384 tokens, three seeds.",
            "Width 256, 10,000 updates, one seed.",
        ),
        comparisons=cases.hard_cases,
        claims=cases.no_claims,
        own_tables=cases.case_tables,
    ),
    TrainingStudy(
        name="adamw",
        title="AdamW with constant decay, with scaled decay, and with AdamC's own form",
        reference="beyond the paper",
        scaled=_rows("Width 64", "Width 256", "Width 256"),
        comparisons=cases.adamw_forms,
        claims=cases.no_claims,
        own_tables=cases.case_tables,
    ),
    TrainingStudy(
        name="decay-sweep",
        title="the best lambda of scaled decay against the best lambda of constant decay",
        reference="beyond the paper",
        scaled=_scaled(
            f"Width 64, five lambdas from a tenth to twice the relaxation-matched one; {CPU_BODY}. {CPU_BLIND}.",
            f"Width 256, five lambdas from a tenth to twice the relaxation-matched one; {MINI_BODY}.",
            "Width 256 at the paper's settings, lambda 0.025 to 0.4, one seed.",
        ),
        comparisons=rules.lambda_sweep,
        claims=rules.judge_best,
        own_tables=regret.map_tables,
        charts=regret.map_charts,
    ),
    TrainingStudy(
        name="decay-rules",
        title="all decay rules side by side, with the same decay at the peak",
        reference="beyond the paper",
        scaled=_rows("Width 64", "Width 256", "Width 256"),
        comparisons=rules.all_rules,
        claims=rules.judge_rules,
        own_tables=rows.control_tables,
    ),
    TrainingStudy(
        name="best-rules",
        title="every decay and norm rule at its best of three strengths",
        reference=best_rules.BEYOND.reference,
        scaled=_scaled(
            "Width 64, 420 updates of 1,536 tokens, 31 arms, two seeds; decay acts only where lambda is large.",
            "Width 128 of 6 layers, 1,600 updates of 16,384 tokens, 31 arms, two seeds.",
            "Width 256, 10,000 updates, 31 arms, one seed.",
        ),
        comparisons=best_rules.best_of_three,
        claims=best_rules.judge_best_rules,
        own_tables=best_rules.best_rules_tables,
    ),
    TrainingStudy(
        name="dense-moe",
        title="both rules in a dense decoder and in a mixture of experts",
        reference="beyond the paper",
        scaled=_rows("Width 64", "Width 256", "Width 256"),
        comparisons=rules.dense_and_moe,
        claims=rules.judge_dense,
        own_tables=rows.control_tables,
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
