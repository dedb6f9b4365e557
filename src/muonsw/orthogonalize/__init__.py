"""Orthogonalizers: functions that replace the singular values of matrices by (nearly) one.

A registry names them, so settings and checkpoints hold a string, and users can add new ones.
"""

from typing import Protocol

import torch
from torch import Tensor

from muonsw.orthogonalize.aurora import aurora as aurora
from muonsw.orthogonalize.iterations import COEFFICIENT_SETS as COEFFICIENT_SETS
from muonsw.orthogonalize.iterations import NS5 as NS5
from muonsw.orthogonalize.iterations import Iteration as Iteration
from muonsw.orthogonalize.iterations import auto as auto
from muonsw.orthogonalize.iterations import check_matrices
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


def exact(matrices: Tensor, *, steps: int | None = None, dtype: torch.dtype | None = None) -> Tensor:  # noqa: ARG001
    """Return the polar factor `U V^T` of matrices `U S V^T` of shape `(..., m, n)`, computed in float64.

    Singular values below the rounding error of float64 (`max(m, n) * eps` of the largest, as in
    `torch.linalg.matrix_rank`) count as zero, so the factor of a zero matrix is zero. Rounding noise in a singular
    float32 matrix is above that, and gets singular value one. A matrix with an infinity or NaN becomes all NaN.

    Examples:
        >>> exact(torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]))
        tensor([[0., 1., 0.],
                [0., 0., 0.]])
    """
    dtype = check_matrices(matrices, dtype)
    if matrices.numel() == 0:
        return torch.empty_like(matrices, dtype=dtype)
    X = normalize(matrices.to(torch.float64))
    finite = X.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    U, S, Vh = torch.linalg.svd(torch.where(finite, X, 0.0), full_matrices=False)  # raises on a NaN
    threshold = max(X.shape[-2:]) * torch.finfo(X.dtype).eps * S.amax(-1, keepdim=True)
    factor = (U * (threshold < S).to(X.dtype).unsqueeze(-2)) @ Vh
    return torch.where(finite, factor, torch.nan).to(dtype)


ORTHOGONALIZERS: Registry[Orthogonalizer] = Registry("orthogonalizer")
ORTHOGONALIZERS.register("auto", auto)
ORTHOGONALIZERS.register("gram_newton_schulz", gram_newton_schulz)
for _name, _coefficients in COEFFICIENT_SETS.items():
    ORTHOGONALIZERS.register(_name, newton_schulz if _name == "newton_schulz" else Iteration(_coefficients))
ORTHOGONALIZERS.register("exact", exact)
ORTHOGONALIZERS.register("aurora", aurora)
