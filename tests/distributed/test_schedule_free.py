"""Schedule-Free over shards, and its checkpoints on other numbers of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muonsw import MuonSW, ScheduleFree
from tests.distributed.problems import group_of, mesh_of
from tests.distributed.test_checkpoint import Net, distance

CLOSE = 1e-9
BEFORE, AFTER = 3, 3
CASES = [((2, 2), {}), *(((4,), own) for own in ({"decay_at": "y"}, {"norm": "target"}, {"normalize": "normuon"}))]


def build(mesh=None, decay_at="z", **options):
    torch.manual_seed(3)
    model = Net().double()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    inner = MuonSW.for_model(model, lr=0.05, weight_decay=0.5, decay="constant", **options)
    return model, ScheduleFree(inner, warmup_steps=2, decay_at=decay_at, model=model)


def train(parts, first, steps):
    model, optimizer = parts
    optimizer.train()
    for step in range(first, first + steps):
        tokens = torch.randint(9, (4,), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()


def uninterrupted(**options):
    parts = build(**options)
    train(parts, 0, BEFORE)
    train(parts, BEFORE, AFTER)
    return parts[0]


def sharded(ranks, **options):
    mesh = mesh_of(*ranks, names=("replicas", "shards")[-len(ranks) :])
    if mesh is None:
        return 0.0
    parts = build(mesh, **options)
    train(parts, 0, BEFORE)
    train(parts, BEFORE, AFTER)
    assert all(isinstance(state["z"], DTensor) for state in parts[1].state.values())
    return distance(parts[0], uninterrupted(**options))


@pytest.mark.parametrize(("ranks", "options"), CASES, ids=str)
def test_shards_are_averaged_as_one_process_does(pool, ranks, options):
    assert max(pool.run(sharded, ranks, **options)) < CLOSE


def template(parts, flatten):
    layout = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return {
        "model": get_model_state_dict(parts[0]),
        "optimizer": get_optimizer_state_dict(*parts, options=layout),
    }


def save(folder, flatten, kind):
    everyone = dist.get_world_size()
    parts = build(mesh_of(everyone)) if kind == "shards" else build(process_group=group_of(everyone))
    train(parts, 0, BEFORE)
    dcp.save(template(parts, flatten), checkpoint_id=folder)


def resume(folder, flatten, kind, ranks):
    mesh, group = mesh_of(ranks), group_of(ranks)
    if mesh is None:
        return 0.0
    parts = build(mesh) if kind == "shards" else build(process_group=group)
    found = template(parts, flatten)
    dcp.load(found, checkpoint_id=folder, process_group=group)
    set_model_state_dict(parts[0], found["model"])
    layout = StateDictOptions(flatten_optimizer_state_dict=flatten)
    set_optimizer_state_dict(*parts, found["optimizer"], options=layout)
    train(parts, BEFORE, AFTER)
    return distance(parts[0], uninterrupted())


@pytest.mark.parametrize("kind", ["shards", "copies"])
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_a_checkpoint_of_four_ranks_goes_on_with_fewer(pool, tmp_path, flatten, kind):
    folder = str(tmp_path / "checkpoint")
    pool.run(save, folder, flatten, kind)
    for ranks in (2, 1):
        assert max(pool.run(resume, folder, flatten, kind, ranks)) < CLOSE


def from_copies_to_shards():
    """A whole state of copies, which torch distributes over shards in the order that each rank's state has."""
    kept = StateDictOptions(full_state_dict=True)
    before, after = build(process_group=dist.group.WORLD), build(mesh_of(dist.get_world_size()))
    train(before, 0, BEFORE)
    set_model_state_dict(after[0], get_model_state_dict(before[0], options=kept), options=kept)
    set_optimizer_state_dict(*after, get_optimizer_state_dict(*before, options=kept), options=kept)
    train(after, BEFORE, AFTER)
    return distance(after[0], uninterrupted())


def test_a_whole_state_of_copies_goes_on_over_shards(pool):
    assert max(pool.run(from_copies_to_shards)) < CLOSE
