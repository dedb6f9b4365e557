"""What a step sends, compared with the formulas of docs/guide/distributed.md, and the routes it takes."""

import math
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from muonsw import MuonSW
from muonsw.distributed.exchange import route, share_by_cost
from muonsw.distributed.shards import Grid
from tests.distributed.problems import give_plain, give_sharded, group_of, mesh_of, take_step

# Two layers of a decoder in float32, so an element takes four bytes each way.
SHAPES = [(48, 48)] * 8 + [(128, 48)] * 4 + [(48, 128)] * 2 + [(32, 1)]
PARAMETERS = sum(torch.Size(shape).numel() for shape in SHAPES)
BYTES = 4 * PARAMETERS


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Counter:
    """Counts the bytes that this rank receives in the collectives of the exchange."""

    def __init__(self, group):
        self.received, self.me, self.ranks = 0, dist.get_rank(group), dist.get_world_size(group)
        self._real = {name: getattr(dist, name) for name in ("all_to_all_single", GATHER, "broadcast")}

    def __enter__(self):
        dist.all_to_all_single = self._all_to_all
        setattr(dist, GATHER, self._all_gather)
        dist.broadcast = self._broadcast
        return self

    def __exit__(self, *_):
        for name, function in self._real.items():
            setattr(dist, name, function)

    def _all_to_all(self, output, send, out_splits, in_splits, **kwargs):
        self.received += (sum(out_splits) - out_splits[self.me]) * output.element_size()
        return self._real["all_to_all_single"](output, send, out_splits, in_splits, **kwargs)

    def _all_gather(self, output, send, **kwargs):
        self.received += (output.numel() - send.numel()) * output.element_size()
        return self._real[GATHER](output, send, **kwargs)

    def _broadcast(self, tensor, *, group_src, **kwargs):
        self.received += tensor.numel() * tensor.element_size() * (group_src != self.me)
        return self._real["broadcast"](tensor, group_src=group_src, **kwargs)


def counted(kind, ranks):
    """Return the bytes that this rank received in the second step, and the calls of each collective."""
    mesh, group = mesh_of(ranks), group_of(ranks)
    if group is None:
        return None
    options = {"lr": 0.05, "ns_dtype": torch.float32}
    values = [0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    if kind == "copies":
        optimizer, give = MuonSW([nn.Parameter(v) for v in values], process_group=group, **options), give_plain
    else:
        placements = {"shards": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}[kind]
        params = [nn.Parameter(distribute_tensor(v, mesh, placements)) for v in values]
        optimizer, give = MuonSW(params, **options), give_sharded
    take_step(optimizer, 0, give)
    with Counter(group) as counter, CommDebugMode() as debug:
        take_step(optimizer, 1, give)
    calls = {str(name).rpartition(".")[2]: count for name, count in debug.get_comm_counts().items()}
    return counter.received, calls


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["shards", "columns"])
def test_sharded_matrices_send_the_documented_bytes(pool, kind, ranks):
    answers = [answer for answer in pool.run(counted, kind, ranks) if answer]
    mean = sum(received for received, _ in answers) / ranks
    assert mean == pytest.approx(2 * (ranks - 1) / ranks**2 * BYTES, rel=0.05)
    for _, calls in answers:
        assert calls == {"alltoall_base_": 2, "allreduce_": 1}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["copies", "replicated"])
def test_replicated_matrices_send_the_documented_bytes(pool, kind, ranks):
    answers = [answer for answer in pool.run(counted, kind, ranks) if answer]
    mean = sum(received for received, _ in answers) / ranks
    assert mean == pytest.approx((ranks - 1) / ranks * BYTES, rel=0.05)
    for _, calls in answers:
        assert calls.pop("allreduce_") == 1
        assert sum(calls.values()) <= ranks


def agreement_bytes(rates):
    """Return the bytes of each reduction in the second step, with rates as floats or tensors."""
    mesh = mesh_of(4)
    params = [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in SHAPES]
    groups = [{"params": params[:8]}, {"params": params[8:], "algorithm": "adamw"}]
    optimizer = MuonSW(groups, lr=0.05, weight_decay=0.5)
    if rates == "tensors":
        for group in optimizer.param_groups:
            group.update(lr=torch.tensor(0.05), weight_decay=torch.tensor(0.5))
    sent, reduce = [], dist.all_reduce

    def counted_reduce(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *args, **kwargs)

    for _ in range(2):
        for param in params:
            param.grad = distribute_tensor(torch.ones(param.shape), mesh, [Shard(0)])
        sent.clear()
        with mock.patch.object(dist, "all_reduce", counted_reduce):
            optimizer.step()
    return sent


@pytest.mark.parametrize("rates", ["numbers", "tensors"])
def test_a_step_reduces_eighty_bytes_once(pool, rates):
    assert pool.run(agreement_bytes, rates) == [[8 * 10]] * 4


def calls_and_bytes(shape, options):
    """Return the collectives of a step on row shards, and the bytes that this rank received in the exchange."""
    param = nn.Parameter(distribute_tensor(torch.randn(shape), mesh_of(4), [Shard(0)]))
    optimizer = MuonSW([param], lr=0.05, **options)
    with Counter(group_of(4)) as counter, CommDebugMode() as debug:
        take_step(optimizer, 0, give_sharded)
    return debug.get_total_counts(), counter.received


@pytest.mark.parametrize(("shape", "options", "is_sent"), [
    ((8, 6, 4), {"matrix": "stack"}, False), ((5, 6, 4), {"matrix": "stack"}, False),
    ((16, 8), {"heads": 4}, False), ((16, 8), {"heads": 8}, False), ((16, 8), {"heads": 2}, True),
], ids=str)  # fmt: skip
def test_matrices_that_one_rank_holds_stay_there(pool, shape, options, is_sent):
    calls, received = zip(*pool.run(calls_and_bytes, shape, options), strict=True)
    assert set(calls) == {3 if is_sent else 1}  # the agreement, and an exchange there and back
    assert any(received) == is_sent


def block_periodic():
    """Return the bytes that a rank received in two block steps and in the full step."""
    param = nn.Parameter(distribute_tensor(torch.randn(16, 8), mesh_of(4), [Shard(0)]))
    optimizer, received = MuonSW([param], lr=0.05, heads=4, block_period=3), []
    for step in range(3):
        with Counter(group_of(4)) as counter:
            take_step(optimizer, step, give_sharded)
        received.append(counter.received)
    return received


def test_block_steps_send_nothing(pool):
    *block_steps, full_step = map(sum, zip(*pool.run(block_periodic), strict=True))
    assert block_steps == [0, 0]
    assert full_step > 0


def test_the_most_loaded_rank_is_within_one_matrix_of_the_mean():
    costs = [max(shape) * min(shape) ** 2 for shape in SHAPES]
    loads = [0] * 4
    for owner, cost in zip(share_by_cost(costs, [None] * len(costs), 4), costs, strict=True):
        loads[owner] += cost
    assert max(loads) <= sum(loads) / 4 + max(costs)


# routes


def lines_through(grid, place, *, shuffled):
    """Return the ranks along each axis through a place, in the order of the grid or shuffled."""
    lines = [grid.movedim(axis, -1)[place[:axis] + place[axis + 1 :]].tolist() for axis in range(grid.dim())]
    return [sorted(line, key=lambda rank: 7 * rank % 5) for line in lines] if shuffled else lines


def size(sender, receiver):
    return (3 * sender + 5 * receiver) % 4  # some have nothing to send


def exchanged(lines, buffers, hops):
    """Send one hop of all ranks."""
    arrived = []
    for me, line in enumerate(lines):
        parts = []
        for giver in line:
            pieces = buffers[giver].split_with_sizes(hops[giver].sent)
            parts.append(pieces[lines[giver].index(me)])
        assert [len(part) for part in parts] == hops[me].received
        arrived.append(torch.cat(parts))
    return arrived


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (3, 1, 2), (2, 2, 3)], ids=str)
def test_pieces_arrive_in_the_order_of_their_senders(shape, shuffled):
    grid, ranks = torch.arange(math.prod(shape)).view(shape), range(math.prod(shape))
    lines = [lines_through(grid, place, shuffled=shuffled) for place in product(*map(range, shape))]
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
