"""Muon^2: momentum divided by the root of the average squared gradient before it is orthogonalized, as by Adam.

arXiv 2604.09967. With M the momentum (Nesterov's, if asked for), G the gradient:

    V <- beta2 V + (1 - beta2) G^2
    M <- M / (sqrt(V) + eps)

No bias correction: a common factor of V is lost in the orthogonalization. The authors' code is not public; the numbers
are those of modded-nanogpt's `train_gpt_simple_muonsq.py` (track 3, 2026-05-01).
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.slots import SQUARES, Options, SlotMember, State

KEY = "exp_avg_sq"


def muon2(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:
    """Divide momentum, in any shape, by the root of the average squared gradient."""
    squares = state["grad"].to(state[KEY].dtype).square()
    average = torch.lerp(state[KEY], squares, 1 - options["beta2"])
    return X / average.sqrt().add_(options["eps"]), {KEY: average}


MUON2 = SlotMember(muon2, {"beta2": 0.95, "eps": 1e-10}, lambda _: {KEY: SQUARES}, elementwise=True, uses_gradient=True)
