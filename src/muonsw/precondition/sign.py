"""The sign of momentum, as AdaMuon orthogonalizes it (Si et al., 2025): every element counts alike."""

from __future__ import annotations

from torch import Tensor

from muonsw.slots import Options, SlotMember, State


def sign(options: Options, X: Tensor, state: State) -> tuple[Tensor, State]:  # noqa: ARG001
    """-1, 0 or 1 for each element of the momentum."""
    return X.sign(), {}


SIGN = SlotMember(sign, {}, elementwise=True)
