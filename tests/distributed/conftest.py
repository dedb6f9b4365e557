"""Ranks for the tests of this folder: one pool for each module."""

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="module")
def pool():
    ranks = Pool(4)
    yield ranks
    ranks.close()
