"""Showing that data are being prepared: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from muonsw.lab.data.corpus import Extent
from muonsw.lab.data.record import Group
from muonsw.lab.terminal import say

_SECONDS_BETWEEN_LINES = 5.0
_STAGES = {"tokenizer": "making the tokenizer", "documents": "encoding"}


@dataclass
class Watch:
    """Adds up what is done and passes it on.

    Attributes:
        extent: How much there is.
        show: Called with a stage, what to say about it, and the fraction that is done, if that is known.
    """

    extent: Extent
    show: Callable[[str, str, float | None], None]
    documents: int = 0
    bytes: int = 0
    started: float = 0.0

    def begun(self, stage: str) -> None:
        """A stage begins."""
        self.started = time.perf_counter()
        self.show(_STAGES[stage], "", None)

    def finished(self, group: Group) -> None:
        """A group is done, now or earlier."""
        self.documents, self.bytes = self.documents + group.documents, self.bytes + group.bytes
        rate = self.bytes / 1e6 / max(time.perf_counter() - self.started, 1e-9)
        said = f"{self.documents:,} documents, {self.bytes / 1e6:,.1f} MB, {rate:.1f} MB/s"
        self.show(_STAGES["documents"], said, self.extent.fraction(self.documents, self.bytes))


@contextmanager
def watching(console: Console, extent: Extent) -> Iterator[Watch]:
    """A watch that draws while its block runs."""
    if not console.is_terminal:
        yield Watch(extent, _lines(console))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None, said="")

        def draw(stage: str, said: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            bars.update(task, description=stage, said=said, total=total, completed=fraction or 0.0)

        yield Watch(extent, draw)


def _lines(console: Console) -> Callable[[str, str, float | None], None]:
    following = 0.0

    def write(stage: str, said: str, fraction: float | None) -> None:
        nonlocal following
        if said and time.monotonic() < following:
            return
        if said:
            following = time.monotonic() + _SECONDS_BETWEEN_LINES
        share = "" if fraction is None else f" ({fraction:.0%})"
        say(console, f"{stage}: {said}{share}" if said else stage)

    return write
