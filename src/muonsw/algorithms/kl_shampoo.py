"""Online KL-Shampoo: momentum between inverse square roots of two coupled factors, recomputed at every step.

The factors minimize the Kullback-Leibler divergence between two Gaussians (Lin et al., "Understanding and Improving
Shampoo and SOAP via Kullback-Leibler Minimization", 2025). The rule follows Tilde Research's
`online-kl-shampoo-release` (OKLS), which also uses scaled decay. Here, roots are in float32 except on GPUs, and
a matrix whose first gradient comes late starts at a multiple of the identity.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from muonsw.algorithms.base import matrix_algorithm, validate_matrices
from muonsw.algorithms.factors import finite_or, pack, unpack_first, unpack_second
from muonsw.machine import full_float32
from muonsw.precision import AUTO
from muonsw.slots import ELEMENTWISE, StateSpec
from muonsw.work import Group, State

# Polynomials a x + b x^3 that bring singular values in [1e-3, 1] to one: CANS, Grishina et al. (arXiv 2506.10935).
CANS = (
    (5.182503604966906, -5.178098480082684),
    (2.586120737395915, -0.6479542005271643),
    (2.567364126726186, -0.6454968804392178),
    (2.520560084348265, -0.6393528082067044),
    (2.410759275435182, -0.6248683598710716),
    (2.1883348130094173, -0.5952022073798908),
    (1.8595760874873613, -0.5504490972723968),
    (1.589020160467417, -0.5126569802066718),
    (1.5051653981684994, -0.5007377068751799),
    (1.5, -0.5),
)

# The scale of the largest element of a float16 operand: a quarter of float16's maximum.
_FLOAT16_TOP = 2.0**14


@full_float32()
def kl_shampoo(group: Group, G: Tensor, state: State) -> tuple[Tensor, State]:
    """Directions for gradients (count, m, n), and the state after them.

    `state` is `exp_avg` (count, m, n); `factors_left` (count, m, m + 1) and `factors_right` (count, n, n + 1), factors
    packed with their roots.
    """
    (beta1, beta2), eps, (_, m, n) = group["betas"], group["eps"], G.shape
    # By default products in roots are float16 on GPUs, else in the dtype of the gradients.
    fast = group["ns_dtype"] == AUTO and G.is_cuda and G.dtype == torch.float32
    dtype = torch.float16 if fast or group["ns_dtype"] == "float16" else G.dtype
    exp_avg = state["exp_avg"].lerp(G, 1 - beta1)
    left, right = ((unpack_first(F), unpack_second(F)) for F in (state["factors_left"], state["factors_right"]))
    if group["update_count"] == 1:
        left, right = _first(G, eps, dtype), _first(G.mT, eps, dtype)
    else:
        size = 2 * G.square().mean((-2, -1), keepdim=True).sqrt() + eps
        left, right = _or_identity(left, size), _or_identity(right, size)
    ahead, whitened_right, whitened_left = G.lerp(exp_avg, beta1), G @ right[1], left[1] @ G
    left = _advanced(left, whitened_right @ whitened_right.mT / n, beta2, eps, dtype)
    right = _advanced(right, whitened_left.mT @ whitened_left / m, beta2, eps, dtype)
    direction = left[1] @ ahead @ right[1]
    # A zero gradient does not initialize the factors: factors of eps alone would nearly stop later steps.
    begun = (state["factors_left"] != 0).any((-2, -1), keepdim=True) | (G != 0).any((-2, -1), keepdim=True)
    factors = {"factors_left": pack(*left), "factors_right": pack(*right)}
    return direction, {"exp_avg": exp_avg, **{key: torch.where(begun, F, 0.0) for key, F in factors.items()}}


def scale(group: Group, m: int, n: int) -> float:
    """Unit variance for Nesterov's average of noise, then the shape scale of muP."""
    beta = group["betas"][0]
    variance = (1 - beta) / (1 + beta) * (1 + 2 * beta - 2 * beta**3)
    return float(variance**-0.5 * math.sqrt(m / n) / (math.sqrt(m) + math.sqrt(n)))


# A factor and its root.
Pair = tuple[Tensor, Tensor]


def _first(G: Tensor, eps: float, dtype: torch.dtype) -> Pair:
    """The factor of rows after the first gradient, plus a multiple of the identity of the same norm."""
    _, m, n = G.shape
    factor = G @ G.mT * (m / (n * G.square().sum((-2, -1), keepdim=True) + eps)).sqrt()
    size = torch.linalg.matrix_norm(factor, keepdim=True) / math.sqrt(m)
    factor = factor + (size + eps) * torch.eye(m, dtype=G.dtype, device=G.device)
    return factor, inverse_sqrt(factor, dtype)


def _or_identity(pair: Pair, size: Tensor) -> Pair:
    """A pair, or `size` times the identity with its root if the pair is zero, thus uninitialized."""
    factor, root = pair
    begun, identity = root[..., :1, :1] != 0, torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    return torch.where(begun, factor, size * identity), torch.where(begun, root, size.rsqrt() * identity)


def _advanced(pair: Pair, gram: Tensor, beta: float, eps: float, dtype: torch.dtype) -> Pair:
    factor = beta * pair[0] + (1 - beta) * gram
    factor = (factor + factor.mT) / 2 + eps * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return factor, finite_or(inverse_sqrt(factor, dtype), pair[1])


def inverse_sqrt(S: Tensor, dtype: torch.dtype) -> Tensor:
    """S^-1/2 of positive definite matrices by ten coupled Newton-Schulz steps, with products of operands in `dtype`.

    `Y = S/L, Z = I`, then `P = Z Y, Y <- Y (a + b P), Z <- (a + b P) Z`, and Z converges to `(S/L)^-1/2`, to 3e-5 for
    condition numbers up to a million. Y, Z and P are scaled to keep float16 from overflow and underflow.
    """
    L = 1.01 * _above_eigenvalues(S)
    scales = [(1.0, 1.0, 1.0)] * (len(CANS) + 1)
    if dtype == torch.float16:
        scales = [(_FLOAT16_TOP / y, _FLOAT16_TOP / z, _FLOAT16_TOP / p) for y, z, p in _ceilings()]
    (y, _, _), (y_next, z_next, _), (a, b) = scales[0], scales[1], CANS[0]
    Y, identity = S * (y / L), torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    Z = a * z_next * identity + b * z_next / y * Y  # the first step: Z is the identity and P is Y
    Y = _multiply_add(Y, a * y_next / y, Y.to(dtype), Y.to(dtype), b * y_next / y**2)
    for (a, b), ((y, z, p), (y_next, z_next, _)) in zip(CANS[1:], pairwise(scales[1:]), strict=True):
        Y_low, Z_low = Y.to(dtype), Z.to(dtype)
        P_low = _multiply(Z_low, Y_low, p / (z * y))
        Y = _multiply_add(Y, a * y_next / y, Y_low, P_low, b * y_next / (y * p))
        Z = _multiply_add(Z, a * z_next / z, P_low, Z_low, b * z_next / (z * p))
    return (Z + Z.mT) / (2 * scales[-1][1] * L.sqrt())


def _multiply(A: Tensor, B: Tensor, alpha: float) -> Tensor:
    """`alpha A B`, summed in at least float32 and rounded to the dtype of A."""
    if A.dtype != torch.float16 or A.is_cuda:
        return torch.baddbmm(A, A, B, beta=0, alpha=alpha)
    return (alpha * (A.float() @ B.float())).to(A.dtype)


def _multiply_add(C: Tensor, beta: float, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    """`beta C + alpha A B` in the dtype of C, which may be wider than that of A and B."""
    if A.dtype != C.dtype and C.is_cuda:
        return torch.baddbmm(C, A, B, C.dtype, beta=beta, alpha=alpha)
    return torch.baddbmm(C, A.to(C.dtype), B.to(C.dtype), beta=beta, alpha=alpha)


@cache
def _ceilings() -> list[tuple[float, float, float]]:
    """The largest Y, Z and P before each step and at the end, for eigenvalues of S/L in [0, 1]."""
    grid = [(i / 4096, 1.0) for i in range(4097)]
    ceilings = []
    for a, b in (*CANS, (1.0, 0.0)):
        ceilings.append((max(y for y, _ in grid), max(z for _, z in grid), max(y * z for y, z in grid)))
        grid = [(y * (a + b * y * z), (a + b * y * z) * z) for y, z in grid]
    return ceilings


def _above_eigenvalues(S: Tensor) -> Tensor:
    """An upper bound of the eigenvalues of positive semidefinite matrices (count, 1, 1).

    The smaller of two: mean plus spread of the eigenvalues (Wolkowicz and Styan), and row sums weighted by row sums
    (Minc). Dividing by the largest element, which is on the diagonal, avoids overflow.
    """
    d, diagonal = S.shape[-1], S.diagonal(dim1=-2, dim2=-1)
    unit = diagonal.amax(-1).clamp(min=torch.finfo(S.dtype).tiny)[..., None, None]
    A = (S / unit).abs()
    mean = (diagonal / unit[..., 0]).mean(-1)
    square = A.square().sum((-2, -1)) / d
    spread = (square - mean.square()).clamp(min=0).sqrt() * math.sqrt(d - 1)
    sums = A.sum(-1, keepdim=True).clamp(min=1e-12)
    weighted = (A @ sums / sums).amax((-2, -1))
    return torch.minimum(mean + spread, weighted)[..., None, None] * unit


def validate(group: Group, name: str, param: Tensor) -> None:
    validate_matrices(group, name, param)
    if group["eps"] == 0:
        raise ValueError("eps=0: KL-Shampoo takes roots of factors that may be singular; use an eps above zero")
    if group["ns_dtype"] == "bfloat16":
        raise ValueError("ns_dtype='bfloat16' is too coarse for the roots of KL-Shampoo; use 'float16' or 'float32'")


KL_SHAMPOO = matrix_algorithm(
    defaults={"betas": (0.9684, 0.9482), "eps": 1e-9, "ns_dtype": "auto"},
    state=lambda _: {
        "exp_avg": ELEMENTWISE,
        "factors_left": StateSpec(lambda m, _: (m, m + 1)),
        "factors_right": StateSpec(lambda _, n: (n, n + 1)),
    },
    directions=kl_shampoo,
    scale=scale,
    validate=validate,
    counts_steps=True,
    scale_free=False,
)
