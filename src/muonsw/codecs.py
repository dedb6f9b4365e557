"""State stored in 8 bits, in bfloat16 or in host memory.

State is decoded before an update and encoded after it, a few parameters at a time to save memory. Kernels that work on
the stored form (`Algorithm.in_place`) skip both.

**8 bits.** Each row (along the first axis of a parameter) is cut into blocks of about 256 elements. A block stores its
largest magnitude s in float32, under `<key>_scale`; an element is `s (c / 127)^4` with a code c in int8, or
`s (c / 255)^4` in uint8 for squares. The fourth power resolves elements down to 1e-9 of s, which the roots of squares
need, and adds 1.5% of noise to normally distributed elements; the second power would add 1%, but resolve nothing below
1e-5. A square above zero never becomes zero, because updates divide by its root. Blocks never cross rows, so parameters
sharded along their first axis have the same codes on any number of ranks.

Rounding is stochastic, by a hash of step and position: rounded to nearest, averages that move by less than half
the distance between two codes would never move. With beta2=0.999, 2,500 steps after gradients had become 10 times
smaller, this left the root of the average square at 4 times its true value; stochastic rounding, at 0.97 times.

**Host memory.** Copies to the device and back run on two streams, to use both directions of the bus during compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import whole_parts
from muonsw.distributed.shards import cutting_order, is_dtensor, noise_place, position
from muonsw.matrices import filled
from muonsw.precision import INT8, LOW_PRECISION, SCALE, STORED, Noise, StoredState, stochastic_round, uniform_hash
from muonsw.work import Group, Item, StepContext

BLOCK, SHORTEST_BLOCK, LONGEST_BLOCK = 256, 16, 2**13

# Smaller parameters, such as norms and biases, need float32 and have little state.
SMALLEST = 4096

# The largest code of each dtype; code 0 is zero.
_LEVELS = {torch.int8: 127, torch.uint8: 255}


def is_encoded(group: Group) -> bool:
    return group["state_dtype"] in STORED or group["offload"]


def is_code(value: Tensor) -> bool:
    return value.dtype in _LEVELS


def _is_rounded(value: Tensor) -> bool:
    return is_code(value) or value.dtype == torch.bfloat16


@cache
def block_length(shape: tuple[int, ...]) -> int | None:
    """How many elements of a row share a scale: a divisor of its length near 256; None to keep float32.

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


def refuse_shards(name: str, group: Group, param: Tensor) -> None:
    """Refuse a sharded parameter whose state does not support its group's storage options.

    Only the same number of ranks could load a block that spans two shards.
    """
    if not is_dtensor(param):
        return
    if group["offload"]:
        raise ValueError(
            f"offload=True does not support DTensors, and {name} is one; use "
            f"fully_shard(offload_policy=CPUOffloadPolicy())"
        )
    length = block_length(tuple(param.shape)) if group["state_dtype"] == INT8 else None
    if length is None:
        return
    mesh, places, shape = param.device_mesh.shape, param.placements, param.shape
    axes = [(size, getattr(place, "dim", 0)) for size, place in zip(mesh, places, strict=True)]
    pieces = math.prod(size for size, axis in axes if axis == 1)
    even = shape[1] % pieces == 0 and shape[1] // pieces * math.prod(shape[2:]) % length == 0
    if not even or any(axis > 1 for _, axis in axes) or cutting_order(places, mesh) is None:
        raise ValueError(
            f"state_dtype='int8' stores {name} in blocks of {length} along its rows, and {places} on a mesh of "
            f"{tuple(mesh)} would cut them; shard it along its first axis, or set state_dtype='bfloat16' in its group"
        )


# a step on encoded state


def update_in_place(group: Group, items: list[Item], ctx: StepContext) -> list[Item]:
    """Update parameters by kernels that read and write encoded state; return those that no kernel supports."""
    in_place = ALGORITHMS[group["algorithm"]].in_place
    if in_place is None or group["fused"] is False or not kernels.available(items[0].param.device):
        return items
    keys = _encoded_keys(group)
    forms: dict[int, list[Item]] = {}  # by block length, 0 without scales
    unsupported: list[Item] = []
    for item in items:
        param, state = item.param, [item.state[key] for key in keys]
        ready = param.numel() and param.is_contiguous() and all(value.device == param.device for value in state)
        ready = ready and all(_is_rounded(value) and value.is_contiguous() for value in state)
        # Large low-precision weights are cut into chunks, on which their noise depends; kernels do not cut.
        if not ready or (param.dtype in LOW_PRECISION and param.nbytes > ctx.chunk_bytes):
            unsupported.append(item)
            continue
        has_scales = is_code(state[0])
        block = state[0].numel() // item.state[f"{keys[0]}{SCALE}"].numel() if has_scales else 0
        forms.setdefault(block, []).append(item)
    for block, same_form in forms.items():
        encoded = {}
        for number, key in enumerate(keys):
            scales = [item.state[f"{key}{SCALE}"] for item in same_form] if block else []
            noises = [_noise(item, number) for item in same_form]
            encoded[key] = StoredState([item.state[key] for item in same_form], scales, noises)
        if not in_place(group, whole_parts(same_form), encoded, ctx):
            unsupported += same_form
    return unsupported


def update_decoded(group: Group, items: Sequence[Item], ctx: StepContext, update: Callable[[list[Item]], None]) -> None:
    """Update parameters on decoded state, in pieces of about `chunk_bytes`; equal shapes stay together."""
    if not items:
        return
    ordered = sorted(items, key=lambda item: item.param.shape)
    pieces = filled([(item, item.param.nbytes) for item in ordered], ctx.chunk_bytes)
    device = items[0].param.device
    copies = _HostCopies(device, pieces) if group["offload"] and device.type == "cuda" else None
    for number, piece in enumerate(pieces):
        stored = piece if copies is None else copies.fetch(number)
        decoded = decode_items(group, stored)
        update(decoded)
        encode_items(group, stored, decoded, ctx.ok)
        if copies is not None:
            copies.give_back(number, stored)


def decode_items(group: Group, items: Sequence[Item]) -> list[Item]:
    decoded, keys = [], _encoded_keys(group)
    for item in items:
        state, param = dict(item.state), item.param
        for key in [key for key in keys if _is_rounded(item.state[key])]:
            value = item.state[key]
            if is_code(value):
                value = decode(value, item.state[f"{key}{SCALE}"], fused=group["fused"] is not False)
            else:
                value = value.float()
            if param.dtype == torch.float64:
                value = value.double()
            if not param.is_contiguous() and value.stride() != param.stride():  # state is laid out like its parameter
                value = torch.empty_like(param, dtype=value.dtype).copy_(value)
            state[key] = value
        decoded.append(item._replace(state=state))
    return decoded


def encode_items(group: Group, items: Sequence[Item], decoded: Sequence[Item], ok: Tensor | None) -> None:
    fused = group["fused"] is not False
    for item, computed in zip(items, decoded, strict=True):
        for number, key in enumerate(_encoded_keys(group)):
            target = item.state[key]
            if is_code(target):
                scale = item.state[f"{key}{SCALE}"]
                encode(computed.state[key], target, scale, _noise(item, number), ok, fused=fused)
            elif _is_rounded(target):
                round_bfloat16(computed.state[key], target, _noise(item, number), ok, fused=fused)


def _encoded_keys(group: Group) -> list[str]:
    """The keys that may be encoded; their order numbers their noise."""
    specs = ALGORITHMS[group["algorithm"]].state(group)
    return [key for key, spec in specs.items() if spec.shape is None and not spec.counter]


def _noise(item: Item, number: int) -> Noise:
    """The noise that rounds tensor `number` of a parameter's state."""
    place = item.position - noise_place(item.parameter)  # the noise has the origin of a shard separately
    key = (place * 0x10001 + number + 1) & 0x7FFFFFFF
    return Noise(item.state["step"], key, position(item.parameter))


# the 8-bit and bfloat16 codecs


def encode(
    x: Tensor, codes: Tensor, scale: Tensor, noise: Noise | None = None, ok: Tensor | None = None, *, fused: bool = True
) -> None:
    """Write a float tensor as codes and scales, unless `ok` is false.

    Rounds to nearest without noise, stochastically (unbiased) with it.
    """
    x = x.float().contiguous()
    if fused and kernels.available(codes.device):
        from muonsw.kernels import stored

        stored.encode(x, codes, scale, _LEVELS[codes.dtype], noise, ok)
        return
    blocks, levels = _in_blocks(x, scale), _LEVELS[codes.dtype]
    largest = blocks.abs().amax(-1)
    # Take reciprocals of the scales only: dividing every element would cost another pass.
    t = (blocks.abs() * largest[..., None].clamp(min=torch.finfo(torch.float32).tiny).reciprocal()).mul_(levels**4)
    below = t.sqrt().sqrt_().floor_().clamp_(max=levels - 1)
    power, gap = _fourth(below), _fourth(below + 1)
    above = t.sub_(power)
    chances = 0.5 if noise is None else uniform_hash(blocks.shape, noise.seed, origin=noise.origin)
    code = below.add_(above > gap.sub_(power).mul_(chances))
    code = torch.maximum(code, blocks > 0) if codes.dtype == torch.uint8 else torch.copysign(code, blocks)
    new = code.to(codes.dtype).view(codes.shape)
    codes.copy_(new if ok is None else torch.where(ok, new, codes))
    scale.copy_(largest if ok is None else torch.where(ok, largest, scale))


def _in_blocks(x: Tensor, scale: Tensor) -> Tensor:
    return x.view(x.shape[0], scale.shape[1], math.prod(x.shape[1:]) // scale.shape[1])


def _fourth(x: Tensor) -> Tensor:
    square = x * x
    return square.mul_(square)


def decode(codes: Tensor, scale: Tensor, *, fused: bool = True) -> Tensor:
    if fused and kernels.available(codes.device):
        from muonsw.kernels import stored

        return stored.decode(codes, scale, _LEVELS[codes.dtype])
    x = codes.to(torch.float32).mul_(1 / _LEVELS[codes.dtype])  # times 127 or 255 this is exactly 1 in float32
    power = torch.copysign(_fourth(x), x)
    return _in_blocks(power, scale).mul_(scale[:, :, None]).view(codes.shape)


def round_bfloat16(x: Tensor, rounded: Tensor, noise: Noise, ok: Tensor | None, *, fused: bool = True) -> None:
    """Write a float tensor as bfloat16 with unbiased stochastic rounding, unless `ok` is false."""
    x = x.float()
    if not x.numel():
        return
    if fused and kernels.available(x.device) and x.is_contiguous() and rounded.is_contiguous():
        from muonsw.kernels import stored

        stored.round_bfloat16(x, rounded, noise, ok)
        return
    after = stochastic_round(x, torch.bfloat16, noise.seed, origin=noise.origin)
    rounded.copy_(after if ok is None else torch.where(ok, after, rounded))


# the host-memory codec


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams for copies to the device and to the host; each copies in order, which the step relies on."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _HostCopies:
    """Copies state between host and device piece by piece: fetches the next piece during an update."""

    def __init__(self, device: torch.device, pieces: list[list[Item]]) -> None:
        self._pieces = pieces
        self._to_device, self._to_host = _streams(device)
        self._to_device.wait_stream(self._to_host)  # the last step's copies must have arrived
        self._arriving = [self._send_for(0)]

    def fetch(self, number: int) -> list[Item]:
        items, arrived = self._arriving.pop()
        if number + 1 < len(self._pieces):
            self._arriving.append(self._send_for(number + 1))
        stream = torch.cuda.current_stream(self._to_device.device)
        stream.wait_event(arrived)
        for item in items:
            for value in item.state.values():
                value.record_stream(stream)
        return items

    def _send_for(self, number: int) -> tuple[list[Item], torch.cuda.Event]:
        with torch.cuda.stream(self._to_device):
            items = [
                item._replace(state={k: v.to(item.param.device, non_blocking=True) for k, v in item.state.items()})
                for item in self._pieces[number]
            ]
            return items, self._to_device.record_event()

    def give_back(self, number: int, items: list[Item]) -> None:
        self._to_host.wait_stream(torch.cuda.current_stream(self._to_host.device))
        with torch.cuda.stream(self._to_host):
            for home, item in zip(self._pieces[number], items, strict=True):
                for key, value in item.state.items():
                    if home.state[key].device != value.device:
                        home.state[key].copy_(value, non_blocking=True)
                        value.record_stream(self._to_host)


def wait_for_host(device: torch.device) -> None:
    _streams(device)[1].synchronize()
