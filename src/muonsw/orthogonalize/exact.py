"""The exact polar factor, for references and small experiments."""

import torch
from torch import Tensor

from muonsw.orthogonalize.iterations import check_matrices, normalize


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
