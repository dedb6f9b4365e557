"""Inner products of weights with what moves them, matrix by matrix, kept on the device until a sample is complete.

One column belongs to one matrix: an expert of a stack, a part of a fused projection, or a whole tensor. Columns of
the same matrix, where a large tensor was measured in pieces, add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw.telemetry.over_ranks import Shared

# The Euclidean norms of the weight before the update, of those entries of it that decay acts on, of the direction, the
# gradient, the momentum and the change of the stored weight; then inner products of the weight with the direction, the
# gradient and the momentum.
NORMS = ("weight", "decayed", "direction", "gradient", "momentum", "change")
PRODUCTS = ("weight_direction", "weight_gradient", "weight_momentum")
ROWS = (*NORMS, *PRODUCTS)

# Rows of more entries than this are summed in pieces: float32 sums lose digits with their length.
LONGEST = 2**16


class Piece(NamedTuple):
    """Which matrices of a parameter one block of columns describes, and how many of their entries.

    `side` is min(m, n) where the direction was orthogonalized, else 0. The update is `lr * scale * direction`, and
    `phi` the decay factor, None where it is not known. Where `change_follows`, the change of the weight was not
    measured: it is decay and update together.
    """

    param: Tensor
    first: int
    matrices: int
    area: int
    side: int = 0
    has_momentum: bool = False
    lr: float | Tensor = 1.0
    scale: float = 1.0
    phi: float | Tensor | None = 0.0
    change_follows: bool = False


class Measurements:
    """Collects columns during one update and brings them to the host together.

    `shared` are the parameters of which other ranks measure other parts.
    """

    def __init__(self) -> None:
        self._found: dict[torch.device, list[tuple[list[Piece], dict[str, Tensor]]]] = {}
        self.shared: dict[Tensor, Shared] = {}

    @property
    def pieces(self) -> list[Piece]:
        """What was measured, in the order of the columns."""
        return [piece for found in self._found.values() for pieces, _ in found for piece in pieces]

    def add(self, pieces: list[Piece], rows: dict[str, Tensor]) -> None:
        """Add a block of columns: by the names in `ROWS`, vectors with one entry for each matrix of the pieces."""
        self._found.setdefault(rows["weight"].device, []).append((pieces, rows))

    def to_host(self) -> dict[str, Tensor]:
        """All columns by row, as float64 on the CPU; one transfer for each device."""
        tables = []
        for found in self._found.values():
            zeros = [torch.zeros_like(rows["weight"]) for _, rows in found]
            entries = [rows.get(name, zero) for name in ROWS for (_, rows), zero in zip(found, zeros, strict=True)]
            tables.append(torch.cat(entries).cpu().double().view(len(ROWS), -1))
        none = torch.zeros(len(ROWS), 0, dtype=torch.float64, device="cpu")
        table = torch.cat(tables, dim=1) if tables else none
        return dict(zip(ROWS, table, strict=True))


def to_floats(values: Sequence[float | Tensor]) -> list[float]:
    """Numbers of which some are scalars on devices, as floats; one transfer for each device.

    Examples:
        >>> to_floats([0.5, torch.tensor(0.25)])
        [0.5, 0.25]
    """
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, {})[id(value)] = value.detach().reshape(())
    known: dict[int, float] = {}
    for tensors in by_device.values():
        known.update(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
    return [known[id(value)] if isinstance(value, Tensor) else value for value in values]


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Inner products are taken in float32, or float64 where the weight is."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of the rows of two (rows, entries) tensors.

    Examples:
        >>> inner(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[1.0, 1.0], [2.0, 5.0]]))
        tensor([3., 6.])
    """
    products: Tensor = torch.linalg.vecdot(x, y)
    return products


def norm(x: Tensor) -> Tensor:
    """Euclidean norms of the rows of a (rows, entries) tensor.

    Examples:
        >>> norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([5., 1.])
    """
    rows, entries = x.shape
    pieces = entries // LONGEST
    norms: Tensor
    if entries <= LONGEST or x.dtype == torch.float64:
        norms = torch.linalg.vector_norm(x, dim=1)
    elif entries % pieces == 0:
        norms = torch.linalg.vector_norm(torch.linalg.vector_norm(x.reshape(rows, pieces, -1), dim=2), dim=1)
    else:
        norms = inner(x, x).sqrt()  # slower, but its sums lose no digits
    return norms
