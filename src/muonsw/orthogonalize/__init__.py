"""Orthogonalizers: functions that replace the singular values of matrices by (nearly) one.

A registry names them, so settings and checkpoints hold a string, and users can add new ones.
"""

from typing import Protocol

import torch
from torch import Tensor

from muonsw.orthogonalize.aurora import aurora as aurora
from muonsw.orthogonalize.coefficients import COEFFICIENT_SETS as COEFFICIENT_SETS
from muonsw.orthogonalize.coefficients import NS5 as NS5
from muonsw.orthogonalize.exact import exact as exact
from muonsw.orthogonalize.iterations import Iteration as Iteration
from muonsw.orthogonalize.iterations import auto as auto
from muonsw.orthogonalize.iterations import gram_newton_schulz as gram_newton_schulz
from muonsw.orthogonalize.iterations import newton_schulz as newton_schulz
from muonsw.orthogonalize.iterations import normalize as normalize
from muonsw.orthogonalize.iterations import polar_express as polar_express
from muonsw.registry import Registry


class Orthogonalizer(Protocol):
    """A function that maps matrices `(..., m, n)` to (nearly) orthogonal ones of the same shape.

    It does not modify its input, treats each matrix separately and maps zero to zero.
    """

    def __call__(self, matrices: Tensor, *, steps: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Orthogonalize in `dtype`, by default the input's; `steps` is `ns_steps=`, None for the default number."""


ORTHOGONALIZERS: Registry[Orthogonalizer] = Registry("orthogonalizer")
ORTHOGONALIZERS.register("auto", auto)
ORTHOGONALIZERS.register("gram_newton_schulz", gram_newton_schulz)
for _name, _coefficients in COEFFICIENT_SETS.items():
    ORTHOGONALIZERS.register(_name, newton_schulz if _name == "newton_schulz" else Iteration(_coefficients))
ORTHOGONALIZERS.register("exact", exact)
ORTHOGONALIZERS.register("aurora", aurora)
