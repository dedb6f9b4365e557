"""Shared set-up: one thread for each worker, and no state that leaks from one test to the next."""

import pytest
import torch

from tests.common.problems import flag_on_device


@pytest.fixture(params=["host", "device"])
def known_by(request, monkeypatch):
    """Whether the host learns of bad gradients, or only the device, as on accelerators."""
    if request.param == "device":
        monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    return request.param


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(1)
    torch.manual_seed(0)
