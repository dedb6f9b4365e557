"""The state of a parameter: which tensors it has, in which dtype, and how they begin.

Keys are torch's own (`momentum_buffer`, `exp_avg`, `exp_avg_sq`, `step`), so that states of torch's optimizers load.
Honest rounding adds `compensation`, a norm rule `radius`. Rules of whole matrices declare theirs (`muonsw.slots`): a
tensor with a shape of its own has the axes of the parameter that count matrices, then two of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from muonsw import norms
from muonsw.algorithms import ALGORITHMS
from muonsw.distributed.shards import held_state, is_dtensor, local, put_state_like, zeros_like_state
from muonsw.matrices import MatrixView
from muonsw.precision import LOW_PRECISION, state_dtype
from muonsw.slots import wide_dtype
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
    if key == "radius" or own_shape(key, group, param) is not None:
        return wide_dtype(param.dtype)
    return param.dtype if key == "compensation" else state_dtype(group["state_dtype"], param.dtype)


def own_shape(key: str, group: Group, param: Tensor) -> torch.Size | None:
    """The shape of a tensor of state that is not laid out like its parameter; None of all others."""
    matrices = ALGORITHMS[group["algorithm"]].matrices
    base, _, number = key.partition(".")
    spec = None if matrices is None else matrices.state(group).get(base)
    if spec is None or spec.shape is None or param.dim() < 2:  # a vector: flattened since, which the step refuses
        return None
    view = MatrixView.of(group)
    _, rows, columns = list(view.cells(param.shape))[int(number or 0)]
    return torch.Size((*param.shape[: view.stack_axes(param.dim())], *spec.shape(*view.out_in(rows, columns))))


def refuse_other_shapes(group: Group, name: str, param: Tensor, state: dict[str, Any]) -> None:
    """Refuse options with which the state that a parameter has does not fit, as after a change in mid-run."""
    for key in [key for key in state_keys(group, param) if key in state]:
        shape = own_shape(key, group, param)
        if shape is not None and state[key].shape != shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(state[key].shape)}, but the options of its group now ask for "
                f"{tuple(shape)}; set them back, or begin anew with optimizer.state[param].clear()"
            )


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
    alike = key not in ("step", "radius") and own_shape(key, group, param) is None and value.shape == param.shape
    if not alike or value.stride() == param.stride():
        return value.to(param.device, dtype, copy=True)
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).copy_(value)


def state_bytes(groups: Iterable[Group]) -> dict[str, int]:
    """What the state of all parameters takes on this rank, by key, whether it is there yet or not."""
    found: dict[str, int] = {}
    for group in groups:
        for param in group["params"]:
            for key in state_keys(group, param):
                base = key.partition(".")[0]
                found[base] = found.get(base, 0) + _elements(key, group, param) * dtype_of(key, group, param).itemsize
    return found


def _elements(key: str, group: Group, param: Tensor) -> int:
    shape, axis = own_shape(key, group, param), _own_axis(key, group, param)
    if key == "step":
        return 1
    if key == "radius":  # one for each matrix, or for each place along a split
        return max(1, ALGORITHMS[group["algorithm"]].count_matrices(group, param))
    if shape is None or axis is None:
        return local(param).numel()
    return math.prod(held_state(param, shape, axis) if is_dtensor(param) else shape)


def placed(key: str, value: Tensor, group: Group, param: Tensor) -> Tensor:
    """A saved tensor as this key of a parameter's state lies over ranks."""
    return put_state_like(param, value, _own_axis(key, group, param))


def _own_axis(key: str, group: Group, param: Tensor) -> int | None:
    """The first axis of a tensor of state that its parameter has not; None where it has all."""
    return None if own_shape(key, group, param) is None else MatrixView.of(group).stack_axes(param.dim())


def _fresh(key: str, group: Group, item: Item) -> Tensor:
    if key == "radius":
        return norms.initial_radius(group, item.name, item.param)
    return zeros(key, group, item.param, item.parameter)


def zeros(key: str, group: Group, param: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of state as it begins, for what this rank holds of a parameter."""
    dtype, shape = dtype_of(key, group, param), own_shape(key, group, parameter)
    if key == "step":
        return torch.zeros((), dtype=dtype, device=param.device)
    if shape is None:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if is_dtensor(parameter):
        return zeros_like_state(parameter, shape, MatrixView.of(group).stack_axes(parameter.dim()), dtype)
    return torch.zeros(shape, dtype=dtype, device=param.device)
