"""Training recipes that the paper prints, as data: open frontier models trained with Muon, and its own four runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

PAPER_BATCH_TOKENS = 524_288
FRONTIER = "appendix on frontier models, table of recipes"
OWN = "table of main results"


@dataclass(frozen=True)
class Recipe:
    """What is printed about one pre-training run; None is not printed.

    Attributes:
        title: The model.
        total: Parameters.
        active: Parameters that one token uses.
        tokens: Of the whole run.
        peak_lr: Highest learning rate, before any factor of a parameter group.
        final_lr: Learning rate at the end.
        weight_decay: Lambda of the matrices that Muon moves.
        tokens_per_active: As printed, rounded.
        reference: Where in the paper.
        batch_tokens: Tokens in an update.
        steps: Updates.
        preset: The lab's model of this shape.
        unknown: What the paper does not say, and what is assumed instead.
    """

    title: str
    total: float
    active: float
    tokens: float
    peak_lr: float
    final_lr: float
    weight_decay: float
    tokens_per_active: float
    reference: str
    batch_tokens: int | None = None
    steps: int | None = None
    preset: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def final_fraction(self) -> float:
        """What is left of the peak at the end.

        Examples:
            >>> round(RECIPES["kimi-k2"].final_fraction, 6)
            0.1
        """
        return self.final_lr / self.peak_lr


_FRONTIER_UNKNOWN = (
    "batch size and steps: sums over steps need --batch-tokens, a constant batch is assumed",
    "warmup: none is assumed unless --warmup-steps is given",
    "shape of the schedule: the paper's text says cosine for these recipes in general; --shape tries another",
    "learning-rate factors of single groups: the printed one is taken for all matrices",
)
_OWN_UNKNOWN = ("whether eta_max of the divided groups was divided too: both are shown",)


def _frontier(title: str, total: float, active: float, tokens: float, peak_lr: float, per_active: float) -> Recipe:
    """A row of the frontier table; all end on a tenth of the peak with lambda 0.1."""
    return Recipe(
        title=title,
        total=total,
        active=active,
        tokens=tokens,
        peak_lr=peak_lr,
        final_lr=peak_lr / 10,
        weight_decay=0.1,
        tokens_per_active=per_active,
        reference=FRONTIER,
        unknown=_FRONTIER_UNKNOWN,
    )


def _own(
    width: int, total: float, active: float, steps: int, tokens: float, per_active: float, peak_lr: float
) -> Recipe:
    """One of the paper's own runs."""
    return Recipe(
        title=f"the paper's width {width}",
        total=total,
        active=active,
        tokens=tokens,
        peak_lr=peak_lr,
        final_lr=peak_lr / 10,
        weight_decay=0.1,
        tokens_per_active=per_active,
        reference=OWN,
        batch_tokens=PAPER_BATCH_TOKENS,
        steps=steps,
        preset=f"w{width}",
        unknown=_OWN_UNKNOWN,
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "glm-4.5": _frontier("GLM-4.5", 355e9, 32e9, 22e12, 2.5e-4, 700),
        "kimi-k2": _frontier("Kimi K2", 1e12, 32e9, 15.5e12, 2.0e-4, 480),
        "deepseek-v4-pro": _frontier("DeepSeek-V4-Pro", 1.6e12, 49e9, 32e12, 2.0e-4, 650),
        "paper-w256": _own(256, 72.7e6, 30.2e6, 35_000, 18.4e9, 610, 1.0e-2),
        "paper-w512": _own(512, 264.9e6, 95.0e6, 110_000, 57.7e9, 610, 7.0e-3),
        "paper-w768": _own(768, 520.0e6, 180.3e6, 223_000, 116.9e9, 650, 5.6e-3),
        "paper-w1024": _own(1024, 932.4e6, 309.6e6, 376_000, 197.1e9, 640, 4.8e-3),
    }
)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ValueError: If there is none, with those there are.

    Examples:
        >>> find_recipe("glm-4.5").peak_lr
        0.00025
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name]
