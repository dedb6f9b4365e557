"""What telemetry knows about each parameter besides its values: name, role, layer, settings, and its matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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
