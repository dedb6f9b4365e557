"""The state of a parameter: which tensors it has, in which dtype, and how they begin.

Keys are torch's own (`momentum_buffer`, `exp_avg`, `exp_avg_sq`, `step`), so that states of torch's optimizers load.
A norm rule adds `radius`. Rules of whole matrices declare theirs (`muonsw.slots`): a
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
from muonsw.distributed.shards import (
    as_dtensor,
    held_state,
    is_dtensor,
    local,
    put_state,
    shard_like,
    state_placements,
    whole,
    zeros_like_state,
)
from muonsw.matrices import MatrixView
from muonsw.precision import INT8, LOW_PRECISION, SCALE, STORED, state_dtype
from muonsw.slots import wide_dtype
from muonsw.stored import average_keys, code_dtype, is_offloaded, refuse_shards, rounds_state
from muonsw.stored.codes import decode, encode, is_code, scale_shape
from muonsw.work import Group, Item, MissingState

# State laid out like its parameter, of which every algorithm that keeps any has one.
_LIKE_PARAMETER = ("momentum_buffer", "exp_avg")
# What honest rounding of a low-precision weight remembers.
_ROUNDING_KEYS = {"stochastic": ("step",), "nearest": ()}


def state_keys(group: Group, param: Tensor) -> tuple[str, ...]:
    """Every key that a parameter's state has once it has been stepped."""
    rounding = _ROUNDING_KEYS[group["rounding"]] if param.dtype in LOW_PRECISION else ()
    norm = () if group["norm"] == norms.FREE else norms.state_keys(group)
    if group["state_dtype"] not in STORED:
        return tuple(dict.fromkeys((*ALGORITHMS[group["algorithm"]].state_keys(group), *rounding, *norm)))
    counted = ("step",) if rounds_state(group) else ()
    return tuple(dict.fromkeys((*average_keys(group, param), *rounding, *norm, *counted)))


def dtype_of(key: str, group: Group, param: Tensor) -> torch.dtype:
    """The dtype in which a tensor of the state is kept."""
    if key == "step" or _codes_of(key, group, param) is not None:
        return torch.float32
    code = code_dtype(key, group, param)
    if code is not None:
        return code
    if key == "radius" or own_shape(key, group, param) is not None:
        return wide_dtype(param.dtype)
    return state_dtype(group["state_dtype"], param.dtype)


def own_shape(key: str, group: Group, param: Tensor) -> torch.Size | None:
    """The shape of a tensor of state that is not laid out like its parameter; None of all others."""
    if _codes_of(key, group, param) is not None:
        return scale_shape(param)
    matrices = ALGORITHMS[group["algorithm"]].matrices
    base, _, number = key.partition(".")
    spec = None if matrices is None else matrices.state(group).get(base)
    if spec is None or spec.shape is None or param.dim() < 2:  # a vector: flattened since, which the step refuses
        return None
    view = MatrixView.of(group)
    _, rows, columns = list(view.cells(param.shape))[int(number or 0)]
    return torch.Size((*param.shape[: view.stack_axes(param.dim())], *spec.shape(*view.out_in(rows, columns))))


def _codes_of(key: str, group: Group, param: Tensor) -> str | None:
    """The key of the codes that a key holds the scales of; None where it holds no scales."""
    codes = key.removesuffix(SCALE)
    return None if codes == key or code_dtype(codes, group, param) is None else codes


def missing_state(group: Group, items: Sequence[Item], leave_out: tuple[str, ...] = ()) -> MissingState:
    """What the state of these parameters of one dtype lacks, except for keys that are left out.

    It is made for all parameters before any keeps it: memory may run out, and a norm rule may refuse a weight.
    State must have the shape of its parameter: kernels read and write as many elements as the parameter has.
    """
    if group["state_dtype"] == INT8 and len(items) > 1:  # the keys then depend on the shape
        return [one for item in items for one in missing_state(group, [item], leave_out)]
    found: MissingState = []
    for key in state_keys(group, items[0].parameter) if items else ():
        if key not in leave_out:
            found += [(item.state, key, _fresh(key, group, item)) for item in items if key not in item.state]
        if key in _LIKE_PARAMETER:
            for item in items:
                misfit = key in item.state and item.state[key].shape != item.param.shape
                if misfit and own_shape(key, group, item.parameter) is None:
                    raise ValueError(
                        f"{key} of {item.name} has shape {tuple(item.state[key].shape)}, and the parameter is now "
                        f"{tuple(item.param.shape)}; begin anew with optimizer.state[param].clear()"
                    )
    return found


def keep(missing: MissingState) -> None:
    """Begin the state that was missing."""
    for state, key, value in missing:
        state[key] = value


def as_state(key: str, value: Any, group: Group, param: Tensor) -> Tensor:
    """A copy of a saved value as this key of a parameter's state: in its dtype, on its device, laid out like it."""
    dtype = dtype_of(key, group, param)
    if not isinstance(value, Tensor):  # older states count steps in plain numbers
        return torch.tensor(value, dtype=dtype, device=param.device)
    if is_offloaded(key, group, param):
        return _laid_out(key, value, group, param, torch.device("cpu"), dtype).pin_memory()
    return _laid_out(key, value, group, param, param.device, dtype)


def _laid_out(key: str, value: Tensor, group: Group, param: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy on a device, with the strides of the parameter where it has its elements; codes lie in rows."""
    if is_code(value):
        return value.to(device, dtype, copy=True).contiguous()
    alike = key not in ("step", "radius") and own_shape(key, group, param) is None and value.shape == param.shape
    if not alike or value.stride() == param.stride():
        return value.to(device, dtype, copy=True)
    return torch.empty_like(param, dtype=dtype, device=device, memory_format=torch.preserve_format).copy_(value)


def in_form(state: dict[str, Any], group: Group, param: Tensor) -> dict[str, Any]:
    """A saved state of a parameter in the form in which its group keeps it: float tensors as codes, or the reverse."""
    found = dict(state)
    for key in [key for key, value in state.items() if isinstance(value, Tensor) and key != "step"]:
        wanted, value = code_dtype(key, group, param), state[key]
        if wanted is not None and not is_code(value):
            found |= _encoded(key, local(placed(key, value, group, param)), group, param)
        elif wanted is None and is_code(value) and f"{key}{SCALE}" in state:
            found[key] = decode(whole(value), whole(found.pop(f"{key}{SCALE}")))  # ranks may hold parts of blocks now
    return found


def _encoded(key: str, value: Tensor, group: Group, param: Tensor) -> dict[str, Tensor]:
    """What this rank holds of a tensor of state as codes and scales, placed like the parameter."""
    codes, scale = (zeros(one, group, local(param), param) for one in (key, f"{key}{SCALE}"))
    encode(value.to(codes.device), codes, local(scale))
    return {key: shard_like(param, codes) if is_dtensor(param) else codes, f"{key}{SCALE}": scale}


def state_bytes(groups: Iterable[Group]) -> dict[str, int]:
    """What the state of all parameters takes on this rank, by key, whether it is there yet or not."""
    found: dict[str, int] = {}
    for group in groups:
        for param in group["params"]:
            for key in state_keys(group, param):
                base = key.partition(".")[0].removesuffix(SCALE)
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
    """A saved tensor as this key of a parameter's state lies over ranks: like it, as its own axes ask, or whole."""
    if not is_dtensor(param):
        return whole(value)
    axis = _own_axis(key, group, param)
    if axis is not None:
        return put_state(param, value, state_placements(param, axis))
    return put_state(
        param, value, norms.radius_placements(group, param) if key == "radius" else as_dtensor(param).placements
    )


def _own_axis(key: str, group: Group, param: Tensor) -> int | None:
    """The first axis of a tensor of state that its parameter has not; None where it has all."""
    if own_shape(key, group, param) is None:
        return None
    return 2 if _codes_of(key, group, param) is not None else MatrixView.of(group).stack_axes(param.dim())


def _fresh(key: str, group: Group, item: Item) -> Tensor:
    if item.param.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{key} of {item.name} is missing, and a CUDA graph would make it anew at each replay; take a step with "
            f"gradients of all parameters before the capture"
        )
    if key == "radius":
        return norms.initial_radius(group, item.name, item.param)
    refuse_shards(item.name, group, item.parameter)  # frameworks put DTensors into groups after construction
    return zeros(key, group, item.param, item.parameter)


def zeros(key: str, group: Group, param: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of state as it begins, for what this rank holds of a parameter."""
    dtype, shape = dtype_of(key, group, parameter), own_shape(key, group, parameter)
    if key == "step":
        return torch.zeros((), dtype=dtype, device=param.device)
    away = is_offloaded(key, group, parameter)
    device = torch.device("cpu") if away else param.device
    if shape is None and dtype.is_floating_point:
        return torch.zeros_like(param, dtype=dtype, device=device, memory_format=torch.preserve_format, pin_memory=away)
    axis = _own_axis(key, group, parameter)
    if axis is not None and shape is not None and is_dtensor(parameter):
        return zeros_like_state(parameter, shape, axis, dtype)
    # codes lie in rows, whatever the strides of the parameter
    return torch.zeros(param.shape if shape is None else shape, dtype=dtype, device=device, pin_memory=away)
