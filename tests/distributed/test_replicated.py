"""Replicated parameters: ranks divide the matrices and end with the same weights."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from muonsw import NORM_RULES, MuonSW
from tests.distributed.pool import CaseError
from tests.distributed.problems import (
    CLOSE,
    DEFAULTS,
    GROUPS,
    PEAK,
    STEPS,
    build,
    compared_with_one_process,
    far,
    give_plain,
    gradient,
    group_of,
    mesh_of,
    plain,
    worst,
)


def divided(ranks, steps=STEPS, absent=(), chosen=tuple(GROUPS), **options):
    group = group_of(ranks)
    if group is None:
        return 0.0
    options = {**DEFAULTS, **options}
    together = build(chosen, plain, torch.float64, options, process_group=group)
    return compared_with_one_process(together, give_plain, options, chosen, steps, absent)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_divided_work_equals_one_process(pool, ranks):
    assert max(pool.run(divided, ranks)) < CLOSE


OPTIONS = [{"cautious": True}, {"nesterov": False}, {"chunk_bytes": 256}, *({"norm": norm} for norm in NORM_RULES)]


def every_option():
    return {str(options): divided(3, steps=2, absent=(2, 8), **options) for options in OPTIONS}


def test_options_work_when_work_is_divided(pool):
    assert far(pool.run(every_option)) == {}


def test_offloaded_momenta_are_refused_when_work_is_divided(pool):
    with pytest.raises(CaseError, match="offload=True keeps momenta on the host"):
        pool.run(divided, 2, steps=1, offload=True)


class Model(nn.Module):
    """A model with a tied head, a convolution, a linear layer that is used in some steps, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 6)
        self.sometimes = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, tokens, use):
        x = self.embedding(tokens)
        x = x + self.conv(x.mT).mT
        x = x + self.second(torch.tanh(self.first(x)))
        if use:
            x = x + self.sometimes(x)
        return self.frozen(x) @ self.embedding.weight.mT


def batch(step, half):
    generator = torch.Generator().manual_seed(100 * step + half)
    return torch.randint(12, (4, 5), generator=generator)


def loss_of(model, tokens, use):
    return nn.functional.cross_entropy(model(tokens, use).flatten(0, 1), tokens.flatten())


def ddp():
    """Train with two micro-batches a step, clipping and a schedule; each rank gets one sequence of each batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    alone = Model().double()
    wrapped = DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=True)
    optimizers = [
        MuonSW.for_model(alone, **DEFAULTS),
        MuonSW.for_model(wrapped, process_group=dist.group.WORLD, **DEFAULTS),
    ]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS) for o in optimizers]
    for step in range(STEPS):
        use = step % 2 == 1
        for half in range(2):
            tokens = batch(step, half)
            (loss_of(alone, tokens, use) / 2).backward()
            mine = tokens.chunk(world)[rank]
            if half == 0:
                with wrapped.no_sync():
                    (loss_of(wrapped, mine, use) / 2).backward()
            else:
                (loss_of(wrapped, mine, use) / 2).backward()
        for model, optimizer, scheduler in zip((alone, wrapped), optimizers, schedulers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(everyone, weights)
    summary = optimizers[1].summary()
    same = all(torch.equal(other, weights) for other in everyone)
    return worst(optimizers[1], optimizers[0]), same, summary.matrices == optimizers[0].summary().matrices


def test_ddp_equals_one_process(pool):
    for difference, same, counted in pool.run(ddp):
        assert difference < CLOSE
        assert same
        assert counted


def different_copies():
    param = nn.Parameter(torch.full((4, 4), float(dist.get_rank())))
    optimizer = MuonSW([("w", param)], lr=PEAK, process_group=dist.group.WORLD)
    param.grad = gradient((4, 4), 0, 0, torch.float32)
    optimizer.step()


def gradient_on_some_ranks():
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = MuonSW([("w", param)], lr=PEAK, process_group=dist.group.WORLD)
    param.grad = None if dist.get_rank() == 2 else torch.ones(4, 4)
    optimizer.step()


def replicated_dtensor_on_some_ranks(algorithm):
    """Without an error, rank 2 would move its copy or its momentum differently."""
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh_of(4), [Replicate()]))
    optimizer = MuonSW([{"params": [("w", param)], "algorithm": algorithm}], lr=PEAK)
    param.grad = None if dist.get_rank() == 2 else torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (different_copies, "w has different values on another rank of process_group"),
        (gradient_on_some_ranks, "w is replicated but has a gradient on some ranks"),
        (partial(replicated_dtensor_on_some_ranks, "adamw"), "w is replicated but has a gradient on some ranks"),
        (partial(replicated_dtensor_on_some_ranks, "muon"), "w is replicated but has a gradient on some ranks"),
    ],
    ids=["copies", "gradients", "adamw", "muon"],
)
def test_copies_that_differ_are_refused_on_every_rank(pool, case, message):
    for ok, answer in pool.attempt(case):
        assert not ok
        assert message in answer


def process_group_without_this_rank():
    MuonSW([nn.Parameter(torch.ones(2, 2))], lr=PEAK, process_group=dist.new_group([0, 1]))


def test_a_rank_outside_its_process_group_is_refused(pool):
    answers = pool.attempt(process_group_without_this_rank)
    assert [ok for ok, _ in answers] == [True, True, False, False]
    assert "rank 3 is not in process_group" in answers[3][1]
