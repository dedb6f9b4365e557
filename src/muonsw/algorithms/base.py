"""What an update rule is: it turns gradients and state into directions, and never touches a weight.

The optimizer subtracts `lr * scale * direction` in one shared place (`muonsw.apply`), where decay, masks and
rounding live too. An algorithm yields its directions chunk by chunk, so that what it holds at one time is
bounded whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.matrices import WHOLE, MatrixView, Part, Region, views
from muonsw.nonfinite import Flag
from muonsw.precision import LOW_PRECISION, Kept
from muonsw.slots import Specs, State, no_state, wide_dtype
from muonsw.work import Group, Item, all_contiguous, dtypes_of, elements, rows_of

if TYPE_CHECKING:
    from muonsw.kernels.elementwise import Weights
    from muonsw.norms import NormRule, Norms

# Entries from which a tensor is large: on an accelerator such tensors are quicker with a kernel each and fewer
# passes over memory, smaller ones with kernels that take many at once.
LARGE = 4 * 2**20


class Update(NamedTuple):
    """Directions for some parts: each part moves by `-lr * scale * direction`.

    Where a norm rule acts, `norms` is what it knows of each part's weights, and `lengths` what it multiplies each
    direction by. `row_factors` (count, rows, 1), if any, are what the rows of all directions, which are one batch, are
    still to be multiplied by: the kernel that moves weights does it on its way.
    """

    parts: list[Part]
    directions: list[Tensor]
    scale: float = 1.0
    norms: list[Norms] | None = None
    lengths: list[Tensor] | None = None
    row_factors: Tensor | None = None

    @property
    def stretched(self) -> list[Tensor]:
        """The directions times their row factors, or in the lengths that a norm rule gives them."""
        if self.row_factors is not None:
            return _times_rows(self.directions, self.row_factors)
        if self.lengths is None:
            return self.directions
        return [U.to(length.dtype) * length for U, length in zip(self.directions, self.lengths, strict=True)]


def _times_rows(directions: list[Tensor], factors: Tensor) -> list[Tensor]:
    rows = factors.shape[1]
    columns = sum(direction.numel() for direction in directions) // factors.numel()
    counts = [direction.numel() // (rows * columns) for direction in directions]
    pairs = zip(directions, factors.split_with_sizes(counts), strict=True)
    return [(U.reshape(-1, rows, columns).to(own.dtype) * own).reshape(U.shape) for U, own in pairs]


class Rates(NamedTuple):
    """Learning rate and decay of one batch at one step, on the host or on the batch's device.

    Where there is a flag and it forbids the step, nothing may change. `norm` is the rule that acts on the norm of the
    weights, None where that is free.
    """

    eta: float | Tensor
    phi: float | Tensor
    flag: Flag | None = None
    norm: NormRule | None = None

    @property
    def on_host(self) -> bool:
        """Whether these are floats by which the host can divide."""
        return isinstance(self.eta, float) and isinstance(self.phi, float) and self.eta > 0

    @property
    def ok(self) -> Tensor | None:
        """The flag as a boolean scalar."""
        return None if self.flag is None else self.flag.ok

    def applied(self, dtype: torch.dtype) -> tuple[float | Tensor, float | Tensor]:
        """Learning rate and decay of weights of this dtype, zero where the flag forbids the step."""
        if self.flag is None:
            return self.eta, self.phi
        factor = self.flag.factor(dtype)
        return factor * self.eta, factor * self.phi


Take = Callable[[Rates], None]


class FusedUpdate(NamedTuple):
    """An update that one kernel makes whole: it advances the state, decays and moves.

    `take` does it, with the learning rate and the decay of the step.
    """

    parts: list[Part]
    take: Take


class Budget(NamedTuple):
    """How much temporary memory one chunk may take, and the flag that says whether gradients are finite.

    `flag` is None where the host has already checked; where it forbids the step, state and weights must stay exactly
    as they are. `on_host` says that learning rate and decay are numbers that the host knows, and the learning rate is
    not zero, as torch's fused kernels want. `plain` asks for directions and no fused update, because something is to be
    done with them; `cut` asks for chunks even where a kernel needs none, because state is decoded for each.
    """

    chunk_bytes: int
    flag: Flag | None = None
    on_host: bool = False
    plain: bool = False
    cut: bool = False

    @property
    def ok(self) -> Tensor | None:
        """The flag as a boolean scalar."""
        return None if self.flag is None else self.flag.ok


class MatrixRule(NamedTuple):
    """A rule that needs whole matrices, in the halves between which the matrices of sharded parameters are exchanged.

    Ranks have agreed that the step is taken before either begins, so neither has a flag.

    Attributes:
        sent_dtype: the dtype of what is to be orthogonalized.
        result_dtype: the dtype of directions.
        advance: moves the state of parts one step on, and writes what is to be orthogonalized to targets, if any.
        directions: the directions for matrices (count, rows, columns) and their state, in a dtype; and the new state.
        scale: how far matrices of a shape move.
        state: what `directions` keeps of each matrix, by key; it travels with the matrix.
        sends_gradient: whether `directions` also wants the gradient, as `state["grad"]`.
    """

    sent_dtype: Callable[[Group, torch.dtype], torch.dtype]
    result_dtype: Callable[[Group, torch.dtype, torch.device], torch.dtype]
    advance: Callable[[Group, list[Part], list[Tensor] | None], None]
    directions: Callable[[Group, Tensor, State, torch.dtype], tuple[Tensor, State]]
    scale: Callable[[Group, int, int], float]
    state: Callable[[Group], Specs] = no_state
    sends_gradient: Callable[[Group], bool] = lambda _: False


class Algorithm(NamedTuple):
    """An update rule: its own options with their defaults, its state, and its directions.

    A rule without `matrices` treats every element on its own: on many ranks it is given shards. `scale_free` says that
    the size of a gradient does not reach the update, so that clipping it has no point.

    A rule that does something else every few steps has `counts_steps`. Where that says so of a group, its
    `update_count` is the number of the step that is being taken, from 1: a plain int that is saved with the group and
    the same on all ranks. Steps that are skipped count, since only the device may know of them, but for those before
    the first that is taken. Whether a matrix has had a gradient before is a question to its state, on the device. No
    graph is captured of such a step.

    `in_place` is the whole update of parts by a kernel that reads and writes state as it is kept, given by key; it
    returns None where there is no such kernel, and makes the bits that `updates` makes of decoded state.
    """

    defaults: dict[str, Any]
    state_keys: Callable[[Group], tuple[str, ...]]
    updates: Callable[[Group, list[Item], Budget], Iterator[Update | FusedUpdate]]
    validate: Callable[[Group, str, Tensor], None]
    matrices: MatrixRule | None = None
    scale_free: bool = False
    counts_steps: Callable[[Group], bool] | None = None
    in_place: Callable[[Group, list[Part], dict[str, list[Kept]]], FusedUpdate | None] | None = None

    def view(self, group: Group) -> MatrixView | None:
        """How this rule sees a group's parameters as matrices; None where every element is on its own."""
        return None if self.matrices is None else MatrixView.of(group)

    def count_matrices(self, group: Group, param: Tensor) -> int:
        """How many matrices of a parameter are orthogonalized."""
        view = self.view(group)
        return 0 if view is None else view.count(param.shape)


def are_large(tensors: list[Tensor]) -> bool:
    """Whether these tensors are large on average."""
    return sum(t.numel() for t in tensors) >= LARGE * len(tensors)


def rounding_key(group: Group, part: Part) -> int:
    """A number for this part of this parameter, whatever the step."""
    place = part.item.position * 0x10001 + sum((axis + 1) * start for axis, start, _ in part.region.cuts)
    return int((group["rounding_seed"] * 0x9E3779B1 + place) & 0x7FFFFFFF)


def kernel_weights(group: Group, parts: list[Part], weights: list[Tensor]) -> Weights:
    """Weights of one dtype, with what their rounding needs."""
    from muonsw.kernels.elementwise import Weights

    rounding = group["rounding"] if weights[0].dtype in LOW_PRECISION else "nearest"
    if rounding == "stochastic":
        counters = [part.item.state["step"] for part in parts]
        return Weights(weights, rounding, counters=counters, keys=[rounding_key(group, part) for part in parts])
    return Weights(weights)


def suits_torch(group: Group, *lists: Sequence[Tensor]) -> bool:
    """Whether torch's fused kernels take these tensors: one dtype, which they do not have to round, no gaps.

    They know no cautious decay, and in lower precision torch 2.12 and 2.13 skip updates silently on CPUs.
    """
    first = lists[0][0]
    if group["cautious"] or first.device.type not in ("cpu", "cuda"):
        return False
    every = list(chain.from_iterable(lists))
    return first.dtype in (torch.float32, torch.float64) and dtypes_of(every) == {first.dtype} and all_contiguous(every)


def torch_is_quicker(items: Sequence[Item]) -> bool:
    """Whether torch's fused kernels, where they can do the work, are to be preferred to ours.

    Asked of a whole batch, because it must not depend on how the batch is cut: the kernels round differently.
    """
    return items[0].param.device.type == "cuda" and elements([item.param for item in items]) < kernels.TORCH_BELOW


def clean(grads: Sequence[Tensor], like: Sequence[Tensor], maximize: bool, ok: Tensor | None) -> list[Tensor]:
    """Gradients in the dtype of `like`, pointing downhill, and zero throughout where `ok` is false.

    The caller's gradients are never changed; where nothing has to be done they are returned as they are.
    """
    ready = [g if g.dtype == s.dtype else g.to(s.dtype) for g, s in zip(grads, like, strict=True)]
    if maximize:
        ready = list(torch._foreach_neg(ready))
    return ready if ok is None else [torch.where(ok, g, 0) for g in ready]


def decay_average(averages: list[Tensor], beta: float, ok: Tensor | None) -> None:
    """Multiply running averages by `beta`, or leave them as they are where `ok` is false."""
    torch._foreach_mul_(averages, beta if ok is None else where_ok(ok, beta, 1.0, averages[0].dtype))


def where_ok(ok: Tensor, value: float, otherwise: float, dtype: torch.dtype) -> Tensor:
    """One of two numbers, chosen on the device; in float64 where the tensors that it multiplies are."""
    return torch.where(ok, torch.full_like(ok, value, dtype=wide_dtype(dtype)), otherwise)


def subtract(weights: list[Tensor], factor: float | Tensor, directions: list[Tensor]) -> None:
    """`W <- W - factor * direction`, in place.

    Decay has weights as their own directions: the factor `1 - phi` would be rounded, to the same side at every step.
    """
    if not isinstance(factor, Tensor):
        torch._foreach_add_(weights, directions, alpha=-factor)
    elif are_large(weights) or directions[0].dtype != weights[0].dtype:
        torch._foreach_addcmul_(weights, directions, [factor] * len(weights), value=-1)
    else:
        torch._foreach_add_(weights, torch._foreach_mul(directions, factor), alpha=-1)


# Momentum, in the two forms people write, which differ by the factor `1 - beta` that orthogonalization does not see:
# `ema` (the paper's listing, `torch.optim.Muon`): `M <- beta M + (1 - beta) G`, Nesterov `(1 - beta) G + beta M`;
# `heavy_ball` (the paper's Algorithm 1, `torch.optim.SGD`): `M <- beta M + G`, Nesterov `G + beta M`.
MOMENTUM_FORMS = ("ema", "heavy_ball")


def advance_momentum(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float, ok: Tensor | None) -> None:
    """Move the buffers one step on, in place."""
    gain = 1 - beta if form == "ema" else 1.0
    if form == "ema" and ok is None:
        torch._foreach_lerp_(momenta, grads, gain)
        return
    if form == "ema" and ok is not None and are_large(momenta):
        weight = where_ok(ok, gain, 0.0, momenta[0].dtype).to(momenta[0].dtype)
        for average, grad in zip(momenta, grads, strict=True):
            average.lerp_(grad, weight)
        return
    decay_average(momenta, beta, ok)
    torch._foreach_add_(momenta, grads, alpha=gain)


def look_ahead(form: str, momenta: list[Tensor], grads: list[Tensor], beta: float, out: list[Tensor]) -> None:
    """Write Nesterov's direction, from the gradients and the advanced buffers, to `out`."""
    for average, grad, target in zip(momenta, grads, out, strict=True):
        if form == "ema":
            torch.lerp(grad, average, beta, out=target)
        else:
            torch.add(grad, average, alpha=beta, out=target)


def elementwise_updates(
    items: list[Item],
    keys: tuple[str, ...],
    budget: Budget,
    fused: Callable[[list[Part]], FusedUpdate | None],
    plain: Callable[[list[Part]], Update],
) -> Iterator[Update | FusedUpdate]:
    """Updates of a rule that treats every entry alike: `fused` ones where there is a kernel, else `plain` ones.

    A kernel is tried on all items at once, since it needs no memory of its own. Weights that are rounded with noise are
    always cut in the same way, because the noise depends on it.
    """
    items = [item for item in items if item.param.numel()]  # an empty shard must not keep copies beside it from kernels
    if not items:
        return
    if not (budget.plain or budget.cut) and items[0].param.dtype not in LOW_PRECISION:
        whole = fused(whole_parts(items))
        if whole is not None:
            yield whole
            return
    for parts in elementwise_parts(items, keys, budget.chunk_bytes):
        update = None if budget.plain else fused(parts)
        yield plain(parts) if update is None else update


def whole_parts(items: Sequence[Item]) -> list[Part]:
    """Every item as one part."""
    return rows_of(Part, zip(items, repeat(WHOLE)))


def columns(parts: Sequence[Part], keys: Sequence[str]) -> list[list[Tensor]]:
    """Weights, gradients and state of parts, a list of each."""
    items = [part.item for part in parts]
    lists = [[item.param for item in items], [item.grad for item in items]]
    lists += [[item.state[key] for item in items] for key in keys]
    return lists if _are_whole(parts) else [views(parts, tensors) for tensors in lists]


def _are_whole(parts: Sequence[Part]) -> bool:
    return False not in [part.region is WHOLE for part in parts]


def elementwise_parts(items: list[Item], keys: tuple[str, ...], chunk_bytes: int) -> Iterator[list[Part]]:
    """Chunks for rules that treat every entry alike: small tensors together, large ones cut.

    Chunks that fit in a CPU's cache make several passes over them cost little more than one.
    """
    if elements([item.param for item in items]) * items[0].param.element_size() <= chunk_bytes:
        yield whole_parts(items)
        return
    chunk: list[Part] = []
    room = chunk_bytes
    for item in items:
        for region, size in _cut(item, keys, chunk_bytes):
            if chunk and size > room:
                yield chunk
                chunk, room = [], chunk_bytes
            chunk.append(Part(item, region))
            room -= size
    if chunk:
        yield chunk


def _cut(item: Item, keys: tuple[str, ...], chunk_bytes: int) -> Iterator[tuple[Region, int]]:
    numel, size = item.param.numel(), item.param.element_size()
    state = [item.state[key] for key in keys if key in item.state]
    tensors = (item.param, item.grad, *(tensor for tensor in state if tensor.dim()))
    if numel * size <= chunk_bytes or not all(t.is_contiguous() for t in tensors):
        yield WHOLE, numel * size
        return
    length = max(1, chunk_bytes // size)
    for start in range(0, numel, length):
        part = min(length, numel - start)
        yield Region(((0, start, part),), flat=True), part * size
