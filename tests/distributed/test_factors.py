"""Algorithms with factors of whole matrices take the same steps on many ranks as on one."""

import pytest

from tests.distributed import test_checkpoint as checkpoints
from tests.distributed.problems import compare, mesh_of
from tests.distributed.test_family import MESHES
from tests.distributed.test_replicated import divided
from tests.distributed.test_sharded import along
from tests.family.algorithms import OPTIONS

CLOSE = 1e-9
# Variants of an algorithm differ in nothing that ranks could notice; ASGO's state is of SOAP's kinds, and that of
# KL-Shampoo of Shampoo's.
QUICK = ("soap", "shampoo")
every_algorithm = pytest.mark.parametrize(
    "options",
    [pytest.param(own, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, own in OPTIONS.items()],
)


def every_mesh(options):
    """One case for each, in one go: starting a case on every rank costs more than its steps."""
    found = {}
    for name, (mesh_shape, axes) in MESHES.items():
        mesh, chunk_bytes = mesh_of(*mesh_shape), 256 if mesh_shape == [3] else None
        found[name] = 0.0 if mesh is None else compare(mesh, along(*axes), chunk_bytes=chunk_bytes, **options)
    return found


@every_algorithm
def test_sharded_matrices_take_the_steps_of_one_process(pool, options):
    for answers in pool.run(every_mesh, options):
        assert {name: value for name, value in answers.items() if not value < CLOSE} == {}


def divided_work(options):
    """The matrices that every rank holds are shared out, with their state everywhere or on the owner alone."""
    cases = [(ranks, owner) for ranks in (2, 4) for owner in (False, True)]
    return {(ranks, owner): divided(ranks, momentum_on_owner=owner, absent=(2, 8), **options) for ranks, owner in cases}


@every_algorithm
def test_divided_work_gives_the_steps_of_one_process(pool, options):
    for answers in pool.run(divided_work, options):
        assert {case: value for case, value in answers.items() if not value < CLOSE} == {}


@every_algorithm
@pytest.mark.parametrize("kind", ["shards", "owners"])
def test_a_checkpoint_of_four_ranks_goes_on_with_fewer(pool, tmp_path, options, kind):
    patterns = {"up.weight": options, "down.weight": options, "experts": {**options, "matrix": "stack"}}
    folder = str(tmp_path / "checkpoint")
    pool.run(checkpoints.save, folder, False, kind, patterns=patterns)
    for ranks in (4, 2, 1):
        assert max(pool.run(checkpoints.resume, folder, False, kind, ranks, patterns=patterns)) < CLOSE
