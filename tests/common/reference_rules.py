"""The reference with the rules that its 130 lines leave out: piecewise decay, and norm rules beside the weight."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw import reference


@dataclass
class Decay(reference.Decay):
    """`muonsw.reference.Decay` with every rule that is registered."""

    points: tuple[tuple[float, float], ...] = ((0.0, 1.0),)  # of a piecewise decay
    tau: float = 0.35  # the least ratio of an update to its weight, for norm="floor" and "row_floor"
    brake: tuple[float, float] = (0.5, 1.0)  # of what a norm grows and shrinks, for norm="brake"

    def phi(self, eta: float) -> float:
        """The fraction of the weight that this step takes."""
        if self.rule == "piecewise":
            return self.lam * eta * self.multiple((self.t - 1) / self.T)
        return super().phi(eta)

    def multiple(self, x: float) -> float:
        """What lambda is multiplied by at a fraction of the run: on the line between the points around it."""
        for (x0, y0), (x1, y1) in zip(self.points, self.points[1:], strict=False):
            if x0 < x <= x1:
                return y0 * (x1 - x) / (x1 - x0) + y1 * (x - x0) / (x1 - x0)
        return self.points[0][1] if x <= self.points[0][0] else self.points[-1][1]

    def move(self, W: Tensor, G: Tensor, U: Tensor, eta: float, eta_hat: float, cautious: bool) -> Tensor:
        """The next weight."""
        moved = super().move(W, G, U, eta, eta_hat, cautious)
        if self.norm in ("relative", "floor", "row_floor", "brake"):
            return self.move_decayed((1 - self.phi(eta)) * W, U, eta, eta_hat)
        return moved

    def move_decayed(self, D: Tensor, U: Tensor, eta: float, eta_hat: float) -> Tensor:
        """The next weight from the decayed one, by the rules that measure an update beside it."""
        if self.norm == "relative":
            return D - eta * math.sqrt((D**2).sum() / (U**2).sum()) * U
        if self.norm == "brake":
            V = D - eta_hat * U
            d, v = math.sqrt((D**2).sum()), math.sqrt((V**2).sum())
            return V * (d + self.brake[0 if v > d else 1] * (v - d)) / v
        rows = zip(D, U, strict=True) if self.norm == "row_floor" else [(D, U)]
        least = [self.tau * math.sqrt((d**2).sum() / (u**2).sum()) for d, u in rows]
        factors = torch.tensor(least, dtype=D.dtype, device=D.device).mul(eta).clamp(min=eta_hat)
        return D - factors.view(-1, *[1] * (D.dim() - 1)) * U
