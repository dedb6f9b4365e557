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

from muonsw import kernels

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

# @YouJiacheng, for five steps: `zeropower_via_newtonschulz5` of microsoft/dion, `quintic` of timm, the preset `dion` of
# optax.
YOU: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Polar Express computed for exactly five steps with a safety factor of 1.02 and a cushion, all of it in the numbers:
# modded-nanogpt, microsoft/dion (which divide by 1.02 times the norm), nanochat (by 1.01).
POLAR_EXPRESS_5: Schedule = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# Flat at one, where it converges; doubles what is small, so it needs many steps (modded-nanogpt's track 3, Aurora).
SIMPLE_QUINTIC: Coefficients = (2.0, -1.5, 0.5)

# The slowest polynomial in use, 1.5 s - 0.5 s^3, multiplies what is small by 1.5, and so lifts the least float64 to one
# in 1074 / log2(1.5) = 1837 steps: no matrix needs more.
MOST_STEPS = 2000

LONGEST_SEGMENT = 3
# Below this many rows the errors of a product's entries no longer average out, and nothing is to be gained.
FEWEST_ROWS = 16


def rescaled(coefficients: Coefficients, scale: float) -> Coefficients:
    """Give the polynomial `p(s / scale)` of a polynomial `p(s)`.

    Examples:
        >>> rescaled((8.0, 16.0, 32.0), 2.0)
        (4.0, 2.0, 1.0)
    """
    a, b, c = coefficients
    return a / scale, b / scale**3, c / scale**5


class CoefficientSet(NamedTuple):
    """The polynomials of successive steps, for matrices divided by `divisor` times their Frobenius norm.

    The last polynomial repeats for ever. `steps` is how many steps the authors take.
    """

    polynomials: Schedule
    steps: int = 5
    divisor: float = 1.0

    def schedule(self, steps: int) -> Schedule:
        """The polynomials of this many steps for matrices of norm one: the first one divides by `divisor`.

        Examples:
            >>> CoefficientSet(((8.0, 16.0, 32.0), (2.0, -1.5, 0.5)), divisor=2.0).schedule(3)
            ((4.0, 2.0, 1.0), (2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
        """
        first, *rest = self.polynomials
        listed = (rescaled(first, self.divisor), *rest)
        return (*listed, *(self.polynomials[-1] for _ in range(steps - len(listed))))[:steps]


# What `orthogonalizer=` takes, with the normalization of the authors less their epsilon, which makes the update depend
# on the size of the gradient where its norm is near 1e-7.
COEFFICIENT_SETS: dict[str, CoefficientSet] = {
    "newton_schulz": CoefficientSet((NS5,)),
    "newton_schulz_you": CoefficientSet(YOU),
    "polar_express": CoefficientSet(
        (*(rescaled(each, POLAR_EXPRESS_SAFETY) for each in POLAR_EXPRESS[:-1]), POLAR_EXPRESS[-1]),
        divisor=POLAR_EXPRESS_SAFETY,
    ),
    "polar_express_5": CoefficientSet(POLAR_EXPRESS_5, divisor=1.02),
    "polar_express_nanochat": CoefficientSet(POLAR_EXPRESS_5, divisor=1.01),
    "simple_quintic": CoefficientSet((SIMPLE_QUINTIC,), steps=12),
}


_Sigma = TypeVar("_Sigma", float, Tensor)


class SingularValueMap(Protocol):
    """A function of singular values, elementwise on a tensor or on one float."""

    def __call__(self, sigma: _Sigma, /) -> _Sigma:
        """Give the new singular values."""


def singular_value_map(schedule: Schedule) -> SingularValueMap:
    """Give the scalar function that a schedule applies to every singular value.

    The singular values are those of the normalised matrix, so relative to its Frobenius norm.

    Examples:
        >>> round(singular_value_map(COEFFICIENT_SETS["newton_schulz"].schedule(5))(1.0), 4)
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
    if len(schedule) == 1 and R.device.type == "cpu":  # one addition less; GPUs would copy X before they add to it
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
    caller asks for one; `steps` is how many steps it takes by default.
    """

    run: Callable[[Tensor, int], Tensor]
    inner: Callable[[torch.dtype, torch.device], torch.dtype]
    steps: int = 5


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
    return iterate(X, COEFFICIENT_SETS["newton_schulz"].schedule(steps), LONGEST_SEGMENT if pays else 1)


# Multiply-adds that the Gram iteration must save on an accelerator, because it takes more launches. On one H200: 192
# matrices of 256 x 768 save 3e10 and gain nothing; 48 of 512 x 1408, a batch of a replayed step, save 4.8e10, and their
# products take 11.2 us a matrix where the plain iteration's take 12.7, by the rates of each kind of product.
WORTH_MORE_LAUNCHES = 4e10


def _fastest(X: Tensor, steps: int) -> Tensor:
    short, long = X.shape[-2:]
    saved = cost(short, long, steps) - cost(short, long, steps, LONGEST_SEGMENT)
    launches_matter = X.device.type != "cpu" and X.numel() // (short * long) * saved < WORTH_MORE_LAUNCHES
    if X.dtype == torch.bfloat16 or launches_matter:
        return PLAIN["newton_schulz"].run(X, steps)
    return _gram(X, steps)


def _fastest_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """On CPUs with bfloat16 units float32 would be slower; everything else is free to choose."""
    return dtype if device.type == "cpu" else _no_bfloat16(dtype, device)


# One for each set of coefficients.
PLAIN: dict[str, Iteration] = {
    name: Iteration(partial(_plain, schedule=chosen.schedule), _as_asked, chosen.steps)
    for name, chosen in COEFFICIENT_SETS.items()
}
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
    return orthogonalize(PLAIN["newton_schulz"], matrices, steps=steps, dtype=dtype)


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
    return orthogonalize(PLAIN["polar_express"], matrices, steps=steps, dtype=dtype)


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
    return orthogonalize(GRAM, matrices, steps=steps, dtype=dtype)


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
    return orthogonalize(AUTO, matrices, steps=steps, dtype=dtype)


def orthogonalize(
    iteration: Iteration, matrices: Tensor, *, steps: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Normalise matrices and run an iteration on them, by default with its own number of steps.

    Args, result and errors are those of `newton_schulz`.

    Examples:
        >>> [round(value, 4) for value in orthogonalize(PLAIN["simple_quintic"], torch.eye(2)).diagonal().tolist()]
        [1.0, 1.0]
    """
    steps = iteration.steps if steps is None else steps
    dtype = check_matrices(matrices, dtype, steps=steps)
    inner = iteration.inner(dtype, matrices.device)
    return iterate_normalized(lambda X: iteration.run(X, steps), matrices, inner).to(dtype)


# what happens to matrices before and after an iteration: checks, scale, orientation, batches

# A batch is cut on CPU so that the working set of a piece stays near a core. Measured on cores with 0.5 MiB
# of L2: between 1 and 4 MiB is flat, and both one matrix at a time and the whole batch at once are
# 1.3 to 1.6 times slower for 200 matrices of 64 x 64 and 64 x 192. Reusing buffers with out= gains nothing.
_CPU_PIECE_BYTES = 2 * 2**20


# Norms between this and its inverse have squares well inside the range of float32.
_SAFE_NORM = 1e-12


def check_matrices(matrices: Tensor, dtype: torch.dtype | None = None, *, steps: int = 1) -> torch.dtype:
    """Refuse what no orthogonalizer can work on, and give the dtype of the result.

    Raises:
        ValueError: If the input is not a real floating-point tensor of at least two axes, the dtype asked
            for is not a real floating-point one, or there is no step to take, or more than can matter.

    Examples:
        >>> check_matrices(torch.zeros(2, 3), torch.bfloat16)
        torch.bfloat16
    """
    if matrices.ndim < 2:
        raise ValueError(f"expected matrices (..., m, n), got a tensor of shape {tuple(matrices.shape)}")
    result = matrices.dtype if dtype is None else dtype
    for found in (matrices.dtype, result):
        if not found.is_floating_point:
            raise ValueError(f"expected real floating-point matrices, got {found}")
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"expected at least one step and at most {MOST_STEPS}, got steps={steps}")
    return result


def normalize(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Divide each matrix by its Frobenius norm, in float32 or better, whatever its scale.

    No epsilon is needed: where squares would over- or underflow, the matrices are first multiplied by powers of
    two, which changes no bit of the result. Zero matrices stay zero; a matrix with an infinite or undefined entry
    keeps an undefined entry. On accelerators, where looking would mean waiting, the powers of two are left out:
    there a norm below 1e-18 counts as zero, and one above 1e18 as infinite.

    Args:
        matrices: `(..., m, n)`.
        dtype: The dtype of the result, by default that of the division.

    Examples:
        >>> normalize(torch.tensor([[3e-30, 4e-30]]))
        tensor([[0.6000, 0.8000]])
    """
    X = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    if X.numel() == 0:
        return X.to(dtype or X.dtype, copy=True)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    if X.device.type == "cpu" and not _squares_are_safe(norm):
        X = X * _power_of_two(X)
        norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    return _divide(X, torch.where(norm > 0, norm, torch.ones_like(norm)), dtype or X.dtype)


def _squares_are_safe(norm: Tensor) -> bool:
    """Tell whether norms of this size were computed without over- or underflow, if the host may look."""
    if norm.requires_grad:
        return False
    low, high = norm.aminmax()
    return float(low) > _SAFE_NORM and float(high) < 1 / _SAFE_NORM


def _power_of_two(X: Tensor) -> Tensor:
    """Give for each matrix the power of two that brings its largest entry near one."""
    # abs() would write a copy and the infinity norm is several times slower on CPU.
    largest = torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))
    limit = 1022 if X.dtype == torch.float64 else 126
    return torch.exp2(-torch.frexp(largest.detach()).exponent.clamp(-limit, limit).to(X.dtype))


def _divide(X: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide and cast in one pass over memory where that is possible."""
    if X.dtype == dtype or X.requires_grad:
        return (X / divisor).to(dtype)
    return torch.div(X, divisor, out=torch.empty_like(X, dtype=dtype))


def iterate_normalized(iterate: Callable[[Tensor], Tensor], matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Run an iteration on normalised matrices of any leading axes and orientation, in `dtype`.

    Args:
        iterate: A function of wide matrices, `(m, n)` or `(batch, m, n)` with `m <= n`, that keeps their
            shape and does not modify them.
        matrices: The matrices `(..., m, n)`; tall ones are transposed for the iteration.
        dtype: The dtype of the iteration and of the result.

    Examples:
        >>> iterate_normalized(lambda wide: 2 * wide, torch.ones(4, 1), torch.float32).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if matrices.numel() == 0:
        return torch.zeros(matrices.shape, dtype=dtype, device=matrices.device)

    def transform(part: Tensor) -> Tensor:
        return iterate(normalize(part[0] if len(part) == 1 else part, dtype))

    rows, columns = matrices.shape[-2:]
    flat = matrices.reshape(-1, rows, columns)
    wide = flat.mT if rows > columns else flat
    piece = _piece_size(wide, dtype)
    if piece >= len(wide):
        result = transform(wide)
    else:
        result = torch.empty_like(wide, dtype=dtype)
        for start in range(0, len(wide), piece):
            result[start : start + piece] = transform(wide[start : start + piece])
    return (result.mT if rows > columns else result).reshape(matrices.shape)


def _piece_size(wide: Tensor, dtype: torch.dtype) -> int:
    """Give the number of matrices to work on at a time, from a batch `(batch, m, n)`."""
    batch, rows, columns = wide.shape
    differentiated = wide.requires_grad and torch.is_grad_enabled()
    if wide.device.type != "cpu" or differentiated:
        return batch
    bytes_per_matrix = 2 * dtype.itemsize * rows * (rows + columns)
    return torch.get_num_threads() * max(1, _CPU_PIECE_BYTES // bytes_per_matrix)


# the products that iterations are made of, each by whatever was measured to be fastest for it

# Rows from which computing one triangle in Triton beats the vendor's dense product, in half precision: on one H200
# 1.15 (X X^T) and 1.5 times (the square) at 512, 1.4 and 1.7 times at 1024; at 256 it loses the first.
KERNEL_ROWS = 512


def symmetric(left: Tensor, right: Tensor) -> Tensor:
    """`left right^T`, where that is symmetric: `X X^T`, or the product of two symmetric matrices that commute.

    Examples:
        >>> symmetric(torch.eye(2, 3), torch.eye(2, 3)).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if kernel_pays(left):
        from muonsw.kernels.symmetric import symmetric_product

        return symmetric_product(left, right)
    return _matmul(left, right.mT)


def polynomial(R: Tensor, coefficients: Coefficients) -> Tensor:
    """`a I + b R + c R^2` of symmetric matrices.

    Examples:
        >>> polynomial(2 * torch.eye(2), (1.0, 10.0, 100.0)).diagonal().tolist()
        [421.0, 421.0]
    """
    a, b, c = coefficients
    if kernel_pays(R):
        from muonsw.kernels.symmetric import symmetric_product

        return symmetric_product(R, R, alpha=c, term=R, beta=b, diagonal=a)
    Z = multiply_add(R, R, R, beta=b, alpha=c)
    Z.diagonal(dim1=-2, dim2=-1).add_(a)
    return Z


def multiply(Q: Tensor, X: Tensor) -> Tensor:
    """`Q X`, in the memory order of `X` on accelerators, so that a transposed view stays one.

    Examples:
        >>> multiply(2 * torch.eye(2), torch.ones(2, 3)).sum().item()
        12.0
    """
    if _order_is_kept(X):
        return torch.bmm(Q, X, out=torch.empty_like(X))
    return _matmul(Q, X)


def multiply_add(addend: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """`beta * addend + alpha * left @ right` in one call, in the memory order of `addend` on accelerators.

    Examples:
        >>> multiply_add(torch.eye(2), torch.eye(2), torch.eye(2), beta=2.0).diagonal().tolist()
        [3.0, 3.0]
    """
    if _order_is_kept(addend):
        return torch.baddbmm(addend, left, right, beta=beta, alpha=alpha, out=torch.empty_like(addend))
    fused = torch.addmm if left.ndim == 2 else torch.baddbmm
    return fused(addend, left, right, beta=beta, alpha=alpha)


def kernel_pays(left: Tensor) -> bool:
    """Whether symmetric products of this tensor go to our kernel."""
    return (
        left.ndim == 3
        and left.dtype in (torch.float16, torch.bfloat16)
        and left.shape[-2] >= KERNEL_ROWS
        and not left.requires_grad
        and kernels.available(left.device)
    )


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """On accelerators the call that does least on the host; `@` thinks about broadcasting first."""
    return torch.bmm(left, right) if left.ndim == 3 and left.device.type != "cpu" else left @ right


def _order_is_kept(X: Tensor) -> bool:
    if X.ndim != 3 or X.device.type == "cpu" or X.requires_grad:
        return False
    return not X.is_contiguous()
