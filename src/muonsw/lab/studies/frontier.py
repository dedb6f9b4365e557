"""The recipe table of the frontier models, and what scaled decay would change: nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from muonsw.lab.arms import Results
from muonsw.lab.console import Column, Table, Value
from muonsw.lab.paper import RECIPES, PrintedRecipe, Tolerance
from muonsw.lab.plan import amount
from muonsw.lab.stats import Claim, Source, within_share
from muonsw.lab.studies.scales import Scale
from muonsw.lab.studies.study import TrainingStudy
from muonsw.lab.theory.schedule import MOST_STEPS, sampled
from muonsw.lab.train.config import ScheduleConfig

# The share of constant decay's total that scaled decay applies under a cosine to a tenth, without warmup: the mean of
# the squared multiple over that of the multiple.
SHARE = (0.55**2 + 0.45**2 / 2.0) / 0.55


class RecipePlan(NamedTuple):
    """A printed recipe, and its decay under the scaled rule."""

    recipe: PrintedRecipe
    scaled_over_constant: float  # total decay of the scaled rule relative to the constant one
    equal_total_weight_decay: float  # lambda at which scaled decay has the total of constant decay


def plan_recipe(recipe: PrintedRecipe) -> RecipePlan:
    """Compute the total decay of a cosine, with the paper's warmup where the number of steps is printed.

    Examples:
        >>> round(plan_recipe(RECIPES["kimi-k2"]).scaled_over_constant, 2)
        0.73
    """
    schedule = ScheduleConfig(warmup_steps=None if recipe.steps else 0, final_fraction=recipe.final_fraction)
    steps = recipe.steps or MOST_STEPS
    multiples = sampled(schedule.multiple(steps), steps)
    share = math.fsum(multiple**2 for multiple in multiples) / math.fsum(multiples)
    return RecipePlan(recipe, share, recipe.weight_decay / share)


def plans() -> Mapping[str, RecipePlan]:
    """Every printed recipe, planned."""
    return {name: plan_recipe(recipe) for name, recipe in RECIPES.items()}


def judge_recipes(_results: Results, _scale: Scale) -> list[Claim]:
    """The printed columns agree with each other, and what scaled decay would change."""
    rounded = Tolerance(0.03, "the paper rounds it to two digits")
    warmup = Tolerance(0.02, "the closed form of a cosine to a tenth has no warmup, which takes up to a thirty-fifth")
    claims = []
    for name, planned in plans().items():
        recipe, source = planned.recipe, Source(planned.recipe.reference, "the printed recipe")
        tokens = f"{recipe.title}: tokens for each active parameter"
        share = f"{recipe.title}: total of scaled decay over that of constant decay"
        each = recipe.tokens / recipe.active
        claims += [
            within_share(f"{name}-tokens", tokens, source, each, recipe.tokens_per_active, rounded),
            within_share(f"{name}-share", share, source, planned.scaled_over_constant, SHARE, warmup),
        ]
    return claims


def recipe_tables(_results: Results, _scale: Scale) -> list[Table]:
    """What is printed, and what scaled decay would change."""
    rows = [_cells(planned) for planned in plans().values()]
    note = "Steps are printed for the paper's own runs only."
    return [Table("recipes", "Recipes", list(rows[0]), [tuple(row.values()) for row in rows], note)]


def _cells(planned: RecipePlan) -> dict[Column, Value]:
    recipe = planned.recipe
    return {
        Column("recipe"): recipe.title,
        Column("total", number=True, rank=2): amount(round(recipe.total)),
        Column("active", number=True, rank=2): amount(round(recipe.active)),
        Column("tokens", number=True, rank=2): amount(round(recipe.tokens)),
        Column("tokens / active", number=True, digits=3): recipe.tokens / recipe.active,
        Column("peak lr", number=True): recipe.peak_lr,
        Column("final lr", number=True, rank=2): recipe.final_lr,
        Column("lambda", number=True): recipe.weight_decay,
        Column("steps", number=True, rank=2): recipe.steps,
        Column("scaled / constant total", number=True, digits=3): planned.scaled_over_constant,
        Column("lambda of equal total", number=True, digits=3): planned.equal_total_weight_decay,
    }


RECIPES_STUDY = TrainingStudy(
    name="recipes",
    title="the recipe table of the frontier models, as inputs of the planner",
    reference="appendix on frontier models",
    comparisons=lambda _scale: [],
    claims=judge_recipes,
    own_tables=recipe_tables,
)
