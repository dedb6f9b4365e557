"""A rank that waits for ever for another one ends itself instead, and says which one is behind."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from muonsw.lab.base.errors import MACHINE
from muonsw.lab.base.launcher import report_error

# Until the first update: importing, compiling and reading a checkpoint take their time.
STARTING_SECONDS = 1800.0
BEAT_SECONDS = 1.0
AGAIN = "start the same command again to go on from the last checkpoint, or let `torchrun --max-restarts` do it"


class Watchdog:
    """Ends this process, with a message, when it makes no progress: a collective waits for a lost rank for ever.

    A second thread tells the other ranks how far this one is, so that the message can name the one that is behind.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size, self.patience = rank, size, STARTING_SECONDS
        self._store, self._ended = store, threading.Event()
        self._count, self._doing, self._since = 0, "starting", time.monotonic()
        for work in (self._guard, self._report):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def alive(self, doing: str) -> None:
        """Say that this process makes progress, and what it does next."""
        self._count, self._doing, self._since = self._count + 1, doing, time.monotonic()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _guard(self) -> None:
        """Never touches the store, which may itself be gone."""
        while not self._ended.wait(BEAT_SECONDS / 4):
            if time.monotonic() - self._since > self.patience:
                self._bark()

    def _bark(self) -> None:
        lines: list[str] = []
        asking = threading.Thread(target=lambda: lines.extend(self._behind()), daemon=True)
        asking.start()
        asking.join(5.0)
        here = f"rank {self.rank} has made no progress for {self.patience:g} s, in: {self._doing}"
        behind = "; ".join(lines) or "rank 0 does not answer"  # its process holds the store
        longer = "if updates may take that long, raise parallel.timeout"
        sentence = f"muonsw: {here} ({behind}); {AGAIN}; {longer}"
        report_error(sentence)
        print(sentence, file=sys.stderr, flush=True)
        os._exit(MACHINE)

    def _report(self) -> None:
        with suppress(Exception):  # the store is on rank 0's machine, and may go at any time
            while not self._ended.wait(BEAT_SECONDS):
                self._store.set(f"beat/{self.rank}", json.dumps([self._count, self._doing, time.time()]))

    def _behind(self) -> Iterator[str]:
        """Which ranks are not as far as this one, or have not been heard of."""
        with suppress(Exception):
            keys = {rank: f"beat/{rank}" for rank in range(self.size) if rank != self.rank}
            heard = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
            for rank in keys:
                count, doing, when = heard.get(rank, (-1, "starting", 0.0))
                silent = time.time() - when > min(self.patience / 2, 30 * BEAT_SECONDS)  # clocks may differ a little
                if count < self._count or silent:
                    yield f"rank {rank} is behind, in: {doing}" + (", and its process is silent" if silent else "")
            if all(count >= self._count for count, _, _ in heard.values()) and len(heard) == len(keys):
                yield "no other rank is behind this one"
