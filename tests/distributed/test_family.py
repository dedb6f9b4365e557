"""Members of the family, whose state may belong to whole matrices: many ranks equal one process."""

import pytest
import torch

from muonsw.distributed.shards import local
from tests.distributed import test_checkpoint as checkpoints
from tests.distributed.problems import (
    CLOSE,
    GROUPS,
    PEAK,
    build,
    compare,
    far,
    give_sharded,
    mesh_of,
    shard0,
    sharded_over,
    take_step,
)
from tests.distributed.test_replicated import divided
from tests.distributed.test_sharded import along
from tests.family.members import OPTIONS, WITH_FACTORS

# Shape of the mesh, sharded axes, chunk_bytes.
MESHES = {
    "4 ranks, rows": ([4], [0], None),
    "4 ranks, columns": ([4], [1], 256),
    "3 ranks, last axis": ([3], [2], 256),
    "hybrid": ([2, 2], [None, 0], 256),
    "rows and columns": ([2, 2], [0, 1], None),
    "rows twice": ([2, 2], [0, 0], None),
    "copies": ([4], [None], None),
}
# The other members are slow tests: their state has the same layout as one of these.
QUICK = ("normuon", "adamuon", "algorithm=soap", "algorithm=shampoo")
DION2 = {"algorithm": "dion2", "fraction": 0.4}
# Other algorithms next to Muon, and a block period that a checkpoint interrupts.
PATTERNS = {
    "up.weight": {"algorithm": "dion2", "fraction": 0.5},
    "experts": {"algorithm": "dion2", "matrix": "stack"},
    "embedding.weight": {"algorithm": "lion"},
    "down.weight": {"algorithm": "muon", "split_sizes": (3, 4), "split_dim": 1, "block_period": 2},
}


def cases(rules, **more):
    slow = {name: () if name in QUICK else pytest.mark.slow for name in rules}
    params = [pytest.param(options, id=name, marks=slow[name]) for name, options in rules.items()]
    return params + [pytest.param(options, id=name) for name, options in more.items()]


def by_patterns(options):
    """Give the matrices of the checkpointed model an algorithm with factors."""
    return {"patterns": {"up.weight": options, "down.weight": options, "experts": {**options, "matrix": "stack"}}}


SAVED = {**OPTIONS, **{name: by_patterns(options) for name, options in WITH_FACTORS.items()}}
every_member = pytest.mark.parametrize("options", cases(OPTIONS))
every_rule = pytest.mark.parametrize("options", cases({**OPTIONS, **WITH_FACTORS}, dion2=DION2))


def every_mesh(options):
    """Run all meshes in one call: starting one on every rank takes longer than its steps."""
    found = {}
    for name, (mesh_shape, axes, chunk_bytes) in MESHES.items():
        mesh, chosen = mesh_of(*mesh_shape), {**options, "chunk_bytes": chunk_bytes}
        found[name] = 0.0 if mesh is None else compare(mesh, along(*axes), steps=3, **chosen)
    return found


@every_rule
def test_sharded_matrices_equal_one_process(pool, options):
    assert far(pool.run(every_mesh, options)) == {}


@every_rule
def test_divided_work_equals_one_process(pool, options):
    assert max(pool.run(divided, 3, absent=(2, 8), **options)) < CLOSE


@pytest.mark.parametrize("options", cases(SAVED, algorithms={"patterns": PATTERNS}))
@pytest.mark.parametrize("kind", ["shards", "copies"])
def test_a_checkpoint_of_four_ranks_resumes_on_two(pool, tmp_path, options, kind):
    folder = str(tmp_path / "checkpoint")
    pool.run(checkpoints.save, folder, False, kind, **options)
    assert max(pool.run(checkpoints.resume, folder, False, kind, 2, **options)) < CLOSE


def state_of_a_rank(options):
    """Return the bytes of state that this rank expects before the first step, and those it has afterwards."""
    optimizer = build(tuple(GROUPS), sharded_over(mesh_of(4), shard0), torch.float64, {"lr": PEAK, **options})
    expected = optimizer.summary().state
    take_step(optimizer, 0, give_sharded)
    found = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            base = key.partition(".")[0]
            found[base] = found.get(base, 0) + local(value).nbytes
    return expected, found


@every_member
def test_the_summary_knows_state_before_it_is_allocated(pool, options):
    for expected, found in pool.run(state_of_a_rank, options):
        assert expected == found
