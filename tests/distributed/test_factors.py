"""Algorithms with factors of whole matrices take the same steps on many ranks as on one."""

import pytest

from tests.distributed import test_checkpoint as checkpoints
from tests.distributed.test_family import every_mesh
from tests.distributed.test_replicated import divided
from tests.family.algorithms import OPTIONS

CLOSE = 1e-9
# Variants of an algorithm differ in nothing that ranks could notice; ASGO's state is of SOAP's kinds, and that of
# KL-Shampoo of Shampoo's.
QUICK = ("soap", "shampoo")
every_algorithm = pytest.mark.parametrize(
    "options",
    [pytest.param(own, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, own in OPTIONS.items()],
)


@every_algorithm
def test_sharded_matrices_take_the_steps_of_one_process(pool, options):
    for answers in pool.run(every_mesh, options):
        assert {name: value for name, value in answers.items() if not value < CLOSE} == {}


def divided_work(options):
    """The matrices that every rank holds are shared out, with their state everywhere or on the owner alone."""
    return {
        (ranks, owner): divided(ranks, momentum_on_owner=owner, absent=(2, 8), **options)
        for ranks, owner in ((2, False), (4, True))
    }


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
    assert max(pool.run(checkpoints.resume, folder, False, kind, 2, patterns=patterns)) < CLOSE
