"""One rank's view of the others: what it exchanges with whom, and which momenta it keeps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.distributed.agreement import Agreement, Member, StepAgreement
from muonsw.distributed.layout import COPIES, HERE, OTHER, Layout, Layouts
from muonsw.distributed.rounds import ExchangeBatch, Round, make_rounds, share_by_cost
from muonsw.distributed.shards import as_dtensor, is_dtensor
from muonsw.precision import SCALE
from muonsw.text import users_line
from muonsw.work import Group, Item, names_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Plans that are remembered: parameters that have gradients now and then make several.
_REMEMBERED = 8


class ItemsByExchange(NamedTuple):
    """The items of a batch by what has to be done for them: nothing, an exchange, or redistribution."""

    here: list[Item]
    exchanged: ExchangeBatch | None = None
    redistributed: ExchangeBatch | None = None


class Ranks:
    """What an optimizer knows of the other ranks.

    Args:
        process_group: ranks that hold plain parameters alike; None where every rank is on its own.
        momentum_on_owner: whether such parameters have their momentum on the rank that orthogonalizes them alone.
    """

    def __init__(self, process_group: ProcessGroup | None = None, *, momentum_on_owner: bool = False) -> None:
        if momentum_on_owner and process_group is None:
            raise ValueError("momentum_on_owner=True needs process_group=, the ranks among which momenta are divided")
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group, the ranks that hold its parameters too; give each "
                f"rank a group that it is in, or None where it trains alone"
            )
        self.process_group = process_group
        self.momentum_on_owner = momentum_on_owner
        self.agreement = Agreement(process_group)
        self.elsewhere: dict[Tensor, str] = {}
        self.layouts = Layouts(process_group)
        self._rounds: dict[Any, list[Round]] = {}
        self._owners: dict[Tensor, int] = {}
        self._warned = False

    def agree(
        self,
        groups: Sequence[Group],
        ok: Tensor | bool,
        *,
        asked: Sequence[Group],
        settings: Group,
        measured: bool,
    ) -> StepAgreement:
        """Agree with the other ranks on this step, and on whether telemetry measures it where that takes them all."""
        every = list(members(groups))
        together = self.momentum_on_owner or any(is_dtensor(member.param) for member in every)
        return self.agreement.reach(groups, every, ok, asked=asked, settings=settings, measured=measured and together)

    def sort(self, group: Group, items: Sequence[Item]) -> ItemsByExchange:
        """Which items this rank updates on its own, which are exchanged, and which are redistributed."""
        rule = ALGORITHMS[group["algorithm"]]
        view = rule.view(group)
        if rule.matrices is None or view is None:
            return ItemsByExchange(list(items))
        by_kind: dict[str, list[tuple[Item, Layout]]] = {}
        for item in items:
            layout = self.layout(group, item.parameter)
            kind = layout.kind if layout.kind in (HERE, OTHER) else "exchanged"
            by_kind.setdefault(kind, []).append((item, layout))
        exchanged, redistributed = (
            ExchangeBatch(
                group, rule.matrices, view, rule.state_keys(group), *map(list, zip(*by_kind[kind], strict=True))
            )
            if kind in by_kind
            else None
            for kind in ("exchanged", OTHER)
        )
        if redistributed is not None and not self._warned:
            self._warned = True
            _warn_of_redistribution(redistributed.items)
        return ItemsByExchange([item for item, _ in by_kind.get(HERE, [])], exchanged, redistributed)

    def layout(self, group: Group, param: Tensor) -> Layout:
        """How a parameter lies over ranks."""
        view = ALGORITHMS[group["algorithm"]].view(group)
        assert view is not None
        return self.layouts.of(param, view.stack_axes(param.dim()))

    def rounds(self, batches: Sequence[ExchangeBatch], chunk_bytes: int) -> list[Round]:
        """The rounds of an exchange, remembered while parameters and settings stay the same."""
        key = (chunk_bytes, *(_key(batch) for batch in batches))
        if key not in self._rounds:
            if len(self._rounds) == _REMEMBERED:
                self._rounds.clear()
            self._rounds[key] = make_rounds(batches, chunk_bytes, self.layouts.of_state, self._settled_owners(batches))
        return self._rounds[key]

    def settle_owners(self, groups: Sequence[Group]) -> None:
        """Give every parameter of which ranks hold copies an owner; those that have one keep it."""
        if not self.momentum_on_owner:
            return
        new = [m for m in members(groups) if m.param not in self._owners and self._is_divided(m.group, m.param)]
        if not new:
            return
        loads = [0] * dist.get_world_size(self.process_group)
        for member in members(groups):
            if member.param in self._owners:
                loads[self._owners[member.param]] += _cost(member)
        shared = share_by_cost([_cost(member) for member in new], len(loads), loads)
        self._owners.update({member.param: owner for member, owner in zip(new, shared, strict=True)})

    def release(self, group: Group, items: Sequence[Item]) -> None:
        """Let go of momenta that other ranks keep."""
        for item in [item for item in items if self.is_elsewhere(item.parameter)] if self._owners else []:
            for key in _with_scales(ALGORITHMS[group["algorithm"]].state_keys(group)):
                item.state.pop(key, None)
            self.elsewhere[item.parameter] = item.name

    def measuring_groups(self, param: Tensor) -> tuple[ProcessGroup, ...]:
        """The ranks that each measure a part of this parameter: those with other shards, or among which it is owned."""
        if is_dtensor(param):
            return self.layouts.sharding_groups(param)
        return (self.process_group,) if self.process_group is not None and self.has_owner(param) else ()

    def is_elsewhere(self, param: Tensor) -> bool:
        """Whether another rank keeps the momentum of a parameter."""
        owner = self._owners.get(param)
        return owner is not None and owner != dist.get_rank(self.process_group)

    def has_owner(self, param: Tensor) -> bool:
        """Whether one rank alone keeps the momentum of a parameter."""
        return param in self._owners

    def fetch(self, group: Group, param: Tensor, state: dict[str, Any], fresh: Callable[[str], Tensor]) -> None:
        """Bring the state of a parameter from its owner, if there is any yet; a collective.

        `fresh` makes room for a key.
        """
        owner, me = self._owners[param], dist.get_rank(self.process_group)
        for key in _with_scales(ALGORITHMS[group["algorithm"]].state_keys(group)):
            has = torch.tensor(int(key in state), dtype=torch.int64, device=param.device)
            dist.broadcast(has, group=self.process_group, group_src=owner)
            if has:
                held = state.pop(key, None)
                state[key] = held if owner == me else fresh(key)  # last on every rank: torch gathers state in its order
                dist.broadcast(state[key], group=self.process_group, group_src=owner)
        self.elsewhere.pop(param, None)

    def require_whole_state(self) -> None:
        """Refuse to hand out a state of which other ranks keep a part."""
        if self.elsewhere:
            name = next(iter(self.elsewhere.values()))
            raise RuntimeError(
                f"the momentum of {name} and {len(self.elsewhere) - 1} more are on other ranks, as "
                f"momentum_on_owner=True asks; call optimizer.gather_state() on every rank first"
            )

    def _is_divided(self, group: Group, param: Tensor) -> bool:
        if is_dtensor(param) or ALGORITHMS[group["algorithm"]].matrices is None:
            return False
        return self.layout(group, param).kind == COPIES

    def _settled_owners(self, batches: Sequence[ExchangeBatch]) -> dict[tuple[int, int], int]:
        return {
            (number, index): self._owners[item.parameter]
            for number, batch in enumerate(batches)
            for index, item in enumerate(batch.items)
            if item.parameter in self._owners
        }


def members(groups: Sequence[Group]) -> Iterator[Member]:
    """Every parameter of an optimizer."""
    for number, group in enumerate(groups):
        for name, param in zip(names_of(group, number), group["params"], strict=True):
            yield Member(group, name, param)


def _with_scales(keys: Sequence[str]) -> list[str]:
    """Keys of state, and those of the scales that state in 8 bits has beside each."""
    return [one for key in keys for one in (key, f"{key}{SCALE}")]


def _key(batch: ExchangeBatch) -> Any:
    """What the units of a batch depend on."""
    options = ALGORITHMS[batch.group["algorithm"]].defaults
    settings = tuple(str(batch.group[key]) for key in (*options, "state_dtype"))
    return (
        settings,
        batch.view,
        tuple((id(item.parameter), id(layout)) for item, layout in zip(batch.items, batch.layouts, strict=True)),
    )


def _cost(member: Member) -> int:
    view = ALGORITHMS[member.group["algorithm"]].view(member.group)
    if view is None:
        return 0
    stack, cells = member.param.shape[: view.stack_axes(member.param.dim())], view.cells(member.param.shape)
    return math.prod(stack) * sum(max(rows, columns) * min(rows, columns) ** 2 for _, rows, columns in cells)


def _warn_of_redistribution(items: Sequence[Item]) -> None:
    names = ", ".join(item.name for item in items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
    placements = as_dtensor(items[0].parameter).placements
    warnings.warn(
        f"{names} lie over ranks in a way that has no fast exchange ({placements}); every rank gathers and "
        f"orthogonalizes them whole, which is right and slow",
        stacklevel=users_line(),
    )
