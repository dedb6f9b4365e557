"""The quintic step that the iterations share, and what it does to singular values."""

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from muonsw.orthogonalize.coefficients import Coefficients, Schedule

_Sigma = TypeVar("_Sigma", float, Tensor)


class SingularValueMap(Protocol):
    """A function of singular values, elementwise on a tensor or on one float."""

    def __call__(self, sigma: _Sigma, /) -> _Sigma:
        """Give the new singular values."""


def multiply_add(addend: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """Compute `beta * addend + alpha * left @ right` in one call, for one matrix or a 3-D stack.

    Examples:
        >>> multiply_add(torch.eye(2), torch.eye(2), torch.eye(2), beta=2.0).diagonal().tolist()
        [3.0, 3.0]
    """
    fused = torch.addmm if left.ndim == 2 else torch.baddbmm
    return fused(addend, left, right, beta=beta, alpha=alpha)


def quintic_step(X: Tensor, coefficients: Coefficients) -> Tensor:
    """Apply one polynomial to the singular values of wide matrices, `(m, n)` or `(batch, m, n)`.

    Examples:
        >>> quintic_step(torch.tensor([[0.5, 0.0]]), (1.0, 2.0, 4.0)).tolist()
        [[0.875, 0.0]]
    """
    a, b, c = coefficients
    gram = X @ X.mT
    even_part = multiply_add(gram, gram, gram, beta=b, alpha=c)
    return multiply_add(X, even_part, X, beta=a)


def apply_schedule(X: Tensor, schedule: Schedule) -> Tensor:
    """Apply a schedule of polynomials, one after another, to the singular values of wide matrices.

    Examples:
        >>> apply_schedule(torch.tensor([[1.0, 0.0]]), ((2.0, 0.0, 0.0), (3.0, 0.0, 0.0))).tolist()
        [[6.0, 0.0]]
    """
    for coefficients in schedule:
        X = quintic_step(X, coefficients)
    return X


def singular_value_map(schedule: Schedule) -> SingularValueMap:
    """Give the scalar function that a schedule applies to every singular value.

    The singular values are those of the normalised matrix, so relative to its Frobenius norm.

    Examples:
        >>> from muonsw.orthogonalize import newton_schulz_schedule
        >>> round(singular_value_map(newton_schulz_schedule(5))(1.0), 4)
        0.6964
    """

    def apply(sigma: _Sigma, /) -> _Sigma:
        for a, b, c in schedule:
            square = sigma * sigma
            sigma = sigma * (a + square * (b + square * c))
        return sigma

    return apply
