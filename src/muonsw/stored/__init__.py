"""State that is kept in another form than a step computes with: 8 bits by block, bfloat16, or in host memory.

A step sees float32 on its device. What it reads is fetched and decoded when an algorithm asks for it, encoded and
returned once the weights have moved: a chunk at a time, so that only what a step works on is ever there in full. Where
an algorithm has a kernel that does so on its way, nothing is decoded at all (`updates_in_place`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import FusedUpdate, whole_parts
from muonsw.distributed.shards import as_dtensor, cutting_order, is_dtensor, noise_place, position
from muonsw.matrices import Part, Region
from muonsw.precision import INT8, LOW_PRECISION, SCALE, STORED, Kept, Noise
from muonsw.stored.codes import block_length, decode, encode, is_code, round_bfloat16
from muonsw.stored.offload import HostCopies
from muonsw.work import Group, Item


def code_dtype(key: str, group: Group, param: Tensor) -> torch.dtype | None:
    """The dtype of the codes of a tensor of state that has an element for each of its parameter's; None without."""
    if group["state_dtype"] != INT8 or block_length(tuple(param.shape)) is None or not _is_average(key, group):
        return None
    return torch.uint8 if "_sq" in key else torch.int8


def _is_average(key: str, group: Group) -> bool:
    """Whether a key of an algorithm has an element for each element of a parameter."""
    algorithm = ALGORITHMS[group["algorithm"]]
    own = None if algorithm.matrices is None else algorithm.matrices.state(group).get(key.partition(".")[0])
    return key != "step" and (own is None or own.shape is None) and key in algorithm.state_keys(group)


def average_keys(group: Group, param: Tensor) -> tuple[str, ...]:
    """The keys of a parameter's state for its group's algorithm, with those of scales."""
    keys = ALGORITHMS[group["algorithm"]].state_keys(group)
    if group["state_dtype"] != INT8:
        return keys
    return (*keys, *(f"{key}{SCALE}" for key in keys if code_dtype(key, group, param) is not None))


def rounds_state(group: Group) -> bool:
    """Whether state is rounded when it is put back, so that steps must be counted for the noise."""
    return group["state_dtype"] in STORED and group["rounding"] != "nearest"


def is_offloaded(key: str, group: Group, param: Tensor) -> bool:
    """Whether a tensor of state is kept in host memory: all but single numbers, of parameters on a GPU."""
    if not group["offload"] or not param.is_cuda or key == "step":
        return False
    return key in average_keys(group, param)


def refuse_shards(name: str, group: Group, param: Tensor) -> None:
    """Refuse a parameter whose shards cannot have their state in the form that its group asks for.

    Blocks that are cut through could be saved for this number of ranks alone.
    """
    if group["offload"] and is_dtensor(param):
        raise ValueError(
            f"offload=True keeps state in host memory, where that of {name}, a DTensor, cannot be; use FSDP's own, "
            f"fully_shard(offload_policy=CPUOffloadPolicy())"
        )
    length = block_length(tuple(param.shape)) if group["state_dtype"] == INT8 and is_dtensor(param) else None
    if length is None:
        return
    mesh, places, shape = as_dtensor(param).device_mesh.shape, as_dtensor(param).placements, param.shape
    axes = [(size, getattr(place, "dim", 0)) for size, place in zip(mesh, places, strict=True)]
    pieces = math.prod(size for size, axis in axes if axis == 1)
    even = shape[1] % pieces == 0 and shape[1] // pieces * math.prod(shape[2:]) % length == 0
    if not even or any(axis > 1 for _, axis in axes) or cutting_order(places, mesh) is None:
        raise ValueError(
            f"state_dtype='int8' keeps {name} in blocks of {length} along its rows, through which {places} on a mesh "
            f"of {tuple(mesh)} cuts; shard it along its first axis, or give its group state_dtype='bfloat16'"
        )


class StoredState(dict[str, Tensor]):
    """The state of a parameter as a step computes with it: decoded when it is asked for, put back when all is moved.

    Args:
        group: the options of the parameter.
        keys: the state of its algorithm.
        item: the parameter, with its state as it is kept.
        copies: brings what is in host memory, and its number there; None where nothing is.
    """

    def __init__(self, group: Group, keys: Sequence[str], item: Item, copies: tuple[HostCopies, int] | None) -> None:
        self._group, self._item, self._kept, self._copies = group, item, item.state, copies
        self._left = item.param.numel()
        self._near: dict[str, Tensor] = {}
        self._away = set() if copies is None else set(_in_host_memory(item))
        self._rounded = [key for key in keys if key in item.state and _is_rounded(group, item.state[key])]
        forms = {*self._rounded, *self._away}
        super().__init__({key: value for key, value in item.state.items() if key not in forms})

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __missing__(self, key: str) -> Tensor:
        value = self._decoded(key) if key in self._rounded else self._on_device(key)
        self[key] = value
        return value

    def _decoded(self, key: str) -> Tensor:
        kept, param = self._on_device(key), self._item.param
        if is_code(kept):
            value = decode(kept, self._on_device(f"{key}{SCALE}"), fused=self._group["fused"] is not False)
        else:
            value = kept.float()
        if param.dtype == torch.float64:
            value = value.double()
        if not param.is_contiguous() and value.stride() != param.stride():  # laid out like its parameter
            value = torch.empty_like(param, dtype=value.dtype).copy_(value)
        return value

    def _on_device(self, key: str) -> Tensor:
        if self._copies is None or key not in self._away:
            return self._kept[key]
        if not self._near:
            copies, number = self._copies
            self._near = copies.fetch(number)
        return self._near[key]

    def moved(self, elements: int, ok: Tensor | None) -> None:
        """Count elements whose weights have moved, and put the state back after the last."""
        self._left -= elements
        if self._left <= 0:
            self.put_back(ok)

    def put_back(self, ok: Tensor | None) -> None:
        """Encode what was decoded, unless `ok` is false, and return what was fetched."""
        for number, key in enumerate(self._rounded):
            if key in self.keys():
                self._encode(key, self.pop(key), _noise(self._group, self._item, number), ok)
        if self._copies is not None and self._near:
            copies, number = self._copies
            copies.give_back(number, self._near)
            for key in [key for key in self._near if key in self.keys()]:
                del self[key]
            self._near = {}

    def _encode(self, key: str, value: Tensor, noise: Noise | None, ok: Tensor | None) -> None:
        kept, fused = self._on_device(key), self._group["fused"] is not False
        if is_code(kept):
            encode(value, kept, self._on_device(f"{key}{SCALE}"), noise, ok, fused=fused)
        else:
            assert noise is not None  # or it would not be in another form
            round_bfloat16(value, kept, noise, ok, fused=fused)


def _noise(group: Group, item: Item, number: int) -> Noise | None:
    """The noise of one of the tensors of a parameter's state that are rounded; None where they are so to nearest."""
    if not rounds_state(group):
        return None
    place = item.position - noise_place(item.parameter)  # a shard has its origin beside it
    key = (group["rounding_seed"] * 0x9E3779B1 + place * 0x10001 + number + 1) & 0x7FFFFFFF
    return Noise(item.state["step"], key, position(item.parameter))


def _is_rounded(group: Group, kept: Tensor) -> bool:
    return is_code(kept) or (kept.dtype == torch.bfloat16 and rounds_state(group))


def updates_in_place(group: Group, items: list[Item], chunk_bytes: int) -> tuple[list[FusedUpdate], list[Item]]:
    """Updates by kernels that read and write state as it is kept, and the items for which there is none."""
    algorithm = ALGORITHMS[group["algorithm"]]
    if algorithm.in_place is None or not kernels.available(items[0].param.device):
        return [], items
    keys = [key for key in algorithm.state_keys(group) if key != "step"]
    forms: dict[int | None, list[Item]] = {}
    for item in items:
        forms.setdefault(_elements_of_a_block(group, keys, item, chunk_bytes), []).append(item)
    updates, others = [], forms.pop(None, [])
    for some in forms.values():
        kept = {
            key: [Kept(i.state[key], i.state.get(f"{key}{SCALE}"), _noise(group, i, number)) for i in some]
            for number, key in enumerate(keys)
        }
        update = algorithm.in_place(group, whole_parts(some), kept)
        if update is None:
            others += some
        else:
            updates.append(update)
    return updates, others


def _elements_of_a_block(group: Group, keys: Sequence[str], item: Item, chunk_bytes: int) -> int | None:
    """How many elements share a scale, 0 without scales; None where a kernel cannot read the state as it lies.

    The noise of low-precision weights depends on how `elementwise_parts` cuts large ones, and kernels cut none.
    """
    param, state = item.param, [item.state[key] for key in keys]
    if not param.numel() or not param.is_contiguous() or any(value.device != param.device for value in state):
        return None
    cut = param.dtype in LOW_PRECISION and param.numel() * param.element_size() > chunk_bytes
    if cut or not all(_is_rounded(group, value) and value.is_contiguous() for value in state):
        return None
    return state[0].numel() // item.state[f"{keys[0]}{SCALE}"].numel() if is_code(state[0]) else 0


def as_computed(group: Group, items: Sequence[Item], ahead: int) -> list[Item]:
    """Items with their state as a step computes with it, of which `ahead` bytes are fetched before they are needed."""
    if not rounds_state(group) and group["state_dtype"] != INT8 and not group["offload"]:
        return list(items)
    keys, places = ALGORITHMS[group["algorithm"]].state_keys(group), {}
    away = _in_order(group, [item for item in items if group["offload"] and _in_host_memory(item)])
    if away:
        copies = HostCopies(away[0].param.device, list(map(_in_host_memory, away)), ahead)
        places = {id(item): (copies, number) for number, item in enumerate(away)}
    return [item._replace(state=StoredState(group, keys, item, places.get(id(item)))) for item in items]


def _in_host_memory(item: Item) -> dict[str, Tensor]:
    """What is kept of a parameter's state on another device than the parameter."""
    return {key: value for key, value in item.state.items() if value.device != item.param.device}


def _in_order(group: Group, items: list[Item]) -> list[Item]:
    """Items in the order in which a step comes to them: matrices of equal shape together."""
    if ALGORITHMS[group["algorithm"]].matrices is None:
        return items
    order = {shape: number for number, shape in enumerate(dict.fromkeys(item.param.shape for item in items))}
    return sorted(items, key=lambda item: order[item.param.shape])


def finish(items: Iterable[Item], ok: Tensor | None) -> None:
    """Put back whatever state of items is still decoded."""
    for item in items:
        if isinstance(item.state, StoredState):
            item.state.put_back(ok)


def put_back(parts: Iterable[Part], ok: Tensor | None) -> None:
    """Put the state of parts back whose weights have moved."""
    for part in parts:
        if isinstance(part.item.state, StoredState):
            part.item.state.moved(_elements(part.item.param, part.region), ok)


def _elements(param: Tensor, region: Region) -> int:
    return math.prod(region.lengths) if region.flat else math.prod(region.shape_in(param.shape))
