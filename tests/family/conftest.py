"""A matrix algorithm that is registered for a test."""

import pytest

from muonsw import ALGORITHMS
from tests.family import toy


@pytest.fixture
def matrix_toy():
    ALGORITHMS.register("matrix_toy", toy.TOY)
    yield
    del ALGORITHMS["matrix_toy"]
