"""What is known of each parameter besides its values: name, role, layer, settings, and how it is seen as matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muonsw import peak, rates
from muonsw.algorithms import ALGORITHMS
from muonsw.matrices import FLATTEN, STACK
from muonsw.routing import classify
from muonsw.work import Group

ModelView = dict[Tensor, tuple[str, str, str | None]]
_UNKNOWN = (None, None, None)


class ParameterInfo(NamedTuple):
    """Name, role and layer of a parameter, and the settings of its group at this update."""

    name: str
    role: str | None
    layer: str | None
    decayed: bool
    lr: float
    peak_lr: float | None
    matrix: str | None


def model_view(model: nn.Module | None) -> ModelView:
    """Name, role and matrix view of a model's parameters."""
    routed = () if model is None else classify(model)
    return {entry.param: (entry.name, entry.role, entry.view.get("matrix")) for entry in routed}


def members(optimizer: Optimizer) -> Iterator[tuple[Group, str | None, str, Tensor]]:
    """Every parameter of an optimizer: its group, its name or None, its position in words, and itself."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or ()
        known = len(names) == len(group["params"])  # not where a framework has put other parameters there, as ZeRO does
        for index, param in enumerate(group["params"]):
            yield group, names[index] if known else None, f"parameter {index} of group {number}", param


def parameter_infos(optimizer: Optimizer, view: ModelView) -> dict[Tensor, ParameterInfo]:
    """What is known of every parameter; reads learning rates that are held in tensors."""
    settings = {id(group): _settings(group) for group in optimizer.param_groups}
    infos = {}
    for group, given, words, param in members(optimizer):
        known, role, _ = view.get(param, _UNKNOWN)
        name = given or known
        lr, peak_lr, decayed = settings[id(group)]
        infos[param] = ParameterInfo(
            name or words,
            group.get("role") or role,
            layer_of(name) if name else None,
            decayed,
            lr,
            peak_lr,
            matrix_view(group, param, view),
        )
    return infos


def layer_of(name: str) -> str | None:
    """The first number in a dotted name.

    Examples:
        >>> layer_of("layers.3.moe.experts.7.down"), layer_of("embedding.weight")
        ('3', None)
    """
    return next((str(int(word)) for word in name.split(".") if word.isdecimal()), None)


def matrix_view(group: Group, param: Tensor, view: ModelView) -> str | None:
    """How a parameter is seen as matrices: "stack", "flatten", or None for one tensor that is one unit."""
    if param.dim() < 3:
        return None
    chosen = group.get("matrix") or view.get(param, _UNKNOWN)[2]
    return STACK if chosen is None and group.get("role") == "experts" else chosen


def matrices(group: Group, param: Tensor, view: str | None) -> list[Tensor]:
    """The matrices of a parameter as batches (count, m, n); none for vectors and for axes of unknown meaning."""
    if param.dim() < 2 or (param.dim() > 2 and view is None) or param.numel() == 0:
        return []
    parts: Sequence[Tensor] = (param,)
    own = ALGORITHMS[group["algorithm"]].view(group) if "algorithm" in group else None
    sizes = None if own is None else own.sizes(param.shape)
    if own is not None and sizes is not None:
        parts = torch.split_with_sizes(param, list(sizes), dim=own.split_axis(param.shape))
    if view == FLATTEN:
        return [part.reshape(1, part.shape[0], -1) for part in parts]
    return [part.reshape(-1, *part.shape[-2:]) for part in parts]


def _settings(group: Group) -> tuple[float, float | None, bool]:
    """Learning rate, the peak that decay divides by, and whether the group is decayed at all."""
    lam = group.get("base_weight_decay", group.get("weight_decay", 0.0))
    decayed = _number(lam) != 0
    known = {"peak": "group", **group, "weight_decay": lam}
    divides = decayed and "resolved_peak_lr" in group and rates.needs_peak(known)
    return _number(group.get("lr", float("nan"))), peak.eta_max(known) if divides else None, decayed


def _number(value: Any) -> float:
    return float(value) if value is not None else 0.0
