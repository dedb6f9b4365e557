"""Schedule-Free over shards; its checkpoints are in test_checkpoint."""

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.distributed.problems import mesh_of
from tests.distributed.test_checkpoint import AFTER, BEFORE, CLOSE, build, distance, train, uninterrupted
from tests.distributed.test_checkpoint import SCHEDULE_FREE as OPTIONS

CASES = [((2, 2), {}), ((4,), {}), ((4,), {"norm": "target"}), ((4,), {"normalize": "normuon"})]


def sharded(ranks, **options):
    parts = build(mesh_of(*ranks, names=("replicas", "shards")[-len(ranks) :]), **OPTIONS | options)
    train(parts, 0, BEFORE)
    train(parts, BEFORE, AFTER)
    assert all(isinstance(state["z"], DTensor) for state in parts[1].state.values())
    return distance(parts[0], uninterrupted(**OPTIONS | options))


@pytest.mark.parametrize(("ranks", "options"), CASES, ids=str)
def test_shards_are_averaged_as_one_process_does(pool, ranks, options):
    assert max(pool.run(sharded, ranks, **options)) < CLOSE


def from_copies_to_shards():
    """A whole state of copies, which torch distributes over shards in the order that each rank's state has."""
    kept = StateDictOptions(full_state_dict=True)
    before, after = build(None, dist.group.WORLD, **OPTIONS), build(mesh_of(dist.get_world_size()), **OPTIONS)
    train(before, 0, BEFORE)
    set_model_state_dict(after[0], get_model_state_dict(before[0], options=kept), options=kept)
    set_optimizer_state_dict(*after[:2], get_optimizer_state_dict(*before[:2], options=kept), options=kept)
    after[2].load_state_dict(before[2].state_dict())
    train(after, BEFORE, AFTER)
    return distance(after[0], uninterrupted(**OPTIONS))


def test_a_whole_state_of_copies_goes_on_over_shards(pool):
    assert max(pool.run(from_copies_to_shards)) < CLOSE
