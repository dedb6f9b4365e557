"""Shared set-up: one thread for each worker, and no state that leaks from one test to the next."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(1)
    torch.manual_seed(0)
