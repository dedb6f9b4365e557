"""Showing that data are being prepared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from muonsw.lab.data.corpus import Extent
from muonsw.lab.data.shards import Group
from muonsw.lab.progress import View, showing

NAME = "preparing"
_STAGES = {"tokenizer": "making the tokenizer", "documents": "encoding"}


@dataclass
class Tally:
    """Adds up what is done and shows it.

    Attributes:
        extent: How much there is.
        view: Where it is shown.
    """

    extent: Extent
    view: View
    documents: int = 0
    bytes: int = 0
    started: float = 0.0

    def begun(self, stage: str) -> None:
        """A stage begins."""
        self.started = time.perf_counter()
        self.view.say(_STAGES[stage])

    def finished(self, group: Group) -> None:
        """A group is done, now or earlier."""
        self.documents, self.bytes = self.documents + group.documents, self.bytes + group.bytes
        rate = self.bytes / 1e6 / max(time.perf_counter() - self.started, 1e-9)
        fraction = self.extent.fraction(self.documents, self.bytes)
        numbers = {"documents": f"{self.documents:,}", "MB": f"{self.bytes / 1e6:,.1f}", "MB/s": f"{rate:.1f}"}
        self.view.update(NAME, fraction, numbers, total=None if fraction is None else 1.0)


@contextmanager
def watching(console: Console, extent: Extent) -> Iterator[Tally]:
    """A tally that draws while its block runs."""
    with showing(console, {NAME: None}) as view:
        yield Tally(extent, view)
