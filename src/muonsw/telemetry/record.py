"""The record of one update: values of each parameter, and of all, the decayed, each role and each layer together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from muonsw.telemetry.measurements import Measurements
from muonsw.telemetry.parameters import ParameterInfo
from muonsw.telemetry.pooling import ALIGNMENTS, PER_MATRIX, Rows, parameter_columns, pooled
from muonsw.telemetry.spectrum import Spectra

Record = dict[str, Any]
Values = dict[str, float | int | None]

# What there is to tell of an update that was skipped.
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
