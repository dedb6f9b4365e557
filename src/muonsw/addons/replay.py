"""A step as a CUDA graph: captured once steps repeat, then replayed in one launch.

The device finishes a small step before the host has launched its kernels. In a replayed step the host still checks and
computes every learning rate and decay, and passes them as scalars on the device. Everything after that (finite check,
state, directions, weights) is captured. Eager steps read the same scalars, so both give the same weights. On many ranks
settled steps are replayed (`muonsw.distributed.ranks`). Collectives run eagerly between graphs, so each rank decides
for itself whether it replays.

A graph reads and writes fixed addresses. Before each replay, everything it is bound to is compared with the current
tensors. State is identified by address and layout alone: references to it would keep its memory alive. Gradients may
move, because our kernels find them through tables that each replay fills in again (`kernels.tables.GraphTables`). A
step in which a torch operation reads a gradient is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonsw import kernels, machine
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.adamw import ADAMW
from muonsw.algorithms.muon import MUON, slots_have_kernels
from muonsw.decay import decays
from muonsw.distributed.shards import local, locals_of
from muonsw.kernels.graphs import GradientReads, Recording, recorded
from muonsw.kernels.tables import GraphTables, TooManyEntriesError, aligned, in_graph, lengths
from muonsw.nonfinite import Flag
from muonsw.options import algorithm_defaults
from muonsw.orthogonalize import ORTHOGONALIZERS, Iteration, aurora
from muonsw.slots import wide_dtype
from muonsw.work import Batch, Group, StepContext, all_contiguous, any_dtensor, elements, items_of

if TYPE_CHECKING:
    from muonsw.optimizer import ScaledDecayOptimizer

# Smaller steps are replayed by default. Larger ones are GPU-bound, and would miss the memory that a graph holds.
AUTOMATIC_BELOW = 2**29

# Steps with the same tensors at the same addresses before one is captured.
SETTLED = 3

# Cached bindings, each with its graph.
_REMEMBERED = 8

# Sizes to try for a step's tables, in entries.
_ROOMS = (2**13, 2**16, 2**20)

# A capture waits for the device, so after the first few there is at most one in this many steps.
_FIRST_CAPTURES, _STEPS_FOR_A_CAPTURE = 16, 50

# A graph holds this memory, so it is just enough for products to fill a GPU: 24 matrices of 768 x 2048 have 504 tiles
# in one triangle, and an H200 computes 264 at a time (with 16 matrices it idled for a third of the time).
REPLAYED_CHUNK_BYTES = 9 * 2**24

# `muonsw.step.update_and_apply`.
Runner = Callable[..., Flag | bool]


class Binding(NamedTuple):
    """Everything a captured step depends on except rates, decay and the addresses of gradients."""

    gradients: tuple[Any, ...]
    parameters: tuple[Any, ...]
    state: tuple[Any, ...]
    options: tuple[Any, ...]


def binding(
    groups: Iterable[Group], state: Mapping[Tensor, Mapping[str, Any]], settings: Any = None
) -> tuple[Binding, tuple[int, ...]] | None:
    """The binding of a step captured now, and the addresses of its gradients.

    None if a tensor has no address, like a sparse gradient.
    """
    # runs before every step, so it avoids a Python call per tensor
    params = list(chain.from_iterable([group["params"] for group in groups]))
    with torch._C.DisableTorchFunctionSubclass():  # makes attributes of DTensors twice as fast
        grads = [param.grad for param in params]
    present = [grad for grad in grads if grad is not None]
    missing = [place for place, grad in enumerate(grads) if grad is None] if len(present) < len(grads) else []
    tensors = list(chain.from_iterable([entries.values() for entries in state.values()]))
    if not all(issubclass(kind, Tensor) for kind in set(map(type, tensors))):
        tensors = [value for value in tensors if isinstance(value, Tensor)]
    shards = params
    if any_dtensor(params):
        trained = [param for param, grad in zip(params, grads, strict=True) if grad is not None] if missing else params
        if _placements(present) != _placements(trained):
            return None  # the step redistributes such gradients
        shards, present, tensors = map(locals_of, (params, present, tensors))
    try:
        places, param_places, state_places = (tuple(map(Tensor.data_ptr, of)) for of in (present, shards, tensors))
        forms, param_forms, state_forms = map(_forms, (present, shards, tensors))
    except RuntimeError:
        return None
    empty = 0 in places or 0 in param_places  # an empty shard, or a wrapper tensor without memory
    if empty and any(not at and t.numel() for at, t in zip((*places, *param_places), (*present, *shards), strict=True)):
        return None
    bound_to = Binding(
        (forms, tuple(missing), aligned(places) or [place % 16 for place in places]),  # kernels are compiled for it
        (param_places, param_forms, lengths(shards), *map(id, params)),
        (state_places, state_forms, *map(id, state), *map(len, state.values())),
        (settings, *machine.product_settings(), *(_options(group) for group in groups)),
    )
    return bound_to, places


def _placements(tensors: Sequence[Tensor]) -> list[Any]:
    return [getattr(tensor, "placements", None) for tensor in tensors]


def _forms(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Layouts and dtypes; strides only if some tensor is not contiguous, because reading them is slow."""
    strides = () if all_contiguous(tensors) else tuple(map(Tensor.stride, tensors))
    return strides, [tensor.dtype for tensor in tensors]


def _options(group: Group) -> tuple[Any, ...]:
    """The options of a group that a graph bakes in, and whether it decays."""
    return (id(group), len(group["params"]), decays(group), *map(group.get, _frozen_options(group["algorithm"])))


@cache
def _frozen_options(algorithm: str) -> tuple[str, ...]:
    names = {"algorithm", *algorithm_defaults(algorithm)} - {"lr", "weight_decay"}
    unread = {"momentum", "betas"} - ALGORITHMS[algorithm].defaults.keys()  # kept in every group for schedulers
    return tuple(sorted(names - unread))


class _Captured(NamedTuple):
    """A graph, what it is bound to, its batches without their items, its address tables, and the flag that it sets."""

    graph: Recording
    bound_to: Binding
    batches: list[Batch]
    tables: GraphTables
    flag: Flag | None

    def replay(self, places: tuple[int, ...]) -> None:
        self.tables.move(places)
        self.graph.replay()


class Replay:
    """The graphs of one optimizer's step, and when to capture one.

    Attributes:
        flag: the flag on the device that the last step depended on.
    """

    def __init__(self) -> None:
        self.flag: Flag | None = None
        self._graphs: list[_Captured] = []
        self._chosen: _Captured | None = None
        self._scalars: list[Tensor] = []
        self._now: Binding | None = None
        self._places: tuple[int, ...] = ()  # of the gradients
        self._seen: list[tuple[Binding, int]] = []
        self._captures = self._replays = self._steps_taken = 0
        self._failure = ""  # why steps cannot be captured
        self._counted: tuple[int, ...] = ()
        self._is_small = self._is_on = False

    def ready(self, optimizer: ScaledDecayOptimizer) -> list[Batch] | None:
        """The batches of a step that a captured graph can run, without their gradients."""
        self._chosen = None
        groups = optimizer.param_groups
        self._is_on = bool(optimizer.replay)
        if optimizer.replay is None and optimizer.nonfinite != "raise":  # automatic
            first = groups[0]["params"][:1]
            self._is_on = bool(first) and first[0].is_cuda and self.pays(groups)
        if not self._is_on or (self._failure and not self._graphs):
            return None
        settings = (optimizer.nonfinite, optimizer.chunk_bytes, optimizer._counters.address)
        now, self._places = binding(groups, optimizer.state, settings) or (None, ())
        self._now = now
        self._chosen = next((graph for graph in self._graphs if graph.bound_to == now), None)
        if self._chosen is not None:
            return self._chosen.batches
        if now is not None:
            # a graph of other parameters would keep them alive
            self._graphs = [graph for graph in self._graphs if graph.bound_to.parameters == now.parameters]
        return None

    def run(
        self, optimizer: ScaledDecayOptimizer, batches: list[Batch], contexts: list[StepContext], runner: Runner
    ) -> Flag | bool:
        """Take a step: replay a graph, capture one, or run eagerly."""
        if self._chosen is None:
            if not batches or not self._is_on:
                return runner(optimizer, batches, contexts)
            reason = supports(optimizer, batches)
            if optimizer.replay and (reason or self._failure):
                why = reason or f"the step cannot be captured: {self._failure}"
                optimizer._counters.warn_once("not replayed", f"replay=True: steps run eagerly, because {why}")
            if reason:
                return runner(optimizer, batches, contexts)
            # learning rate and decay of each batch, on the device; zero between steps
            kinds = [(batch.device, wide_dtype(batch.dtype)) for batch in batches for _ in ("lr", "decay")]
            if [(scalar.device, scalar.dtype) for scalar in self._scalars] != kinds:
                self._graphs.clear()
                self._scalars = [torch.zeros((), device=device, dtype=dtype) for device, dtype in kinds]
            optimizer._counters.place(batches[0].device)
        self._steps_taken += 1
        try:
            torch._foreach_add_(self._scalars, [float(x) for ctx in contexts for x in (ctx.eta, ctx.phi)])
            if self._chosen is not None:
                self._replays += 1
                self.flag = self._chosen.flag
                self._chosen.replay(self._places)
            else:
                self._take(optimizer, batches, contexts, runner)
        except BaseException:
            torch._foreach_zero_(self._scalars)  # the next step adds its rates to these
            raise
        return True if self.flag is None else self.flag

    def _take(
        self, optimizer: ScaledDecayOptimizer, batches: list[Batch], contexts: list[StepContext], runner: Runner
    ) -> None:
        """Take a step without a graph, on the same scalars: eagerly, or by capturing it first."""
        pairs = zip(self._scalars[::2], self._scalars[1::2], strict=True)
        contexts = [ctx._replace(eta=eta, phi=phi) for ctx, (eta, phi) in zip(contexts, pairs, strict=True)]
        if optimizer.replay is None and optimizer.chunk_bytes is None:
            contexts = [ctx._replace(chunk_bytes=REPLAYED_CHUNK_BYTES) for ctx in contexts]

        def program() -> None:
            finite = runner(optimizer, batches, contexts, captured=True)
            self.flag = finite if isinstance(finite, Flag) else None
            torch._foreach_zero_(self._scalars)

        params = [param for group in optimizer.param_groups for param in group["params"]]
        captured = self._capture(program, params, batches) if self._settled() else None
        if captured is None:
            program()
        else:
            captured.replay(self._places)

    def pays(self, groups: Sequence[Group]) -> bool:
        """Whether replay is possible and faster, given that the first parameter is on a GPU."""
        if torch.version.hip is not None or not all(map(has_kernels_throughout, groups)):  # not tried on AMD's GPUs
            return False
        if any(map(cycles_beta, groups)):
            return False
        counts = tuple([len(group["params"]) for group in groups])
        if counts != self._counted:
            self._counted = counts
            self._is_small = elements([local(p) for group in groups for p in group["params"]]) < AUTOMATIC_BELOW
        return self._is_small and kernels.available(groups[0]["params"][0].device)

    def _settled(self) -> bool:
        """Whether enough steps had the current binding; counts this one."""
        now = self._now
        if now is None or self._failure:
            return False
        times = next((count for seen, count in self._seen if seen == now), 0)
        older = [entry for entry in self._seen if entry[0] != now]
        self._seen = [(now, times + 1), *older][:_REMEMBERED]
        return times >= SETTLED and self._captures < _FIRST_CAPTURES + self._steps_taken // _STEPS_FOR_A_CAPTURE

    def _capture(self, program: Callable[[], None], params: Sequence[Tensor], work: list[Batch]) -> _Captured | None:
        """Capture the program; None, with the reason in `_failure`, if that is impossible."""
        # All graphs share one pool, because nothing in it outlives a replay, except the flag until the next replay.
        assert self._now is not None
        self._captures += 1
        order = {id(param): place for place, param in enumerate(params)}
        grads = [item.grad for item in sorted(items_of(work), key=lambda item: order[id(item.parameter)])]
        device, pool = work[0].device, self._graphs[0].graph.pool if self._graphs else None
        watch = GradientReads(grads)
        for room in _ROOMS:
            tables = GraphTables(grads, device, room)

            def captured_program(tables: GraphTables = tables) -> None:
                tables.compute()
                with in_graph(tables), watch:
                    program()

            try:
                graph = recorded(captured_program, device, pool)
                tables.finish()
                break
            except TooManyEntriesError:
                self._failure = f"its tables have more than {room} entries"
            except Exception as error:  # the eager step that follows raises it again if capturing did not cause it
                self._failure = (str(error) or type(error).__name__).splitlines()[0]
                return None
        else:
            return None
        self._failure = "torch operations read gradients" if watch.seen or tables.overlap else ""
        if self._failure:
            return None
        captured = _Captured(graph, self._now, [batch._replace(items=[]) for batch in work], tables, self.flag)
        self._graphs = [captured, *self._graphs][:_REMEMBERED]
        return captured


def has_kernels_throughout(group: Group) -> bool:
    """Whether our own kernels run a group's step; functions that users register may depend on anything."""
    algorithm, polar = ALGORITHMS[group["algorithm"]], ORTHOGONALIZERS.get(group.get("orthogonalizer", "auto"))
    return (
        (algorithm is MUON or algorithm is ADAMW)
        and slots_have_kernels(group)
        and (isinstance(polar, Iteration) or polar is aurora)
        and group["fused"] is not False
        and not algorithm.counts_steps(group)
    )


def cycles_beta(group: Group) -> bool:
    """Whether a scheduler (OneCycleLR) changes a beta that the group's rule reads, which a graph bakes in."""
    return "max_momentum" in group and "betas" in ALGORITHMS[group["algorithm"]].defaults


def supports(optimizer: ScaledDecayOptimizer, batches: Sequence[Batch]) -> str:
    """Why a step of these batches cannot be replayed; empty if it can."""
    devices = {batch.device for batch in batches}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"its parameters are on {', '.join(sorted(map(str, devices)))}, not on one CUDA device"
    if optimizer.nonfinite == "raise":
        return "nonfinite='raise' waits for the device"
    for group in [batch.group for batch in batches]:
        if group["offload"]:
            return "offload=True copies state from the host and back"
        if cycles_beta(group):
            return "the scheduler cycles AdamW's first beta; pass cycle_momentum=False to it"
        if not has_kernels_throughout(group):
            return f"algorithm={group['algorithm']!r} with these options runs partly on torch operations"
    return ""
