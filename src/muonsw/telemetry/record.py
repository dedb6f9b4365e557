"""From the measurements of one update to its record.

Measured are norms and inner products of weights with what moves them, for each matrix: an expert of a stack, a part of
a fused projection, or a whole tensor. Sums of squares and of inner products add up over ranks, matrices, roles and
layers; the means and cosines of a record are computed from sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from muonsw.telemetry.parameters import ParameterInfo

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
