"""The ranks that train one run together, and what they agree on.

`World` is a single process, `SharedWorld` one of the processes that torchrun started. Both have the same methods, so
that the loop is written once. Rank 0 prints, and writes every file.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from muonsw import machine
from muonsw.lab.base.errors import Diverged, Interrupted, MachineError, UsageError
from muonsw.lab.base.launcher import is_rank
from muonsw.lab.train.checkpoint import CheckpointError
from muonsw.lab.train.config import ParallelConfig

T = TypeVar("T")

STARTING_SECONDS, CONNECTING_SECONDS = 1800.0, 3.0
AGAIN = "start the same command again to go on from the last checkpoint, or let `torchrun --max-restarts` do it"
SLOW = "if a rank may take that long, raise parallel.timeout"
# gloo and NCCL raise plain errors; these words tell a lost connection from a fault of the program.
LOST = ("connection", "timed out", "timeout", "gloo", "nccl", "broken pipe", "socket", "recvvalue", "sendbytes")
# Errors that one rank reports to the others; anything else is a fault of the program.
SHARED_ERRORS = (UsageError, CheckpointError, Diverged)


class World:
    """A single process.

    Attributes:
        rank: This process among all.
        size: How many there are.
        local: This process among those of its machine.
        alone: Whether there are no other ranks to agree with.
    """

    rank, size, local = 0, 1, 0
    alone = True

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, raise the same error on all."""
        return work()

    def leading(self, work: Callable[[], T]) -> T | None:
        """Do something on rank 0 only; if it fails, raise the same error on all."""
        return self.together(lambda: work() if self.leads else None)

    def from_leader(self, thing: T) -> T:
        """Rank 0's value, on all ranks."""
        return thing

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of numbers on the host."""
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over ranks of numbers on the host."""
        return self.total(numbers) / self.size

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return number


class SharedWorld(World):
    """One of the processes that torchrun started, on one machine or several.

    Messages travel over gloo between the hosts, and never wait for a GPU.

    Args:
        timeout: Seconds to wait for another rank in any collective.
    """

    alone = False

    def __init__(self, timeout: float) -> None:
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        store, self.rank, self.size = _meet()
        backend = "cpu:gloo,cuda:nccl" if machine.gpus() else "gloo"
        patience = timedelta(seconds=timeout)
        store = PrefixStore("ranks", store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=patience)

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, raise the same error on all.

        The work itself must not wait for other ranks.
        """
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

    def from_leader(self, thing: T) -> T:
        """Rank 0's value, on all ranks."""
        things = [thing]
        dist.broadcast_object_list(things, src=0)
        return things[0]

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of numbers on the host."""
        summed = numbers.clone()
        dist.all_reduce(summed)
        return summed

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


def _meet() -> tuple[Store, int, int]:
    """Return a store that only these processes have written to, this rank, and the number of ranks.

    torchrun keeps one store for all its restarts, and a rank that starts early may find there the address of a process
    that is gone. So rank 0 opens a store of its own, whose port is sent through the old one: no store listens at a
    stale port, and a rank that finds none asks again.
    """
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=STARTING_SECONDS)))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return store, rank, size
    host, key = os.environ["MASTER_ADDR"], "muonsw/port"
    if rank == 0:
        fresh = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        store.set(key, str(fresh.port))
        return fresh, rank, size
    end = time.monotonic() + STARTING_SECONDS
    while True:
        try:
            patience = timedelta(seconds=CONNECTING_SECONDS)
            theirs = TCPStore(host, int(store.get(key)), size, is_master=False, timeout=patience)
        except dist.DistError:
            if time.monotonic() > end:
                raise
        else:
            theirs.set_timeout(timedelta(seconds=STARTING_SECONDS))
            return theirs, rank, size


@contextmanager
def joined(timeout: float = ParallelConfig.timeout) -> Iterator[World]:
    """Yield the world that this process was started into.

    Raises:
        MachineError: If another rank was lost, or did not answer within the timeout.
    """
    if not is_rank():
        yield World()
        return
    try:
        yield SharedWorld(timeout)
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
