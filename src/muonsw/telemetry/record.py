"""Turn the measurements of one step into a record.

Each matrix (an expert of a stack, a part of a fused projection, or a whole tensor) has squared norms and inner products
of its weight, gradient, update and momentum. These add up over ranks, matrices, roles and layers; a record's means and
cosines are computed from the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from muonsw import peak
from muonsw.addons.norm_rules import Matrices, acts
from muonsw.algorithms import ALGORITHMS
from muonsw.decay import needs_peak
from muonsw.matrices import MatrixView
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.routing import classify
from muonsw.work import Group, names_of

# Name, role and matrix view of a model's parameters.
ModelView = dict[Tensor, tuple[str, str, str | None]]
Record = dict[str, Any]

# w is the weight before the step, u the update, g the gradient, m the momentum after the step, d the change of the
# stored weight, `decayed` the elements of w that decay acts on, `ww_momentum` the square of w if it has a momentum.
SQUARES = ("ww", "ww_momentum", "decayed", "uu", "gg", "mm", "dd")
PRODUCTS = ("wu", "wg", "wm")
MEASURED = ("numel", *SQUARES, *PRODUCTS)

# Each cosine: its inner product and the two squared norms.
ALIGNMENTS = {
    "alignment_update": ("wu", "ww", "uu"),
    "alignment_gradient": ("wg", "ww", "gg"),
    "alignment_momentum": ("wm", "ww_momentum", "mm"),
}
SETTINGS = ("decay", "lr", "peak_lr")
# Values that only matrices have.
PER_MATRIX = ("defect", "spectral_norm", "condition")
MEANS = (*(f"{name}_mean" for name in ALIGNMENTS), *SETTINGS, *PER_MATRIX)
# Values that a skipped step has.
KNOWN_WHEN_SKIPPED = ("weight_rms", "lr", "peak_lr", "spectral_norm", "condition", "numel")


class ParameterInfo(NamedTuple):
    """Facts about a parameter at this step that need no measurement."""

    group: Group
    name: str
    role: str | None
    layer: str | None
    decayed: bool  # whether its group has a weight decay
    lr: float
    peak_lr: float | None
    decay: float | None  # phi, None if unknown
    view: MatrixView | None  # as the step's algorithm saw it
    matrices: Matrices
    lengths: list[float]  # the norm of an orthogonal update of each cell, 0 if there is none


def parameter_infos(
    optimizer: Optimizer, model: ModelView, phis: Sequence[float | None]
) -> dict[Tensor, ParameterInfo]:
    """Describe every parameter, given each group's decay; waits for learning rates in device tensors."""
    infos = {}
    for number, (group, phi) in enumerate(zip(optimizer.param_groups, phis, strict=True)):
        lam = group.get("base_weight_decay", group.get("weight_decay"))
        lr, decayed, peak_lr, view = float(group.get("lr", math.nan)), bool(lam), None, None
        settings = {"peak": "group", **group, "weight_decay": lam}
        if "resolved_peak_lr" in group and needs_peak(settings):
            peak_lr = peak.eta_max(settings)
        rule = ALGORITHMS[group["algorithm"]] if isinstance(optimizer, ScaledDecayOptimizer) else None
        if rule is not None:
            view = rule.view(group)
            if view is not None and group.get("block_period") and group["update_count"] % group["block_period"] == 0:
                view = view.unsplit()  # as the step did
        for param, place in zip(group["params"], names_of(group, number), strict=True):
            known, role, matrix = model.get(param, (None, None, None))
            name = place if group.get("param_names") else known or place
            matrices = Matrices.of(group, param.shape, view, matrix)
            lengths = [0.0] * len(matrices.cells)
            if rule is not None and rule.matrices is not None and group["algorithm"] == "muon" and not acts(group):
                assert view is not None
                sizes = [(cell.rows, cell.columns) for cell in matrices.cells]
                lengths = [lr * rule.matrices.scale(group, *view.out_in(*size)) * min(size) ** 0.5 for size in sizes]
            layer = next((str(int(word)) for word in name.split(".") if word.isdecimal()), None)
            role = group.get("role") or role
            infos[param] = ParameterInfo(group, name, role, layer, decayed, lr, peak_lr, phi, view, matrices, lengths)
    return infos


def model_view(model: nn.Module | None) -> ModelView:
    routed = () if model is None else classify(model)
    return {entry.param: (entry.name, entry.role, entry.view.get("matrix")) for entry in routed}


class Measured(NamedTuple):
    """One parameter: sums over its matrices for each name in `MEASURED`, and means with their weights."""

    info: ParameterInfo
    matrices: int
    sums: dict[str, float]
    means: dict[str, tuple[float, float]]


def describe_step(entries: list[Measured], *, was_skipped: bool, parameters: bool) -> Record:
    """The values of all measured parameters, and by role, layer and name."""

    def pooled(key: str) -> Record:
        members: dict[str | None, list[Measured]] = {}
        for entry in entries:
            members.setdefault(getattr(entry.info, key), []).append(entry)
        return {value: describe(chosen, was_skipped) for value, chosen in members.items() if value is not None}

    layers = pooled("layer")
    record: Record = {
        "all": describe(entries, was_skipped),
        "decayed": describe([entry for entry in entries if entry.info.decayed], was_skipped),
        "roles": pooled("role"),
        "layers": {layer: layers[layer] for layer in sorted(layers, key=int)},
    }
    if parameters:
        record["parameters"] = {entry.info.name: describe([entry], was_skipped) for entry in entries}
        for entry in entries:
            for name in ALIGNMENTS if entry.matrices == 1 else ():  # the mean over one matrix adds nothing
                del record["parameters"][entry.info.name][f"{name}_mean"]
    return record


def measured(info: ParameterInfo, table: Tensor, spectra: dict[str, Tensor]) -> Measured:
    exist = table[0] > 0
    of = dict(zip(MEASURED, table[:, exist], strict=True))
    sums = {name: float(values.sum()) for name, values in of.items()}
    means = {name: (value, sums["numel"]) for name in SETTINGS if (value := getattr(info, name)) is not None}
    if sums["ww"] != 0 and info.decay is not None:  # cautious decay spares some elements
        means["decay"] = info.decay * sums["decayed"] / sums["ww"], sums["numel"]
    for name, (product, left, right) in ALIGNMENTS.items():
        defined = (of[left] != 0) & (of[right] != 0)  # includes NaN, which must show
        if defined.any():
            x, y = of[left][defined].sqrt(), of[right][defined].sqrt()
            means[f"{name}_mean"] = float((of[product][defined] / (x * y)).clamp(-1, 1).mean()), 1
    lengths = table.new_tensor(info.lengths).repeat_interleave(info.matrices.stack.numel())[exist]
    values = {"defect": (of["uu"].sqrt() / lengths)[lengths > 0], **spectra}
    means |= {name: (float(each.mean()), len(each)) for name, each in values.items() if len(each)}
    return Measured(info, int(exist.sum()), sums, means)


def describe(entries: Sequence[Measured], was_skipped: bool) -> Record:
    """The values of several parameters together, None if a value is undefined or not finite."""
    total = {name: sum(entry.sums[name] for entry in entries) for name in MEASURED}
    values = {
        "weight_rms": math.sqrt(_ratio(total["ww"], total["numel"])),
        "update_rms": math.sqrt(_ratio(total["uu"], total["numel"])),
        "relative_update": math.sqrt(_ratio(total["uu"], total["ww"])),
        "applied_rms": math.sqrt(_ratio(total["dd"], total["numel"])),
        "gradient_rms": math.sqrt(_ratio(total["gg"], total["numel"])),
    }
    for name, (product, left, right) in ALIGNMENTS.items():
        cosine = _ratio(total[product], math.sqrt(total[left]) * math.sqrt(total[right]))
        values[name] = cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))  # against rounding
    for name in MEANS:
        pairs = [entry.means[name] for entry in entries if name in entry.means]
        if pairs or name not in PER_MATRIX:
            values[name] = _ratio(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))
    # A skipped step has no update, so its size must be None and not zero.
    unknown = values.keys() - KNOWN_WHEN_SKIPPED if was_skipped else ()
    finite = {name: value if math.isfinite(value) and name not in unknown else None for name, value in values.items()}
    return {**finite, "numel": int(total["numel"])}


def _ratio(x: float, y: float) -> float:
    return x / y if y else math.nan
