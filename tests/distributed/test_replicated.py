"""Parameters that every rank holds: matrices are divided over ranks, and every rank ends with the same weights."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from muonsw import NORM_RULES, MuonSW
from muonsw.distributed.shards import is_dtensor, whole
from tests.distributed.problems import (
    GROUPS,
    PEAK,
    STEPS,
    build,
    give_plain,
    give_sharded,
    gradient,
    group_of,
    groups_of,
    mesh_of,
    parameters,
    plain,
    shard0,
    sharded_over,
    take_step,
    trained_alone,
    worst,
)

CLOSE = 1e-9


def divided(ranks, steps=STEPS, absent=(), chosen=tuple(GROUPS), **options):
    group = group_of(ranks)
    if group is None:
        return 0.0
    own = {key: options.pop(key) for key in ("momentum_on_owner",) if key in options}
    options = {"lr": PEAK, "weight_decay": 0.5, **options}
    together = build(chosen, plain, torch.float64, options, process_group=group, **own)
    for step in range(steps):
        take_step(together, step, give_plain, absent)
    return worst(together, trained_alone(chosen, steps, absent, torch.float64, options))


@pytest.mark.parametrize("owner", [False, True], ids=["everywhere", "on owner"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_divided_work_gives_the_steps_of_one_process(pool, ranks, owner):
    assert max(pool.run(divided, ranks, momentum_on_owner=owner)) < CLOSE


@pytest.mark.parametrize("options", [{"cautious": True}, {"nesterov": False}, {"chunk_bytes": 256}], ids=str)
@pytest.mark.parametrize("owner", [False, True], ids=["everywhere", "on owner"])
def test_options_mean_the_same_where_work_is_divided(pool, options, owner):
    assert max(pool.run(divided, 3, steps=2, momentum_on_owner=owner, absent=(2, 8), **options)) < CLOSE


def every_norm(owner):
    rules = [{"norm": norm} for norm in NORM_RULES]
    return [
        divided(3, steps=2, momentum_on_owner=owner, **rule)
        for rule in (*rules, {"norm": "target", "target_norm": 0.1})
    ]


@pytest.mark.parametrize("owner", [False, True], ids=["everywhere", "on owner"])
def test_norm_rules_act_on_copies(pool, owner):
    assert all(max(answers) < CLOSE for answers in pool.run(every_norm, owner))


def owned_state():
    world = dist.group.WORLD
    optimizer = MuonSW(groups_of(GROUPS, plain), lr=PEAK, weight_decay=0.5, process_group=world, momentum_on_owner=True)
    for step in range(2):
        take_step(optimizer, step, give_plain)
    kept = sum(s["momentum_buffer"].numel() for s in optimizer.state.values() if "momentum_buffer" in s)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.state_dict()
    warned = str(caught[0].message)
    optimizer.gather_state()
    saved = copy.deepcopy(optimizer.state_dict())
    alone = MuonSW(groups_of(GROUPS, plain), lr=PEAK, weight_decay=0.5)
    half = group_of(2)
    resumed = [alone]
    if half is not None:
        resumed.append(
            MuonSW(groups_of(GROUPS, plain), lr=PEAK, weight_decay=0.5, process_group=half, momentum_on_owner=True)
        )
    for other in resumed:
        other.load_state_dict(copy.deepcopy(saved))
        for mine, theirs in zip(parameters(other), parameters(optimizer), strict=True):
            mine.data.copy_(theirs.data)
    for step in range(2, 4):
        for one in (optimizer, *resumed):
            take_step(one, step, give_plain)
    return kept, warned, max(worst(one, optimizer) for one in resumed)


def test_momentum_is_on_its_owner_alone_and_comes_back_for_a_checkpoint(pool):
    answers = pool.run(owned_state)
    muon = sum(
        torch.Size(s).numel() for shapes, options in GROUPS.values() if "algorithm" not in options for s in shapes
    )
    sgd = 9  # whose momentum is not Muon's and is kept everywhere
    assert sum(kept for kept, _, _ in answers) == muon + 4 * sgd
    assert max(kept for kept, _, _ in answers) < muon / 2
    for _, warned, difference in answers:
        assert "not whole: " in warned
        assert "call optimizer.gather_state() on every rank first" in warned
        assert difference < CLOSE


def gathered_of_a_weight_of_zeros():
    """What a fresh optimizer holds after `gather_state` was refused, and once there is a weight to gather."""
    params, world = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.zeros(4, 3))], dist.group.WORLD
    optimizer = MuonSW(params, lr=PEAK, norm="hyperball", process_group=world, momentum_on_owner=True)
    with pytest.raises(ValueError, match="a weight of norm zero"):
        optimizer.gather_state()
    refused = len(optimizer.state)
    params[1].data.fill_(1.0)
    optimizer.gather_state()
    return refused, [sorted(optimizer.state[param]) for param in params]


def test_a_gather_that_is_refused_begins_no_state(pool):
    assert pool.run(gathered_of_a_weight_of_zeros) == [(0, [["momentum_buffer", "radius"]] * 2)] * 4


def radii_of_a_fresh_optimizer(norm):
    """Whether `gather_state` begins with the radii of the first step, of shards beside copies."""
    found = []
    for begin in (MuonSW.gather_state, lambda optimizer: take_step(optimizer, 0, give)):
        groups = [*groups_of(("matrices",), sharded_over(mesh_of(4), shard0)), *groups_of(("heads",), plain)]
        optimizer = MuonSW(groups, lr=PEAK, norm=norm, process_group=dist.group.WORLD, momentum_on_owner=True)
        begin(optimizer)
        found.append([whole(optimizer.state[param]["radius"]) for param in parameters(optimizer)])
    return all(map(torch.equal, *found))


def give(param, grad):
    return give_sharded(param, grad) if is_dtensor(param) else grad


@pytest.mark.parametrize("norm", ["target", "hyperball"])
def test_a_fresh_optimizer_gathers_the_radii_of_sharded_weights(pool, norm):
    assert pool.run(radii_of_a_fresh_optimizer, norm) == [True] * 4


class Model(nn.Module):
    """An embedding tied to its head, a convolution, a linear layer that is used now and then, and a frozen one."""

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


def ddp(owner):
    """Two micro-batches a step, clipping, a schedule; each rank sees one sequence of each batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    alone = Model().double()
    wrapped = DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=True)
    options = {"lr": PEAK, "weight_decay": 0.5}
    optimizers = [
        MuonSW.for_model(alone, **options),
        MuonSW.for_model(wrapped, process_group=dist.group.WORLD, momentum_on_owner=owner, **options),
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


@pytest.mark.parametrize("owner", [False, True], ids=["everywhere", "on owner"])
def test_ddp_trains_as_one_process_does(pool, owner):
    for difference, same, counted in pool.run(ddp, owner):
        assert difference < CLOSE
        assert same
        assert counted


def rounded_copies():
    """bfloat16 weights under the noise of stochastic rounding, whose seed counts steps on every rank."""
    options = {"process_group": dist.group.WORLD, "momentum_on_owner": True}
    optimizer = MuonSW(groups_of(["matrices"], plain, torch.bfloat16), lr=PEAK, **options)
    for step in range(3):
        take_step(optimizer, step, give_plain)
    return [p.detach() for p in parameters(optimizer)]


def test_copies_round_alike(pool):
    first, *others = pool.run(rounded_copies)
    for other in others:
        assert all(map(torch.equal, first, other))


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


def gradient_of_a_replicated_dtensor_on_some_ranks(algorithm):
    """Rank 2 would move its copy, or its momentum, by another gradient than the others."""
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh_of(4), [Replicate()]))
    optimizer = MuonSW([{"params": [("w", param)], "algorithm": algorithm}], lr=PEAK)
    param.grad = None if dist.get_rank() == 2 else torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (different_copies, "w has other values on another rank of process_group"),
        (gradient_on_some_ranks, "w has a gradient on some ranks only"),
        (partial(gradient_of_a_replicated_dtensor_on_some_ranks, "adamw"), "w has a gradient on some ranks only"),
        (partial(gradient_of_a_replicated_dtensor_on_some_ranks, "muon"), "w has a gradient on some ranks only"),
    ],
    ids=["copies", "gradients", "adamw", "muon"],
)
def test_what_is_not_replicated_is_refused_on_every_rank(pool, case, message):
    for ok, answer in pool.attempt(case):
        assert not ok
        assert message in answer


def a_group_of_others():
    MuonSW([nn.Parameter(torch.ones(2, 2))], lr=PEAK, process_group=dist.new_group([0, 1]))


def test_a_rank_that_is_not_in_its_process_group_is_told_so(pool):
    answers = pool.attempt(a_group_of_others)
    assert [ok for ok, _ in answers] == [True, True, False, False]
    assert "rank 3 is not in process_group" in answers[3][1]


def test_momenta_need_ranks_to_be_divided_among():
    with pytest.raises(ValueError, match="needs process_group="):
        MuonSW([nn.Parameter(torch.ones(2, 2))], lr=PEAK, momentum_on_owner=True)
