"""Statistics of both sides of matrices: Gram matrices, their eigenbases and inverse roots.

Used by SOAP, Shampoo and their relatives. Tensors are batches of equal matrices, (count, m, n) for gradients and
(count, d, d) for factors, in float32 or float64.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from muonsw.text import users_line


def rotate(X: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`left^T X right`; a side longer than its basis is not rotated."""
    X = left.mT @ X if left.shape[-1] == X.shape[-2] else X
    return X @ right if right.shape[-1] == X.shape[-1] else X


def rotate_back(X: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`left X right^T`, the inverse of `rotate`."""
    return rotate(X, left.mT, right.mT)


def eigenbasis(A: Tensor, otherwise: Tensor) -> Tensor:
    """Eigenvectors of symmetric matrices, largest eigenvalue first; `otherwise` if the decomposition fails."""
    return finite_or(eigh(A)[1].flip(-1), otherwise)


def power_iteration(A: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Improve a basis towards the eigenvectors of A; also return the column order, by descending `diag(Q^T A Q)`.

    A basis of zeros is uninitialized, and replaced by the identity.
    """
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    basis = torch.where(basis.any(-1, keepdim=True).any(-2, keepdim=True), basis, identity)
    image = A @ basis
    order = (basis * image).sum(-2).argsort(dim=-1, descending=True, stable=True)
    image, basis = (X.gather(-1, order.unsqueeze(-2).expand_as(X)) for X in (image, basis))
    return finite_or(orthonormal(image, basis), basis), order


def orthonormal(X: Tensor, basis: Tensor) -> Tensor:
    """Q of the QR decomposition of X, up to the signs of its columns; X is A times `basis`."""
    return cholesky_qr(X, basis) if X.is_cuda and X.dtype == torch.float32 else torch.linalg.qr(X).Q


# Shift of the diagonal of a Gram matrix of unit columns, per column: the rounding error of its sums in float64.
_SHIFT = 1e-14

# Tolerance for orthonormal float32 columns: a few units in the last place.
_NOT_ORTHONORMAL = 1e-6


def cholesky_qr(X: Tensor, basis: Tensor) -> Tensor:
    """`orthonormal` by Cholesky decompositions of Gram matrices, which GPUs do in batches, unlike QR.

    Q is `X R^-1`, with R the Cholesky factor of `X^T X`, so float64 must resolve the square of X's condition number. A
    first pass with a shifted diagonal makes this safe, and a second pass without a shift corrects Q (shifted Cholesky
    QR, Fukaya et al. 2020). So Q has float32's precision at any condition number, unlike QR in float32. `basis`
    replaces columns of zeros or NaN; other singular matrices go to QR. The host waits for that check.
    """
    Q = X.double()
    lengths = torch.linalg.vector_norm(Q, dim=-2, keepdim=True)
    Q = torch.where(lengths > 0, Q / lengths, basis.double())
    for shift in (_SHIFT * Q.shape[-1], 0.0):
        gram = Q.mT @ Q
        gram.diagonal(dim1=-2, dim2=-1).add_(shift)
        R = torch.linalg.cholesky_ex(gram, upper=True).L
        Q = torch.linalg.solve_triangular(R, Q, upper=True, left=False)
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    singular = ~((Q.mT @ Q - identity).abs().amax((-2, -1)) < _NOT_ORTHONORMAL)  # NaN too
    Q = Q.to(X.dtype)
    if singular.any():
        Q[singular] = torch.linalg.qr(X[singular]).Q
    return Q


def inverse_root(A: Tensor, power: float, eps: float, otherwise: Tensor) -> Tensor:
    """`(A + eps I)^-power` of symmetric matrices; `otherwise` if the decomposition fails.

    If rounding leaves an eigenvalue below eps, all are shifted up until the smallest is eps.
    """
    values, Q = eigh(A + eps * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    values = values + (eps - values.amin(-1, keepdim=True)).clamp(min=0)
    return finite_or((Q * values.pow(-power).unsqueeze(-2)) @ Q.mT, otherwise)


def finite_or(X: Tensor, otherwise: Tensor) -> Tensor:
    """X, with each matrix that has a non-finite element replaced from `otherwise`."""
    return torch.where(X.isfinite().all(-1, keepdim=True).all(-2, keepdim=True), X, otherwise)


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a batch; the host waits for them, as in torch's function.

    On failure, retries the matrices one by one and then in float64; NaN if that fails too.
    """
    try:
        values, vectors = torch.linalg.eigh(A)
        if values.isfinite().all():
            return values, vectors
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # includes torch's LinAlgError and errors of cuSOLVER
        pass
    if len(A) > 1:
        pairs = [eigh(matrix) for matrix in torch.split(A, 1)]
        return torch.cat([values for values, _ in pairs]), torch.cat([vectors for _, vectors in pairs])
    if A.dtype != torch.float64:
        values, vectors = eigh(A.double())
        return values.to(A.dtype), vectors.to(A.dtype)
    warnings.warn(
        f"the eigendecomposition of a {A.shape[-1]} x {A.shape[-1]} factor failed, even in float64; keeping the last "
        f"good basis or root. Look for exploding gradients",
        stacklevel=users_line(),
    )
    return torch.full_like(A[..., 0], torch.nan), torch.full_like(A, torch.nan)


# Symmetric matrices in less memory.
#
# `pack` stores two in one tensor (count, d, d + 1): the first above the diagonal, the second below. `fold` stores one,
# [[A, B^T], [B, C]] with A of size k = d // 2, in a rectangle of d (d + 1) / 2 elements and d - k rows: the upper
# triangle of A above the lower triangle of C, then B.


def pack(first: Tensor, second: Tensor) -> Tensor:
    return pad(first.triu(), (1, 0)) + pad(second.tril(), (0, 1))


def unpack_first(packed: Tensor) -> Tensor:
    above = packed[..., 1:].triu()
    return above + above.triu(1).mT


def unpack_second(packed: Tensor) -> Tensor:
    below = packed[..., :-1].tril()
    return below + below.tril(-1).mT


def average_first(packed: Tensor, new: Tensor, beta: float, gain: float) -> Tensor:
    """Packed matrices, with the first replaced by `beta first + gain new`."""
    factors = torch.full_like(packed[0], beta).triu(1) + torch.ones_like(packed[0]).tril()
    return torch.addcmul(gain * pad(new.triu(), (1, 0)), packed, factors)


def folded_shape(size: int) -> tuple[int, int]:
    """The shape of a folded matrix.

    Examples:
        >>> folded_shape(6), folded_shape(5), folded_shape(1)
        ((3, 7), (3, 5), (1, 1))
    """
    return size - size // 2, 2 * (size // 2) + 1


def fold(matrix: Tensor) -> Tensor:
    """Fold symmetric matrices (..., d, d) into rectangles."""
    size = matrix.shape[-1]
    k, rows = size // 2, size - size // 2
    above = pad(matrix[..., :k, :k].triu(), (1, 0, 0, rows - k))
    below = pad(matrix[..., k:, k:].tril(), (0, k + 1 - rows))
    return torch.cat([above + below, matrix[..., k:, :k]], -1)


def unfold(folded: Tensor) -> Tensor:
    """Invert `fold`, exactly."""
    rows, k = folded.shape[-2], folded.shape[-1] // 2
    A, C, B = folded[..., :k, 1 : k + 1].triu(), folded[..., :rows].tril(), folded[..., k + 1 :]
    top = torch.cat([A + A.triu(1).mT, B.mT], -1)
    return torch.cat([top, torch.cat([B, C + C.tril(-1).mT], -1)], -2)
