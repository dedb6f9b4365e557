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
def test_averages_over_shards_equal_one_process(pool, ranks, options):
    assert max(pool.run(sharded, ranks, **options)) < CLOSE


def from_copies_to_shards():
    """Load the full state of replicas into shards; torch distributes it in the order of each rank's state."""
    full = StateDictOptions(full_state_dict=True)
    before, after = build(None, dist.group.WORLD, **OPTIONS), build(mesh_of(dist.get_world_size()), **OPTIONS)
    train(before, 0, BEFORE)
    set_model_state_dict(after[0], get_model_state_dict(before[0], options=full), options=full)
    set_optimizer_state_dict(*after[:2], get_optimizer_state_dict(*before[:2], options=full), options=full)
    after[2].load_state_dict(before[2].state_dict())
    train(after, BEFORE, AFTER)
    return distance(after[0], uninterrupted(**OPTIONS))


def test_the_full_state_of_replicas_loads_into_shards(pool):
    assert max(pool.run(from_copies_to_shards)) < CLOSE
