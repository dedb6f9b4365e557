"""Ranks for the tests of this folder: one pool for all of them."""

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool():
    ranks = Pool(4)
    yield ranks
    ranks.close()
