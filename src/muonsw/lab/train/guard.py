"""Noticing that a run has gone wrong before it spoils anything that was saved."""

from __future__ import annotations

import math
from typing import Any

from muonsw.lab.errors import Diverged

__all__ = ["Diverged", "LossGuard"]

# Losses in a row that must be too high: one bad batch is not a divergence.
PATIENCE = 3


class LossGuard:
    """Watches the training loss.

    Args:
        excess: Nats above the lowest loss so far that count as diverging.

    Examples:
        >>> guard = LossGuard(excess=5.0)
        >>> guard.watch(1, 2.0)
        >>> guard.watch(2, math.nan)
        Traceback (most recent call last):
        ...
        muonsw.lab.errors.Diverged: the loss of update 2 is nan; ...
    """

    def __init__(self, excess: float) -> None:
        self.excess, self.lowest, self.strikes = excess, math.inf, 0

    def watch(self, step: int, loss: float) -> None:
        """Look at the loss of one update.

        Raises:
            Diverged: If it is not finite, or has been too high for some updates.
        """
        advice = "lower the learning rate or the weight decay, or lengthen the warmup"
        if not math.isfinite(loss):
            raise Diverged(f"the loss of update {step} is {loss}; {advice}", step)
        self.strikes = self.strikes + 1 if loss > self.lowest + self.excess else 0
        self.lowest = min(self.lowest, loss)
        if self.strikes >= PATIENCE:
            raise Diverged(f"the loss of update {step} is {loss:.3f}, after {self.lowest:.3f} at best; {advice}", step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"lowest": self.lowest if math.isfinite(self.lowest) else None, "strikes": self.strikes}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.lowest = math.inf if state["lowest"] is None else state["lowest"]
        self.strikes = state["strikes"]
