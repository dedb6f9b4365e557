"""Largest singular values and condition numbers of weight matrices; measured only on request."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from muonsw.slots import wide_dtype

# By value and parameter, one entry for each matrix of the parameter.
Spectra = dict[str, dict[Tensor, Tensor]]

# Vectors that are iterated together: the error falls with the gap to the singular value after the last of them.
BLOCK = 8
# Iterations from random vectors, and from those of the last sample, since when a weight has moved little.
COLD, WARM = 12, 4


class SpectralNorms:
    """Power iteration with a memory: each sample starts from the directions that the last one ended with.

    Start vectors come from a generator of its own, so that no random number of the training is used up.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vectors: dict[tuple[Tensor, int], Tensor] = {}

    def measure(self, param: Tensor, batches: Iterable[Tensor]) -> Tensor:
        """The spectral norm of each matrix in these batches (count, m, n) of a parameter, on its device.

        Examples:
            >>> weight = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
            >>> SpectralNorms().measure(weight, [weight.unsqueeze(0)])
            tensor([3.0000], dtype=torch.float64)
        """
        return torch.cat([self._norms((param, number), batch) for number, batch in enumerate(batches)])

    def _norms(self, key: tuple[Tensor, int], batch: Tensor) -> Tensor:
        W = batch.detach().to(wide_dtype(batch.dtype))
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
    found = []
    for batch in batches:
        W = batch.detach().double()
        gram = W @ W.mT if W.shape[1] <= W.shape[2] else W.mT @ W
        eigenvalues = _eigenvalues(gram)
        noise = eigenvalues[:, -1] * gram.shape[-1] * torch.finfo(torch.float64).eps
        smallest = torch.where(eigenvalues[:, 0] > noise, eigenvalues[:, 0], 0.0)
        found.append((eigenvalues[:, -1] / smallest).sqrt())
    return torch.cat(found)


def _eigenvalues(gram: Tensor) -> Tensor:
    """Eigenvalues of symmetric matrices (count, n, n), ascending; not a number where torch would refuse a matrix."""
    finite = gram.isfinite().all(-1).all(-1, keepdim=True)
    values: Tensor = torch.linalg.eigvalsh(torch.where(finite.unsqueeze(-1), gram, 0.0))
    return torch.where(finite, values, torch.nan)
