"""The recipe table of the frontier models, as inputs of the planner: nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping

from muonsw.lab.claims.claim import Claim, Stated, within_share
from muonsw.lab.paper import RECIPES, Tolerance
from muonsw.lab.plan import RecipePlan, plan_recipe
from muonsw.lab.studies.arms import Comparison, Results
from muonsw.lab.studies.costs import amount
from muonsw.lab.studies.scales import Scale
from muonsw.lab.tables import Column, Table

# The share of constant decay's total that scaled decay applies under a cosine to a tenth, without warmup: the mean of
# the squared multiple over that of the multiple.
SHARE = (0.55**2 + 0.45**2 / 2.0) / 0.55


def no_runs(_scale: Scale) -> list[Comparison]:
    """Planning trains nothing."""
    return []


def plans() -> Mapping[str, RecipePlan]:
    """Every printed recipe, planned."""
    return {name: plan_recipe(recipe) for name, recipe in RECIPES.items()}


def judge_recipes(_results: Results, _scale: Scale) -> list[Claim]:
    """The printed columns agree with each other, and what scaled decay would change."""
    rounded = Tolerance(0.03, "the paper rounds it to two digits")
    warmup = Tolerance(0.02, "the closed form of a cosine to a tenth has no warmup, which takes up to a thirty-fifth")
    claims = []
    for name, planned in plans().items():
        recipe, source = planned.recipe, Stated(planned.recipe.reference, "the printed recipe")
        tokens = f"{recipe.title}: tokens for each active parameter"
        share = f"{recipe.title}: total of scaled decay over that of constant decay"
        each = recipe.tokens / recipe.active
        claims += [
            within_share(f"{name}-tokens", tokens, source, each, recipe.tokens_per_active, rounded),
            within_share(f"{name}-share", share, source, planned.scaled_over_constant, SHARE, warmup),
        ]
    return claims


def recipe_tables(_results: Results, _scale: Scale) -> list[Table]:
    """What is printed, and what the planner makes of it."""
    columns = (
        "recipe",
        Column("total", number=True, rank=2),
        Column("active", number=True, rank=2),
        Column("tokens", number=True, rank=2),
        Column("tokens / active", number=True, digits=3),
        Column("peak lr", number=True),
        Column("final lr", number=True, rank=2),
        Column("lambda", number=True),
        Column("updates", number=True, rank=2),
        Column("scaled / constant total", number=True, digits=3),
        Column("lambda of equal total", number=True, digits=3),
    )
    rows = [
        (
            planned.recipe.title,
            amount(round(planned.recipe.total)),
            amount(round(planned.recipe.active)),
            amount(round(planned.recipe.tokens)),
            planned.recipe.tokens / planned.recipe.active,
            planned.recipe.peak_lr,
            planned.recipe.final_lr,
            planned.recipe.weight_decay,
            planned.steps,
            planned.scaled_over_constant,
            planned.equal_total_weight_decay,
        )
        for planned in plans().values()
    ]
    note = "Updates are printed for the paper's own runs only; `muonsw plan --recipe NAME` shows one in full."
    return [Table("recipes", "Recipes", columns, rows, note)]
