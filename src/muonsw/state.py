"""The state of a parameter: which tensors it has, in which dtype, and how they begin.

Keys are torch's own (`momentum_buffer`, `exp_avg`, `exp_avg_sq`, `step`), so that states of torch's optimizers load.
Honest rounding adds `compensation`, a norm rule `radius`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muonsw import norms
from muonsw.algorithms import ALGORITHMS
from muonsw.precision import LOW_PRECISION, state_dtype
from muonsw.work import Group, Item

# What honest rounding of a low-precision weight remembers.
_ROUNDING_KEYS = {"stochastic": ("step",), "kahan": ("compensation",), "nearest": ()}


def state_keys(group: Group, param: Tensor) -> tuple[str, ...]:
    """Every key that a parameter's state has once it has been stepped."""
    rounding = _ROUNDING_KEYS[group["rounding"]] if param.dtype in LOW_PRECISION else ()
    norm = () if group["norm"] == norms.FREE else norms.state_keys(group)
    return (*ALGORITHMS[group["algorithm"]].state_keys(group), *rounding, *norm)


def dtype_of(key: str, group: Group, param: Tensor) -> torch.dtype:
    """The dtype in which a tensor of the state is kept."""
    if key == "step":
        return torch.float32
    if key == "radius":
        return norms.wide_dtype(param)
    return param.dtype if key == "compensation" else state_dtype(group["state_dtype"], param.dtype)


def ensure_state(group: Group, items: Sequence[Item], leave_out: tuple[str, ...] = ()) -> None:
    """Create what the state of these parameters of one dtype lacks, except for keys that another rank keeps."""
    if not items:
        return
    for key in state_keys(group, items[0].param):
        if key not in leave_out:
            for item in [item for item in items if key not in item.state]:
                item.state[key] = _fresh(key, group, item)


def as_state(key: str, value: Any, group: Group, param: Tensor) -> Tensor:
    """A copy of a saved value as this key of a parameter's state: in its dtype, on its device, laid out like it."""
    dtype = dtype_of(key, group, param)
    if not isinstance(value, Tensor):  # older states count steps in plain numbers
        return torch.tensor(value, dtype=dtype, device=param.device)
    if key in ("step", "radius") or value.shape != param.shape or value.stride() == param.stride():
        return value.to(param.device, dtype, copy=True)
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).copy_(value)


def _fresh(key: str, group: Group, item: Item) -> Tensor:
    param = item.param
    if key == "radius":
        return norms.initial_radius(group, item.name, param)
    dtype = dtype_of(key, group, param)
    if key == "step":
        return torch.zeros((), dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
