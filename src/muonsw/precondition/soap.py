"""SOAP-Muon: momentum whitened in the eigenbasis of Shampoo's factors before it is orthogonalized.

The precondition of the record holder of modded-nanogpt's track 3 (2026-06-09, `train_gpt_clean_SOTA.py`). With U the
momentum (Nesterov's, if asked for), Q_l and Q_r the bases of the last step:

    P = Q_l^T U Q_r
    V <- beta2 V + (1 - beta2) P^2
    U <- Q_l (P / max(sqrt(V), eps)) Q_r^T
    L <- beta2 L + (1 - beta2) G G^T,  R <- beta2 R + (1 - beta2) G^T G,  then Q_l and Q_r follow, as in SOAP

The first step is Muon's, since there are no bases yet. That file also blends, floors and brakes updates by layer, which
is not done here.
"""

from __future__ import annotations

from torch import Tensor

from muonsw.slots import SQUARES, Options, SlotMember, Specs, State

KEY = "exp_avg_sq_rotated"


def soap(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:
    """Whiten momentum in the bases of the last step, then let the bases follow the gradient.

    Args:
        options: `beta2` of squares and factors; `eps`; `frequency`, the steps from one change of the bases to the
            next; `max_dim`, the longest side that is rotated; and the number of the step.
        X: momentum (count, m, n).
        state: squares, factors, bases and the gradient.
    """
    from muonsw.algorithms.soap import whitened_momentum  # which is made of what slots are

    dtype = state["basis_left"].dtype  # which `state_dtype` does not change, as it does that of squares and momentum
    X, G, squares = (tensor.to(dtype) for tensor in (X, state["grad"], state[KEY]))
    kept = {"exp_avg_sq": squares, **{key: state[key] for key in _state(options) if key != KEY}}
    refresh = (options["step"] - 1) % options["frequency"] == 0
    first = options["step"] == 1
    X, new = whitened_momentum(X, G, kept, options["beta2"], options["eps"], refresh=refresh, first=first)
    return X, {KEY: new.pop("exp_avg_sq"), **new}


def _state(options: Options) -> Specs:
    from muonsw.algorithms.soap import sides

    return {KEY: SQUARES, **sides(options["max_dim"])}


SOAP = SlotMember(
    soap,
    {"beta2": 0.9, "eps": 1e-8, "frequency": 1, "max_dim": 10000},
    _state,
    uses_gradient=True,
    counts_steps=True,
)
