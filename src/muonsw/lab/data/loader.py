"""Batches of token windows whose order is a pure function of the seed and the step.

A loader keeps no position: resuming at a step is asking for that step, and ranks, micro-batches and prefetching only
decide who asks for which rows, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from muonsw.lab.data.shards import Shard, ShardError
from muonsw.lab.data.shuffle import Indices, shuffled

TokenBatch: TypeAlias = tuple[Tensor, Tensor]
T = TypeVar("T")


class Windows:
    """Windows of `sequence + 1` tokens over shards; none crosses a shard's end. `count` is how many there are.

    Neighbouring windows share one token, the last target of one and the first input of the next, so that every token of
    a shard but the first is a target in at most one window.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int) -> None:
        self.shards, self.sequence = tuple(shards), sequence
        counts = np.array([(len(shard.tokens) - 1) // sequence for shard in shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self.count = int(self._ends[-1])
        if self.count == 0:
            tokens = sum(len(shard.tokens) for shard in shards)
            needs = f"no shard holds one window of {sequence + 1} tokens"
            raise ValueError(f"{needs} ({tokens} tokens in {len(shards)} shards): shorten the sequence or add data")

    def gather(self, ids: Indices) -> TokenBatch:
        """Inputs and targets of the windows with these ids, int64 of shape (len(ids), sequence)."""
        rows = np.empty((len(ids), self.sequence + 1), dtype=np.int64)
        owners = np.searchsorted(self._ends, ids, side="right")
        for row, window, owner in zip(rows, ids.tolist(), owners.tolist(), strict=True):
            start = (window - (int(self._ends[owner - 1]) if owner else 0)) * self.sequence
            row[:] = self.shards[owner].tokens[start : start + self.sequence + 1]
        # A model would fail on such a token without naming the shard.
        if rows.max() >= (vocab := self.shards[0].vocab_size):
            bad = self.shards[owners[rows.max(axis=1).argmax()]].path
            wrong = f"{bad} holds the token {rows.max()}, outside the vocabulary of {vocab}"
            raise ShardError(f"{wrong}: delete it and prepare the data again")
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class TokenLoader:
    """Training batches: every epoch visits every window once, in an order keyed by the seed and the epoch.

    Epochs follow each other without a gap, so a batch may hold the end of one and the beginning of the next. `batch`
    counts sequences over all ranks and micro-batches; `limit` visits only the first windows. The order of the shards is
    part of the data order.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int, batch: int, seed: int, limit: int | None = None) -> None:
        self.windows, self.batch, self.seed = Windows(shards, sequence), batch, seed
        self.size = min(limit or self.windows.count, self.windows.count)  # windows in an epoch
        if self.size < batch:
            short = f"the corpus has {self.size} windows of {sequence + 1} tokens, fewer than one batch"
            raise ValueError(f"{short} of {batch}: make the batch or the sequence smaller, or add data")

    def batch_at(self, step: int) -> TokenBatch:
        """Inputs and targets of a step, counted from 0; int64 of shape (batch, sequence)."""
        return self.windows.gather(self._ids(step, 0, self.batch))

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[TokenBatch]:
        """The micro-batches of one rank.

        Micro-batch m of all ranks, in the order of the ranks, then micro-batch m + 1: together exactly
        `batch_at(step)`.
        """
        if self.batch % (ranks * accumulation):
            split = f"{ranks} ranks x {accumulation} micro-batches"
            raise ValueError(f"a batch of {self.batch} does not split evenly into {split}: choose a multiple")
        rows = self.batch // (ranks * accumulation)
        starts = (rows * (ranks * micro + rank) for micro in range(accumulation))
        return (self.windows.gather(self._ids(step, start, start + rows)) for start in starts)

    def epochs(self, total_steps: int) -> float:
        """How many times a run of this many steps visits the corpus."""
        return total_steps * self.batch / self.size

    def _ids(self, step: int, first: int, last: int) -> Indices:
        """The windows in rows first to last of a step's batch."""
        # Python's integers have no largest value: step * batch may pass 64 bits though no index within an epoch does.
        samples = range(step * self.batch + first, step * self.batch + last)
        size, parts = self.size, []
        for epoch in range(samples[0] // size, samples[-1] // size + 1):
            begin, end = max(samples.start - epoch * size, 0), min(samples.stop - epoch * size, size)
            parts.append(shuffled(np.arange(begin, end), size, (self.seed, epoch)))
        return np.concatenate(parts)


class ValidationLoader:
    """The same windows in the same order for every run, whatever its seed or batch; the last batch may be smaller.

    All windows, or `windows` of them, spread evenly over the shards.
    """

    def __init__(self, shards: Sequence[Shard], sequence: int, batch: int, windows: int | None = None) -> None:
        self.windows, self.batch = Windows(shards, sequence), batch
        chosen = min(windows or self.windows.count, self.windows.count)
        self.ids: Indices = np.arange(chosen, dtype=np.int64) * self.windows.count // chosen

    def __len__(self) -> int:
        return (len(self.ids) + self.batch - 1) // self.batch

    def __iter__(self) -> Iterator[TokenBatch]:
        for start in range(0, len(self.ids), self.batch):
            yield self.windows.gather(self.ids[start : start + self.batch])

    def parts(self, *, ranks: int, rank: int) -> Iterator[tuple[TokenBatch, int]]:
        """The batches of one rank, and how many rows of each count; together all ranks read every window once.

        Every rank has as many batches, since a sharded model needs all ranks for a forward pass; a rank that has
        nothing left reads the first window again, and none of its rows count.
        """
        for start in range(self.batch * rank, len(self) * self.batch + self.batch * rank, self.batch * ranks):
            ids = self.ids[start : start + self.batch]
            yield self.windows.gather(ids if len(ids) else self.ids[:1]), len(ids)


def prefetch(read: Callable[[int], T], start: int, stop: int, *, ahead: int = 2) -> Iterator[T]:
    """`read(start), ..., read(stop - 1)`, computed by one background thread up to `ahead` items early.

    An error in `read` is raised where its item would have come. Closing the iterator ends the thread.
    """
    steps = iter(range(start, stop))
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        waiting: deque[Future[T]] = deque(worker.submit(read, step) for step in islice(steps, ahead))
        while waiting:
            item = waiting.popleft().result()
            waiting.extend(worker.submit(read, step) for step in islice(steps, 1))
            yield item
    finally:
        worker.shutdown(cancel_futures=True)
