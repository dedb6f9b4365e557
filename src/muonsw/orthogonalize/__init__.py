"""Orthogonalizers: functions that replace the singular values of matrices by (nearly) one.

They are registered by name, so that settings and checkpoints hold a string and users can add their own.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from muonsw.orthogonalize.aurora import aurora as aurora
from muonsw.orthogonalize.exact import exact as exact
from muonsw.orthogonalize.iterations import AUTO, GRAM, PLAIN
from muonsw.orthogonalize.iterations import COEFFICIENT_SETS as COEFFICIENT_SETS
from muonsw.orthogonalize.iterations import NS5 as NS5
from muonsw.orthogonalize.iterations import POLAR_EXPRESS as POLAR_EXPRESS
from muonsw.orthogonalize.iterations import Coefficients as Coefficients
from muonsw.orthogonalize.iterations import CoefficientSet as CoefficientSet
from muonsw.orthogonalize.iterations import Iteration as Iteration
from muonsw.orthogonalize.iterations import Schedule as Schedule
from muonsw.orthogonalize.iterations import auto as auto
from muonsw.orthogonalize.iterations import gram_newton_schulz as gram_newton_schulz
from muonsw.orthogonalize.iterations import newton_schulz as newton_schulz
from muonsw.orthogonalize.iterations import normalize as normalize
from muonsw.orthogonalize.iterations import orthogonalize as orthogonalize
from muonsw.orthogonalize.iterations import polar_express as polar_express
from muonsw.orthogonalize.iterations import singular_value_map as singular_value_map
from muonsw.registry import Registry


class Orthogonalizer(Protocol):
    """A function that maps matrices `(..., m, n)` to (nearly) orthogonal ones of the same shape.

    It does not modify its input, treats each matrix on its own and maps zero to zero.
    """

    def __call__(self, matrices: Tensor, *, steps: int, dtype: torch.dtype | None = None) -> Tensor:
        """Orthogonalize in `dtype`, the input's unless given."""


ORTHOGONALIZERS: Registry[Orthogonalizer] = Registry("orthogonalizer")
ORTHOGONALIZERS.register("auto", auto)
ORTHOGONALIZERS.register("newton_schulz", newton_schulz)
ORTHOGONALIZERS.register("polar_express", polar_express)
ORTHOGONALIZERS.register("gram_newton_schulz", gram_newton_schulz)
ORTHOGONALIZERS.register("exact", exact)
ORTHOGONALIZERS.register("aurora", aurora)

# What a fused momentum pass, which normalises by itself, can hand its matrices to.
ITERATIONS: dict[Orthogonalizer, Iteration] = {
    auto: AUTO,
    newton_schulz: PLAIN["newton_schulz"],
    polar_express: PLAIN["polar_express"],
    gram_newton_schulz: GRAM,
}

for _name, _iteration in PLAIN.items():
    if _name not in ORTHOGONALIZERS:
        ORTHOGONALIZERS.register(_name, partial(orthogonalize, _iteration))
        ITERATIONS[ORTHOGONALIZERS[_name]] = _iteration


__all__ = [
    "COEFFICIENT_SETS",
    "ITERATIONS",
    "NS5",
    "ORTHOGONALIZERS",
    "POLAR_EXPRESS",
    "CoefficientSet",
    "Coefficients",
    "Iteration",
    "Orthogonalizer",
    "Schedule",
    "aurora",
    "auto",
    "exact",
    "gram_newton_schulz",
    "newton_schulz",
    "normalize",
    "orthogonalize",
    "polar_express",
    "singular_value_map",
]
