"""The quintic Newton-Schulz iteration of Muon."""

from functools import partial

import torch
from torch import Tensor

from muonsw.orthogonalize.coefficients import newton_schulz_schedule
from muonsw.orthogonalize.normalize import check_matrices, iterate_normalized
from muonsw.orthogonalize.polynomial import apply_schedule


def newton_schulz(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Push the singular values of matrices towards one with Muon's polynomial.

    Five steps map singular values from 1.5e-3 up (relative to the Frobenius norm) into [0.68, 1.2025] and
    smaller ones to about 485 times themselves. The iteration does not converge to one: more steps keep the
    same band and reach smaller singular values.

    Args:
        matrices: `(..., m, n)`, left unmodified; each matrix is treated on its own.
        steps: How many times the polynomial is applied.
        dtype: The dtype of the iteration and of the result; the input's unless given. The matrices are
            normalised in float32 or better either way.

    Returns:
        Matrices of the same shape. Zero matrices stay exactly zero.

    Raises:
        ValueError: If the input is not a real floating-point tensor of at least two axes, or `steps < 1`.

    Examples:
        >>> result = newton_schulz(torch.diag(torch.tensor([1e-20, 2e-20, 3e-20])))
        >>> [round(value, 2) for value in result.diagonal().tolist()]
        [0.7, 0.68, 1.12]
    """
    dtype = check_matrices(matrices, dtype, steps=steps)
    return iterate_normalized(partial(apply_schedule, schedule=newton_schulz_schedule(steps)), matrices, dtype)
