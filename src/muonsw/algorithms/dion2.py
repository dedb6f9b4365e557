"""Dion2: only the largest rows of the momentum are orthogonalized and move, and only they are forgotten.

`microsoft/dion` at 0a059a4, `dion/dion2.py`. On the shorter side of a matrix (its rows, or its columns where it is
tall) the slices of largest L1 norm are selected:

    M <- M + G
    S = the k = ceil(fraction * size) largest slices of M
    W <- (1 - phi) W;   W[S] <- W[S] - lr * scale * polar(M[S])
    M[S] <- momentum * M[S]

The shape scale is that of the whole matrix, and all of it decays. Unlike the authors' default on many ranks, which
selects in each shard, the selection is that of whole matrices, whatever the number of ranks.
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
    """Orthogonalized slices at their places, zero elsewhere, for gradients (count, m, n)."""
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
        "momentum_buffer": M.scatter(-2, index, group["momentum"] * S)  # only what moved is forgotten
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
