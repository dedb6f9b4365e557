"""The lab's one view of work under way: live bars in a terminal, a plain line now and then in a file.

Only the process that owns the terminal draws. Numbers are never cut: where the line is too narrow the bar goes first,
then the names are shortened. rich draws; its `Progress` would repeat the headings of all numbers in every row, which
does not fit into 80 columns, and prints nothing to a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muonsw.lab.console import harmless, say

SECONDS_BETWEEN_LINES = 10.0
DRAWINGS_A_SECOND = 2
GAP = 2
WIDEST_BAR, NARROWEST_BAR, NARROWEST_NAME = 30, 6, 8


@dataclass
class Activity:
    """One thing under way."""

    total: float | None = None  # how much there is to do, in any unit that all of a view share; None is unknown
    done: float = 0.0
    numbers: dict[str, str] = field(default_factory=dict)  # what is shown about it, under short headings
    complete: bool = False
    _begun: float | None = None
    _begun_at: float = 0.0

    def advance(self, done: float) -> None:
        """Note how far it is."""
        if self._begun is None:
            self._begun, self._begun_at = time.monotonic(), done
        self.done = done

    @property
    def left(self) -> float:
        """What is still to be done, as far as that is known."""
        return 0.0 if self.complete or self.total is None else max(self.total - self.done, 0.0)

    @property
    def pace(self) -> float | None:
        """Seconds for each unit since it was first heard of; None before anything was done."""
        if self._begun is None or self.done <= self._begun_at:
            return None
        return (time.monotonic() - self._begun) / (self.done - self._begun_at)

    def time_left(self) -> str:
        """When it will be done, at its own pace."""
        if self.complete:
            return "done"
        return "" if self.pace is None or self.total is None else clock(self.left * self.pace)

    def texts(self) -> list[str]:
        """Its numbers, each behind its heading."""
        return [f"{heading} {text}" for heading, text in self.numbers.items() if text]

    def bar(self, width: int) -> ProgressBar:
        """How much is done, as a bar."""
        if self.complete:
            return ProgressBar(total=1.0, completed=1.0, width=width)
        return ProgressBar(total=self.total, completed=self.done, width=width, pulse=self.total is None)


class View:
    """What is under way, by name, and how to show it; `showing` makes one."""

    def __init__(self, console: Console, items: Mapping[str, Activity], what: str, workers: int) -> None:
        self.console, self.items, self.what = console, dict(items), what
        self.workers = max(1, min(workers, len(self.items)))
        self._shown = time.monotonic()

    def update(
        self,
        name: str,
        done: float | None = None,
        numbers: Mapping[str, str] | None = None,
        *,
        total: float | None = None,
    ) -> None:
        """Note how far something is, in the unit of its total, and what its numbers are; those not given stay."""
        item = self.items[name]
        item.total = item.total if total is None else total
        item.numbers |= numbers or {}
        if done is not None:
            item.advance(done)
        if time.monotonic() - self._shown > SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            if line := self._line():
                self.log(line)

    def finish(self, name: str, said: str = "") -> None:
        """Note that something has ended, and what to say about it in a file."""
        self.items[name].complete = True
        self.log(f"{name}: {said or 'complete'}")

    def say(self, text: str) -> None:
        """Print a line that stays, above what moves."""
        say(self.console, text)

    def log(self, text: str) -> None:
        """Print a line where nothing moves: a terminal shows the same in its bars."""
        if not self.console.is_terminal:
            say(self.console, text)

    def summary(self) -> str:
        """How much of all of it is done, and when the rest will be."""
        items = self.items.values()
        paces = [item.pace for item in items if not item.complete and item.pace is not None]
        left = sum(item.left for item in items)
        rest = f", about {clock(left * max(paces) / self.workers)} left" if paces and left else ""
        return f"{sum(item.complete for item in items)} of {len(items)} {self.what} complete{rest}"

    def _moving(self) -> dict[str, Activity]:
        return {harmless(name): item for name, item in self.items.items() if item.texts() and not item.complete}

    def _line(self) -> str:
        parts = [f"{name}: {', '.join(item.texts())}" for name, item in self._moving().items()]
        return "; ".join(parts if len(self.items) == 1 else [self.summary(), *parts])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = {harmless(name): item for name, item in self.items.items()}
        if len(rows) == 1:
            ((name, item),) = rows.items()
            yield _alone(name, item, options.max_width)
            return
        if len(rows) > console.height - 4:  # more than the screen has lines
            rows = self._moving()
        if rows:
            yield _table(rows, options.max_width)
        yield Text(self.summary(), style="dim")


@contextmanager
def showing(
    console: Console, totals: Mapping[str, float | None], *, what: str = "runs", workers: int = 1
) -> Iterator[View]:
    """Show what is under way while the block runs: bars that move in a terminal, else a line now and then.

    Args:
        console: Where to.
        totals: How much there is to do, by name, in one unit for all; None is unknown.
        what: What they are called together, as in "3 of 6 runs complete".
        workers: How many run at a time.

    Examples:
        >>> with showing(Console(width=60), {"training": 12}) as view:
        ...     view.say("72,677,632 parameters")
        ...     view.update("training", 4, {"update": "4/12", "loss": "2.6051"})
        ...     view.finish("training", "validation loss 2.6050")
        72,677,632 parameters
        training: validation loss 2.6050
    """
    view = View(console, {name: Activity(total) for name, total in totals.items()}, what, workers)
    if not console.is_terminal:
        yield view
        return
    with Live(view, console=console, refresh_per_second=DRAWINGS_A_SECOND, transient=True):
        yield view


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    Examples:
        >>> clock(75.2), clock(3675)
        ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _alone(name: str, item: Activity, width: int) -> RenderableType:
    """One activity: its bar, and below it all its numbers, on as many lines as they need."""
    left = item.time_left()
    end = f"{item.done / item.total:.0%}  {left} left" if item.total and left else ""
    room = width - cell_len(name) - cell_len(end) - 2 * GAP
    line = Table.grid(padding=(0, GAP, 0, 0))
    bars = [item.bar(min(room, WIDEST_BAR))] if room >= NARROWEST_BAR else []
    line.add_row(Text(name, no_wrap=True), *bars, Text(end, no_wrap=True))
    return Group(line, *_lines(item.texts(), width))


def _lines(parts: list[str], width: int) -> Iterator[Text]:
    """Parts side by side, a new line where the next one does not fit."""
    line = ""
    for part in parts:
        if line and cell_len(line) + GAP + cell_len(part) > width:
            yield Text(line, no_wrap=True)
            line = ""
        line = f"{line}{' ' * GAP if line else ''}{part}"
    yield Text(line, no_wrap=True)


def _table(items: Mapping[str, Activity], width: int) -> Table:
    """Several activities, one line each."""
    headings = list(dict.fromkeys(heading for item in items.values() for heading in item.numbers))
    rows = {name: [*(item.numbers.get(key, "") for key in headings), item.time_left()] for name, item in items.items()}
    widths = [max(map(cell_len, column)) for column in zip([*headings, "left"], *rows.values(), strict=True)]
    names = max(map(cell_len, items))
    spare = width - sum(widths) - GAP * len(widths)
    bar = min(spare - names - GAP, WIDEST_BAR)
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(width=max(min(names, spare), NARROWEST_NAME), no_wrap=True, overflow="ellipsis")
    if bar >= NARROWEST_BAR:
        table.add_column(width=bar)
    for size in widths:
        table.add_column(width=size, justify="right", no_wrap=True)
    blank = [""] if bar >= NARROWEST_BAR else []
    table.add_row("", *blank, *(Text(title, style="dim") for title in [*headings, "left"]))
    for name, item in items.items():
        table.add_row(Text(name), *(item.bar(bar) for _ in blank), *map(Text, rows[name]))
    return table
