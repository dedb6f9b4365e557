"""Aurora in float64, one matrix and one row at a time."""

import torch

from tests.family.references.coefficients import orthogonalize as polar_by_polynomials


def polar(M):
    return polar_by_polynomials("simple_quintic", M)


def aurora(M, K=2, beta=0.5, polar=polar):
    m, n = M.shape
    if m == n:
        return polar(M)
    if m < n:
        return aurora(M.T, K, beta, polar).T
    D = [1 / float(M[i].norm()) if M[i].any() else 1.0 for i in range(m)]
    for k in range(K):
        U = polar(torch.stack([D[i] * M[i] for i in range(m)]))
        if k < K - 1:
            squares = [float((U[i] ** 2).sum()) for i in range(m)]
            D = [D[i] * ((n / m) / squares[i]) ** beta if squares[i] else D[i] for i in range(m)]
    return U
