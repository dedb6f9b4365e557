"""Members of the `precondition` slot: what becomes of momentum before it is orthogonalized.

`state["grad"]` is the gradient, for members that use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.machine import full_float32
from muonsw.orthogonalize import normalize
from muonsw.slots.base import SQUARES, Options, SlotMember, Specs, State


def sign(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """The sign of momentum, as AdaMuon orthogonalizes it (Si et al., 2025): every element counts alike."""
    return X.sign(), {}


SIGN = SlotMember(sign, {}, elementwise=True)


def muon2(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:
    """Muon^2: momentum, in any shape, divided by the root of the average squared gradient, as by Adam.

        V <- beta2 V + (1 - beta2) G^2
        M <- M / (sqrt(V) + eps)

    arXiv 2604.09967. No bias correction: a common factor of V is lost in the orthogonalization. The authors' code is
    not public; the defaults are those of modded-nanogpt's `train_gpt_simple_muonsq.py` (track 3, 2026-05-01).
    """
    squares = state["grad"].to(state["exp_avg_sq"].dtype).square()
    average = torch.lerp(state["exp_avg_sq"], squares, 1 - options["beta2"])
    return X / average.sqrt().add_(options["eps"]), {"exp_avg_sq": average}


MUON2 = SlotMember(
    muon2, {"beta2": 0.95, "eps": 1e-10}, lambda _: {"exp_avg_sq": SQUARES}, elementwise=True, uses_gradient=True
)


def equalize(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """MuonEq: momentum (count, m, n) as matrices of Frobenius norm one whose rows have equal norms.

    arXiv 2603.28254, in the form of nanochat (`nanochat/optim.py`): the polar factor is better conditioned. Unlike
    nanochat's, it does not depend on the size of the gradient: only rows of exactly zero are left alone.
    """
    X = normalize(X)
    norms = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    return X / torch.where(norms > 0, norms * X.shape[-2] ** 0.5, 1.0), {}


EQUALIZE = SlotMember(equalize, {})


@full_float32()
def soap(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:
    """SOAP-Muon: momentum whitened in the eigenbases of Shampoo's factors, which then follow the gradient.

        P = Q_l^T U Q_r                                         in the bases of the last step
        V <- beta2 V + (1 - beta2) P^2
        U <- Q_l (P / max(sqrt(V), eps)) Q_r^T
        L <- beta2 L + (1 - beta2) G G^T,  R <- beta2 R + (1 - beta2) G^T G,  then Q_l and Q_r as in SOAP

    The precondition of the record of modded-nanogpt's track 3 (2026-06-09, `train_gpt_clean_SOTA.py`), without its
    blending, floors and brakes by layer. The first step is Muon's, since there are no bases yet. The bases change every
    `frequency` steps; sides longer than `max_dim` are not rotated.
    """
    from muonsw.algorithms.factors import rotate, rotate_back  # algorithms import this package
    from muonsw.algorithms.soap import advance_bases, have_begun

    bases, step = (state["basis_left"], state["basis_right"]), options["step"]
    dtype = bases[0].dtype  # `state_dtype` changes that of squares and momentum only
    X, G, squares = (tensor.to(dtype) for tensor in (X, state["grad"], state[_ROTATED]))
    rotated = rotate(X, *bases)
    squares = squares.lerp(rotated.square(), 1 - options["beta2"])
    whitened = rotate_back(rotated / squares.sqrt().clamp(min=options["eps"]), *bases)
    kept = {"exp_avg_sq": squares, **{key: state[key] for key in _soap_state(options) if key != _ROTATED}}
    refresh = (step - 1) % options["frequency"] == 0
    new = advance_bases(G, kept, options["beta2"], refresh=refresh, first=step == 1)
    X = torch.where(have_begun(max(bases, key=Tensor.numel)), whitened, X)
    return X, {_ROTATED: new.pop("exp_avg_sq"), **new}


_ROTATED = "exp_avg_sq_rotated"


def _soap_state(options: Options) -> Specs:
    from muonsw.algorithms.soap import sides

    return {_ROTATED: SQUARES, **sides(options["max_dim"])}


SOAP = SlotMember(
    soap,
    {"beta2": 0.9, "eps": 1e-8, "frequency": 1, "max_dim": 10000},
    _soap_state,
    uses_gradient=True,
    counts_steps=True,
)
