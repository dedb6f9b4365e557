"""What is known about each parameter, and the way from the measurements of one update to its record.

Measured are norms and inner products of weights with what moves them, for each matrix: an expert of a stack, a part of
a fused projection, or a whole tensor. Sums of squares and of inner products add up over ranks, matrices, roles and
layers; the means and cosines of a record are computed from sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muonsw import peak, rates
from muonsw.addons.norm_rules import acts
from muonsw.algorithms import ALGORITHMS
from muonsw.distributed.shards import local, offset
from muonsw.matrices import STACK, WHOLE, MatrixCell, MatrixView, Region, box
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.routing import classify
from muonsw.slots import wide_dtype
from muonsw.work import Group, names_of

# Name, role and matrix view of a model's parameters.
ModelView = dict[Tensor, tuple[str, str, str | None]]
_UNKNOWN = (None, None, None)
Record = dict[str, Any]
Sums = dict[str, float]

# w is the weight before the update, u the update, g the gradient, m the momentum after the update, d the change of the
# stored weight, `decayed` those elements of w that decay acts on, `ww_momentum` the square of w if it has a momentum.
SQUARES = ("ww", "ww_momentum", "decayed", "uu", "gg", "mm", "dd")
PRODUCTS = ("wu", "wg", "wm")
MEASURED = ("numel", *SQUARES, *PRODUCTS)

# Each cosine: its inner product, and the squares it divides by.
ALIGNMENTS = {
    "alignment_update": ("wu", "ww", "uu"),
    "alignment_gradient": ("wg", "ww", "gg"),
    "alignment_momentum": ("wm", "ww_momentum", "mm"),
}
SETTINGS = ("decay", "lr", "peak_lr")
# What only matrices have.
PER_MATRIX = ("defect", "spectral_norm", "condition")
# What is known of an update that was skipped.
KNOWN_WHEN_SKIPPED = ("weight_rms", "lr", "peak_lr", "spectral_norm", "condition", "numel")


class Matrices(NamedTuple):
    """The matrices of a parameter, each measured by itself; equal on every rank."""

    cells: list[MatrixCell]  # regions of equal matrices; one of 0 rows where the parameter is measured as a whole
    stack: torch.Size  # the leading axes of the parameter, which count the matrices of each cell
    lengths: list[float]  # the norm of an orthogonal direction of each cell after its shape scale, 0 if there is none

    @classmethod
    def of(cls, optimizer: Optimizer, group: Group, param: Tensor, view: ModelView) -> Matrices:
        """The matrices that our optimizers see, the experts of a stack, or the parameter as it is."""
        shape = param.shape
        rule = ALGORITHMS[group["algorithm"]] if isinstance(optimizer, ScaledDecayOptimizer) else None
        if rule is not None and rule.matrices is not None:
            matrix_view = MatrixView.of(group)
        else:
            matrix = group.get("matrix") or view.get(param, _UNKNOWN)[2]
            matrix_view = MatrixView(matrix or (STACK if group.get("role") == "experts" else None))
            if len(shape) < 2 or (len(shape) > 2 and matrix_view.matrix is None):
                return cls([MatrixCell(WHOLE, 0, 0)], shape[:0], [0.0])
        cells = list(matrix_view.cells(shape))
        lengths = [0.0] * len(cells)
        if rule is not None and rule.matrices is not None and group["algorithm"] == "muon" and not acts(group):
            scales = [rule.matrices.scale(group, *matrix_view.out_in(cell.rows, cell.columns)) for cell in cells]
            lengths = [s * min(cell.rows, cell.columns) ** 0.5 for s, cell in zip(scales, cells, strict=True)]
        return cls(cells, shape[: matrix_view.stack_axes(len(shape))], lengths)

    @property
    def total(self) -> int:
        return len(self.cells) * self.stack.numel()

    def batches(self, param: Tensor) -> list[Tensor]:
        """The matrices of a whole parameter as batches (count, m, n); none of what is not known to hold matrices."""
        cells = [cell for cell in self.cells if param.numel() and cell.rows * cell.columns]
        return [cell.region.of(param).reshape(-1, cell.rows, cell.columns) for cell in cells]

    def rows(self, param: Tensor) -> list[Rows]:
        """What this rank holds of the matrices, those of one size together."""
        held, axes = local(param).shape, len(self.stack)
        here = box(offset(param), held)
        places = torch.arange(self.stack.numel(), dtype=torch.int64, device="cpu").view(self.stack)
        numbers = places[here.slices[:axes]].flatten()
        by_area: dict[int, Rows] = {}
        for index, cell in enumerate(self.cells):
            region = cell.region.within(here)
            shape = region.shape_in(held)
            if shape.numel():
                area = math.prod(shape[axes:])
                rows = by_area.setdefault(area, Rows(area, wide_dtype(param.dtype), [], []))
                rows.regions.append(WHOLE if shape == held else region)
                rows.numbers.extend((numbers + index * self.stack.numel()).tolist())
        return list(by_area.values())


class Rows(NamedTuple):
    """Matrices as rows of `area` elements: where they lie in a shard, and their numbers in the whole parameter."""

    area: int
    dtype: torch.dtype
    regions: list[Region]
    numbers: list[int]

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor that has the shape of the parameter."""
        rows = [region.of(local(tensor)).reshape(-1, self.area) for region in self.regions]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(self.dtype)


class ParameterInfo(NamedTuple):
    """Name, role, layer and matrices of a parameter, and the settings of its group at this update.

    `decayed` is whether the group has a weight decay, `decay` is phi of this update, None where it is not known.
    """

    group: Group
    name: str
    role: str | None
    layer: str | None
    decayed: bool
    lr: float
    peak_lr: float | None
    decay: float | None
    matrices: Matrices


def parameter_infos(optimizer: Optimizer, view: ModelView, phis: Sequence[float | None]) -> dict[Tensor, ParameterInfo]:
    """Describe every parameter, given the decay of each group; reads learning rates that are held in tensors."""
    infos = {}
    for number, (group, phi) in enumerate(zip(optimizer.param_groups, phis, strict=True)):
        lam = group.get("base_weight_decay", group.get("weight_decay"))
        lr, decayed, peak_lr = float(group.get("lr", math.nan)), bool(lam), None
        settings = {"peak": "group", **group, "weight_decay": lam}
        if decayed and "resolved_peak_lr" in group and rates.needs_peak(settings):
            peak_lr = peak.eta_max(settings)
        for param, place in zip(group["params"], names_of(group, number), strict=True):
            known, role, _ = view.get(param, _UNKNOWN)
            name = place if group.get("param_names") else known or place
            role, layer = group.get("role") or role, layer_of(name)
            matrices = Matrices.of(optimizer, group, param, view)
            infos[param] = ParameterInfo(group, name, role, layer, decayed, lr, peak_lr, phi, matrices)
    return infos


def model_view(model: nn.Module | None) -> ModelView:
    routed = () if model is None else classify(model)
    return {entry.param: (entry.name, entry.role, entry.view.get("matrix")) for entry in routed}


def layer_of(name: str) -> str | None:
    """The first number in a dotted name: '3' of 'layers.3.moe.experts.7.down'."""
    return next((str(int(word)) for word in name.split(".") if word.isdecimal()), None)


class Sample(NamedTuple):
    """What was measured at one update: a table for each parameter, with a row for each name in `MEASURED`."""

    infos: dict[Tensor, ParameterInfo]
    tables: dict[Tensor, Tensor]
    spectra: dict[Tensor, dict[str, Tensor]]
    skipped: int
    was_skipped: bool


def build(step: int, sample: Sample, *, parameters: bool) -> Record:
    rows = []
    for param, info in sample.infos.items():
        sums = parameter_sums(info, sample.tables[param], sample.spectra.get(param, {}))
        if sums["numel"]:
            rows.append((info, sums))

    def pooled(parts: list[Sums]) -> Record:
        return describe({name: sum(sums[name] for sums in parts) for name in ALL_SUMS}, sample.was_skipped)

    roles = dict.fromkeys(info.role for info, _ in rows if info.role is not None)
    layers = sorted({info.layer for info, _ in rows if info.layer is not None}, key=int)
    record: Record = {"kind": "telemetry", "step": step}
    record["all"] = pooled([sums for _, sums in rows])
    record["decayed"] = pooled([sums for info, sums in rows if info.decayed])
    record["roles"] = {role: pooled([sums for info, sums in rows if info.role == role]) for role in roles}
    record["layers"] = {layer: pooled([sums for info, sums in rows if info.layer == layer]) for layer in layers}
    if parameters:
        record["parameters"] = {info.name: describe(sums, sample.was_skipped) for info, sums in rows}
        for values, (_, sums) in zip(record["parameters"].values(), rows, strict=True):
            for name in ALIGNMENTS if sums["matrices"] == 1 else ():  # means over matrices say nothing new
                del values[f"{name}_mean"]
    return {**record, "skipped": sample.skipped, "was_skipped": sample.was_skipped}


# Names of what adds up over parameters; `count_x` is by how much the sum `x` is divided.
MEANS = (*(f"{name}_mean" for name in ALIGNMENTS), *SETTINGS, *PER_MATRIX)
ALL_SUMS = (*MEASURED, "matrices", *MEANS, *(f"count_{name}" for name in MEANS))


def parameter_sums(info: ParameterInfo, table: Tensor, spectra: dict[str, Tensor]) -> Sums:
    sums: Sums = dict.fromkeys(ALL_SUMS, 0.0)
    cosines: dict[str, list[float]] = {name: [] for name in ALIGNMENTS}
    # The norm that the update of each matrix would have if its direction were orthogonal.
    lengths = [info.lr * length for length in info.matrices.lengths for _ in range(info.matrices.stack.numel())]
    for column, length in zip(table.T.tolist(), lengths, strict=True):
        of = dict(zip(MEASURED, column, strict=True))
        if not of["numel"]:
            continue
        sums["matrices"] += 1
        for name, value in of.items():
            sums[name] += value
        if length > 0:
            sums["defect"] += math.sqrt(of["uu"]) / length
            sums["count_defect"] += 1
        for name, (product, left, right) in ALIGNMENTS.items():
            if of[left] != 0 and of[right] != 0:  # a NaN is defined: it must show
                cosines[name].append(_cosine(of[product], of[left], of[right]))
    for name, found in cosines.items():
        if found:
            sums[f"{name}_mean"], sums[f"count_{name}_mean"] = sum(found) / len(found), 1
    for name, setting in zip(SETTINGS, (info.decay, info.lr, info.peak_lr), strict=True):
        if setting is not None:
            sums[name], sums[f"count_{name}"] = setting * sums["numel"], sums["numel"]
    if sums["ww"] != 0 and info.decay is not None:
        sums["decay"] *= sums["decayed"] / sums["ww"]  # cautious decay spares some elements
    for name, values in spectra.items():
        sums[name], sums[f"count_{name}"] = float(values.sum()), len(values)
    return sums


def describe(sums: Sums, was_skipped: bool) -> Record:
    """The values of a record from sums, None where a value does not exist or is not finite."""
    numel = sums["numel"]
    values = {
        "weight_rms": math.sqrt(_ratio(sums["ww"], numel)),
        "update_rms": math.sqrt(_ratio(sums["uu"], numel)),
        "relative_update": math.sqrt(_ratio(sums["uu"], sums["ww"])),
        "applied_rms": math.sqrt(_ratio(sums["dd"], numel)),
        "gradient_rms": math.sqrt(_ratio(sums["gg"], numel)),
    }
    values |= {name: _ratio(sums[name], sums[f"count_{name}"]) for name in SETTINGS}
    for name, (product, left, right) in ALIGNMENTS.items():
        values[name] = _cosine(sums[product], sums[left], sums[right])
        values[f"{name}_mean"] = _ratio(sums[f"{name}_mean"], sums[f"count_{name}_mean"])
    values |= {name: _ratio(sums[name], sums[f"count_{name}"]) for name in PER_MATRIX if sums[f"count_{name}"]}
    # A skipped update has no size and no direction; zeros would claim otherwise.
    known: Iterable[str] = KNOWN_WHEN_SKIPPED if was_skipped else values
    finite = {name: value if math.isfinite(value) and name in known else None for name, value in values.items()}
    return {**finite, "numel": int(numel)}


def _ratio(x: float, y: float) -> float:
    return x / y if y else math.nan


def _cosine(product: float, left: float, right: float) -> float:
    cosine = _ratio(product, math.sqrt(left) * math.sqrt(right))
    return cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))  # rounding may lead beyond
