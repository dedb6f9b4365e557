"""Ranks for the tests of this folder: one pool for all of them, which ends with the last, as idle ranks cost time."""

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="package")
def pool():
    ranks = Pool(4)
    yield ranks
    ranks.close()
