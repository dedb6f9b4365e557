"""AdaMuon's second moment: elements of an orthogonalized direction divided by the root of their average square.

Si et al., "AdaMuon" (2025), `Chongjie-Si/AdaMuon`. With U the direction:

    V <- beta2 V + (1 - beta2) U^2
    U <- U / (sqrt(V) + eps)
    U <- U sqrt(min(m, n)) / (||U|| + eps)

Together with `precondition="sign"` and `scale="match_rms_adamw"` this is the authors' rule, in which the direction has
elements of RMS 0.2. There beta2 is the momentum's coefficient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.slots import SQUARES, Options, SlotMember, State

KEY = "exp_avg_sq_direction"


def adamuon(options: Options, U: Tensor, state: State) -> tuple[Tensor, State]:
    """Divide directions (count, m, n) by the root of the average square; their norm is that of an orthogonal matrix."""
    eps = options["eps"]
    wide = U.to(state[KEY].dtype)
    average = torch.lerp(state[KEY], wide.square(), 1 - options["beta2"])
    divided = wide / (average.sqrt() + eps)
    norm = torch.linalg.vector_norm(divided, dim=(-2, -1), keepdim=True)
    return divided * (min(U.shape[-2:]) ** 0.5 / (norm + eps)), {KEY: average}


ADAMUON = SlotMember(adamuon, {"beta2": 0.95, "eps": 1e-8}, lambda _: {KEY: SQUARES})
