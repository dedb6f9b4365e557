"""Largest singular values and condition numbers of weight matrices; measured only on request."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from muonsw.distributed.shards import whole
from muonsw.slots import wide_dtype
from muonsw.telemetry.parameters import Matrices

# Vectors that are iterated together: the error falls with the gap to the singular value after the last of them.
BLOCK = 8
# Iterations from random vectors, and from those of the last sample, since when a weight has moved little.
COLD, WARM = 12, 4


class Spectrum:
    """Measures spectral norms by a power iteration that starts where the last sample ended, and condition numbers.

    Start vectors come from a generator of its own, so that no random number of the training is used up.
    """

    def __init__(self, *, spectral_norm: bool, condition: bool, seed: int = 0) -> None:
        self.spectral_norm = spectral_norm
        self.condition = condition
        self._generator = torch.Generator().manual_seed(seed)
        self._vectors: dict[tuple[Tensor, int], Tensor] = {}

    def measure(self, param: Tensor, matrices: Matrices, weight: Tensor) -> dict[str, Tensor]:
        """The requested values of each matrix of a parameter, from a copy of its weight; brings shards together."""
        values: dict[str, Tensor] = {}
        if not (self.spectral_norm or self.condition):
            return values
        batches = matrices.batches(whole(weight))
        if batches and self.spectral_norm:
            norms = [self._norms((param, number), batch) for number, batch in enumerate(batches)]
            values["spectral_norm"] = torch.cat(norms)
        if batches and self.condition:
            values["condition"] = condition_numbers(batches)
        return values

    def _norms(self, key: tuple[Tensor, int], batch: Tensor) -> Tensor:
        """The largest singular value of each matrix of a batch (count, m, n)."""
        W = batch.to(wide_dtype(batch.dtype))
        shape = (W.shape[0], W.shape[2], min(BLOCK, *W.shape[1:]))
        V = self._vectors.get(key)
        iterations = WARM
        if V is None or V.shape != shape:  # other weights may have been put into the parameter
            iterations = COLD
            V = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        V = V.to(W)
        for _ in range(iterations):
            V = torch.linalg.qr(W.mT @ (W @ V)).Q
        if V.isfinite().all():
            self._vectors[key] = V
        image = (W @ V).double()
        return _eigenvalues(image.mT @ image)[:, -1].clamp(min=0).sqrt()


def condition_numbers(batches: Iterable[Tensor]) -> Tensor:
    """Largest over smallest singular value of each matrix, up to about 1e7; beyond that they are not finite.

    From the eigenvalues of the smaller Gram matrix in float64, which costs an eigendecomposition.

    Examples:
        >>> condition_numbers([torch.diag(torch.tensor([4.0, 2.0, 1.0])).unsqueeze(0)])
        tensor([4.], dtype=torch.float64)
    """
    numbers = []
    for batch in batches:
        W = batch.double()
        gram = W @ W.mT if W.shape[1] <= W.shape[2] else W.mT @ W
        eigenvalues = _eigenvalues(gram)
        noise = eigenvalues[:, -1] * gram.shape[-1] * torch.finfo(torch.float64).eps
        smallest = torch.where(eigenvalues[:, 0] > noise, eigenvalues[:, 0], 0.0)
        numbers.append((eigenvalues[:, -1] / smallest).sqrt())
    return torch.cat(numbers)


def _eigenvalues(gram: Tensor) -> Tensor:
    """Eigenvalues of symmetric matrices (count, n, n), ascending; not a number where torch would refuse a matrix."""
    finite = gram.isfinite().all(-1).all(-1, keepdim=True)
    values: Tensor = torch.linalg.eigvalsh(torch.where(finite.unsqueeze(-1), gram, 0.0))
    return torch.where(finite, values, torch.nan)
