"""The ranks that train one run together: what they agree on, and how they share a model.

A `World` has the same methods for a single process, so that the loop is written once. Rank 0 prints, and writes every
file.
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
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from muonsw import machine
from muonsw.lab.errors import Diverged, Interrupted, MachineError, UsageError, is_rank
from muonsw.lab.tasks import LossParts
from muonsw.lab.train.checkpoint import CheckpointError
from muonsw.lab.train.config import ParallelConfig, RunConfig

T = TypeVar("T")

STARTING, CONNECTING = timedelta(minutes=30), timedelta(seconds=3)
AGAIN = "rerun the same command to resume from the last checkpoint, or let `torchrun --max-restarts` do it"
SLOW = "if a rank may take that long, raise parallel.timeout"
# gloo and NCCL raise plain errors; these words tell a lost connection from a fault of the program.
LOST = ("connection", "timed out", "timeout", "gloo", "nccl", "broken pipe", "socket", "recvvalue", "sendbytes")
# Errors that one rank reports to the others; anything else is a fault of the program.
SHARED_ERRORS = (UsageError, CheckpointError, Diverged)
# torch 2.13 has renamed the setting.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers"


class World:
    """The processes that train one run; a single one unless `connect` has joined it to others."""

    rank, size, local = 0, 1, 0  # `local` counts the ranks of this machine
    alone = True  # whether there are no other ranks to agree with

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def connect(self, timeout: float) -> None:
        """Join the processes that torchrun started; a rank waits at most `timeout` seconds for another one."""
        # Messages travel over gloo between the hosts, and never wait for a GPU.
        backend = "cpu:gloo,cuda:nccl" if machine.gpus() else "gloo"
        store, self.rank, self.size = next(rendezvous("env://", timeout=STARTING))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun keeps one store for all its restarts, in which a rank may find the address of a process that is
            # gone. So rank 0 opens a store of its own and sends its port through the old one; a rank that finds a stale
            # port asks again.
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
        else:
            store = PrefixStore("ranks", store)
        patience = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=patience)
        self.local, self.alone = int(os.environ.get("LOCAL_RANK", "0")), False

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank, which must not wait for others; if it fails on one, raise the same on all."""
        if self.alone:
            return work()
        result, error = None, None
        try:
            result = work()
        except SHARED_ERRORS as problem:
            error = problem
        errors: list[Any] = [None] * self.size
        dist.all_gather_object(errors, error)
        for rank, problem_there in enumerate(errors):
            if problem_there is not None:
                raise agreed(problem_there, rank) from error
        return cast("T", result)

    def leading(self, work: Callable[[], T]) -> T | None:
        """Do something on rank 0 only; if it fails, raise the same error on all."""
        return self.together(lambda: work() if self.leads else None)

    def from_leader(self, thing: T) -> T:
        """Rank 0's value, on all ranks."""
        things = [thing]
        if not self.alone:
            dist.broadcast_object_list(things, src=0)
        return things[0]

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of numbers on the host."""
        summed = numbers.clone()
        if not self.alone:
            dist.all_reduce(summed)
        return summed

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        largest = torch.tensor(number)
        if not self.alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


@contextmanager
def joined(timeout: float = ParallelConfig.timeout) -> Iterator[World]:
    """Yield the world that this process was started into; raise a `MachineError` if another rank is lost."""
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
        # The first sentence, without the place in torch's source.
        reason = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0]).partition(". ")[0][:200]
        slow = f"; {SLOW}" if "timed out" in text or "timeout" in text else ""
        raise MachineError(f"another rank has ended or cannot be reached ({reason}); {AGAIN}{slow}") from error
    except Exception as error:
        if known_to_all(error):
            dist.destroy_process_group()
        raise
    else:
        dist.destroy_process_group()


def speaker() -> str | None:
    """The prefix of this process's messages: None for a single process and for rank 0."""
    rank = os.environ["RANK"] if is_rank() else "0"
    return None if rank == "0" else f"rank {rank}: "


def known_to_all(error: Exception) -> bool:
    """Whether every rank raises this error, so that only one of them reports it."""
    return isinstance(error, Diverged | Interrupted) or getattr(error, "agreed", False)


def agreed(error: Exception, rank: int = 0) -> Exception:
    """Mark an error as raised by all ranks, and name the rank that it comes from."""
    failure = error if rank == 0 or isinstance(error, Diverged) else type(error)(f"{error} (on rank {rank})")
    failure.agreed = True  # type: ignore[attr-defined]
    return failure


class PlacedModel:
    """A module that computes a loss: on one process, replicated by DDP, or sharded layer by layer by FSDP2."""

    def __init__(self, module: nn.Module, config: RunConfig, world: World, device: torch.device) -> None:
        self.module, self.forward = module, cast("Callable[..., LossParts]", module)
        self.strategy = "" if world.alone else config.parallel.strategy
        # The ranks among which Muon's matrices are divided; sharded weights know their ranks themselves.
        self.process_group = dist.group.WORLD if self.strategy == "ddp" else None
        # Buffers that are not saved, such as a table of rotations, never change; the statistics of a BatchNorm do.
        saved = module.state_dict(keep_vars=True)
        self._buffers = [name for name, _ in module.named_buffers() if name in saved]
        if self.strategy == "ddp":
            settings: dict[str, Any] = {_SYNC_BUFFERS: bool(self._buffers), "gradient_as_bucket_view": True}
            self.forward = nn.parallel.DistributedDataParallel(module, **settings)
        elif self.strategy == "fsdp":
            if self._buffers:
                buffer = f"{self._buffers[0]} is a buffer of each rank"
                raise UsageError(f"{buffer}, so the model cannot be divided: use strategy ddp")
            from torch.distributed.device_mesh import init_device_mesh  # slow to import
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.tensor import Shard

            parallel = config.parallel
            axes = {"replicas": parallel.replicas} if parallel.replicas > 1 else {}
            axes |= {"shards": world.size // parallel.replicas}
            mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            # New groups do not take the timeout of the first one. torch 2.15 made the function public.
            set_timeout = getattr(dist, "set_timeout", None) or torch.distributed.distributed_c10d._set_pg_timeout
            for group in mesh.get_all_groups():
                set_timeout(timedelta(seconds=parallel.timeout), group)
            by_rows = {id(param) for param in module.parameters() if param.dim() == 3 and parallel.experts == "rows"}
            for part in (*layers_of(module), module):
                fully_shard(part, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if id(p) in by_rows else None)

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Surround the passes of a micro-batch: gradients stay on their rank until the last one of a step."""
        if self.strategy == "fsdp":
            cast("Any", self.module).set_requires_gradient_sync(last)
        if self.strategy == "ddp" and not last:
            return cast("AbstractContextManager[object]", cast("Any", self.forward).no_sync())
        return nullcontext()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, as DDP's next forward pass would."""
        if self.strategy == "ddp":
            for name in self._buffers:
                dist.broadcast(self.module.get_buffer(name), src=0)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The parts of a model that are gathered one after the other: the members of its outermost lists of modules."""
    if isinstance(module, nn.ModuleList):
        return [layer for layer in module if next(layer.parameters(), None) is not None]
    return [layer for child in module.children() for layer in layers_of(child)]


def require_division(config: RunConfig, ranks: int) -> None:
    """Raise a `UsageError` if a run cannot be divided over this number of ranks."""
    if config.batch % (ranks * config.accumulation):
        split = f"accumulation={config.accumulation} micro-batches on each of {ranks} ranks"
        raise UsageError(f"batch={config.batch} does not split into {split}: choose a multiple")
    if config.parallel.strategy != "fsdp" or ranks == 1:
        return
    replicas = config.parallel.replicas
    if ranks % replicas:
        raise UsageError(f"{ranks} ranks cannot hold parallel.replicas={replicas} equal copies: choose a divisor")
    shards, model = ranks // replicas, config.model
    if model and config.parallel.experts == "rows" and (model.width % shards or 2 * model.ff_width % shards):
        sizes = f"model.width={model.width} and twice ff={model.ff_width}"
        raise UsageError(f"{sizes} do not split into {shards} equal parts: set parallel.experts to 'stack'")
