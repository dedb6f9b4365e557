"""Newton-Schulz and its relatives: polynomials that push the singular values of matrices towards one.

**The polynomial.** One step replaces `X` by `a X + b (X X^T) X + c (X X^T)^2 X`, and with it each singular value
`s` by `a s + b s^3 + c s^5`. A schedule is the sequence of `(a, b, c)`, one for each step: Muon repeats one
polynomial, Polar Express uses another at each step.

**The plain form** multiplies `X` by `Z = a I + b R + c R^2`, `R = X X^T`, at every step.

**The Gram form** saves long products. The next step's `R` is `Z R Z`, so several steps need only `R` and the product
`Q` of their `Z`, which are small if `X` is elongated; `X` is used only at the start and the end of such a segment.

**Rounding limits a segment.** An eigenvalue of `R` that should be zero is off by the rounding error, possibly
negative, and each step multiplies it by `a^2`. A restart computes `R` from `X` again, which removes the error. The
largest distance (spectral norm) to the polynomial in float64, over spectra with condition numbers up to 1e6, each
product rounded once, determines the number of steps in a segment:

                                              24 x 96                       256 x 768
    set, steps of segments            float16         float32         float16         float32
                                   plain   Gram    plain   Gram    plain   Gram    plain   Gram
    newton_schulz          3 2     0.05    0.06    2e-5    2e-5    0.02    0.04    1e-5    2e-5
    newton_schulz_you      2 2 1   0.05    0.05    3e-5    2e-5    0.02    0.02    1e-5    3e-5
    polar_express          1 2 2   0.10    0.10    5e-5    5e-5    0.04    0.04    2e-5    5e-5
    polar_express_5        1 2 2   0.10    0.09    5e-5    5e-5    0.04    0.04    2e-5    6e-5
    simple_quintic         4 4 4   0.33    0.36    1e-4    1e-4    0.21    0.18    7e-5    2e-4

Longer segments are worse in float16: `newton_schulz` in segments of 4 and 1 steps is off by 12, `newton_schulz_you` of
3 and 2 by 0.35, `polar_express` of 2 and 3 by 0.16 and of 3 and 2 by 1.8 (its first step multiplies errors by 66). In
bfloat16 even the plain form is off by 0.4 to 1.1, so the Gram form never uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from muonsw import kernels

# The polynomials that iterations apply to singular values, as published by their authors.

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

# The slowest polynomial in use, 1.5 s - 0.5 s^3, multiplies small values by 1.5, so it lifts the smallest float64 to
# one in 1074 / log2(1.5) = 1837 steps: no matrix needs more.
MOST_STEPS = 2000

# With fewer rows the errors of a product's elements do not average out, and the Gram form is no faster.
FEWEST_ROWS = 16

# Multiply-adds that the Gram form must save on an accelerator, because it takes more launches. On one H200: 192
# matrices of 256 x 768 save 3e10 and gain nothing; 48 of 512 x 1408, a batch of a replayed step, save 4.8e10, and
# their products take 11.2 us a matrix instead of the plain form's 12.7.
WORTH_MORE_LAUNCHES = 4e10

_CPU_PIECE_BYTES = 2 * 2**20


def gram_saves(short: int, long: int) -> int:
    """Multiply-adds saved by each step that joins a segment: two fewer long products, three more short ones."""
    return short**2 * (2 * long - 3 * short) if short >= FEWEST_ROWS else 0


@dataclass(frozen=True)
class Iteration:
    """An orthogonalizer: a coefficient set and the form of its iteration.

    `form` is "plain", "gram" (plain for matrices less than 1.5 times longer than wide, which gain nothing), or "auto",
    whichever is faster.

    Examples:
        >>> orthogonal = Iteration(COEFFICIENT_SETS["simple_quintic"])(torch.diag(torch.tensor([1e-20, 3e-20])))
        >>> [round(value, 4) for value in orthogonal.diagonal().tolist()]
        [1.0, 1.0]
    """

    coefficients: CoefficientSet
    form: str = "auto"

    @torch.no_grad()
    def __call__(self, matrices: Tensor, *, steps: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Push the singular values of matrices `(..., m, n)` towards one; no gradient flows through.

        `steps` defaults to the authors' number. `dtype` applies to the products (see `inner`) and the result; the
        default is the input's. Matrices are always normalized in float32 or better. Zero matrices stay exactly zero.
        """
        steps = self.coefficients.steps if steps is None else steps
        dtype = check_matrices(matrices, dtype, steps=steps)
        if matrices.numel() == 0:
            return torch.zeros(matrices.shape, dtype=dtype, device=matrices.device)
        rows, columns = matrices.shape[-2:]
        flat, inner = matrices.reshape(-1, rows, columns), self.inner(dtype, matrices.device)
        wide, piece = flat.mT if rows > columns else flat, len(flat)
        if wide.is_cpu:
            # The working set of a piece stays near a core. Measured with 0.5 MiB of L2: between 1 and 4 MiB is flat;
            # one matrix at a time and the whole batch at once are 1.3 to 1.6 times slower.
            bytes_per_matrix = 2 * inner.itemsize * min(rows, columns) * (rows + columns)
            piece = torch.get_num_threads() * max(1, _CPU_PIECE_BYTES // bytes_per_matrix)
        results = [self.run(normalize(X, inner), steps) for X in torch.split(wide, piece)]
        # in the memory order of the input, even if that is transposed
        result = results[0] if len(results) == 1 else torch.cat(results, out=torch.empty_like(wide, dtype=inner))
        return (result.mT if rows > columns else result).reshape(matrices.shape).to(dtype)

    def inner(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The dtype of the products for a result in `dtype`.

        The Gram form never uses bfloat16: float16 costs the same on GPUs and rounds eight times less. Other devices use
        float32, except that "auto" uses bfloat16 and the plain form on CPUs.
        """
        if dtype != torch.bfloat16 or self.form == "plain" or (self.form == "auto" and device.type == "cpu"):
            return dtype
        return torch.float16 if device.type == "cuda" else torch.float32

    def run(self, X: Tensor, steps: int) -> Tensor:
        """Iterate on wide matrices `(batch, m, n)` of Frobenius norm one."""
        segments = self.coefficients.segments(steps)
        batch, short, long = X.shape
        saved = gram_saves(short, long) * batch * (steps - len(segments))
        launches_matter = self.form == "auto" and not X.is_cpu and saved < WORTH_MORE_LAUNCHES
        if self.form == "plain" or X.dtype == torch.bfloat16 or saved <= 0 or launches_matter:
            segments = [(polynomial,) for segment in segments for polynomial in segment]
        for segment in segments:
            a, b, c = segment[0]
            R = symmetric(X, X)
            if len(segment) == 1 and X.is_cpu:  # saves an addition; GPUs would copy X first
                X = torch.baddbmm(X, torch.baddbmm(R, R, R, beta=b, alpha=c), X, beta=a)
                continue
            Q = Z = symmetric(R, R, alpha=c, term=R, beta=b, diagonal=a)  # all matrices but X are symmetric and commute
            for a, b, c in segment[1:]:
                R = symmetric(symmetric(Z, R), Z)
                Z = symmetric(R, R, alpha=c, term=R, beta=b, diagonal=a)
                Q = symmetric(Q, Z)
            del R, Z
            # on accelerators in the memory order of X
            X = torch.bmm(Q, X) if X.is_cpu or X.is_contiguous() else torch.bmm(Q, X, out=torch.empty_like(X))
        return X


# Five steps map singular values from 1.5e-3 up (relative to the Frobenius norm) into [0.68, 1.2025] and smaller ones to
# about 485 times themselves. More steps keep the same band and reach smaller singular values.
newton_schulz = Iteration(COEFFICIENT_SETS["newton_schulz"], "plain")
gram_newton_schulz = Iteration(COEFFICIENT_SETS["newton_schulz"], "gram")
auto = Iteration(COEFFICIENT_SETS["newton_schulz"])

# Singular values from 1.5e-3 up end in [0.870, 1.124] after 5 steps, [0.997, 1.002] after 6 and at one (to 1e-14) after
# 8; those near zero grow 967, 1810 and 6300 times. With the safety factor the input may be 2% too large and the later
# steps 1% off, more than bfloat16 rounding adds; without it a singular value of 1.00001 already diverges.
polar_express = Iteration(COEFFICIENT_SETS["polar_express"])


# Rows from which computing one triangle in Triton beats the vendor's dense product, in half precision: on one H200
# 1.15 (X X^T) and 1.5 times (the square) at 512, 1.4 and 1.7 times at 1024; at 256 it loses the first.
KERNEL_ROWS = 512


def symmetric(
    left: Tensor,
    right: Tensor,
    *,
    alpha: float = 1.0,
    term: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """`alpha left right^T + beta term + diagonal I`, by the method that measured fastest.

    The product is `X X^T` or one of two commuting symmetric matrices.
    """
    by_kernel = (
        left.dtype in (torch.float16, torch.bfloat16)
        and left.shape[-2] >= KERNEL_ROWS
        and left.shape[-2] * left.shape[-1] < 2**31  # the kernel counts in int32
        and kernels.available(left.device)
    )
    if by_kernel:
        from muonsw.kernels.symmetric import symmetric_product

        return symmetric_product(left, right, alpha=alpha, term=term, beta=beta, diagonal=diagonal)
    if term is None:
        return torch.bmm(left, right.mT)
    result = torch.baddbmm(term, left, right, beta=beta, alpha=alpha)
    result.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return result


def check_matrices(matrices: Tensor, dtype: torch.dtype | None = None, *, steps: int = 1) -> torch.dtype:
    """Check the arguments of an orthogonalizer, and return the dtype of the result."""
    if matrices.ndim < 2:
        raise ValueError(f"expected matrices (..., m, n), got a tensor of shape {tuple(matrices.shape)}")
    result = matrices.dtype if dtype is None else dtype
    for checked in (matrices.dtype, result):
        if not checked.is_floating_point:
            raise ValueError(f"expected real floating-point matrices, got {checked}")
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"expected 1 to {MOST_STEPS} steps, got steps={steps}")
    return result


# Norms between this and its inverse have squares well inside the range of float32.
_SAFE_NORM = 1e-12


@torch.no_grad()
def normalize(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Divide each matrix by its Frobenius norm, in float32 or better, whatever its scale.

    Zero matrices stay zero; a matrix with an infinity or NaN keeps a NaN. No epsilon is needed: if squares overflow or
    underflow, matrices are first multiplied by powers of two, which changes no bit of the result. On accelerators,
    where that check would wait, a norm below 1e-18 counts as zero, and one above 1e18 as infinite.

    Examples:
        >>> normalize(torch.tensor([[3e-30, 4e-30]]))
        tensor([[0.6000, 0.8000]])
    """
    X = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    dtype = dtype or X.dtype
    if X.numel() == 0:
        return X.to(dtype, copy=True)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    if X.device.type == "cpu":
        low, high = norm.aminmax()
        if not (float(low) > _SAFE_NORM and float(high) < 1 / _SAFE_NORM):
            # abs() would write a copy and the infinity norm is several times slower on CPU.
            largest = torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))
            limit = 1022 if X.dtype == torch.float64 else 126
            X = X * torch.exp2(-torch.frexp(largest).exponent.clamp(-limit, limit).to(X.dtype))
            norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    divisor = torch.where(norm > 0, norm, 1.0)
    return torch.div(X, divisor, out=torch.empty_like(X, dtype=dtype))  # division and cast in one pass
