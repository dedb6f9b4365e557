"""The polynomials that iterations apply to singular values, as published by their authors."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypeAlias

Coefficients: TypeAlias = tuple[float, float, float]
Schedule: TypeAlias = tuple[Coefficients, ...]

# Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Steep at zero, so five
# steps lift small singular values, at the price of a band around one instead of convergence to one.
NS5: Coefficients = (3.4445, -4.7750, 2.0315)

# Amsel, Persson, Musco and Gower, "The Polar Express" (2025, arXiv:2505.16932): the minimax-optimal quintic
# of each step for singular values in [1e-3, 1], as published, before its safety factor. The last entry
# is the limit of the sequence and repeats.
POLAR_EXPRESS: Schedule = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# The published safety factor: it divides the argument of each polynomial but the last, because a singular value that
# rounding pushes past the end of its interval would diverge.
POLAR_EXPRESS_SAFETY = 1.01

# @YouJiacheng, for five steps: `zeropower_via_newtonschulz5` of microsoft/dion, `quintic` of timm, the preset `dion` of
# optax.
YOU: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Polar Express computed for exactly five steps, with a safety factor of 1.02 and a cushion in the coefficients:
# modded-nanogpt, microsoft/dion (which divide by 1.02 times the norm), nanochat (by 1.01).
POLAR_EXPRESS_5: Schedule = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# Flat at one, so it converges; only doubles small values, so it needs many steps (modded-nanogpt's track 3, Aurora).
SIMPLE_QUINTIC: Coefficients = (2.0, -1.5, 0.5)


def rescaled(coefficients: Coefficients, scale: float) -> Coefficients:
    """The polynomial `p(s / scale)` for a polynomial `p(s)`."""
    a, b, c = coefficients
    return a / scale, b / scale**3, c / scale**5


class CoefficientSet(NamedTuple):
    """The polynomials of successive steps, for matrices divided by `divisor` times their Frobenius norm.

    `steps` is the authors' number of steps. `restarts` has the number of steps in each segment of the Gram form; one
    is the plain form. The last polynomial and the last of `restarts` repeat.

    Examples:
        >>> halving = CoefficientSet(((8.0, 16.0, 32.0), (2.0, -1.5, 0.5)), divisor=2.0, restarts=(1, 2))
        >>> halving.segments(4)
        [((4.0, 2.0, 1.0),), ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5)), ((2.0, -1.5, 0.5),)]
    """

    polynomials: Schedule
    steps: int = 5
    divisor: float = 1.0
    restarts: tuple[int, ...] = (1,)

    def schedule(self, steps: int) -> Schedule:
        """The polynomials of this many steps for matrices of norm one; the first includes `divisor`."""
        first, *rest = self.polynomials
        repeated = [self.polynomials[-1]] * (steps - len(self.polynomials))
        return (rescaled(first, self.divisor), *rest, *repeated)[:steps]

    @cache  # noqa: B019 - the sets are few, and immutable
    def segments(self, steps: int) -> list[Schedule]:
        """The same polynomials, cut where the Gram form restarts."""
        schedule = self.schedule(steps)
        segments: list[Schedule] = []
        while schedule:
            length = self.restarts[min(len(segments), len(self.restarts) - 1)]
            segments.append(schedule[:length])
            schedule = schedule[length:]
        return segments


# Values of `orthogonalizer=`, normalized as by the authors but without their epsilon, which makes the update depend on
# the size of a gradient of norm near 1e-7.
COEFFICIENT_SETS: dict[str, CoefficientSet] = {
    "newton_schulz": CoefficientSet((NS5,), restarts=(3,)),
    "newton_schulz_you": CoefficientSet(YOU, restarts=(2,)),
    "polar_express": CoefficientSet(
        (*(rescaled(each, POLAR_EXPRESS_SAFETY) for each in POLAR_EXPRESS[:-1]), POLAR_EXPRESS[-1]),
        divisor=POLAR_EXPRESS_SAFETY,
        restarts=(1, 2),
    ),
    "polar_express_5": CoefficientSet(POLAR_EXPRESS_5, divisor=1.02, restarts=(1, 2)),
    "polar_express_nanochat": CoefficientSet(POLAR_EXPRESS_5, divisor=1.01, restarts=(1, 2)),
    "simple_quintic": CoefficientSet((SIMPLE_QUINTIC,), steps=12, restarts=(4,)),
}
