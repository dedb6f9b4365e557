"""The one way in which CUDA graphs are captured, by the optimizer's replay and by the lab's trainer."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonsw.kernels import watches


def recorded(
    program: Callable[[], None], device: torch.device, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """A program as a graph, without running it; it works on tensors that stay, and never waits for the device.

    `torch.cuda.graph` would also empty the allocator's cache, and the gradients of the next steps would lie elsewhere.
    Other threads, which read data ahead, may go on. The memory `pool` may be shared with other graphs, none of whose
    tensors outlive a replay.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    torch.cuda.synchronize(device)
    collects = gc.isenabled()
    gc.disable()  # a graph that is destroyed while another is captured would spoil it
    try:
        with torch.cuda.stream(stream or torch.cuda.Stream(device)):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                program()
                graph.capture_end()
            except BaseException:
                _abandon(graph, device, pool)
                raise
    finally:
        if collects:
            gc.enable()
    return graph


class GradientReads(TorchDispatchMode):
    """Finds out whether anything reads or writes some tensors directly, and not through a table of addresses.

    Attributes:
        seen: whether an operation of torch, other than a view, or a kernel was given one.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.seen = False

    def __enter__(self) -> Self:
        watches.append(self._look)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        watches.remove(self._look)
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it is given unless its result is a view of that."""
        result = operation(*args, **(kwargs or {}))
        if not (operation.is_view and self._holds([result])):
            self._look([*args, *(kwargs or {}).values()])
        return result

    def _look(self, given: Sequence[Any]) -> None:
        self.seen |= self._holds(given)

    def _holds(self, given: Sequence[Any]) -> bool:
        """Whether one of these, or of the lists among these, lies in the memory of the tensors."""
        flat = chain.from_iterable(value if isinstance(value, list | tuple) else [value] for value in given)
        values = [getattr(value, "base", value) for value in flat]  # Triton's descriptors have a tensor of that name
        return any(value.untyped_storage().data_ptr() in self._memory for value in values if isinstance(value, Tensor))


# Graphs whose capture was invalidated: torch's allocators go on asking them which streams they capture.
_invalid: list[torch.cuda.CUDAGraph] = []


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a capture that has failed, in the stream of the capture.

    Where the failure has invalidated it (something waited for the device), torch's own `capture_end` raises before it
    ends the capture in allocator and generator. The allocator would then refuse to empty its cache, and in torch 2.11
    the generator would draw no number any more: only the end of a capture that succeeds resets it.
    """
    from torch._C import _cuda_endAllocateToPool, _cuda_releasePool

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        with suppress(RuntimeError):
            graph.capture_end()
            return
        _invalid.append(graph)
        with suppress(RuntimeError):  # where `capture_end` came so far
            _cuda_endAllocateToPool(device.index, pool)
            _cuda_releasePool(device.index, pool)
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()
