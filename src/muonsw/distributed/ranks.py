"""One rank's view of the others: what it agrees on with them, and what it exchanges with whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.distributed.agreement import Agreement, Member, StepAgreement
from muonsw.distributed.layout import HERE, Layouts
from muonsw.distributed.rounds import ExchangeBatch, Round, make_rounds
from muonsw.work import Batch, Group, Item, names_of

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
        self.agreement = Agreement(process_group)
        self.announced: list[str] = []  # what a hook will do around this step together with all other ranks
        self.layouts = Layouts(process_group)
        self._rounds: dict[Any, list[Round]] = {}

    def agree(
        self,
        groups: Sequence[Group],
        *,
        ok: Tensor | bool,
        options: Sequence[Group],
    ) -> StepAgreement:
        """Agree with the other ranks on this step, and on what hooks have announced.

        `options` are those of the optimizer, then those of each group, all as plain data.
        """
        every = [
            Member(group, name, param)
            for number, group in enumerate(groups)
            for name, param in zip(names_of(group, number), group["params"], strict=True)
        ]
        return self.agreement.reach(groups, every, ok, options=options, announced=self.announced)

    def sort(self, batch: Batch) -> tuple[list[Item], ExchangeBatch | None]:
        """The items whose matrices are whole on this rank, and those that are exchanged."""
        rule, view = ALGORITHMS[batch.group["algorithm"]].matrices, batch.view
        if rule is None or view is None:
            return batch.items, None
        here, exchanged = [], ExchangeBatch(batch.group, rule, view, [], [])
        for item in batch.items:
            layout = self.layouts.of(item.parameter, view.stack_axes(item.parameter.dim()))
            if layout.kind == HERE:
                here.append(item)
            else:
                exchanged.items.append(item)
                exchanged.layouts.append(layout)
        return here, exchanged if exchanged.items else None

    def rounds(self, batches: Sequence[ExchangeBatch], chunk_bytes: int) -> list[Round]:
        """The rounds of an exchange, remembered while parameters and settings stay the same."""
        key = (chunk_bytes, *(_key(batch) for batch in batches))
        if key not in self._rounds:
            if len(self._rounds) == _REMEMBERED:
                self._rounds.clear()
            self._rounds[key] = make_rounds(batches, chunk_bytes, self.layouts.of_state)
        return self._rounds[key]


def _key(batch: ExchangeBatch) -> Any:
    """What the units of a batch depend on."""
    known = {*ALGORITHMS[batch.group["algorithm"]].defaults, "state_dtype"}
    of_slots = ("precondition_", "normalize_")
    return (
        tuple((key, str(value)) for key, value in batch.group.items() if key in known or key.startswith(of_slots)),
        batch.view,
        tuple((id(item.parameter), id(layout)) for item, layout in zip(batch.items, batch.layouts, strict=True)),
    )
