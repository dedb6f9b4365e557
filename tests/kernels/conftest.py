"""Kernels run on the GPU if there is one, else in Triton's interpreter on the CPU (see the root conftest)."""

import pytest
import torch

from muonsw import machine

if not machine.triton():
    collect_ignore_glob = ["*.py"]


@pytest.fixture
def device():
    return torch.device("cuda" if machine.gpus() else "cpu")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles smaller than the tests' matrices, and kernels for matrices of 16 rows and more."""
    from muonsw.kernels import symmetric
    from muonsw.orthogonalize import iterations

    monkeypatch.setattr(symmetric, "best_tiles", lambda _: symmetric.Tiles(32, 16, 4, 2))
    monkeypatch.setattr(iterations, "KERNEL_ROWS", 16)


@pytest.fixture
def kernels_on(monkeypatch):
    """Make the optimizers use our kernels on any device, even if torch's would be faster."""
    from muonsw import kernels

    def switch(on):
        monkeypatch.setattr(kernels, "available", lambda _: on)
        monkeypatch.setattr(kernels, "TORCH_BELOW", 0)

    return switch
