"""Dion2: orthogonalize and apply only the largest rows of the momentum, and shrink only those.

`microsoft/dion` at 0a059a4, `dion/dion2.py`. Along the shorter side of a matrix (rows, or columns if it is tall) it
selects the slices of largest L1 norm:

    M <- M + G
    S = the k = ceil(fraction * size) largest slices of M
    W <- (1 - phi) W;   W[S] <- W[S] - lr * scale * polar(M[S])
    M[S] <- momentum * M[S]

The shape scale and weight decay are those of the whole matrix. Unlike the authors' default, which selects in each
shard, this selects in whole matrices on any number of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muonsw.algorithms.base import matrix_algorithm
from muonsw.machine import product_dtype
from muonsw.matrices import SHAPE_SCALES
from muonsw.orthogonalize import ORTHOGONALIZERS
from muonsw.slots import ELEMENTWISE
from muonsw.work import Group, State


def directions(group: Group, G: Tensor, state: State) -> tuple[Tensor, State]:
    """Orthogonalized slices in place, zero elsewhere, for gradients (count, m, n)."""
    if G.shape[-2] > G.shape[-1]:
        U, new = directions(group, G.mT, {"momentum_buffer": state["momentum_buffer"].mT})
        return U.mT, {"momentum_buffer": new["momentum_buffer"].mT}
    M = state["momentum_buffer"].to(G.dtype) + G
    count = max(1, math.ceil(group["fraction"] * M.shape[-2]))
    index = torch.linalg.vector_norm(M, ord=1, dim=-1).topk(count, sorted=False).indices
    index = index.unsqueeze(-1).expand(-1, -1, M.shape[-1])
    S = M.gather(-2, index)
    dtype = product_dtype(group["ns_dtype"], S.dtype, S.device)
    U = ORTHOGONALIZERS[group["orthogonalizer"]](S, steps=group["ns_steps"], dtype=dtype).to(S.dtype)
    return torch.zeros_like(M).scatter(-2, index, U), {
        "momentum_buffer": M.scatter(-2, index, group["momentum"] * S)  # shrink only the selected momentum
    }


DION2 = matrix_algorithm(
    defaults={
        "fraction": 0.25,
        "momentum": 0.95,
        "orthogonalizer": "polar_express_5",
        "ns_steps": None,
        "ns_dtype": "auto",
        "scale": "match_rms_adamw",
    },
    state=lambda _: {"momentum_buffer": ELEMENTWISE},
    directions=directions,
    scale=lambda group, m, n: SHAPE_SCALES[group["scale"]](m, n),
)
