"""The polar factor itself, for references and small experiments."""

import torch
from torch import Tensor

from muonsw.orthogonalize.iterations import check_matrices, normalize

# Squaring the condition number costs the Gram route about `eps * condition^2` of accuracy. At a condition
# number of 1e3, where eigenvalues spread over 1e6, that is 2e-10 in float64 (measured: 1.5e-10 in the
# spectral norm against the SVD, 2e-8 at 1e4); matrices beyond it take the SVD.
_SMALLEST_EIGENVALUE_RATIO = 1e-6


def exact(matrices: Tensor, *, steps: int | None = None, dtype: torch.dtype | None = None) -> Tensor:  # noqa: ARG001
    """Give the polar factor `U V^T` of matrices `U S V^T` of shape `(..., m, n)`, computed in float64.

    Singular values below the rounding error of float64 (`max(m, n) * eps` of the largest, as in
    `torch.linalg.matrix_rank`) count as zero, so the factor of a zero matrix is zero. Elements are not second-guessed:
    noise in a float32 matrix that should be singular gets singular value one like everything else. A matrix with an
    infinite or undefined element is undefined throughout.

    Well-conditioned matrices go through an eigendecomposition of their Gram matrix, which is twice as fast as the SVD
    and agrees with it to 1e-9; choosing between the two waits for the device.

    Examples:
        >>> exact(torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]))
        tensor([[0., 1., 0.],
                [0., 0., 0.]])
    """
    dtype = check_matrices(matrices, dtype)
    if matrices.numel() == 0:
        return torch.empty_like(matrices, dtype=dtype)
    rows, columns = matrices.shape[-2:]
    X = normalize(matrices.to(torch.float64)).reshape(-1, rows, columns)
    result = _polar(X.mT).mT if rows > columns else _polar(X)
    return result.reshape(matrices.shape).to(dtype)


def _polar(X: Tensor) -> Tensor:
    """Give the polar factors of wide matrices `(batch, m, n)` by the faster safe route for each."""
    finite = X.sum((-2, -1)).isfinite()
    if not bool(finite.all()):  # the decompositions raise on such matrices
        partial = torch.full_like(X, torch.nan)
        partial[finite] = _polar(X[finite])
        return partial
    eigenvalues, vectors = torch.linalg.eigh(X @ X.mT)
    result: Tensor = (vectors * eigenvalues.rsqrt().unsqueeze(-2)) @ vectors.mT @ X
    ill_conditioned = eigenvalues[:, 0] <= _SMALLEST_EIGENVALUE_RATIO * eigenvalues[:, -1]
    if bool(ill_conditioned.any()):
        result[ill_conditioned] = polar_by_svd(X[ill_conditioned])
    return result


def polar_by_svd(X: Tensor) -> Tensor:
    """Give the polar factors of `(..., m, n)` from the part of the SVD above the rounding error."""
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    threshold = max(X.shape[-2:]) * torch.finfo(X.dtype).eps * S.amax(-1, keepdim=True)
    kept = (threshold < S).to(X.dtype)
    factor: Tensor = (U * kept.unsqueeze(-2)) @ Vh
    return factor
