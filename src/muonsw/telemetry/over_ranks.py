"""Measurements of parameters whose parts lie on several ranks, added up so that every rank has the same record."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Shared(NamedTuple):
    """The ranks that measure parts of a parameter, where they reduce, and how many matrices it has in all."""

    group: ProcessGroup
    device: torch.device
    matrices: int


def sum_over_ranks(
    keys: Tensor, rows: dict[str, Tensor], shared: Mapping[int, Shared]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Columns of matrices by their keys, those of shared parameters summed over ranks; a collective.

    Args:
        keys: the key of each column, ascending.
        rows: sums, each with one entry for each key; `numel` is above zero in every column that means something.
        shared: the first key of each shared parameter, whose matrices have the keys that follow.
    """
    table = torch.stack(list(rows.values()))
    found_keys, found = [], []
    alone = torch.ones(len(keys), dtype=torch.bool, device="cpu")
    by_group: dict[ProcessGroup, list[int]] = {}
    for first in sorted(shared):
        by_group.setdefault(shared[first].group, []).append(first)
    for group, firsts in by_group.items():
        numbers = [range(first, first + shared[first].matrices) for first in firsts]
        wanted = torch.tensor([*chain.from_iterable(numbers)], dtype=torch.int64, device="cpu")
        mine = torch.isin(keys, wanted)
        sums = table.new_zeros(len(rows), len(wanted))
        sums[:, torch.searchsorted(wanted, keys[mine])] = table[:, mine]
        device = shared[firsts[0]].device
        total = sums.to(device)
        dist.all_reduce(total, group=group)
        total = total.cpu()
        measured = total[list(rows).index("numel")] > 0
        found_keys.append(wanted[measured])
        found.append(total[:, measured])
        alone &= ~mine
    every = torch.cat([table[:, alone], *found], dim=1)
    return torch.cat([keys[alone], *found_keys]), dict(zip(rows, every, strict=True))
