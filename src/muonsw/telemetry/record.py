"""From what was measured at one update to its record: one pipeline, top to bottom.

1. **Measurements** are norms and inner products of weights with what moves them, one column for each matrix (an expert
   of a stack, a part of a fused projection, or a whole tensor), kept on the device until a sample is complete. Columns
   of one matrix, where a large tensor was measured in pieces, add up.
2. **Rows** hold sums (squares, inner products, values times the number of elements), so that the row of a larger part
   is the sum of the rows of its smaller parts: from pieces to matrices, over ranks, to parameters, roles and layers.
3. **The record** has means and cosines: of each parameter, and of all, the decayed, each role and each layer together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.telemetry.parameters import ParameterInfo
from muonsw.telemetry.spectrum import Spectra

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rows = dict[str, Tensor]

# 1. measurements

# The Euclidean norms of the weight before the update, of those entries of it that decay acts on, of the direction, the
# gradient, the momentum and the change of the stored weight; then inner products of the weight with the direction, the
# gradient and the momentum.
NORMS = ("weight", "decayed", "direction", "gradient", "momentum", "change")
PRODUCTS = ("weight_direction", "weight_gradient", "weight_momentum")
ROWS = (*NORMS, *PRODUCTS)

# Rows of more elements than this are summed in pieces: float32 sums lose digits with their length.
LONGEST = 2**16


class Piece(NamedTuple):
    """Which matrices of a parameter one block of columns describes, and how many entries of each.

    `side` is min(m, n) where the direction was orthogonalized, else 0. The update is `lr * scale * direction`, and
    `phi` the decay factor, None where it is not known. Where `change_follows`, the change of the weight was not
    measured: it is decay and update together.
    """

    param: Tensor
    numbers: Sequence[int]
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
        self.shared: dict[Tensor, MeasuringRanks] = {}

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


# 2. rows

# Each cosine: its inner product, and the squares it divides by.
ALIGNMENTS = {
    "alignment_update": ("wu", "ww", "uu"),
    "alignment_gradient": ("wg", "ww", "gg"),
    "alignment_momentum": ("wm", "ww_momentum", "mm"),
}

# What only matrices have: rows hold the sum over matrices, and how many there are under `count_`.
PER_MATRIX = ("defect", "spectral_norm", "condition")

# More matrices than any parameter has, to number those of all parameters at once.
_STRIDE = 2**40


def parameter_columns(
    measured: Measurements, infos: Mapping[Tensor, ParameterInfo], spectra: Spectra
) -> tuple[Rows, list[ParameterInfo]]:
    """One column for each parameter that was measured, in the order of the optimizer, and what is known of each."""
    seen = {piece.param for piece in measured.pieces} | measured.shared.keys()
    params = [param for param in infos if param in seen]
    owners, matrices = _matrix_columns(measured, {param: number for number, param in enumerate(params)})
    anywhere, owners = torch.unique(owners, return_inverse=True)
    params = [params[number] for number in anywhere.tolist()]
    matrices["matrices"] = torch.ones_like(matrices["numel"])
    for name, terms in ALIGNMENTS.items():
        matrices[name], matrices[f"count_{name}"] = _cosine(matrices, terms)
    rows = _summed(matrices, owners, len(params))
    for name in ALIGNMENTS:
        cosines, count = rows.pop(name), rows.pop(f"count_{name}")
        rows[f"{name}_mean"] = torch.where(count > 0, cosines / count, 0.0)
        rows[f"count_{name}_mean"] = (count > 0).double()
    found = [infos[param] for param in params]
    _add_settings(rows, found)
    _add_spectra(rows, params, spectra)
    return rows, found


def pooled(rows: Rows, members: Sequence[list[int]]) -> Rows:
    """One column for each list of columns: their sum."""
    chosen = torch.tensor([column for columns in members for column in columns], dtype=torch.int64, device="cpu")
    target = torch.tensor([i for i, columns in enumerate(members) for _ in columns], dtype=torch.int64, device="cpu")
    return _summed(rows, target, len(members), chosen)


def _summed(rows: Rows, target: Tensor, size: int, chosen: Tensor | None = None) -> Rows:
    """The rows with their columns, or those chosen, added up into `size` new ones."""
    table = torch.stack(list(rows.values()))
    table = table if chosen is None else table[:, chosen]
    return dict(zip(rows, table.new_zeros(len(rows), size).index_add(1, target, table), strict=True))


def _matrix_columns(measured: Measurements, index: dict[Tensor, int]) -> tuple[Tensor, Rows]:
    """One column for each matrix: which parameter it belongs to, and its rows."""
    pieces = measured.pieces
    piece_of = torch.repeat_interleave(
        torch.tensor([len(piece.numbers) for piece in pieces], dtype=torch.int64, device="cpu")
    )

    def per_matrix(values: Sequence[float]) -> Tensor:
        return _column(values)[piece_of]

    factors = to_floats([piece.lr for piece in pieces] + [0.0 if piece.phi is None else piece.phi for piece in pieces])
    lrs, phis = factors[: len(pieces)], factors[len(pieces) :]
    rows = _additive(measured.to_host(), per_matrix([lr * piece.scale for lr, piece in zip(lrs, pieces, strict=True)]))
    phi = per_matrix(phis)
    both = phi.square() * rows["ww"] + 2 * phi * rows["wu"] + rows["uu"]  # the square of phi W + u
    rows["dd"] = torch.where(per_matrix([piece.change_follows for piece in pieces]) > 0, both.clamp(min=0), rows["dd"])
    rows["numel"] = per_matrix([piece.area for piece in pieces])
    rows["side_numel"] = per_matrix([piece.side for piece in pieces]) * rows["numel"]
    rows["ww_momentum"] = torch.where(per_matrix([piece.has_momentum for piece in pieces]) > 0, rows["ww"], 0.0)
    rows["phi_numel"] = phi * rows["numel"]
    rows["count_decay"] = per_matrix([piece.phi is not None for piece in pieces]) * rows["numel"]

    keys = [index[piece.param] * _STRIDE + number for piece in pieces for number in piece.numbers]
    unique, inverse = torch.unique(torch.tensor(keys, dtype=torch.int64, device="cpu"), return_inverse=True)
    matrices = _summed(rows, inverse, len(unique))
    if measured.shared:
        shared = {index[param] * _STRIDE: entry for param, entry in measured.shared.items() if param in index}
        unique, matrices = sum_over_ranks(unique, matrices, shared)

    side = matrices.pop("side_numel") / matrices["numel"]
    matrices["count_defect"] = (side > 0).double()
    matrices["defect"] = torch.where(side > 0, (matrices["oo"] / side).sqrt(), 0.0)
    return unique // _STRIDE, matrices


def _additive(measured: Rows, move: Tensor) -> Rows:
    """Squares and inner products, of which those of a matrix are the sum of those of its pieces.

    w is the weight before the update, u the update, o its direction, g the gradient, m the momentum, d the change. What
    has overflowed is NaN: over infinity an alignment or a relative size would be zero.
    """
    rows = {
        "ww": measured["weight"].square(),
        "decayed": measured["decayed"].square(),
        "oo": measured["direction"].square(),
        "uu": (measured["direction"] * move).square(),
        "gg": measured["gradient"].square(),
        "mm": measured["momentum"].square(),
        "dd": measured["change"].square(),
        "wu": measured["weight_direction"] * move,
        "wg": measured["weight_gradient"],
        "wm": measured["weight_momentum"],
    }
    return {name: torch.where(row.isfinite(), row, torch.nan) for name, row in rows.items()}


def _cosine(matrices: Rows, terms: tuple[str, str, str]) -> tuple[Tensor, Tensor]:
    """The cosine of each matrix, and 1 where there is one; matrices of norm zero have none."""
    product, left, right = (matrices[term] for term in terms)
    size = left.sqrt() * right.sqrt()
    defined = ~(size == 0)  # a NaN is defined: it must show
    return torch.where(defined, product / size, 0.0), defined.double()


def _add_settings(rows: Rows, infos: list[ParameterInfo]) -> None:
    """Decay, learning rate and peak, each times the number of entries that have one."""
    acted_on = torch.where(rows["ww"] == 0, 1.0, rows["decayed"] / rows["ww"])
    rows["decay"] = torch.where(rows["count_decay"] > 0, rows["phi_numel"] * acted_on, 0.0)
    rows["lr"], rows["count_lr"] = _column([info.lr for info in infos]) * rows["numel"], rows["numel"]
    rows["peak_lr"] = _column([info.peak_lr or 0.0 for info in infos]) * rows["numel"]
    rows["count_peak_lr"] = _column([info.peak_lr is not None for info in infos]) * rows["numel"]


def _add_spectra(rows: Rows, params: list[Tensor], spectra: Spectra) -> None:
    for name in ("spectral_norm", "condition"):
        found = [spectra.get(name, {}).get(param) for param in params]
        rows[name] = _column([0.0 if v is None else float(v.sum()) for v in found])
        rows[f"count_{name}"] = _column([0 if v is None else len(v) for v in found])


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


class MeasuringRanks(NamedTuple):
    """The ranks that measure parts of a parameter, where they reduce, and how many matrices it has in all."""

    groups: tuple[ProcessGroup, ...]
    device: torch.device
    matrices: int


def sum_over_ranks(
    keys: Tensor, rows: dict[str, Tensor], shared: Mapping[int, MeasuringRanks]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Columns of matrices by their keys, those of shared parameters summed over ranks; a collective.

    Args:
        keys: the key of each column, ascending.
        rows: sums, each with one entry for each key; `numel` is above zero in every column that means something.
        shared: the first key of each shared parameter, whose matrices have the keys that follow.
    """
    table = torch.stack(list(rows.values()))
    found_keys, found = [], []
    alone = torch.ones(len(keys), dtype=torch.bool, device="cpu")
    by_groups: dict[tuple[ProcessGroup, ...], list[int]] = {}
    for first in sorted(shared):
        by_groups.setdefault(shared[first].groups, []).append(first)
    for groups, firsts in by_groups.items():
        numbers = [range(first, first + shared[first].matrices) for first in firsts]
        wanted = torch.tensor([*chain.from_iterable(numbers)], dtype=torch.int64, device="cpu")
        mine = torch.isin(keys, wanted)
        sums = table.new_zeros(len(rows), len(wanted))
        sums[:, torch.searchsorted(wanted, keys[mine])] = table[:, mine]
        device = shared[firsts[0]].device
        total = sums.to(device)
        for group in groups:
            dist.all_reduce(total, group=group)
        total = total.cpu()
        measured = total[list(rows).index("numel")] > 0
        found_keys.append(wanted[measured])
        found.append(total[:, measured])
        alone &= ~mine
    every = torch.cat([table[:, alone], *found], dim=1)
    return torch.cat([keys[alone], *found_keys]), dict(zip(rows, every, strict=True))


# 3. the record

Record = dict[str, Any]
Values = dict[str, float | int | None]

# What is known of an update that was skipped.
_KNOWN_WHEN_SKIPPED = ("weight_rms", "lr", "peak_lr", "spectral_norm", "condition", "numel")


def build(
    step: int,
    measured: Measurements,
    infos: Mapping[Tensor, ParameterInfo],
    spectra: Spectra,
    *,
    skipped: int,
    was_skipped: bool,
    parameters: bool,
) -> Record:
    """The record of update number `step`."""
    rows, found = parameter_columns(measured, infos, spectra)
    members: dict[tuple[str, ...], list[int]] = {
        ("all",): list(range(len(found))),
        ("decayed",): [i for i, info in enumerate(found) if info.decayed],
        **{("roles", role): chosen for role, chosen in _collect(info.role for info in found).items()},
        **{("layers", layer): chosen for layer, chosen in _collect(info.layer for info in found).items()},
    }
    record: Record = {"kind": "telemetry", "step": step, "all": {}, "decayed": {}, "roles": {}, "layers": {}}
    for (first, *rest), values in zip(members, describe(pooled(rows, list(members.values()))), strict=True):
        if rest:
            record[first][rest[0]] = values
        else:
            record[first] = values
    if parameters:
        described = describe(rows)
        record["parameters"] = dict(
            zip((info.name for info in found), map(_own, described, rows["matrices"].tolist()), strict=True)
        )
    if was_skipped:
        _forget_update(record)
    return {**record, "skipped": skipped, "was_skipped": was_skipped}


def describe(rows: Rows) -> list[Values]:
    """Columns of sums as the values of the record, None where a value does not exist or is not finite."""
    numel = rows["numel"]
    values = {
        "weight_rms": (rows["ww"] / numel).sqrt(),
        "update_rms": (rows["uu"] / numel).sqrt(),
        "relative_update": (rows["uu"] / rows["ww"]).sqrt(),
        "applied_rms": (rows["dd"] / numel).sqrt(),
        "gradient_rms": (rows["gg"] / numel).sqrt(),
    }
    values |= {name: rows[name] / rows[f"count_{name}"] for name in ("decay", "lr", "peak_lr")}
    for name, (product, left, right) in ALIGNMENTS.items():
        values[name] = rows[product] / (rows[left].sqrt() * rows[right].sqrt())
        values[f"{name}_mean"] = rows[f"{name}_mean"] / rows[f"count_{name}_mean"]
    values |= {name: rows[name] / rows[f"count_{name}"] for name in PER_MATRIX}
    columns = zip(*(column.tolist() for column in values.values()), strict=True)
    described: list[Values] = [dict(zip(values, map(_finite, column), strict=True)) for column in columns]
    for name in PER_MATRIX:
        for entry, count in zip(described, rows[f"count_{name}"].tolist(), strict=True):
            if not count:
                del entry[name]
    for entry, count in zip(described, numel.tolist(), strict=True):
        entry["numel"] = int(count)
    return described


def _own(values: Values, matrices: float) -> Values:
    """The values of one parameter; means over its matrices say nothing new where it is one."""
    return values if matrices > 1 else {name: v for name, v in values.items() if not name.endswith("_mean")}


def _forget_update(record: Record) -> None:
    """A skipped update has no size and no direction; zeros would claim otherwise."""
    nested = (v for key in ("roles", "layers", "parameters") for v in record.get(key, {}).values())
    for values in (record["all"], record["decayed"], *nested):
        for name in values:
            if name not in _KNOWN_WHEN_SKIPPED:
                values[name] = None


def _collect(keys: Iterable[str | None]) -> dict[str, list[int]]:
    """Which positions share a key; None is no key. Layers come in the order of their numbers."""
    found: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        if key is not None:
            found.setdefault(key, []).append(position)
    return dict(
        sorted(found.items(), key=lambda item: (not item[0].isdecimal(), int(item[0]) if item[0].isdecimal() else 0))
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
