"""Members of the `normalize` slot: what becomes of directions after they are orthogonalized."""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.slots.base import SQUARES, Options, SlotMember, Specs, State, StateSpec, wide_dtype

# NorMuon's averages: one for each output, or one for each place along the longer axis (rows of tall matrices, columns
# of wide ones).
AXES = ("rows", "longer")


def normuon(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:
    """NorMuon: slices of directions (count, m, n) divided by the root of their average square, the norm kept.

        V <- beta2 V + (1 - beta2) mean_j U_ij^2
        U <- U / (sqrt(V) + eps)
        U <- U c / (||U|| + eps)                                c the Frobenius norm before

    Li et al., "NorMuon: Making Muon more efficient and scalable" (2025), `zichongli5/NorMuon`. With `snap`, U is first
    scaled to the norm sqrt(min(m, n)), as nanochat does. Norms after the division follow from the mean squares before
    it, so the matrix is read twice and written once. Unlike the authors' code, statistics are in float32 and a
    convolution's rows are its output channels.
    """
    ((key, before),), eps = state.items(), options["eps"]  # (count, m, 1) or (count, 1, n)
    along = -2 if before.shape[-1] != 1 else -1
    wide = torch.promote_types(U.dtype, before.dtype)
    squares = torch.linalg.vector_norm(U, dim=along, keepdim=True, dtype=wide).square().to(before.dtype)
    norm = target = _norm(squares)
    if options["snap"]:
        target = torch.full_like(norm, min(U.shape[-2:]) ** 0.5)
    gain = target / torch.where(norm > 0, norm, 1.0)
    squares = squares * gain.square()
    average = torch.lerp(before, squares / U.shape[along], 1 - options["beta2"])
    divisor = average.sqrt() + eps
    factor = gain * target / (_norm(squares / divisor.square()) + eps) / divisor
    return _rescaled(U, factor), {key: average}


def _norm(squares: Tensor) -> Tensor:
    return squares.sum(dim=(-2, -1), keepdim=True).sqrt()


def _normuon_state(options: Options) -> Specs:
    if options["axis"] == "rows":
        return {"exp_avg_sq_row": StateSpec(lambda m, _: (m, 1))}
    return {"exp_avg_sq_slice": StateSpec(lambda m, n: (m, 1) if m >= n else (1, n))}


NORMUON = SlotMember(normuon, {"beta2": 0.95, "eps": 1e-10, "axis": "rows", "snap": False}, _normuon_state)


def adamuon(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:
    """AdaMuon: directions divided by the root of their average square, with the norm of an orthogonal matrix.

        V <- beta2 V + (1 - beta2) U^2
        U <- U / (sqrt(V) + eps)
        U <- U sqrt(min(m, n)) / (||U|| + eps)

    Si et al., "AdaMuon" (2025), `Chongjie-Si/AdaMuon`. The authors' rule has `precondition="sign"` and
    `scale="match_rms_adamw"` too, and the momentum's coefficient as beta2.
    """
    ((key, before),), eps = state.items(), options["eps"]
    wide = U.to(before.dtype)
    average = torch.lerp(before, wide.square(), 1 - options["beta2"])
    divided = wide / (average.sqrt() + eps)
    norm = torch.linalg.vector_norm(divided, dim=(-2, -1), keepdim=True)
    return divided * (min(U.shape[-2:]) ** 0.5 / (norm + eps)), {key: average}


ADAMUON = SlotMember(adamuon, {"beta2": 0.95, "eps": 1e-8}, lambda _: {"exp_avg_sq_direction": SQUARES})


def muon_plus(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """Muon+: the Frobenius norm of directions set to that of an orthogonal matrix, sqrt(min(m, n)); zero stays zero.

    arXiv 2602.21545. Every matrix then moves exactly as far as its shape scale says.
    """
    norm = torch.linalg.vector_norm(U, dim=(-2, -1), keepdim=True, dtype=wide_dtype(U.dtype))
    factor = min(U.shape[-2:]) ** 0.5 / torch.where(norm > 0, norm, 1.0)
    return _rescaled(U, factor), {}


MUON_PLUS = SlotMember(muon_plus, {})


def _rescaled(U: Tensor, factor: Tensor) -> Tensor:
    """Directions times factors of float32 or better, computed in that; stored as the directions are on accelerators."""
    if U.device.type == "cpu":  # CPUs are slow where operands differ in dtype, here and when weights move
        return U.to(factor.dtype) * factor
    return torch.mul(U, factor, out=torch.empty_like(U))
