"""From what was measured at one update to its record: one pipeline, top to bottom.

1. **Measurements** are norms and inner products of weights with what moves them, one column for each matrix (an expert
   of a stack, a part of a fused projection, or a whole tensor), kept on the device until a sample is complete.
2. **Rows** hold sums (squares, inner products, values times the number of elements), so that the row of a larger part
   is the sum of the rows of its smaller parts: over ranks, to parameters, roles and layers.
3. **The record** has means and cosines: of each parameter, and of all, the decayed, each role and each layer together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
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

# w is the weight before the update, u the update, g the gradient, m the momentum after the update, d the change of the
# stored weight, `decayed` those elements of w that decay acts on. Measured are the roots of squares, and products.
SQUARES = ("ww", "decayed", "uu", "gg", "mm", "dd")
PRODUCTS = ("wu", "wg", "wm")

# Rows of more elements than this are summed in pieces: float32 sums lose digits with their length.
LONGEST = 2**16


class Measured(NamedTuple):
    """Matrices of a parameter, by their numbers in it, of each of which `area` elements were measured here.

    `orthogonal` are the norms that their updates would have if their directions were orthogonal, 0 where they are not
    orthogonalized; `phi` is the decay factor, None where it is not known. `values` are vectors by the names in
    `SQUARES` and `PRODUCTS`, with one element for each matrix.
    """

    param: Tensor
    numbers: Sequence[int]
    area: int
    orthogonal: Sequence[float]
    phi: float | None
    values: dict[str, Tensor]


class MeasuringRanks(NamedTuple):
    """The ranks that measure parts of a parameter, where they reduce, and how many matrices it has in all."""

    groups: tuple[ProcessGroup, ...]
    device: torch.device
    matrices: int


class Sample(NamedTuple):
    """What was measured at one update; `shared` are the parameters of which other ranks measure other parts."""

    measured: list[Measured]
    shared: dict[Tensor, MeasuringRanks]
    skipped: int
    was_skipped: bool


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of the rows of two (rows, elements) tensors."""
    products: Tensor = torch.linalg.vecdot(x, y)
    return products


def norm(x: Tensor) -> Tensor:
    """Euclidean norms of the rows of a (rows, elements) tensor."""
    rows, elements = x.shape
    pieces = elements // LONGEST
    norms: Tensor
    if elements <= LONGEST or x.dtype == torch.float64:
        norms = torch.linalg.vector_norm(x, dim=1)
    elif elements % pieces == 0:
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


def _device(entry: Measured) -> str:
    return str(entry.values["ww"].device)


def _measured_rows(measured: Sequence[Measured]) -> Rows:
    """One column for each matrix in turn, as float64 on the CPU; one transfer for each device."""
    names, constants = (*SQUARES, *PRODUCTS), ("numel", "orthogonal", "phi", "count_decay", "has_momentum")
    tables = [torch.zeros(len(names), 0, dtype=torch.float64, device="cpu")]
    for _, same in groupby(measured, _device):
        found = [entry.values for entry in same]
        zeros = [torch.zeros_like(values["ww"]) for values in found]
        columns = [values.get(name, zero) for name in names for values, zero in zip(found, zeros, strict=True)]
        tables.append(torch.cat(columns).cpu().double().view(len(names), -1))
    table = torch.cat(tables, dim=1)
    table[: len(SQUARES)].square_()
    known = [
        (e.area, length * e.area, (e.phi or 0.0) * e.area, (e.phi is not None) * e.area, "mm" in e.values)
        for e in measured
        for length in e.orthogonal
    ]
    # What has overflowed is NaN: over infinity an alignment or a relative size would be zero.
    rows = dict(zip(names, torch.where(table.isfinite(), table, torch.nan), strict=True))
    rows |= zip(
        constants, torch.tensor(known, dtype=torch.float64, device="cpu").view(-1, len(constants)).T, strict=True
    )
    rows["ww_momentum"] = torch.where(rows.pop("has_momentum") > 0, rows["ww"], 0.0)
    return rows


def _matrix_columns(sample: Sample, params: Sequence[Tensor]) -> tuple[Tensor, Rows]:
    """One column for each matrix, summed over ranks: the number of its parameter in `params`, and its rows."""
    measured = sorted(sample.measured, key=_device)
    counts = dict.fromkeys(params, 0)
    for entry in measured:
        counts[entry.param] = max(counts[entry.param], 1 + max(entry.numbers))
    counts |= {param: ranks.matrices for param, ranks in sample.shared.items()}
    firsts = dict(zip(params, accumulate(counts.values(), initial=0), strict=False))
    rows = _measured_rows(measured)
    table = torch.zeros(len(rows), sum(counts.values()), dtype=torch.float64, device="cpu")
    table[:, _indices(firsts[entry.param] + n for entry in measured for n in entry.numbers)] = torch.stack(
        [*rows.values()]
    )

    together: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for param in [param for param in params if param in sample.shared]:
        together.setdefault(sample.shared[param].groups, []).append(param)
    for groups, of_groups in together.items():
        columns = _indices(firsts[param] + n for param in of_groups for n in range(counts[param]))
        total = table[:, columns].to(sample.shared[of_groups[0]].device)
        for group in groups:
            dist.all_reduce(total, group=group)
        table[:, columns] = total.cpu()

    there = table[list(rows).index("numel")] > 0
    owners = torch.repeat_interleave(_indices(counts.values()))
    return owners[there], dict(zip(rows, table[:, there], strict=True))


def parameter_columns(
    sample: Sample, infos: Mapping[Tensor, ParameterInfo], spectra: Spectra
) -> tuple[Rows, list[ParameterInfo]]:
    """One column for each parameter that was measured, in the order of the optimizer, and what is known of each."""
    seen = {entry.param for entry in sample.measured} | sample.shared.keys()
    params = [param for param in infos if param in seen]
    owners, matrices = _matrix_columns(sample, params)
    present, owners = torch.unique(owners, return_inverse=True)
    params = [params[number] for number in present.tolist()]

    matrices["matrices"] = torch.ones_like(matrices["numel"])
    orthogonal = matrices.pop("orthogonal") / matrices["numel"]
    matrices["count_defect"] = (orthogonal > 0).double()
    matrices["defect"] = torch.where(orthogonal > 0, matrices["uu"].sqrt() / orthogonal, 0.0)
    for name, (product, left, right) in ALIGNMENTS.items():
        defined = ~((matrices[left] == 0) | (matrices[right] == 0))  # a NaN is defined: it must show
        cosines = _cosine(matrices[product], matrices[left], matrices[right])
        matrices[name], matrices[f"count_{name}"] = torch.where(defined, cosines, 0.0), defined.double()

    rows = _summed(matrices, owners, len(params))
    for name in ALIGNMENTS:
        cosines, count = rows.pop(name), rows.pop(f"count_{name}")
        rows[f"{name}_mean"] = torch.where(count > 0, cosines / count, 0.0)
        rows[f"count_{name}_mean"] = (count > 0).double()
    found = [infos[param] for param in params]
    # Decay, learning rate and peak, each times the number of elements that have one.
    acted_on = torch.where(rows["ww"] == 0, 1.0, rows["decayed"] / rows["ww"])
    rows["decay"] = torch.where(rows["count_decay"] > 0, rows["phi"] * acted_on, 0.0)
    rows["lr"], rows["count_lr"] = _column([info.lr for info in found]) * rows["numel"], rows["numel"]
    rows["peak_lr"] = _column([info.peak_lr or 0.0 for info in found]) * rows["numel"]
    rows["count_peak_lr"] = _column([info.peak_lr is not None for info in found]) * rows["numel"]
    for name in ("spectral_norm", "condition"):
        spectrum = [spectra.get(name, {}).get(param) for param in params]
        rows[name] = _column([0.0 if v is None else float(v.sum()) for v in spectrum])
        rows[f"count_{name}"] = _column([0 if v is None else len(v) for v in spectrum])
    return rows, found


def _cosine(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (product / (left.sqrt() * right.sqrt())).clamp(-1.0, 1.0)  # rounding may lead beyond


def _summed(rows: Rows, target: Tensor, size: int) -> Rows:
    """The rows with their columns added up into `size` new ones."""
    table = torch.stack([*rows.values()])
    return dict(zip(rows, table.new_zeros(len(rows), size).index_add(1, target, table), strict=True))


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _indices(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64, device="cpu")


# 3. the record

Record = dict[str, Any]
Values = dict[str, float | int | None]

# What is known of an update that was skipped.
_KNOWN_WHEN_SKIPPED = ("weight_rms", "lr", "peak_lr", "spectral_norm", "condition", "numel")


def build(
    step: int, sample: Sample, infos: Mapping[Tensor, ParameterInfo], spectra: Spectra, *, parameters: bool
) -> Record:
    """The record of update number `step`."""
    rows, found = parameter_columns(sample, infos, spectra)
    members: dict[tuple[str, ...], list[int]] = {
        ("all",): list(range(len(found))),
        ("decayed",): [i for i, info in enumerate(found) if info.decayed],
        **{("roles", role): chosen for role, chosen in _collect(info.role for info in found).items()},
        **{("layers", layer): chosen for layer, chosen in _collect(info.layer for info in found).items()},
    }
    chosen = _indices(column for columns in members.values() for column in columns)
    target = _indices(number for number, columns in enumerate(members.values()) for _ in columns)
    pooled = _summed({name: row[chosen] for name, row in rows.items()}, target, len(members))
    record: Record = {"kind": "telemetry", "step": step, "all": {}, "decayed": {}, "roles": {}, "layers": {}}
    for (first, *rest), values in zip(members, describe(pooled), strict=True):
        if rest:
            record[first][rest[0]] = values
        else:
            record[first] = values
    if parameters:
        record["parameters"] = {}
        for info, values, matrices in zip(found, describe(rows), rows["matrices"].tolist(), strict=True):
            # means over matrices say nothing new where there is one
            own = values if matrices > 1 else {k: v for k, v in values.items() if not k.endswith("_mean")}
            record["parameters"][info.name] = own
    if sample.was_skipped:  # it has no size and no direction; zeros would claim otherwise
        nested = (v for key in ("roles", "layers", "parameters") for v in record.get(key, {}).values())
        for values in (record["all"], record["decayed"], *nested):
            values.update(dict.fromkeys(values.keys() - _KNOWN_WHEN_SKIPPED))
    return {**record, "skipped": sample.skipped, "was_skipped": sample.was_skipped}


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
        values[name] = _cosine(rows[product], rows[left], rows[right])
        values[f"{name}_mean"] = rows[f"{name}_mean"] / rows[f"count_{name}_mean"]
    values |= {name: rows[name] / rows[f"count_{name}"] for name in PER_MATRIX}
    described: list[Values] = []
    columns = zip(*(row.tolist() for row in values.values()), strict=True)
    counts = zip(*(rows[f"count_{name}"].tolist() for name in PER_MATRIX), strict=True)
    for column, count, elements in zip(columns, counts, numel.tolist(), strict=True):
        lacking = {name for name, number in zip(PER_MATRIX, count, strict=True) if not number}
        entry = {name: _finite(value) for name, value in zip(values, column, strict=True) if name not in lacking}
        described.append({**entry, "numel": int(elements)})
    return described


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
