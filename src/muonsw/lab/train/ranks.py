"""The ranks that train one run together: communication between them, and DDP or FSDP for the model.

`World` works for a single process, too, so the training loop needs no special cases. Rank 0 prints and writes files.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from muonsw import machine
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError, is_rank
from muonsw.lab.tasks import LossParts
from muonsw.lab.train.checkpoint import CheckpointError
from muonsw.lab.train.config import RunConfig

T = TypeVar("T")

STARTING, CONNECTING = timedelta(minutes=30), timedelta(seconds=3)
AGAIN = "rerun the same command to resume from the last checkpoint, or let `torchrun --max-restarts` do it"
# gloo and NCCL raise a plain `RuntimeError`; these words tell a lost connection from a bug.
LOST = ("connection", "timed out", "timeout", "gloo", "nccl", "broken pipe", "socket", "recvvalue", "sendbytes")
# Errors that one rank reports to the others; anything else is a bug.
SHARED_ERRORS = (UsageError, CheckpointError, Diverged)
# torch 2.13 renamed the setting.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers"


class World:
    """The processes that train one run; a single one unless `connect` has joined it to others."""

    rank, size, local = 0, 1, 0  # `local` is the rank on this machine
    alone = True

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def connect(self, timeout: float) -> None:
        """Join the processes that torchrun started; ranks wait at most `timeout` seconds for each other."""
        # CPU tensors, such as messages, go over gloo and never wait for a GPU.
        backend = "cpu:gloo,cuda:nccl" if machine.gpus() else "gloo"
        store, self.rank, self.size = next(rendezvous("env://", timeout=STARTING))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun reuses one store for all its restarts, so it may hold the addresses of dead processes. So rank 0
            # opens a new store and sends its port through the old one; a rank that reads a stale port tries again.
            host, key, end = os.environ["MASTER_ADDR"], "muonsw/port", time.monotonic() + STARTING.total_seconds()
            fresh: Store | None = None
            if self.leads:
                fresh = TCPStore(host, 0, self.size, is_master=True, wait_for_workers=False)
                store.set(key, str(fresh.port))
            while fresh is None:
                try:
                    fresh = TCPStore(host, int(store.get(key)), self.size, is_master=False, timeout=CONNECTING)
                    fresh.set_timeout(STARTING)
                except dist.DistError:
                    if time.monotonic() > end:
                        raise
            store = fresh
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
        self.local, self.alone = int(os.environ.get("LOCAL_RANK", "0")), False

    def together(self, work: Callable[[], T]) -> T:
        """Call a function without collectives on every rank; an error on one rank is raised on all."""
        if self.alone:
            return work()
        result, error = None, None
        try:
            result = work()
        except SHARED_ERRORS as problem:
            error = problem
        errors: list[Any] = [None] * self.size
        dist.all_gather_object(errors, error)
        for rank, error_there in enumerate(errors):
            if error_there is not None:
                raise agreed(error_there, rank) from error
        return cast("T", result)

    def leading(self, work: Callable[[], T]) -> T:
        """Call a function on rank 0 only; all ranks return its result or raise its error."""
        results = [self.together(lambda: work() if self.leads else None)]
        if not self.alone:
            dist.broadcast_object_list(results, src=0)
        return cast("T", results[0])

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor on the CPU over all ranks, in place."""
        if not self.alone:
            dist.all_reduce(values)
        return values

    def largest(self, number: int) -> int:
        largest = torch.tensor(number)
        if not self.alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


@contextmanager
def joined(timeout: float) -> Iterator[World]:
    """Connect to the other ranks, if any; raise a `MachineError` if one of them is lost."""
    world = World()
    if not is_rank():
        yield world
        return
    try:
        world.connect(timeout)
        yield world
    except RuntimeError as error:
        text = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(word in text for word in LOST):
            raise
        # The first sentence, without the location in torch's source.
        reason = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0]).partition(". ")[0][:200]
        slow = "; if a rank may take that long, raise parallel.timeout" if re.search("time(d )?out", text) else ""
        raise MachineError(f"another rank has ended or cannot be reached ({reason}); {AGAIN}{slow}") from error
    except Exception as error:
        if known_to_all(error):
            dist.destroy_process_group()
        raise
    else:
        dist.destroy_process_group()


def speaker() -> str | None:
    """The prefix of this process's error messages; None for rank 0 or a single process."""
    rank = os.environ["RANK"] if is_rank() else "0"
    return None if rank == "0" else f"rank {rank}: "


def known_to_all(error: Exception) -> bool:
    """Whether all ranks raise this error, so that only rank 0 needs to report it."""
    return isinstance(error, Diverged | Interrupted) or getattr(error, "agreed", False)


def agreed(error: Exception, rank: int = 0) -> Exception:
    """Mark an error as raised by all ranks, and name the rank where it occurred."""
    failure = error if rank == 0 or isinstance(error, Diverged) else type(error)(f"{error} (on rank {rank})")
    failure.agreed = True  # type: ignore[attr-defined]
    return failure


class PlacedModel:
    """A module that computes a loss, on one process, with DDP, or with FSDP2."""

    def __init__(self, module: nn.Module, config: RunConfig, world: World, device: torch.device) -> None:
        self.module, self.forward = module, cast("Callable[..., LossParts]", module)
        self.strategy = "" if world.alone else config.parallel.strategy
        # The ranks that share Muon's work; sharded weights carry their own mesh.
        self.process_group = dist.group.WORLD if self.strategy == "ddp" else None
        # Buffers that are not saved, such as the rotary table, never change; the statistics of a BatchNorm do.
        saved = module.state_dict(keep_vars=True)
        self._buffers = [name for name, _ in module.named_buffers() if name in saved]
        if self.strategy == "ddp":
            settings: dict[str, Any] = {_SYNC_BUFFERS: bool(self._buffers), "gradient_as_bucket_view": True}
            self.forward = nn.parallel.DistributedDataParallel(module, **settings)
        elif self.strategy == "fsdp":
            if self._buffers:
                raise UsageError(f"fsdp cannot shard a model with buffers ({self._buffers[0]}): use strategy ddp")
            from torch.distributed.device_mesh import DeviceMesh  # slow to import
            from torch.distributed.fsdp import fully_shard

            # Not a new group: it would not inherit the timeout.
            mesh = DeviceMesh.from_group(cast("Any", dist.group.WORLD), device.type)
            for part in (*layers_of(module), module):
                fully_shard(part, mesh=mesh)

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """A context for the passes of a micro-batch; ranks exchange gradients only in the last one of a step."""
        if self.strategy == "fsdp":
            cast("Any", self.module).set_requires_gradient_sync(last)
        if self.strategy == "ddp" and not last:
            return cast("AbstractContextManager[object]", cast("Any", self.forward).no_sync())
        return nullcontext()

    def share_buffers(self) -> None:
        """Broadcast rank 0's buffers, as DDP's next forward pass would."""
        if self.strategy == "ddp":
            for name in self._buffers:
                dist.broadcast(self.module.get_buffer(name), src=0)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The members of a model's outermost `ModuleList`s, which FSDP gathers one at a time."""
    if isinstance(module, nn.ModuleList):
        return [layer for layer in module if next(layer.parameters(), None) is not None]
    return [layer for child in module.children() for layer in layers_of(child)]
