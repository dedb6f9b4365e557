"""Orthogonalizers by name, so that settings and checkpoints hold a string and users can add their own."""

from typing import Protocol

import torch
from torch import Tensor

from muonsw.orthogonalize.exact import exact
from muonsw.orthogonalize.gram import gram_newton_schulz
from muonsw.orthogonalize.newton_schulz import newton_schulz
from muonsw.orthogonalize.polar_express import polar_express
from muonsw.registry import Registry


class Orthogonalizer(Protocol):
    """A function that maps matrices `(..., m, n)` to (nearly) orthogonal ones of the same shape.

    It does not modify its input, treats each matrix on its own and maps zero to zero.
    """

    def __call__(self, matrices: Tensor, *, steps: int, dtype: torch.dtype | None = None) -> Tensor:
        """Orthogonalize in `dtype`, the input's unless given."""


ORTHOGONALIZERS: Registry[Orthogonalizer] = Registry("orthogonalizer")
ORTHOGONALIZERS.register("newton_schulz", newton_schulz)
ORTHOGONALIZERS.register("polar_express", polar_express)
ORTHOGONALIZERS.register("gram_newton_schulz", gram_newton_schulz)
ORTHOGONALIZERS.register("exact", exact)
