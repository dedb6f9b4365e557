"""The reference with the rule that its 130 lines leave out: piecewise decay."""

from dataclasses import dataclass

from muonsw import reference


@dataclass
class Decay(reference.Decay):
    """`muonsw.reference.Decay` with every rule that is registered."""

    points: tuple[tuple[float, float], ...] = ((0.0, 1.0),)  # of a piecewise decay

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
