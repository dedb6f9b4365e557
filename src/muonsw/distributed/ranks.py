"""One rank's view of the others: what it agrees on with them, and what it exchanges with whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.distributed.agreement import Known, agree
from muonsw.distributed.layout import Layout, Layouts
from muonsw.distributed.rounds import Round, make_rounds
from muonsw.work import Batch, Group, Item

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Plans that are remembered: parameters that have gradients now and then make several.
_REMEMBERED = 8


class Ranks:
    """What an optimizer knows of the other ranks.

    Args:
        process_group: ranks that hold plain parameters alike; None where every rank is on its own.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group, the ranks that hold its parameters too; give each "
                f"rank a group that it is in, or None where it trains alone"
            )
        self.process_group = process_group
        self.announced: list[str] = []  # what a hook will do around this step together with all other ranks
        self.layouts = Layouts(process_group)
        self._known = Known()
        self._rounds: dict[Any, list[Round]] = {}

    def agree(self, groups: Sequence[Group], settings: Group, *, ok: Tensor | bool) -> tuple[bool, list[Tensor]]:
        """Agree with the other ranks on this step, and on what hooks have announced."""
        can_step, absent, self._known = agree(
            self.process_group, groups, self._known, ok=ok, settings=settings, announced=self.announced
        )
        return can_step, absent

    def sort(self, batch: Batch) -> tuple[list[Item], list[Item], list[Layout]]:
        """The items whose matrices are whole on this rank, and those that are exchanged, with their layouts."""
        if batch.view is None:
            return batch.items, [], []
        here, exchanged, layouts = [], [], []
        for item in batch.items:
            layout = self.layouts.of(item.parameter, batch.view.stack_axes(item.parameter.dim()))
            if layout.grid is None:
                here.append(item)
            else:
                exchanged.append(item)
                layouts.append(layout)
        return here, exchanged, layouts

    def rounds(self, batches: Sequence[Batch], layouts: Sequence[Sequence[Layout]], chunk_bytes: int) -> list[Round]:
        """The rounds of an exchange, remembered while layouts and settings stay the same."""
        key: list[Any] = [chunk_bytes]
        for batch, places in zip(batches, layouts, strict=True):
            known = {*ALGORITHMS[batch.group["algorithm"]].defaults, "state_dtype"}
            slots = ("precondition_", "normalize_")
            key += [(name, str(v)) for name, v in batch.group.items() if name in known or name.startswith(slots)]
            key += [batch.device, batch.dtype, batch.view, tuple(map(id, places))]  # `layouts` keeps them alive
        if tuple(key) not in self._rounds:
            if len(self._rounds) == _REMEMBERED:
                self._rounds.clear()
            self._rounds[tuple(key)] = make_rounds(batches, layouts, chunk_bytes, self.layouts)
        return self._rounds[tuple(key)]
