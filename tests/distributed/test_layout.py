"""Pieces between any two ranks of a grid arrive along its axes."""

import math
from itertools import product

import pytest
import torch

from muonsw.distributed.layout import Grid, route


def lines_through(grid, place, *, turned):
    """The ranks along each axis through a place, in the order of the grid or in another one."""
    lines = [grid.movedim(axis, -1)[place[:axis] + place[axis + 1 :]].tolist() for axis in range(grid.dim())]
    return [sorted(line, key=lambda rank: 7 * rank % 5) for line in lines] if turned else lines


def size(sender, receiver):
    return (3 * sender + 5 * receiver) % 4  # some have nothing to send


def exchanged(lines, buffers, hops):
    """One hop of all ranks at once."""
    arrived = []
    for me, line in enumerate(lines):
        parts = []
        for giver in line:
            pieces = buffers[giver].split_with_sizes(hops[giver].sent)
            parts.append(pieces[lines[giver].index(me)])
        assert [len(part) for part in parts] == hops[me].received
        arrived.append(torch.cat(parts))
    return arrived


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (3, 1, 2), (2, 2, 3)], ids=str)
def test_pieces_between_any_two_ranks_arrive_in_the_order_of_their_senders(shape, turned):
    grid, ranks = torch.arange(math.prod(shape)).view(shape), range(math.prod(shape))
    lines = [lines_through(grid, place, turned=turned) for place in product(*map(range, shape))]
    groups = ("a process group",) * len(shape)
    routes = [route(Grid(groups, shape, tuple(ranks), rank, lines[rank]), size) for rank in ranks]
    buffers = [torch.cat([torch.full((size(rank, to),), 100 * rank + to) for to in ranks]) for rank in ranks]
    for axis in range(len(shape)):
        hops = [hops[axis] for hops in routes]
        buffers = [hop.arrange(buffer) for buffer, hop in zip(buffers, hops, strict=True)]
        buffers = exchanged([line[axis] for line in lines], buffers, hops)
    for rank in ranks:
        expected = torch.cat([torch.full((size(sender, rank),), 100 * sender + rank) for sender in ranks])
        assert routes[rank][-1].arrange(buffers[rank]).equal(expected)
