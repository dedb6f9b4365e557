"""The processes that train one run together: what they tell each other, and how each notices that another is gone.

`World` is a process on its own, `SharedWorld` one of those that torchrun started. Both have the same methods, so that
the loop is written once. Rank 0 speaks, and writes everything but the other ranks' parts of a checkpoint.
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
from muonsw.lab.train.watchdog import AGAIN, STARTING_SECONDS, Watchdog

T = TypeVar("T")

CONNECTING_SECONDS = 3.0
# How a lost connection is called by gloo and NCCL, which raise plain errors.
LOST = ("connection", "timed out", "timeout", "gloo", "nccl", "broken pipe", "socket", "recvvalue", "sendbytes")
# What a rank may raise as its answer; anything else is a fault of the program.
TELLABLE = (UsageError, CheckpointError, Diverged)


class World:
    """A process on its own.

    Attributes:
        rank: This process among all.
        size: How many there are.
        local: This process among those of its machine.
        alone: Whether nothing has to be agreed.
    """

    rank, size, local = 0, 1, 0
    alone = True

    @property
    def leads(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; where it fails on one, it fails on all with the same error."""
        return work()

    def leading(self, work: Callable[[], T]) -> T | None:
        """Do something on rank 0 alone; where it fails, it fails on all."""
        return self.together(lambda: work() if self.leads else None)

    def gather(self, thing: T) -> list[T]:
        """What each rank has to say, on all of them."""
        return [thing]

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of numbers on the host."""
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over ranks of numbers on the host."""
        return self.total(numbers) / self.size

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return number

    def alive(self, doing: str) -> None:
        """Say that this process makes progress, and what it does next."""

    def watch(self, seconds: float) -> None:
        """End this process when it has made no progress for so long."""


class SharedWorld(World):
    """This process among those that torchrun started, on one machine or several.

    Messages travel over gloo between the hosts, and never wait for a GPU.
    """

    alone = False

    def __init__(self) -> None:
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        store, self.rank, self.size = _meet()
        self._watchdog = Watchdog(self.rank, self.size, store.clone())  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if machine.gpus() else "gloo"
        # How long to wait for each other is the watchdog's business, which can say more about it.
        dist.init_process_group(
            backend,
            store=PrefixStore("ranks", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(days=7),
        )

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; where it fails on one, it fails on all with the same error.

        The work itself must not wait for other ranks.
        """
        result, error = None, None
        try:
            result = work()
        except TELLABLE as problem:
            error = problem
        errors = self.gather(error)
        for rank, problem_there in enumerate(errors):
            if problem_there is not None:
                raise agreed(problem_there, rank) from error
        return cast("T", result)

    def gather(self, thing: T) -> list[T]:
        """What each rank has to say, on all of them."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing)
        return found

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of numbers on the host."""
        summed = numbers.clone()
        dist.all_reduce(summed)
        return summed

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def alive(self, doing: str) -> None:
        """Say that this process makes progress, and what it does next."""
        self._watchdog.alive(doing)

    def watch(self, seconds: float) -> None:
        """End this process when it has made no progress for so long."""
        self._watchdog.alive("starting")
        self._watchdog.patience = seconds

    def unwatch(self) -> None:
        """Let this process take as long as it wants."""
        self._watchdog.end()

    def leave(self) -> None:
        """Destroy the process group; all ranks are here."""
        self.unwatch()
        dist.destroy_process_group()


def _meet() -> tuple[Store, int, int]:
    """A store that these processes share and no earlier ones have written to; this rank; how many there are.

    torchrun keeps one store for all its restarts, and a rank that starts early may find there the address of a process
    that is gone. So rank 0 opens a store of its own, whose port is sent through the old one: no store listens at a
    stale port, and a rank that finds none asks again.
    """
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=STARTING_SECONDS)))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return store, rank, size
    host, key = os.environ["MASTER_ADDR"], "muonsw/port"
    if rank == 0:
        own = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        store.set(key, str(own.port))
        return own, rank, size
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
def joined() -> Iterator[World]:
    """The world that this process was started into, while the block runs.

    Raises:
        MachineError: If another rank was lost.
    """
    if not is_rank():
        yield World()
        return
    ranks = None
    try:
        ranks = SharedWorld()
        yield ranks
        ranks.leave()
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        raise MachineError(f"another rank has ended or cannot be reached ({_brief(error)}); {AGAIN}") from error
    except Exception as error:
        if ranks is not None and known_to_all(error):
            ranks.leave()
        raise
    finally:
        if ranks is not None:
            ranks.unwatch()


def speaker() -> str | None:
    """How a message of this process begins: nothing on its own or on rank 0, else the rank."""
    rank = os.environ["RANK"] if is_rank() else "0"
    return None if rank == "0" else f"rank {rank}: "


def _brief(error: RuntimeError) -> str:
    """The first sentence of an error, without the place in torch's source."""
    line = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0])
    return line.partition(". ")[0][:200]


def _is_lost(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in LOST)


def known_to_all(error: Exception) -> bool:
    """Whether every rank raises this error, so that one of them reports it."""
    return isinstance(error, Diverged | Interrupted) or getattr(error, "agreed", False)


def agreed(error: Exception, rank: int = 0) -> Exception:
    """An error as all ranks raise it: with the rank that it comes from, and marked, so that one rank reports it."""
    failure = error if rank == 0 or isinstance(error, Diverged) else type(error)(f"{error} (on rank {rank})")
    failure.agreed = True  # type: ignore[attr-defined]
    return failure
