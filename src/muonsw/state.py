"""The tensors in a parameter's state: shape, dtype, placement and initial value.

An algorithm declares a `StateSpec` for each tensor. Keys are torch's (`momentum_buffer`, `exp_avg`, `exp_avg_sq`,
`step`), so states of torch's optimizers load. State is allocated for all trainable parameters at once, with or without
a gradient, because distributed checkpoint needs the same keys on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.codecs import block_length, decode, encode, is_code, refuse_shards
from muonsw.distributed.shards import (
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
from muonsw.work import Group, label_of, named_params

if TYPE_CHECKING:
    from muonsw.optimizer import ScaledDecayOptimizer


class StateLayout(NamedTuple):
    """The layout of one tensor in a parameter's state."""

    name: str  # the name of its spec, which several tensors may share, such as codes and their scales
    shape: torch.Size  # over all ranks
    dtype: torch.dtype
    extra_axis: int | None = None  # the first axis that the parameter lacks; None if laid out like the parameter
    on_host: bool = False  # in pinned host memory


RADIUS = "radius"  # the target norm of a norm rule, the same on every rank

COUNTER_LAYOUT = StateLayout("step", torch.Size(()), torch.float32, 0)


def layouts(group: Group, param: Tensor) -> dict[str, StateLayout]:
    on_host = group["offload"] and param.is_cuda
    dtype = state_dtype(group["state_dtype"], param.dtype)
    block = block_length(tuple(param.shape)) if group["state_dtype"] == INT8 else None
    known: dict[str, StateLayout] = {}
    for key, spec in ALGORITHMS[group["algorithm"]].state(group).items():
        if spec.counter:
            known[key] = COUNTER_LAYOUT
        elif spec.shape is not None and param.dim() > 1:  # `cells` refuses flattened matrices at the step
            view = MatrixView.of(group)
            stack = param.shape[: view.stack_axes(param.dim())]
            for cell_key, cell in zip(view.cell_keys(key), view.cells(param.shape), strict=True):
                shape = torch.Size((*stack, *spec.shape(*view.out_in(cell.rows, cell.columns))))
                known[cell_key] = StateLayout(key, shape, wide_dtype(param.dtype), len(stack), on_host)
        elif block is None:
            known[key] = StateLayout(key, param.shape, dtype, None, on_host)
        else:
            scales = torch.Size((param.shape[0], math.prod(param.shape[1:]) // block))
            known[key] = StateLayout(key, param.shape, torch.uint8 if spec.squares else torch.int8, None, on_host)
            known[f"{key}{SCALE}"] = StateLayout(key, scales, torch.float32, 2, on_host)
    if group["state_dtype"] in STORED or param.dtype in LOW_PRECISION:
        known["step"] = COUNTER_LAYOUT  # the noise of rounding depends on it
    return known


def allocate(optimizer: ScaledDecayOptimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        specs = tuple(ALGORITHMS[group["algorithm"]].state(group))
        options = (group["algorithm"], group["state_dtype"], specs)
        before = optimizer._allocated.get(number, options)
        if before[:2] != options[:2]:
            raise ValueError(
                f"algorithm and state_dtype of {label_of(group, number)} cannot change during a run; set them in the "
                f"param_groups of optimizer.state_dict() and load that"
            )
        settled = number in optimizer._allocated and before == options
        for name, param in named_params(group, number):
            state = optimizer.state.get(param) or {}
            if settled and (not specs or specs[0] in state):
                continue
            if not (param.requires_grad or param.grad is not None):
                continue
            refuse_shards(name, group, param)  # frameworks may put DTensors into groups
            missing = {key: layout for key, layout in layouts(group, param).items() if key not in state}
            optimizer.state[param].update({key: zeros(layout, param) for key, layout in missing.items()})
        optimizer._allocated[number] = options


def zeros(layout: StateLayout, param: Tensor) -> Tensor:
    """One tensor of a parameter's initial state; a DTensor for a DTensor."""
    shard, dtype = local(param), layout.dtype
    if layout.extra_axis is not None and is_dtensor(param) and layout is not COUNTER_LAYOUT:
        return zeros_like_state(param, layout.shape, layout.extra_axis, dtype)
    device = torch.device("cpu") if layout.on_host else shard.device
    if layout.extra_axis is not None:
        return torch.zeros(layout.shape, dtype=dtype, device=device, pin_memory=layout.on_host)
    order = torch.preserve_format if dtype.is_floating_point else torch.contiguous_format  # codes are in rows
    like = torch.zeros_like(shard, dtype=dtype, device=device, memory_format=order, pin_memory=layout.on_host)
    return shard_like(param, like) if is_dtensor(param) else like


def state_bytes(groups: Iterable[Group]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for group in groups:
        for param in group["params"]:
            for layout in layouts(group, param).values():
                if layout.extra_axis is None:
                    count = local(param).numel()
                elif is_dtensor(param) and layout is not COUNTER_LAYOUT:
                    count = math.prod(held_state(param, layout.shape, layout.extra_axis))
                else:
                    count = layout.shape.numel()
                totals[layout.name] = totals.get(layout.name, 0) + count * layout.dtype.itemsize
    return totals


# saved state


def restored(state: dict[str, Any], group: Group, param: Tensor) -> dict[str, Any]:
    """Copy a parameter's saved state into the encoding, dtype and placement of its group.

    Tensors of a preconditioner or normalizer that the group no longer has are dropped.
    """
    known = layouts(group, param)
    recoded = dict(state)  # converted between floats and codes, as the group stores them
    for key in [key for key, value in state.items() if isinstance(value, Tensor)]:
        value, scale_key, layout = state[key], f"{key}{SCALE}", known.get(key)
        if is_code(value) and (layout is None or layout.dtype.is_floating_point) and scale_key in state:
            recoded[key] = decode(whole(value), whole(recoded.pop(scale_key)))  # blocks may now cross ranks
        elif layout is not None and not is_code(value) and scale_key in known:
            codes, scale = zeros(layout, param), zeros(known[scale_key], param)
            shard = local(_placed(value, StateLayout(key, param.shape, torch.float32), param))
            encode(shard.to(local(codes).device), local(codes), local(scale))
            recoded |= {key: codes, scale_key: scale}
    copies: dict[str, Any] = {}
    for key, value in recoded.items():
        layout, device = known.get(key), local(param).device
        if layout is COUNTER_LAYOUT:  # a number in older states
            copies[key] = torch.as_tensor(value, dtype=torch.float32, device=device).clone()
        elif not isinstance(value, Tensor):
            copies[key] = value
        elif key == RADIUS or (layout is None and not value.dim()):  # the same on every rank
            copies[key] = whole(value).to(device, copy=True)
        elif layout is not None or value.shape == param.shape:
            copies[key] = _placed(value, layout or StateLayout(key, param.shape, value.dtype), param)
    return copies


def _placed(value: Tensor, layout: StateLayout, param: Tensor) -> Tensor:
    """Copy a saved tensor as its layout says: over ranks, on its device, with the parameter's strides."""
    if is_dtensor(param):
        axis = layout.extra_axis
        places = param.placements if axis is None else state_placements(param, axis)
        value = put_state(param, value, places)
    else:
        value = whole(value)
    device = torch.device("cpu") if layout.on_host else param.device
    if is_code(value):
        copy = value.to(device, layout.dtype, copy=True).contiguous()
    elif value.shape != param.shape or value.stride() == param.stride():
        copy = value.to(device, layout.dtype, copy=True)
    else:
        copy = torch.empty_like(param, dtype=layout.dtype, device=device, memory_format=torch.preserve_format)
        copy.copy_(value)
    return copy.pin_memory() if layout.on_host else copy
