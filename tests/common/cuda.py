"""What tests on a CUDA device share, and a tensor that passes as one there."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def no_waiting():
    """Make anything that waits for the device an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class OnAGPU(torch.Tensor):
    """A tensor that says it is on a GPU, wherever it is."""

    is_cuda = True
