"""Save on one number of ranks and resume on another, also under Schedule-Free."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonsw import MuonSW, ScheduleFree
from tests.common.problems import RULE_OPTIONS
from tests.distributed.problems import CLOSE, group_of, mesh_of

BEFORE, AFTER = 3, 3


class Net(nn.Module):
    """A model with uneven shapes, a stack of experts, and an empty shard on three or more ranks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 2, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 2, 6))

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.down(torch.tanh(self.up(x))) + torch.einsum("eoi,bi->bo", self.experts, x)


def build(mesh=None, process_group=None, schedule_free=False, **options):
    torch.manual_seed(3)
    model = Net().double()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = MuonSW.for_model(model, lr=0.05, **{"weight_decay": 0.5, "process_group": process_group, **options})
    if schedule_free:
        optimizer = ScheduleFree(optimizer, warmup_steps=2, model=model)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def train(parts, first, steps):
    model, optimizer, scheduler = parts
    if isinstance(optimizer, ScheduleFree):
        optimizer.train()
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(9, (4,), generator=generator)
        model(tokens).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ScheduleFree):
        optimizer.eval()


def weights(model):
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def distance(model, reference):
    return max((a - b).abs().max().item() for a, b in zip(weights(model), weights(reference), strict=True))


def uninterrupted(**options):
    parts = build(**options)
    train(parts, 0, BEFORE + AFTER)
    return parts[0]


def template(parts, flatten):
    model, optimizer, scheduler = parts
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "scheduler": scheduler.state_dict(),
    }


def save(folder, flatten, kind, **options):
    mesh = mesh_of(dist.get_world_size()) if kind == "shards" else None
    parts = build(mesh, dist.group.WORLD if kind == "copies" else None, **options)
    train(parts, 0, BEFORE)
    momentum = next((s["momentum_buffer"] for s in parts[1].state.values() if "momentum_buffer" in s), None)
    dcp.save(template(parts, flatten), checkpoint_id=folder)
    return isinstance(momentum, DTensor)


def resume(folder, flatten, kind, ranks, **options):
    """Resume on the first ranks; return the difference from a run that never stopped."""
    mesh, group = mesh_of(ranks), group_of(ranks)
    if group is None:
        return 0.0
    parts = build(mesh if kind == "shards" else None, group if kind == "copies" else None, **options)
    found = template(parts, flatten)
    dcp.load(found, checkpoint_id=folder, process_group=group)
    model, optimizer, scheduler = parts
    set_model_state_dict(model, found["model"])
    layout = StateDictOptions(flatten_optimizer_state_dict=flatten)
    set_optimizer_state_dict(model, optimizer, found["optimizer"], options=layout)
    scheduler.load_state_dict(found["scheduler"])
    train(parts, BEFORE, AFTER)
    return distance(model, uninterrupted(**options))


COSINE = {"decay": "cosine", "weight_decay": 0.01, **RULE_OPTIONS["cosine"]}
GRADIENT_NORM = {"decay": "gradient_norm", "weight_decay": 0.01}  # saves an average
HYPERBALL = {"norm": "hyperball", "patterns": {"up.weight": {"split_sizes": (3, 4)}}}  # saves a radius per matrix


SCHEDULE_FREE = {"decay": "constant", "schedule_free": True}


@pytest.mark.parametrize(("saved", "resumed", "flatten", "options"), [
    ("shards", "shards", False, {}), ("shards", "shards", True, GRADIENT_NORM), ("shards", "shards", False, HYPERBALL),
    ("copies", "copies", True, COSINE), ("copies", "copies", False, GRADIENT_NORM),
    ("copies", "copies", True, HYPERBALL), ("copies", "plain", False, {}),
    ("shards", "shards", True, SCHEDULE_FREE), ("copies", "copies", False, SCHEDULE_FREE),
    ("shards", "shards", False, {**SCHEDULE_FREE, "norm": "target"}),
    ("shards", "shards", False, {**SCHEDULE_FREE, "normalize": "normuon"}),
], ids=str)  # fmt: skip
def test_a_checkpoint_of_four_ranks_resumes_on_fewer(pool, tmp_path, saved, resumed, flatten, options):
    folder = str(tmp_path / "checkpoint")
    assert set(pool.run(save, folder, flatten, saved, **options)) == {saved == "shards"}
    for ranks in (4, 2, 1) if saved == resumed else (1,):
        assert max(pool.run(resume, folder, flatten, resumed, ranks, **options)) < CLOSE


def from_copies_to_shards():
    """Load the full state of replicas into shards; torch distributes it in the order of each rank's state."""
    full = StateDictOptions(full_state_dict=True)
    before = build(None, dist.group.WORLD, **SCHEDULE_FREE)
    after = build(mesh_of(dist.get_world_size()), **SCHEDULE_FREE)
    train(before, 0, BEFORE)
    set_model_state_dict(after[0], get_model_state_dict(before[0], options=full), options=full)
    set_optimizer_state_dict(*after[:2], get_optimizer_state_dict(*before[:2], options=full), options=full)
    after[2].load_state_dict(before[2].state_dict())
    train(after, BEFORE, AFTER)
    return distance(after[0], uninterrupted(**SCHEDULE_FREE))


def test_the_full_state_of_replicas_loads_into_shards(pool):
    assert max(pool.run(from_copies_to_shards)) < CLOSE


def from_a_single_process(**options):
    """Load a plain state into a sharded optimizer, and its state into a plain one."""
    alone = build(**options)
    train(alone, 0, BEFORE)
    saved = copy.deepcopy([part.state_dict() for part in alone])
    parts = build(**options)
    parts[0].load_state_dict(saved[0])
    fully_shard(parts[0], mesh=mesh_of(4))
    optimizer = MuonSW.for_model(parts[0], lr=0.05, weight_decay=0.5, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    sharded = (parts[0], optimizer, scheduler)
    train(sharded, BEFORE, 1)
    train(alone, BEFORE, 1)

    back = build(**options)
    for mine, whole in zip(back[0].parameters(), weights(parts[0]), strict=True):
        mine.data.copy_(whole)
    back[1].load_state_dict(optimizer.state_dict())
    back[2].load_state_dict(scheduler.state_dict())
    for other in (sharded, alone, back):
        train(other, BEFORE + 1, AFTER - 1)
    return distance(parts[0], alone[0]), distance(back[0], alone[0])


@pytest.mark.parametrize("options", [{}, {"norm": "target"}], ids=str)
def test_states_of_one_process_load_into_shards_and_back(pool, options):
    for into, back in pool.run(from_a_single_process, **options):
        assert into < CLOSE
        assert back < CLOSE


def keys_of_a_first_step():
    """Take a step with zero gradients and rate, with which frameworks create the state before a load."""
    mesh = mesh_of(4)
    model, optimizer, _ = build(mesh)
    before = weights(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with warnings.catch_warnings(action="error"):
        optimizer.step()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    placed = [
        isinstance(value, DTensor) and value.placements == param.placements
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if key != "step"
    ]
    unchanged = all(map(torch.equal, before, weights(model)))
    fresh = [set(group) for group in build()[1].param_groups]
    every = len(optimizer.state) == len(list(model.parameters()))
    return unchanged, all(placed) and every, [set(group) for group in optimizer.param_groups] == fresh


def test_a_step_at_rate_zero_creates_state_for_every_parameter(pool):
    for unchanged, complete, same_keys in pool.run(keys_of_a_first_step):
        assert unchanged
        assert complete
        assert same_keys


def gathered_radii(shape, axes, options):
    """Gather and reload the norm of a weight of which some ranks have an empty shard."""
    param = nn.Parameter(distribute_tensor(torch.full(shape, -3.0), mesh_of(2, 2), list(map(Shard, axes))))
    optimizer = MuonSW([{"params": [param], **options}], lr=0.05, norm="hyperball")
    found = []
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
        found += optimizer.state[param]["radius"].flatten().tolist()
        optimizer.load_state_dict(optimizer.state_dict())
    return found


@pytest.mark.parametrize(("shape", "axes", "options"), [
    ((1,), (0, 0), {"algorithm": "adamw"}), ((1, 2, 2), (0, 0), {"matrix": "stack"}),
    ((1, 2, 2), (0, 1), {"matrix": "stack"}), ((1, 4), (0, 1), {"heads": 1}),
], ids=str)  # fmt: skip
def test_norms_of_weights_with_empty_shards_can_be_gathered(pool, shape, axes, options):
    whole = pytest.approx([3.0 if shape == (1,) else 6.0] * 2)
    assert pool.run(gathered_radii, shape, axes, options) == [whole] * 4
