"""Symmetric matrices in half the memory: one triangle of each, folded into a rectangle.

Of a matrix `[[A, B^T], [B, C]]` of size d, with A of size k = d // 2, the rectangle has d - k rows: the upper triangle
of A above the lower triangle of C, then B.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_shape(size: int) -> tuple[int, int]:
    """The shape of a packed matrix: d (d + 1) / 2 elements.

    Examples:
        >>> packed_shape(6), packed_shape(5), packed_shape(1)
        ((3, 7), (3, 5), (1, 1))
    """
    return size - size // 2, 2 * (size // 2) + 1


def pack(matrix: Tensor) -> Tensor:
    """Symmetric matrices (..., d, d) as rectangles."""
    size = matrix.shape[-1]
    k, rows = size // 2, size - size // 2
    above = pad(matrix[..., :k, :k].triu(), (1, 0, 0, rows - k))
    below = pad(matrix[..., k:, k:].tril(), (0, k + 1 - rows))
    return torch.cat([above + below, matrix[..., k:, :k]], -1)


def unpack(packed: Tensor) -> Tensor:
    """Rectangles as symmetric matrices again, exactly.

    Examples:
        >>> matrix = torch.arange(25.0).view(5, 5)
        >>> symmetric = matrix + matrix.mT
        >>> torch.equal(unpack(pack(symmetric)), symmetric)
        True
    """
    rows, k = packed.shape[-2], packed.shape[-1] // 2
    A, C, B = packed[..., :k, 1 : k + 1].triu(), packed[..., :rows].tril(), packed[..., k + 1 :]
    top = torch.cat([A + A.triu(1).mT, B.mT], -1)
    return torch.cat([top, torch.cat([B, C + C.tril(-1).mT], -1)], -2)
