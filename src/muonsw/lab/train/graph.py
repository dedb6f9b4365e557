"""Replay functions of a batch as CUDA graphs: a small model is bound by kernel launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from muonsw.kernels.graphs import recorded
from muonsw.lab.tasks import Batch, map_tensors, tensors_of

# Eager calls before one is captured: kernels are compiled, and states made, on the way.
WARM_CALLS = 3

# A graph holds the activations of a call; beyond this many tokens the launches no longer matter.
MOST_TOKENS = 65_536

Result = TypeVar("Result")


class GraphedFunction(Generic[Result]):
    """A function that is captured once and then replayed on new batches of the same shape.

    What it returns is overwritten by the next call, so use it before. Where it cannot be captured it stays eager, with
    a warning.

    Args:
        function: Works on tensors of fixed shapes and never waits for the device.
        device: A CUDA device.
    """

    def __init__(self, function: Callable[[list[Batch]], Result], device: torch.device) -> None:
        self.function = function
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls = 0
        self._refused = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: list[Batch] = []
        self._result: Result | None = None

    def __call__(self, batches: list[Batch]) -> Result:
        """The function of these batches; the first calls are eager."""
        self._calls += 1
        fits = self._graph is None or [t.shape for t in _tensors(batches)] == [t.shape for t in _tensors(self._batches)]
        if self._calls <= WARM_CALLS or self._refused or not fits:
            return self.eager(batches)
        if self._graph is None:
            self._capture(batches)
        if self._graph is None:
            return self.eager(batches)
        assert self._result is not None
        for held, given in zip(_tensors(self._batches), _tensors(batches), strict=True):
            held.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._result

    def eager(self, batches: list[Batch]) -> Result:
        """An eager call, on the stream of the capture: autograd remembers on which stream it met the weights."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self.function(batches)
        current.wait_stream(self._stream)
        return result

    def _capture(self, batches: list[Batch]) -> None:
        """Record a call without making it; the thread that reads batches ahead goes on meanwhile."""
        self._batches = [map_tensors(Tensor.clone, batch) for batch in batches]

        def program() -> None:
            self._result = self.function(self._batches)

        try:
            self._graph = recorded(program, self._stream.device, stream=self._stream)
        except RuntimeError as error:
            self._refused = True
            warnings.warn(f"updates are not replayed as a CUDA graph: {error}", RuntimeWarning, stacklevel=2)


def _tensors(batches: list[Batch]) -> list[Tensor]:
    return [tensor for batch in batches for tensor in tensors_of(batch)]
