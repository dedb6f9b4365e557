"""One pool of ranks for all tests of this folder; it ends with the last one, because idle ranks cost time."""

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="package")
def pool():
    ranks = Pool(4)
    yield ranks
    ranks.close()
