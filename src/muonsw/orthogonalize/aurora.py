"""Aurora: rescale the rows of a matrix until all rows of its polar factor have equal norms.

Tilde Research (2026), `tilde-research/aurora-release` at 3d79a5c. The squared row norms of a tall orthogonal matrix add
up to `n`, but are as unequal as those of the momentum: a neuron with small gradients hardly moves. Aurora finds the
diagonal `D` that makes the rows of `polar(D M)` equal, by `K` rounds of `D_i <- D_i ((n/m) / ||U_i||^2)^beta`. In wide
matrices it equalizes columns; in square ones rows are already equal.

Unlike the authors' code it adds no epsilon to row norms, so the size of the gradient does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muonsw.orthogonalize.iterations import COEFFICIENT_SETS, Iteration, check_matrices, normalize

SIMPLE_QUINTIC = Iteration(COEFFICIENT_SETS["simple_quintic"])


def aurora(
    matrices: Tensor,
    *,
    steps: int | None = None,
    dtype: torch.dtype | None = None,
    iterations: int = 2,
    beta: float = 0.5,
    polar: Callable[..., Tensor] = SIMPLE_QUINTIC,
) -> Tensor:
    """Orthogonalize matrices `(..., m, n)` to rows (columns if wide) of equal norm.

    Calls `polar` `iterations` times with `steps` (None for its default); each round corrects row norms by the power
    `beta`. Products and the result are in `dtype`, row norms in float32 or better. Zero matrices and zero rows stay
    exactly zero.

    Examples:
        >>> tall = torch.tensor([[1.0, 2.0], [0.0, 0.1], [3.0, -1.0], [0.2, 0.1]])
        >>> [round(value, 2) for value in aurora(tall, iterations=8).norm(dim=1).square().tolist()]
        [0.5, 0.5, 0.5, 0.5]
    """
    dtype = check_matrices(matrices, dtype)
    rows, columns = matrices.shape[-2:]
    if rows == columns or matrices.numel() == 0:
        return polar(matrices, steps=steps, dtype=dtype)
    if rows < columns:
        return aurora(matrices.mT, steps=steps, dtype=dtype, iterations=iterations, beta=beta, polar=polar).mT
    X = normalize(matrices)
    lengths = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    X = X / torch.where(lengths > 0, lengths, 1.0)  # zero rows stay zero
    U = polar(X, steps=steps, dtype=dtype)
    for _ in range(iterations - 1):
        excess = U.to(X.dtype).square().sum(-1, keepdim=True) * (rows / columns)
        X = X / torch.where(excess > 0, excess, 1.0) ** beta
        U = polar(X, steps=steps, dtype=dtype)
    return U
