"""What happens to matrices before and after an iteration: checks, scale, orientation, batches."""

from collections.abc import Callable

import torch
from torch import Tensor

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
            for is not a real floating-point one, or there is no step to take.

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
    if steps < 1:
        raise ValueError(f"expected at least one step, got steps={steps}")
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
    if torch.compiler.is_compiling() or norm.requires_grad:
        return False
    low, high = norm.aminmax()
    return bool((low > _SAFE_NORM) & (high < 1 / _SAFE_NORM))


def _power_of_two(X: Tensor) -> Tensor:
    """Give for each matrix the power of two that brings its largest entry near one."""
    # abs() would write a copy and the infinity norm is several times slower on CPU.
    largest = torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))
    limit = 1022 if X.dtype == torch.float64 else 126
    return torch.exp2(-torch.frexp(largest.detach()).exponent.clamp(-limit, limit).to(X.dtype))


def _divide(X: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide and cast in one pass over memory where that is possible."""
    if X.dtype == dtype or torch.compiler.is_compiling() or X.requires_grad:
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
    if wide.device.type != "cpu" or torch.compiler.is_compiling() or differentiated:
        return batch
    bytes_per_matrix = 2 * dtype.itemsize * rows * (rows + columns)
    return torch.get_num_threads() * max(1, _CPU_PIECE_BYTES // bytes_per_matrix)
