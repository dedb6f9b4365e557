"""A step as a CUDA graph: captured once it repeats itself, then replayed in one launch.

A small step is over before the host has launched its kernels. Where it is replayed the host still decides every
learning rate and every decay, with all its checks, and hands them over as scalars on the device; whatever comes after
that (the finite check, state, directions, weights) is captured. Steps that are not replayed take the same scalars from
the same place, so that both ways give the same weights.

A graph reads and writes fixed addresses. Before each replay everything that it is bound to is compared with what is
there now. Gradients and state are known by address and layout alone: to hold on to them would keep their memory from
the next backward pass, and from a user who moves state elsewhere. Our kernels find gradients through tables, which a
replay computes anew (`kernels.tables.GraphTables`), so gradients may lie elsewhere at each step. Where an operation of
torch reads one, the graph is bound to its address too, and there may be a graph for each of a few places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsw import kernels, machine, rates
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.adamw import ADAMW
from muonsw.algorithms.base import Rates
from muonsw.algorithms.muon import MUON, polar_name
from muonsw.algorithms.muon_kernels import in_kernels
from muonsw.decay import DECAY_RULES, decays
from muonsw.kernels.graphs import GradientReads, recorded
from muonsw.kernels.tables import GraphTables, TooManyEntriesError, aligned, in_graph, lengths
from muonsw.nonfinite import Flag
from muonsw.normalize import NORMALIZE
from muonsw.norms import FREE
from muonsw.options import algorithm_defaults
from muonsw.orthogonalize import ITERATIONS, ORTHOGONALIZERS
from muonsw.precondition import PRECONDITION
from muonsw.slots import wide_dtype
from muonsw.work import Batch, Group, all_contiguous, elements, items_of

# Elements of all parameters below which steps are replayed unless the user says no: with more of them the device is
# what takes long, and the memory that a graph keeps for itself would be missed.
AUTOMATIC_BELOW = 2**29

# Steps that must have found the same tensors in the same places before one is captured.
SETTLED = 3

# Bindings that are remembered, each with its graph.
_REMEMBERED = 8

# Entries of all tables of a step, as far as they are tried.
_ROOMS = (2**13, 2**16, 2**20)

# A capture waits for the device, so after the first few there is one for so many steps.
_FIRST_CAPTURES, _STEPS_FOR_A_CAPTURE = 16, 50

# Steps in a row without a replay after which the user is warned.
PATIENCE = 50

# The algorithms whose steps our own kernels make.
OURS = (MUON, ADAMW)

# Takes the step of these batches, with the rates of each, unless the flag that it returns forbids it.
StepTaker = Callable[[list[Batch], list[Rates]], Flag | None]


class Binding(NamedTuple):
    """All that a captured step depends on beside learning rates and decay; on `places`, of gradients, only some do."""

    places: tuple[int, ...]
    gradients: tuple[Any, ...]
    parameters: tuple[Any, ...]
    state: tuple[Any, ...]
    options: tuple[Any, ...]

    def anywhere(self) -> Binding:
        """The same, wherever the gradients lie."""
        return self._replace(places=())

    def difference(self, other: Binding) -> str:
        """What is not the same, in words."""
        pairs = zip(self._fields, self, other, strict=True)
        names = ["gradients" if name == "places" else name for name, mine, theirs in pairs if mine != theirs]
        return " and ".join(dict.fromkeys(names))


def binding(groups: Iterable[Group], state: Mapping[Tensor, Mapping[str, Any]], settings: Any = None) -> Binding | None:
    """What a step captured now would be bound to; None where a tensor has no address, such as a sparse gradient.

    Asked before every step, so no Python function runs for each tensor.
    """
    params = list(chain.from_iterable([group["params"] for group in groups]))
    grads = [param.grad for param in params]
    there = [grad for grad in grads if grad is not None]
    missing = [place for place, grad in enumerate(grads) if grad is None] if len(there) < len(grads) else []
    kept = list(chain.from_iterable([one.values() for one in state.values()]))
    if set(map(type, kept)) != {Tensor}:
        kept = [value for value in kept if isinstance(value, Tensor)]
    try:
        places, own, kept_at = _addresses(there), _addresses(params), _addresses(kept)
        forms, own_forms, kept_forms = _forms(there), _forms(params), _forms(kept)
    except RuntimeError:
        return None
    if 0 in places or 0 in own:  # the shell of a tensor that keeps its numbers elsewhere
        return None
    return Binding(
        places,
        (forms, tuple(missing), aligned(places) or [place % 16 for place in places]),  # kernels are compiled for it
        (own, own_forms, lengths(params), *map(id, params)),
        (kept_at, kept_forms, *map(id, state), *map(len, state.values())),
        (settings, *machine.product_settings(), *(_options(group) for group in groups)),
    )


def _addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, tensors))


def _forms(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Layouts and dtypes; strides only where there are gaps, because asking takes long."""
    strides = () if all_contiguous(tensors) else tuple(map(Tensor.stride, tensors))
    return strides, [tensor.dtype for tensor in tensors]


def _options(group: Group) -> tuple[Any, ...]:
    """The options of a group that a graph freezes, and of which kind those are that reach it as numbers."""
    return (id(group), len(group["params"]), decays(group), *_frozen_options(group["algorithm"])(group))


@cache
def _frozen_options(algorithm: str) -> Callable[[Group], tuple[Any, ...]]:
    names = algorithm_defaults(algorithm).keys() - {"lr", "weight_decay", "algorithm"}
    if any(ALGORITHMS[algorithm] is known for known in OURS):  # which read no other momentum than their own
        names -= {"momentum", "betas"} - ALGORITHMS[algorithm].defaults.keys()
    return itemgetter("algorithm", *sorted(names))


class _Captured(NamedTuple):
    """A graph, what it is bound to, its batches without their items, its address tables, and the flag that it sets."""

    graph: torch.cuda.CUDAGraph
    bound_to: Binding
    batches: list[Batch]
    tables: GraphTables
    flag: Flag | None

    def fits(self, now: Binding | None) -> bool:
        """Whether a replay would be the step of what is there now."""
        if now is None or self.bound_to[1:] != now[1:]:
            return False
        return self.bound_to.places in ((), now.places)

    def replay(self, now: Binding) -> None:
        """Replay it on the gradients that are there now."""
        self.tables.move(now.places)
        self.graph.replay()


class Replay:
    """The graphs of one optimizer's step, and when to capture one.

    Attributes:
        flag: what may have forbidden the last step, on the device.
    """

    def __init__(self) -> None:
        self.flag: Flag | None = None
        self._graphs: list[_Captured] = []
        self._chosen: _Captured | None = None
        self._scalars: list[Tensor] = []
        self._now: Binding | None = None
        self._seen: list[tuple[Binding, int]] = []
        self._is_bound_to_places = False
        self._captures = self._replays = self._steps_taken = self._steps_without = 0
        self._failure = self._moving = ""
        self._counted: tuple[int, ...] = ()
        self._is_small = False

    def pays(self, groups: Sequence[Group]) -> bool:
        """Whether steps of these parameters, the first of which is on a GPU, are quicker replayed, and could be."""
        if torch.version.hip is not None or not all(map(is_ours_alone, groups)):  # graphs were not tried on AMD's
            return False
        if any(map(_cycles_beta, groups)):
            return False
        counts = tuple([len(group["params"]) for group in groups])
        if counts != self._counted:
            self._counted = counts
            self._is_small = elements([param for group in groups for param in group["params"]]) < AUTOMATIC_BELOW
        return self._is_small and kernels.available(groups[0]["params"][0].device)

    def ready(
        self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Any]], settings: Any
    ) -> list[Batch] | None:
        """The batches of a step that can be replayed, without their gradients; None where none was captured."""
        if self._failure and not self._graphs:
            return None
        now, before = binding(groups, state, settings), self._now
        self._now = now
        self._chosen = next((one for one in self._graphs if one.fits(now)), None)
        if self._chosen is not None:
            return self._chosen.batches
        if now is not None:  # a graph of other parameters would keep them alive
            self._graphs = [one for one in self._graphs if one.bound_to.parameters == now.parameters]
        if now is not None and before is not None and now != before:
            self._moving = now.difference(before)
        return None

    def again(self, rates: list[Rates]) -> None:
        """Replay the step that is ready, with the rates of each batch in turn."""
        assert self._chosen is not None
        assert self._now is not None
        self._replays += 1
        self._steps_without = 0
        self._steps_taken += 1
        self.flag = self._chosen.flag
        with self._handed_over(rates):
            self._chosen.replay(self._now)

    def take(self, work: list[Batch], rates: list[Rates], step: StepTaker, *, asked: bool) -> None:
        """Take a step that is not ready: eagerly, or by capturing it first.

        `asked` says that the user wants replays, also by graphs that are bound to the places of gradients.
        """
        self._place_scalars(work)
        self._steps_without += 1
        self._steps_taken += 1

        def program() -> None:
            pairs = zip(self._scalars[::2], self._scalars[1::2], strict=True)
            handed = [known._replace(eta=eta, phi=phi) for known, (eta, phi) in zip(rates, pairs, strict=True)]
            self.flag = step(work, handed)
            torch._foreach_zero_(self._scalars)

        with self._handed_over(rates):
            captured = self._capture(program, work, asked=asked) if self._settled() else None
            if captured is None:
                program()
            else:
                assert self._now is not None
                captured.replay(self._now)

    @contextmanager
    def _handed_over(self, rates: list[Rates]) -> Iterator[None]:
        """Give the rates of a step to the device; the step itself makes zeros of them again, or else its error does."""
        try:
            torch._foreach_add_(self._scalars, [float(scalar) for one in rates for scalar in (one.eta, one.phi)])
            yield
        except BaseException:
            torch._foreach_zero_(self._scalars)  # or the next step would be too long
            raise

    @property
    def complaint(self) -> str:
        """Why steps are not replayed although they could be; empty while there is hope."""
        if self._failure:
            return f"the step cannot be captured: {self._failure}"
        if self._steps_without < PATIENCE:
            return ""
        if self._now is None:
            return "a parameter or a gradient has no memory of its own"
        hint = "; keep them in place with zero_grad(set_to_none=False)" if self._moving == "gradients" else ""
        return f"{self._moving} changed too often in {PATIENCE} steps{hint}"

    def _settled(self) -> bool:
        """Whether steps have found what there is now often enough; counts this one."""
        now = self._now
        if now is None or self._failure:
            return False
        now = now if self._is_bound_to_places else now.anywhere()
        times = next((count for seen, count in self._seen if seen == now), 0)
        others = [entry for entry in self._seen if entry[0] != now]
        self._seen = [(now, times + 1), *others][:_REMEMBERED]
        return times >= SETTLED and self._captures < _FIRST_CAPTURES + self._steps_taken // _STEPS_FOR_A_CAPTURE

    def _place_scalars(self, work: Sequence[Batch]) -> None:
        """A learning rate and a decay on the device for each batch; between steps they are zero."""
        wanted = [(batch.device, wide_dtype(batch.dtype)) for batch in work for _ in ("lr", "decay")]
        if [(scalar.device, scalar.dtype) for scalar in self._scalars] != wanted:
            self._graphs.clear()
            self._scalars = [torch.zeros((), device=device, dtype=dtype) for device, dtype in wanted]

    def _capture(self, program: Callable[[], None], work: list[Batch], *, asked: bool) -> _Captured | None:
        """A graph of the program; None, and the reason kept, if there can be none.

        Nothing in a graph's memory outlives its replay, so all graphs share it; its flag is held until the next one.
        """
        assert self._now is not None
        self._captures += 1
        grads = [item.grad for item in sorted(items_of(work), key=itemgetter(0))]  # in the order of the parameters
        watch = GradientReads(grads)
        try:
            graph, tables = self._recorded(program, work[0].device, grads, watch)
        except Exception as error:  # the step is taken eagerly now, and raises what the capture did not cause
            self._failure = (str(error) or type(error).__name__).splitlines()[0]
            return None
        fixed = watch.seen or tables.overlap
        if fixed and not asked:
            self._failure = "gradients are read where they lie"
            return None
        self._is_bound_to_places |= fixed
        bound_to = self._now if fixed else self._now.anywhere()
        captured = _Captured(graph, bound_to, [batch._replace(items=[]) for batch in work], tables, self.flag)
        self._graphs = [captured, *self._graphs][:_REMEMBERED]
        return captured

    def _recorded(
        self, program: Callable[[], None], device: torch.device, grads: list[Tensor], watch: GradientReads
    ) -> tuple[torch.cuda.CUDAGraph, GraphTables]:
        """The program as a graph, with room for its tables."""
        pool = self._graphs[0].graph.pool() if self._graphs else None
        for room in _ROOMS:
            tables = GraphTables(grads, device, room)

            def begun(tables: GraphTables = tables) -> None:
                tables.compute()
                with in_graph(tables), watch:
                    program()

            with suppress(TooManyEntriesError):
                graph = recorded(begun, device, pool)
                tables.finish()
                return graph, tables
        raise TooManyEntriesError(f"its tables have more than {_ROOMS[-1]} entries")


def is_ours_alone(group: Group) -> bool:
    """Whether our own kernels make a group's step; what users register may depend on more than the tensors it sees."""
    return (
        any(ALGORITHMS.get(group["algorithm"]) is known for known in OURS)
        and in_kernels(NORMALIZE.member(group))
        and in_kernels(PRECONDITION.member(group))
        and ORTHOGONALIZERS.get(polar_name(group)) in ITERATIONS
        and group["norm"] == FREE
        and group["fused"] is not False
        and not rates.counts_steps(group)
    )


def _cycles_beta(group: Group) -> bool:
    """Whether a scheduler cycles the first beta, as OneCycleLR does in all groups, and the steps depend on it."""
    return "max_momentum" in group and "betas" in ALGORITHMS[group["algorithm"]].defaults


def obstacle(work: Sequence[Batch], nonfinite: str) -> str:
    """Why a step of these batches cannot be replayed at all; empty if it can."""
    devices = {batch.device for batch in work}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"its parameters are on {', '.join(sorted(map(str, devices)))}, not on one CUDA device"
    if nonfinite == "raise":
        return "nonfinite='raise' waits for the device"
    for group in [batch.group for batch in work]:
        if polar_name(group) == "exact":
            return "orthogonalizer='exact' waits for the device"
        if group["offload"]:
            return "offload=True copies state from the host and back"
        if rates.counts_steps(group):
            return f"algorithm={group['algorithm']!r} does something else every few steps"
        if DECAY_RULES[group["decay"]].uses_gradient and decays(group):
            return f"decay={group['decay']!r} waits for the device"
    return ""
