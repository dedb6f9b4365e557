"""MuonEq: rows of the momentum brought to one norm before it is orthogonalized.

arXiv 2603.28254, in the form of nanochat (`nanochat/optim.py`): each row is scaled to the root mean square of all row
norms. The polar factor of the result is better conditioned. Unlike nanochat's, a small gradient is no different from a
large one: rows are compared with the norm of their matrix, not with 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.orthogonalize import normalize
from muonsw.slots import Options, SlotMember, State


def equalize(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """Momentum (count, m, n) as matrices of Frobenius norm one whose rows have equal norms; rows of zeros stay."""
    X = normalize(X)
    norms = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    return X / torch.where(norms > 0, norms * X.shape[-2] ** 0.5, 1.0), {}


EQUALIZE = SlotMember(equalize, {})
