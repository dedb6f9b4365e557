"""Named polynomial schedules of the matrix iterations, with their sources.

One step of every iteration replaces `X` by `a X + b (X X^T) X + c (X X^T)^2 X`, which replaces each
singular value `s` by `a s + b s^3 + c s^5`. A schedule is the sequence of `(a, b, c)`, one per step.
"""

from typing import TypeAlias

Coefficients: TypeAlias = tuple[float, float, float]
Schedule: TypeAlias = tuple[Coefficients, ...]

# Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Steep at zero, so five
# steps lift small singular values, at the price of a band around one instead of convergence to one.
NS5: Coefficients = (3.4445, -4.7750, 2.0315)

# Amsel, Persson, Musco and Gower, "The Polar Express" (2025, arXiv:2505.16932): the minimax-optimal quintic
# of each step for singular values in [1e-3, 1], as published, before its safety factor. The last entry
# is the limit of the sequence and repeats for ever.
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

# The published safety factor: each polynomial but the limit sees its argument divided by it, so that a
# singular value pushed past the end of its interval by rounding is not thrown away to infinity.
POLAR_EXPRESS_SAFETY = 1.01


def rescaled(coefficients: Coefficients, scale: float) -> Coefficients:
    """Give the polynomial `p(s / scale)` of a polynomial `p(s)`.

    Examples:
        >>> rescaled((8.0, 16.0, 32.0), 2.0)
        (4.0, 2.0, 1.0)
    """
    a, b, c = coefficients
    return a / scale, b / scale**3, c / scale**5


def newton_schulz_schedule(steps: int) -> Schedule:
    """Give the schedule of `newton_schulz`: the same polynomial at each step.

    Examples:
        >>> newton_schulz_schedule(2)
        ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))
    """
    return (NS5,) * steps


def polar_express_schedule(steps: int) -> Schedule:
    """Give the schedule of `polar_express` for input of Frobenius norm one, safety included.

    The publication divides the input by 1.01 times its norm as well; that division is folded into the
    first polynomial here.

    Examples:
        >>> len(polar_express_schedule(10)), polar_express_schedule(10)[-1]
        (10, (1.875, -1.25, 0.375))
    """
    *safe, limit = POLAR_EXPRESS
    first, *rest = (rescaled(polynomial, POLAR_EXPRESS_SAFETY) for polynomial in safe)
    schedule = (rescaled(first, POLAR_EXPRESS_SAFETY), *rest)
    return (*schedule, *(limit for _ in range(steps - len(schedule))))[:steps]
