"""Capture of CUDA graphs, for the optimizer's replay and the lab's trainer."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonsw.kernels import watches


class Recording:
    """A program as CUDA graphs, with what must run eagerly between them."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.pool = pool or torch.cuda.graph_pool_handle()
        self._device = device
        self._runs: list[Callable[[], Any]] = []
        self._graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        for run in self._runs:
            run()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._graph.capture_end()
        if not caught:  # torch warns of an empty graph
            self._runs.append(self._graph.replay)

    def cut(self, action: Callable[[], Any]) -> None:
        self.end()
        self._runs.append(action)
        self.begin()

    def abandon(self) -> None:
        """End a failed capture, in its own stream.

        If the failure invalidated the capture (something waited for the device), torch's own `capture_end` raises
        before it ends the capture in the allocator and the generator. The allocator would then refuse to empty its
        cache, and in torch 2.11 the generator would stop working: only a successful capture resets it.
        """
        from torch._C import _cuda_endAllocateToPool, _cuda_releasePool

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of an empty graph
            with suppress(RuntimeError):
                self._graph.capture_end()
                return
            _invalid.append(self._graph)
            with suppress(RuntimeError):  # `capture_end` may have done this part
                _cuda_endAllocateToPool(self._device.index, self.pool)
                _cuda_releasePool(self._device.index, self.pool)
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()


# Graphs with an invalidated capture stay alive: torch's allocators keep asking them which streams they capture.
_invalid: list[torch.cuda.CUDAGraph] = []

_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


def eagerly(action: Callable[[], Any]) -> None:
    """Run an action that cannot be captured: now, or at each replay between the graphs being recorded.

    Collectives are never captured. All ranks would have to capture and replay a collective together, and
    `destroy_process_group` would wait until its graph is gone.
    """
    recording = _current.get()
    if recording is None:
        action()
    else:
        recording.cut(action)


def recorded(
    program: Callable[[], None], device: torch.device, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> Recording:
    """Record a program without running it. It must work on tensors that stay, and never wait for the device.

    `torch.cuda.graph` would also empty the allocator's cache and so move the gradients of the next steps. Other
    threads, such as data loaders, may keep using the device. Recordings whose tensors do not outlive a replay may share
    `pool`.
    """
    recording = Recording(device, pool)
    torch.cuda.synchronize(device)
    collects = gc.isenabled()
    gc.disable()  # destroying another graph would invalidate the capture
    token = _current.set(recording)
    try:
        with torch.cuda.stream(stream or torch.cuda.Stream(device)):
            recording.begin()
            try:
                program()
                recording.end()
            except BaseException:
                recording.abandon()
                raise
    finally:
        _current.reset(token)
        if collects:
            gc.enable()
    return recording


class GradientReads(TorchDispatchMode):
    """Detects direct reads and writes of some tensors, as opposed to access through a table of addresses.

    Attributes:
        seen: whether a kernel or a torch operation other than a view was passed one of them.
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
        """Run an operation, and check its arguments unless its result is a view of them."""
        result = operation(*args, **(kwargs or {}))
        if not (operation.is_view and self._holds([result])):
            self._look([*args, *(kwargs or {}).values()])
        return result

    def _look(self, given: Sequence[Any]) -> None:
        self.seen |= self._holds(given)

    def _holds(self, given: Sequence[Any]) -> bool:
        """Whether any of these values, or of the lists among them, shares memory with the tensors."""
        flat = chain.from_iterable(value if isinstance(value, list | tuple) else [value] for value in given)
        values = [getattr(value, "base", value) for value in flat]  # Triton's descriptors hold their tensor in `base`
        return any(value.untyped_storage().data_ptr() in self._memory for value in values if isinstance(value, Tensor))
