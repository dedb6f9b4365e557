"""Parameters that are sharded over ranks take the steps that they would take on one."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from tests.distributed.problems import GROUPS, compare, mesh_of

CLOSE = 1e-9


def along(axis):
    """Shards along an axis, or the last one of a tensor that has fewer."""
    return lambda value, options: [Shard(min(axis, value.dim() - 1))]  # noqa: ARG005


def sharded(ranks, axis, **options):
    mesh = mesh_of(ranks)
    return compare(mesh, along(axis), **options) if mesh is not None else 0.0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_sharded_step_is_the_step_of_one_process(pool, ranks, axis):
    assert max(pool.run(sharded, ranks, axis)) < CLOSE
