"""Sums over the shards of weights: one all-reduce for all parameters that the same ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.matrices import Region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ShardedWeights(NamedTuple):
    """The weights (matrices, or whole tensors) of one sharded parameter.

    Attributes:
        groups: the process groups over which, one after another, shards of the same weights add up.
        many: how many weights the parameter has.
        numbers: which of them each element of this rank's shard belongs to; of length one along axes where all
            elements belong to the same.
    """

    groups: tuple[ProcessGroup, ...]
    many: int
    numbers: Tensor


class Term(NamedTuple):
    """Values of some weights, (*numbers, width), to be added to those of other shards; `place` lengths parameters."""

    place: int
    numbers: Tensor
    values: Tensor


@lru_cache(maxsize=1024)
def shard_numbers(
    counted: tuple[int, ...], sizes: tuple[int, ...] | None, axis: int, shard: Region, device: torch.device
) -> Tensor:
    """The number of the weight to which each element of a shard belongs.

    Args:
        counted: the shape of the numbers of the whole parameter, of length one along axes within a weight.
        sizes: the lengths of weights along `axis`, None where it is not split.
        axis: the axis that is split.
        shard: this rank's part of the parameter, cut along axes that tell weights apart.
        device: where they are needed.
    """
    weights = list(counted)
    if sizes is not None:
        weights[axis] = len(sizes)
    numbers = torch.arange(math.prod(weights), dtype=torch.int64, device=device).view(weights)
    if sizes is not None:
        repeats = torch.tensor(sizes, dtype=torch.int64, device=device)
        numbers = numbers.repeat_interleave(repeats, axis, output_size=sum(sizes))
    return shard.of(numbers)


def all_reduce_sums(weights: Sequence[ShardedWeights], terms: Sequence[Term], width: int) -> list[Tensor]:
    """The sum over all ranks for each term's numbers, of shape (*numbers, width).

    Args:
        weights: all sharded parameters, in the same order on every rank, also those of which this rank holds nothing.
        terms: what this rank knows.
        width: how many values each weight has.
    """
    totals: dict[int, Tensor] = {}
    for groups, device in dict.fromkeys((one.groups, one.numbers.device) for one in weights):
        places = [place for place, one in enumerate(weights) if (one.groups, one.numbers.device) == (groups, device)]
        lengths = [weights[place].many for place in places]
        message = torch.zeros(sum(lengths), width, dtype=torch.float64, device=device)
        rooms = dict(zip(places, message.split_with_sizes(lengths), strict=True))
        for term in [term for term in terms if term.place in rooms]:
            rooms[term.place].index_add_(0, term.numbers.reshape(-1), term.values.reshape(-1, width))
        for group in groups:
            dist.all_reduce(message, group=group)
        totals |= rooms
    return [totals[term.place][term.numbers] for term in terms]
