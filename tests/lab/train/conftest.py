"""Fixtures that several test files share."""

import pytest

from muonsw.lab.train.loop import train
from tests.lab.train.small_runs import small_run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(small_run(), folder)
    return folder
