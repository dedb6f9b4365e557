"""Helpers of tests on a CUDA device, and a CPU tensor that claims to be on one."""

import contextlib
import warnings

import torch
from torch import nn

from tests.common.problems import matrices, set_gradients


@contextlib.contextmanager
def no_waiting():
    """Make anything that waits for the device an error: in torch, and in the driver, whose waits torch does not see."""
    torch.cuda._sleep(1_000_000_000)  # half a second
    busy = torch.cuda.Event()
    busy.record()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the host waited for the device, or took half a second"


def on_gpu(*shapes, dtype=torch.float32):
    """The parameters of `matrices`, moved."""
    return [nn.Parameter(param.detach().cuda()) for param in matrices(*shapes, dtype=dtype)]


def feed(params, step):
    """The same gradients as `set_gradients`, moved."""
    twins = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in params]
    set_gradients(twins, step)
    for p, t in zip(params, twins, strict=True):
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(t.grad)


class OnAGPU(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True
