"""From the measurements of one update to its record.

1. **Measurements** are norms and inner products of weights with what moves them, for each matrix (an expert of a stack,
   a part of a fused projection, or a whole tensor), kept on the device until a sample is complete.
2. **Sums** of squares, of inner products, and of settings times the number of elements, for each matrix and then for
   each parameter. Sums of parts add up to the sum of the whole: over ranks, roles and layers.
3. **The record** has means and cosines: of each parameter, and of all, the decayed, each role and each layer together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.distributed.shards import local
from muonsw.telemetry.parameters import ParameterInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Record = dict[str, Any]
# Vectors with an element for each matrix or parameter.
Sums = dict[str, Tensor]

# 1. measurements

# w is the weight before the update, u the update, g the gradient, m the momentum after the update, d the change of the
# stored weight, `decayed` those elements of w that decay acts on, `ww_momentum` the square of w if it has a momentum.
# The roots of squares are measured.
SQUARES = ("ww", "ww_momentum", "decayed", "uu", "gg", "mm", "dd")
PRODUCTS = ("wu", "wg", "wm")

# Rows of more elements than this are summed in pieces: float32 sums lose digits with their length.
LONGEST = 2**16


class Measured(NamedTuple):
    """Matrices of a parameter, by their numbers in it, of each of which `area` elements were measured here.

    `values` are vectors by the names in `SQUARES` and `PRODUCTS`, with one element for each matrix.
    """

    param: Tensor
    numbers: Sequence[int]
    area: int
    values: dict[str, Tensor]


class Sample(NamedTuple):
    """What was measured at one update; `shared` are the groups of ranks that measure parts of a parameter."""

    infos: dict[Tensor, ParameterInfo]
    measured: list[Measured]
    shared: dict[Tensor, tuple[ProcessGroup, ...]]
    spectra: dict[Tensor, dict[str, Tensor]]
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


# 2. sums

# Each cosine: its inner product, and the squares it divides by.
ALIGNMENTS = {
    "alignment_update": ("wu", "ww", "uu"),
    "alignment_gradient": ("wg", "ww", "gg"),
    "alignment_momentum": ("wm", "ww_momentum", "mm"),
}

# What only matrices have: a sum over matrices, and under `count_` how many there are.
PER_MATRIX = ("defect", "spectral_norm", "condition")


def matrix_sums(sample: Sample) -> Sums:
    """Sums over ranks for each matrix of each parameter in turn, as float64 on the CPU; zero where nothing moved."""
    counts = {param: info.matrices.total for param, info in sample.infos.items()}
    firsts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    names = (*SQUARES, *PRODUCTS)
    table = torch.zeros(1 + len(names), sum(counts.values()), dtype=torch.float64, device="cpu")
    by_device: dict[torch.device, list[Measured]] = {}
    for entry in sample.measured:
        by_device.setdefault(entry.values["ww"].device, []).append(entry)
    for entries in by_device.values():  # one transfer for each
        values = []
        for entry in entries:
            zero = torch.zeros_like(entry.values["ww"])
            values.append(torch.stack([entry.values.get(name, zero) for name in names]))
        columns = _indices(firsts[entry.param] + number for entry in entries for number in entry.numbers)
        table[0, columns] = _column([entry.area for entry in entries for _ in entry.numbers])
        table[1:, columns] = torch.cat(values, dim=1).cpu().double()
    table[1 : 1 + len(SQUARES)].square_()
    # What has overflowed is NaN: over infinity an alignment or a relative size would be zero.
    table[~table.isfinite()] = torch.nan

    for groups in dict.fromkeys(sample.shared.values()):
        params = [param for param, ranks in sample.shared.items() if ranks == groups]
        columns = _indices(firsts[param] + number for param in params for number in range(counts[param]))
        total = table[:, columns].to(local(params[0]).device)
        for group in groups:
            dist.all_reduce(total, group=group)
        table[:, columns] = total.cpu()
    return dict(zip(("numel", *names), table, strict=True))


def parameter_sums(sample: Sample) -> tuple[Sums, list[ParameterInfo]]:
    """One column for each parameter that was measured, in the order of the optimizer, and what is known of each."""
    infos, sums = list(sample.infos.values()), matrix_sums(sample)
    sums["matrices"] = (sums["numel"] > 0).double()
    # The norm that each update would have if its direction were orthogonal.
    orthogonal = _column(
        [i.lr * length for i in infos for length in i.matrices.lengths for _ in range(i.matrices.stack.numel())]
    )
    has_defect = (orthogonal > 0) & (sums["numel"] > 0)
    sums["defect"] = torch.where(has_defect, sums["uu"].sqrt() / orthogonal, 0.0)
    sums["count_defect"] = has_defect.double()
    for name, (product, left, right) in ALIGNMENTS.items():
        defined = ~((sums[left] == 0) | (sums[right] == 0))  # a NaN is defined: it must show
        cosines = _cosine(sums[product], sums[left], sums[right])
        sums[name], sums[f"count_{name}"] = torch.where(defined, cosines, 0.0), defined.double()

    owners = torch.repeat_interleave(_indices(info.matrices.total for info in infos))
    table = torch.stack([*sums.values()])
    sums = dict(zip(sums, table.new_zeros(len(sums), len(infos)).index_add(1, owners, table), strict=True))
    for name in ALIGNMENTS:
        cosines, count = sums.pop(name), sums.pop(f"count_{name}")
        sums[f"{name}_mean"] = torch.where(count > 0, cosines / count, 0.0)
        sums[f"count_{name}_mean"] = (count > 0).double()
    # Decay, learning rate and peak, each times the number of elements that have one.
    for name in ("decay", "lr", "peak_lr"):
        settings = [getattr(info, name) for info in infos]
        sums[name] = _column([setting or 0.0 for setting in settings]) * sums["numel"]
        sums[f"count_{name}"] = _column([setting is not None for setting in settings]) * sums["numel"]
    acted_on = torch.where((sums["ww"] == 0) | (sums["count_decay"] == 0), 1.0, sums["decayed"] / sums["ww"])
    sums["decay"] *= acted_on
    for name in ("spectral_norm", "condition"):
        spectra = [sample.spectra.get(param, {}).get(name) for param in sample.infos]
        sums[name] = _column([0.0 if values is None else float(values.sum()) for values in spectra])
        sums[f"count_{name}"] = _column([0 if values is None else len(values) for values in spectra])
    measured = sums["numel"] > 0
    chosen = [info for info, is_measured in zip(infos, measured.tolist(), strict=True) if is_measured]
    return {name: row[measured] for name, row in sums.items()}, chosen


def _cosine(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (product / (left.sqrt() * right.sqrt())).clamp(-1.0, 1.0)  # rounding may lead beyond


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _indices(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64, device="cpu")


# 3. the record

# What is known of an update that was skipped.
_KNOWN_WHEN_SKIPPED = ("weight_rms", "lr", "peak_lr", "spectral_norm", "condition", "numel")


def build(step: int, sample: Sample, *, parameters: bool) -> Record:
    """The record of update number `step`."""
    sums, infos = parameter_sums(sample)
    roles, layers = _positions(info.role for info in infos), _positions(info.layer for info in infos)
    layers = dict(sorted(layers.items(), key=lambda entry: int(entry[0])))
    decayed = [column for column, info in enumerate(infos) if info.decayed]
    table = torch.stack([*sums.values()])
    pools = [range(len(infos)), decayed, *roles.values(), *layers.values()]
    pooled = torch.stack([table[:, _indices(columns)].sum(1) for columns in pools], dim=1)
    of_all, of_decayed, *others = described = describe(dict(zip(sums, pooled, strict=True)))
    record: Record = {"kind": "telemetry", "step": step, "all": of_all, "decayed": of_decayed}
    record["roles"] = dict(zip(roles, others, strict=False))
    record["layers"] = dict(zip(layers, others[len(roles) :], strict=True))
    if parameters:
        singles = describe(sums)
        for values, matrices in zip(singles, sums["matrices"].tolist(), strict=True):
            if matrices == 1:  # means over matrices say nothing new
                for name in ALIGNMENTS:
                    del values[f"{name}_mean"]
        record["parameters"] = dict(zip([info.name for info in infos], singles, strict=True))
        described += singles
    if sample.was_skipped:  # it has no size and no direction; zeros would claim otherwise
        for values in described:
            values.update(dict.fromkeys(values.keys() - _KNOWN_WHEN_SKIPPED))
    return {**record, "skipped": sample.skipped, "was_skipped": sample.was_skipped}


def describe(sums: Sums) -> list[Record]:
    """The values of the record from sums, None where a value does not exist or is not finite."""
    numel = sums["numel"]
    values = {
        "weight_rms": (sums["ww"] / numel).sqrt(),
        "update_rms": (sums["uu"] / numel).sqrt(),
        "relative_update": (sums["uu"] / sums["ww"]).sqrt(),
        "applied_rms": (sums["dd"] / numel).sqrt(),
        "gradient_rms": (sums["gg"] / numel).sqrt(),
    }
    values |= {name: sums[name] / sums[f"count_{name}"] for name in ("decay", "lr", "peak_lr")}
    for name, (product, left, right) in ALIGNMENTS.items():
        values[name] = _cosine(sums[product], sums[left], sums[right])
        values[f"{name}_mean"] = sums[f"{name}_mean"] / sums[f"count_{name}_mean"]
    values |= {name: sums[name] / sums[f"count_{name}"] for name in PER_MATRIX}
    described: list[Record] = []
    columns = zip(*(row.tolist() for row in values.values()), strict=True)
    counts = zip(*(sums[f"count_{name}"].tolist() for name in PER_MATRIX), strict=True)
    for column, count, elements in zip(columns, counts, numel.tolist(), strict=True):
        lacking = {name for name, number in zip(PER_MATRIX, count, strict=True) if not number}
        finite = [number if math.isfinite(number) else None for number in column]
        entry = {name: number for name, number in zip(values, finite, strict=True) if name not in lacking}
        described.append({**entry, "numel": int(elements)})
    return described


def _positions(keys: Iterable[str | None]) -> dict[str, list[int]]:
    """Which positions share a key; None is no key."""
    positions: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        if key is not None:
            positions.setdefault(key, []).append(position)
    return positions
