"""Newton-Schulz and its relatives: polynomials that push the singular values of matrices towards one.

**The polynomial.** One step replaces `X` by `a X + b (X X^T) X + c (X X^T)^2 X`, and with it each singular value
`s` by `a s + b s^3 + c s^5`. A schedule is the sequence of `(a, b, c)`, one for each step: Muon repeats one
polynomial, Polar Express uses another at each step.

**Segments.** With `R = X X^T`, one step is `X <- Z X`, `Z = a I + b R + c R^2`, and the next step's `R` is `Z R Z`.
So several steps need `R` and the product `Q` of their `Z` alone, which are small where `X` is elongated; `X` is
touched at the start and at the end of a segment. The plain iteration has segments of one step, the Gram iteration
longer ones.

**Rounding limits a segment.** An eigenvalue of `R` that should be zero is off by the rounding error, possibly
negative, and each step multiplies it by about twelve. A new segment computes `R` from `X` again, which removes the
error. Largest distance (spectral norm) to the exact polynomial and largest singular value after five steps, over
spectra with condition numbers up to 1e6, each product rounded once:

    iteration                   24 x 96            256 x 768
    plain, bfloat16             0.50    1.20       0.20    1.20
    plain, float16              0.06    1.20       0.03    1.20
    segments 2 2 1, float16     0.06    1.20       0.03    1.20
    segments 3 2, float16       0.09    1.20       0.04    1.20
    segments 4 1, float16       12      13         0.4     1.20

Hence segments of at most three steps, and never in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from muonsw.orthogonalize.normalize import check_matrices, iterate_normalized
from muonsw.orthogonalize.products import kernel_pays, multiply, multiply_add, polynomial, symmetric

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

LONGEST_SEGMENT = 3
# Below this many rows the errors of a product's entries no longer average out, and nothing is to be gained.
FEWEST_ROWS = 16


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


def rescaled(coefficients: Coefficients, scale: float) -> Coefficients:
    """Give the polynomial `p(s / scale)` of a polynomial `p(s)`.

    Examples:
        >>> rescaled((8.0, 16.0, 32.0), 2.0)
        (4.0, 2.0, 1.0)
    """
    a, b, c = coefficients
    return a / scale, b / scale**3, c / scale**5


_Sigma = TypeVar("_Sigma", float, Tensor)


class SingularValueMap(Protocol):
    """A function of singular values, elementwise on a tensor or on one float."""

    def __call__(self, sigma: _Sigma, /) -> _Sigma:
        """Give the new singular values."""


def singular_value_map(schedule: Schedule) -> SingularValueMap:
    """Give the scalar function that a schedule applies to every singular value.

    The singular values are those of the normalised matrix, so relative to its Frobenius norm.

    Examples:
        >>> round(singular_value_map(newton_schulz_schedule(5))(1.0), 4)
        0.6964
    """

    def apply(sigma: _Sigma, /) -> _Sigma:
        for a, b, c in schedule:
            square = sigma * sigma
            sigma = sigma * (a + square * (b + square * c))
        return sigma

    return apply


def iterate(X: Tensor, schedule: Schedule, longest: int = 1) -> Tensor:
    """Apply a schedule to the singular values of wide matrices, `(m, n)` or `(batch, m, n)`, in segments.

    Examples:
        >>> iterate(torch.tensor([[0.5, 0.0]]), ((1.0, 2.0, 4.0),)).tolist()
        [[0.875, 0.0]]
    """
    for start in range(0, len(schedule), longest):
        X = _segment(X, schedule[start : start + longest])
    return X


def _segment(X: Tensor, schedule: Schedule) -> Tensor:
    """Apply the polynomials of one segment; all matrices but `X` are symmetric and commute."""
    R = symmetric(X, X)
    if len(schedule) == 1 and not kernel_pays(R):  # two calls instead of three
        a, b, c = schedule[0]
        return multiply_add(X, multiply_add(R, R, R, beta=b, alpha=c), X, beta=a)
    Q = Z = polynomial(R, schedule[0])
    for coefficients in schedule[1:]:
        R = symmetric(symmetric(Z, R), Z)
        Z = polynomial(R, coefficients)
        Q = symmetric(Q, Z)
    del R, Z
    return multiply(Q, X)


class Iteration(NamedTuple):
    """An orthogonalizer that works on normalised matrices.

    `run` takes wide matrices of Frobenius norm one and the number of steps; `inner` says in which dtype, where the
    caller asks for one.
    """

    run: Callable[[Tensor, int], Tensor]
    inner: Callable[[torch.dtype, torch.device], torch.dtype]


def _as_asked(dtype: torch.dtype, device: torch.device) -> torch.dtype:  # noqa: ARG001
    return dtype


def _no_bfloat16(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The same products with eight times less rounding: float16 on GPUs, float32 where that is no faster."""
    if dtype != torch.bfloat16:
        return dtype
    return torch.float16 if device.type == "cuda" else torch.float32


def _plain(X: Tensor, steps: int, schedule: Callable[[int], Schedule]) -> Tensor:
    return iterate(X, schedule(steps))


def _gram(X: Tensor, steps: int) -> Tensor:
    pays = gram_pays(X.shape[-2], X.shape[-1], steps)
    return iterate(X, newton_schulz_schedule(steps), LONGEST_SEGMENT if pays else 1)


# Multiply-adds that the Gram iteration must save on an accelerator, because it takes more launches. Measured on one
# H200: 192 matrices of 256 x 768 save 3e10 and gain nothing, the eightfold of 512 x 1408 gains.
WORTH_MORE_LAUNCHES = 5e10


def _fastest(X: Tensor, steps: int) -> Tensor:
    short, long = X.shape[-2:]
    saved = cost(short, long, steps) - cost(short, long, steps, LONGEST_SEGMENT)
    launches_matter = X.device.type != "cpu" and X.numel() // (short * long) * saved < WORTH_MORE_LAUNCHES
    if X.dtype == torch.bfloat16 or launches_matter:
        return _plain(X, steps, newton_schulz_schedule)
    return _gram(X, steps)


def _fastest_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """On CPUs with bfloat16 units float32 would be slower; everything else is free to choose."""
    return dtype if device.type == "cpu" else _no_bfloat16(dtype, device)


NEWTON_SCHULZ = Iteration(partial(_plain, schedule=newton_schulz_schedule), _as_asked)
POLAR = Iteration(partial(_plain, schedule=polar_express_schedule), _as_asked)
GRAM = Iteration(_gram, _no_bfloat16)
AUTO = Iteration(_fastest, _fastest_dtype)


def cost(short: int, long: int, steps: int, longest: int = 1) -> int:
    """Count the multiply-adds of an iteration: two long products a segment, the rest short.

    Examples:
        >>> cost(1, 4, steps=5), cost(1, 4, steps=5, longest=3)
        (45, 30)
    """
    segments = -(-steps // longest)
    return segments * 2 * short**2 * long + (steps + 3 * (steps - segments)) * short**3


def gram_pays(short: int, long: int, steps: int) -> bool:
    """Whether segments save work: for matrices more than one and a half times longer than wide.

    Examples:
        >>> gram_pays(64, 64, 5), gram_pays(64, 128, 5)
        (False, True)
    """
    return short >= FEWEST_ROWS and cost(short, long, steps, LONGEST_SEGMENT) < cost(short, long, steps)


def newton_schulz(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Push the singular values of matrices towards one with Muon's polynomial.

    Five steps map singular values from 1.5e-3 up (relative to the Frobenius norm) into [0.68, 1.2025] and
    smaller ones to about 485 times themselves. The iteration does not converge to one: more steps keep the
    same band and reach smaller singular values.

    Args:
        matrices: `(..., m, n)`, left unmodified; each matrix is treated on its own.
        steps: How many times the polynomial is applied.
        dtype: The dtype of the iteration and of the result; the input's unless given. The matrices are
            normalised in float32 or better either way.

    Returns:
        Matrices of the same shape. Zero matrices stay exactly zero.

    Raises:
        ValueError: If the input is not a real floating-point tensor of at least two axes, or `steps < 1`.

    Examples:
        >>> result = newton_schulz(torch.diag(torch.tensor([1e-20, 2e-20, 3e-20])))
        >>> [round(value, 2) for value in result.diagonal().tolist()]
        [0.7, 0.68, 1.12]
    """
    return _orthogonalize(NEWTON_SCHULZ, matrices, steps, dtype)


def polar_express(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Push the singular values of matrices to one, as fast as quintic polynomials can.

    With the published safety factor, singular values from 1.5e-3 up (relative to the Frobenius norm) end in
    [0.870, 1.124] after 5 steps, [0.997, 1.002] after 6 and at one (to 1e-14) after 8; those near zero grow
    967, 1810 and 6300 times. Without the factor the interval is hardly narrower ([0.876, 1.124] after 5), but
    a singular value of 1.00001 already diverges; with it the input may be 2% too large and the later steps
    1% off, more than bfloat16 rounding adds. From the eighth step on the polynomial stays the same.

    Args, result and errors are those of `newton_schulz`.

    Examples:
        >>> result = polar_express(torch.diag(torch.tensor([1e-20, 2e-20, 3e-20])), steps=8)
        >>> [round(value, 4) for value in result.diagonal().tolist()]
        [1.0, 1.0, 1.0]
    """
    return _orthogonalize(POLAR, matrices, steps, dtype)


def gram_newton_schulz(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Do what `newton_schulz` does, in fewer operations for matrices at least 1.5 times longer than wide.

    In exact arithmetic the results are equal. Matrices closer to square, where nothing is gained, take the plain
    iteration. Nothing is computed in bfloat16: a bfloat16 result is computed in float16 on CUDA and in float32
    elsewhere.

    Args, result and errors are those of `newton_schulz`.

    Examples:
        >>> wide = torch.eye(16, 64)
        >>> torch.allclose(gram_newton_schulz(wide), newton_schulz(wide))
        True
    """
    return _orthogonalize(GRAM, matrices, steps, dtype)


def auto(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Do what `newton_schulz` does, the way that was measured to be fastest for the shape and the device.

    Long matrices take the Gram iteration (1.2 to 1.5 times faster on CPUs in float32), others the plain one. On
    GPUs a bfloat16 result is computed in float16, which costs the same and rounds eight times less; CPUs that
    multiply bfloat16 take the plain iteration in it.

    Args, result and errors are those of `newton_schulz`.

    Examples:
        >>> torch.allclose(auto(torch.eye(16, 64)), newton_schulz(torch.eye(16, 64)))
        True
    """
    return _orthogonalize(AUTO, matrices, steps, dtype)


def _orthogonalize(iteration: Iteration, matrices: Tensor, steps: int, dtype: torch.dtype | None) -> Tensor:
    dtype = check_matrices(matrices, dtype, steps=steps)
    inner = iteration.inner(dtype, matrices.device)
    return iterate_normalized(lambda X: iteration.run(X, steps), matrices, inner).to(dtype)
