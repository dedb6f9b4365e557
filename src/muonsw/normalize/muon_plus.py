"""Muon+: the Frobenius norm of a direction set to that of an exactly orthogonal matrix, sqrt(min(m, n)).

arXiv 2602.21545. It takes back what the iteration leaves of the singular values on average, so that every matrix moves
exactly as far as its shape scale says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.slots import Options, SlotMember, State, rescaled, wide_dtype


def muon_plus(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """Scale each direction (count, m, n) to the norm sqrt(min(m, n)); zero stays zero."""
    norm = torch.linalg.vector_norm(U, dim=(-2, -1), keepdim=True, dtype=wide_dtype(U.dtype))
    factor = min(U.shape[-2:]) ** 0.5 / torch.where(norm > 0, norm, 1.0)
    return rescaled(U, factor), {}


MUON_PLUS = SlotMember(muon_plus, {})
