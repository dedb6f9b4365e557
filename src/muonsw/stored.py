"""State that is kept in another form than a step computes with: 8 bits by block, bfloat16, or in host memory.

A step sees float32 on its device. What it reads is fetched and decoded when an algorithm asks for it, encoded and
returned once the weights have moved: a chunk at a time, so that only what a step works on is ever there in full.

In 8 bits the first axis of a parameter counts rows, and each row is cut into blocks of about 256 elements. A block
keeps its largest magnitude s as float32, under `<key>_scale`; an element is `s (c / 127)^4` with a code c in int8, or
`s (c / 255)^4` in uint8 where it is an average of squares (keys with `_sq`). The fourth power resolves elements down to
1e-9 of s, which the roots of squares need, and puts noise of 1.5% on normal numbers; the square would put 1%, and
resolve nothing below 1e-5. A square above zero never becomes zero, since updates divide by its root. Blocks never cross
rows, so parameters that are sharded along their first axis have the same codes on any number of ranks.

Rounding is stochastic, by a hash of seed, step and position: averages that move by less than half of what is between
two codes would stay where they are. Rounded to the nearest code, the root of an average of squares with beta2=0.999
was still 4 times too large 2,500 steps after gradients had become 10 times smaller, as against 0.97 times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms import ALGORITHMS
from muonsw.distributed.shards import as_dtensor, cutting_order, is_dtensor, position
from muonsw.matrices import Part, Region
from muonsw.offload import HostCopies
from muonsw.precision import INT8, SCALE, mix, stochastic_round, uniform_hash
from muonsw.work import Group, Item

# The values of `state_dtype` with which state is kept in another form.
STORED = (INT8, "bfloat16")

BLOCK, SHORTEST_BLOCK, LONGEST_BLOCK = 256, 16, 2**13

# Parameters with fewer elements keep float32: norms and biases need it, and have little state.
SMALLEST = 4096

# The largest code by dtype; zero is zero.
_LEVELS = {torch.int8: 127, torch.uint8: 255}

# Elements that are encoded at a time: several passes over them are then made in a CPU's cache.
_AT_A_TIME = {"cpu": 2**18, "cuda": 2**26}


@cache
def block_length(shape: tuple[int, ...]) -> int | None:
    """How many elements of a row share a scale: a divisor of its length near 256; None where state stays in float32.

    Examples:
        >>> block_length((768, 3072)), block_length((512, 512, 3, 3)), block_length((1000, 1009)), block_length((9000,))
        (256, 256, 1009, None)
    """
    row = math.prod(shape[1:])
    if len(shape) < 2 or math.prod(shape) < SMALLEST or row < SHORTEST_BLOCK:
        return None
    shorter = next(size for size in range(BLOCK, 0, -1) if row % size == 0)
    if shorter >= min(BLOCK // 4, row):
        return shorter
    return next((size for size in range(BLOCK, LONGEST_BLOCK + 1) if row % size == 0), None)


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


def scale_shape(param: Tensor) -> torch.Size:
    """The shape of the scales of a parameter's codes: (rows, blocks in a row)."""
    length = block_length(tuple(param.shape))
    assert length is not None
    return torch.Size((param.shape[0], math.prod(param.shape[1:]) // length))


def average_keys(group: Group, param: Tensor) -> tuple[str, ...]:
    """The keys of a parameter's state for its group's algorithm, with those of scales."""
    keys = ALGORITHMS[group["algorithm"]].state_keys(group)
    if group["state_dtype"] != INT8:
        return keys
    return (*keys, *(f"{key}{SCALE}" for key in keys if code_dtype(key, group, param) is not None))


def is_code(value: Tensor) -> bool:
    """Whether a tensor of state holds codes."""
    return value.dtype in _LEVELS


def rounds_state(group: Group) -> bool:
    """Whether state is rounded when it is put back, so that steps must be counted for the noise."""
    return group["state_dtype"] in STORED and group["rounding"] != "nearest"


def is_offloaded(key: str, group: Group, param: Tensor) -> bool:
    """Whether a tensor of state is kept in host memory: all but single numbers, of parameters on a GPU."""
    if not group["offload"] or not param.is_cuda or key == "step":
        return False
    return key == "compensation" or key in average_keys(group, param)


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


def encode(
    x: Tensor, codes: Tensor, scale: Tensor, noise: Noise | None = None, ok: Tensor | None = None, *, fused: bool = True
) -> None:
    """Write a float tensor as codes and scales, unless `ok` is false.

    To the nearest code, or with noise up or down with the odds that keep the mean.
    """
    x = x.float().contiguous()
    if fused and kernels.available(codes.device):
        from muonsw.kernels import stored

        stored.encode(x, codes, scale, _LEVELS[codes.dtype], noise, ok)
    elif ok is None:
        _encode_rows(x, codes, scale, noise)
    else:
        after = torch.empty_like(codes), torch.empty_like(scale)
        _encode_rows(x, *after, noise)
        codes.copy_(torch.where(ok, after[0], codes))
        scale.copy_(torch.where(ok, after[1], scale))


def _encode_rows(x: Tensor, codes: Tensor, scale: Tensor, noise: Noise | None) -> None:
    rows = _in_blocks(codes, scale)
    x, row = x.view(rows.shape), math.prod(rows.shape[1:])
    step = max(1, _AT_A_TIME.get(x.device.type, 2**26) // row)
    for start in range(0, rows.shape[0], step):
        some = slice(start, start + step)
        chances = None if noise is None else noise.of(x[some].shape, start * row)
        scale[some] = x[some].abs().amax(-1)
        rows[some] = _codes(x[some], scale[some, :, None], codes.dtype, chances)


def _in_blocks(x: Tensor, scale: Tensor) -> Tensor:
    """A tensor (rows, ...) as (rows, blocks, elements)."""
    return x.view(x.shape[0], scale.shape[1], math.prod(x.shape[1:]) // scale.shape[1])


def _codes(x: Tensor, scale: Tensor, dtype: torch.dtype, chances: Tensor | None) -> Tensor:
    """Codes of blocks; divided are only scales, since every division of an element would take as long as a pass."""
    levels = _LEVELS[dtype]
    t = (x.abs() * scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()).mul_(levels**4)
    below = t.sqrt().sqrt_().floor_().clamp_(max=levels - 1)
    power, gap = _fourth(below), _fourth(below + 1)
    above = t.sub_(power)
    code = below.add_(above > gap.sub_(power).mul_(0.5 if chances is None else chances))
    return torch.maximum(code, x > 0).to(dtype) if dtype == torch.uint8 else torch.copysign(code, x).to(dtype)


def _fourth(x: Tensor) -> Tensor:
    square = x * x
    return square.mul_(square)


def decode(codes: Tensor, scale: Tensor, *, fused: bool = True) -> Tensor:
    """The float32 values of codes, in their shape."""
    if fused and kernels.available(codes.device):
        from muonsw.kernels import stored

        return stored.decode(codes, scale, _LEVELS[codes.dtype])
    x = codes.to(torch.float32).mul_(1 / _LEVELS[codes.dtype])  # 127 and 255 times these are one in float32
    power = torch.copysign(_fourth(x), x)
    return _in_blocks(power, scale).mul_(scale[:, :, None]).view(codes.shape)


def round_bfloat16(x: Tensor, rounded: Tensor, noise: Noise, ok: Tensor | None, *, fused: bool = True) -> None:
    """Write a float tensor as bfloat16, up or down with the odds that keep the mean, unless `ok` is false."""
    x = x.float()
    if not x.numel():
        return
    if fused and kernels.available(x.device) and x.is_contiguous() and rounded.is_contiguous():
        from muonsw.kernels import stored

        stored.round_bfloat16(x, rounded, noise, ok)
        return
    after = stochastic_round(x, torch.bfloat16, noise.seed, origin=noise.origin)
    rounded.copy_(after if ok is None else torch.where(ok, after, rounded))


class Noise(NamedTuple):
    """Numbers in [0, 1) for each element of a tensor of state at a step.

    Attributes:
        counter: the number of the step, on the device of the state.
        key: a number for this tensor of state, whatever the step.
        origin: the position in the whole parameter at which this rank's shard begins.
    """

    counter: Tensor
    key: int
    origin: int = 0

    @property
    def seed(self) -> Tensor:
        """Step and key as an int32 scalar."""
        return mix(self.counter.to(torch.int32) ^ self.key)

    def of(self, shape: torch.Size, start: int) -> Tensor:
        """The numbers of the elements from `start` on."""
        return uniform_hash(shape, self.seed, origin=self.origin + start)


class StoredState(dict[str, Tensor]):
    """The state of a parameter as a step computes with it: decoded when it is asked for, put back when all is moved.

    Args:
        group: the options of the parameter.
        keys: the state of its algorithm.
        item: the parameter, with its state as it is kept.
        copies: brings what is in host memory, and its number there; None where nothing is.
    """

    def __init__(
        self, group: Group, keys: Sequence[str], item: Item, copies: tuple[HostCopies, int] | None = None
    ) -> None:
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
                self._encode(key, self.pop(key), self._noise(number), ok)
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

    def _noise(self, number: int) -> Noise | None:
        if not rounds_state(self._group):
            return None
        key = (self._group["rounding_seed"] * 0x9E3779B1 + self._item.position * 0x10001 + number + 1) & 0x7FFFFFFF
        return Noise(self._kept["step"], key, position(self._item.parameter))


def _is_rounded(group: Group, kept: Tensor) -> bool:
    return is_code(kept) or (kept.dtype == torch.bfloat16 and rounds_state(group))


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
