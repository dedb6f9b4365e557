"""NorMuon: rows of an orthogonalized direction divided by the root of their average square.

Li et al., "NorMuon: Making Muon more efficient and scalable" (2025), `zichongli5/NorMuon`. With U the direction of m
outputs and n inputs (the paper's O), c its Frobenius norm:

    V <- beta2 V + (1 - beta2) mean_j U_ij^2
    U <- U / (sqrt(V) + eps)
    U <- U c / (||U|| + eps)

With `snap`, U is first scaled to the norm sqrt(min(m, n)), as nanochat does (Muon+). Norms after the division follow
from the mean squares before it, so the matrix is read twice and written once. Unlike the authors' code, statistics are
in float32 and a convolution's rows are its output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.slots import Options, SlotMember, Specs, State, StateSpec, rescaled

ROWS, LONGER = "rows", "longer"


def normuon(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:
    """Divide slices of directions (count, m, n) by the root of their average square; the Frobenius norm stays.

    The option `axis` is "rows" (an average for each output), or "longer" (for each place along the longer axis: each
    row of a tall matrix, each column of a wide one). The state is (count, m, 1) or (count, 1, n).
    """
    eps, key = options["eps"], _key(options)
    along = -2 if state[key].shape[-1] != 1 else -1
    wide = torch.promote_types(U.dtype, state[key].dtype)
    squares = torch.linalg.vector_norm(U, dim=along, keepdim=True, dtype=wide).square().to(state[key].dtype)
    norm = target = _norm(squares)
    if options["snap"]:
        target = torch.full_like(norm, min(U.shape[-2:]) ** 0.5)
    gain = target / torch.where(norm > 0, norm, 1.0)
    squares = squares * gain.square()
    average = torch.lerp(state[key], squares / U.shape[along], 1 - options["beta2"])
    divisor = average.sqrt() + eps
    factor = gain * target / (_norm(squares / divisor.square()) + eps) / divisor
    return rescaled(U, factor), {key: average}


def _norm(squares: Tensor) -> Tensor:
    return squares.sum(dim=(-2, -1), keepdim=True).sqrt()


def _key(options: Options) -> str:
    return "exp_avg_sq_row" if options["axis"] == ROWS else "exp_avg_sq_slice"


def _state(options: Options) -> Specs:
    if options["axis"] == ROWS:
        return {_key(options): StateSpec(lambda m, _: (m, 1))}
    return {_key(options): StateSpec(lambda m, n: (m, 1) if m >= n else (1, n))}


NORMUON = SlotMember(normuon, {"beta2": 0.95, "eps": 1e-10, "axis": ROWS, "snap": False}, _state)
