"""The lab's one view of work under way: live bars in a terminal, a plain line now and then in a file.

Only the process that owns the terminal draws. Numbers are never cut: where the line is too narrow the bar goes first,
then the names are shortened.
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

from muonsw.lab.terminal import harmless, say

SECONDS_BETWEEN_LINES = 10.0
DRAWINGS_A_SECOND = 2
GAP = 2
WIDEST_BAR, NARROWEST_BAR, NARROWEST_NAME = 30, 6, 8


@dataclass
class Item:
    """One thing under way.

    Attributes:
        total: How much there is to do, in any unit that all items of a view share; None is unknown.
        done: How much of it is done.
        numbers: What is shown about it, as text under short headings.
        complete: Whether it has ended.
    """

    total: float | None = None
    done: float = 0.0
    numbers: dict[str, str] = field(default_factory=dict)
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


class View:
    """Items under way and how to show them; `showing` makes one.

    Args:
        console: Where to draw.
        items: What is under way, by name.
        what: What the items are called together, as in "3 of 6 runs complete".
        workers: How many items run at a time.
    """

    def __init__(self, console: Console, items: Mapping[str, Item], what: str, workers: int) -> None:
        self.console, self.items, self.what = console, dict(items), what
        self.workers = max(1, min(workers, len(self.items)))
        self._shown = time.monotonic()

    def update(
        self,
        name: str,
        done: float | None = None,
        numbers: Mapping[str, str] | None = None,
        /,
        *,
        total: float | None = None,
        **more: str,
    ) -> None:
        """Note how far an item is and what its numbers are; those not given stay as they were.

        Args:
            name: The item.
            done: In the unit of its total.
            numbers: Texts by heading.
            total: Where it was not known before.
            more: Further texts; an underscore in a heading is shown as a space.
        """
        item = self.items[name]
        item.total = item.total if total is None else total
        item.numbers |= {**(numbers or {}), **{heading.replace("_", " "): text for heading, text in more.items()}}
        if done is not None:
            item.advance(done)
        if time.monotonic() - self._shown > SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            self.log(self._line())

    def finish(self, name: str, said: str = "") -> None:
        """Note that an item has ended, and what to say about it in a file."""
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
        complete = sum(item.complete for item in self.items.values())
        left = self._seconds_left()
        rest = "" if left is None else f", about {clock(left)} left"
        return f"{complete} of {len(self.items)} {self.what} complete{rest}"

    def _seconds_left(self) -> float | None:
        paces = [item.pace for item in self.items.values() if not item.complete and item.pace is not None]
        left = sum(item.left for item in self.items.values())
        return left * max(paces) / self.workers if paces and left else None

    def _line(self) -> str:
        running = {name: item for name, item in self.items.items() if item.numbers and not item.complete}
        parts = [f"{name}: {_numbers(item)}" for name, item in running.items()]
        return "; ".join(parts if len(self.items) == 1 else [self.summary(), *parts])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = {harmless(name): item for name, item in self.items.items()}
        if len(shown) == 1:
            ((name, item),) = shown.items()
            yield _alone(name, item, options.max_width)
            return
        rows = shown
        if len(rows) > console.height - 4:  # more than the screen has lines: those that move
            rows = {name: item for name, item in rows.items() if item.numbers and not item.complete}
        if rows:
            yield _table(rows, options.max_width)
        yield Text(self.summary(), style="dim")


@contextmanager
def showing(
    console: Console, totals: Mapping[str, float | None], *, what: str = "runs", workers: int = 1
) -> Iterator[View]:
    """Show items under way while the block runs.

    Args:
        console: A terminal shows bars that move; anything else gets a line now and then.
        totals: How much each item has to do, by name, in one unit for all; None is unknown.
        what: What the items are called together.
        workers: How many run at a time.

    Examples:
        >>> with showing(Console(width=60), {"training": 12}) as view:
        ...     view.say("72,677,632 parameters")
        ...     view.update("training", 4, update="4/12", loss="2.6051")
        ...     view.finish("training", "validation loss 2.6050")
        72,677,632 parameters
        training: validation loss 2.6050
    """
    view = View(console, {name: Item(total) for name, total in totals.items()}, what, workers)
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


def _numbers(item: Item) -> str:
    return ", ".join(f"{heading} {text}" for heading, text in item.numbers.items() if text)


def _alone(name: str, item: Item, width: int) -> RenderableType:
    """One item: its bar, and below it all its numbers, on as many lines as they need."""
    left = item.time_left()
    end = f"{item.done / item.total:.0%}  {left} left" if item.total and left else ""
    room = width - cell_len(name) - cell_len(end) - 2 * GAP
    line = Table.grid(padding=(0, GAP, 0, 0))
    cells: list[RenderableType] = [Text(name, no_wrap=True)]
    if room >= NARROWEST_BAR:
        cells.append(_bar(item, min(room, WIDEST_BAR)))
    line.add_row(*cells, Text(end, no_wrap=True))
    return Group(line, *_lines([f"{heading} {text}" for heading, text in item.numbers.items() if text], width))


def _lines(parts: list[str], width: int) -> Iterator[Text]:
    """Parts side by side, a new line where the next one does not fit."""
    line = ""
    for part in parts:
        if line and cell_len(line) + GAP + cell_len(part) > width:
            yield Text(line, no_wrap=True)
            line = ""
        line = f"{line}{' ' * GAP if line else ''}{part}"
    yield Text(line, no_wrap=True)


def _table(items: Mapping[str, Item], width: int) -> Table:
    """Several items, one line each."""
    headings = list(dict.fromkeys(heading for item in items.values() for heading in item.numbers))
    rows = {name: [*(item.numbers.get(key, "") for key in headings), item.time_left()] for name, item in items.items()}
    titles = [*headings, "left"]
    widths = [max(map(cell_len, column)) for column in zip(titles, *rows.values(), strict=True)]
    names = max(map(cell_len, items))
    spare = width - sum(widths) - GAP * len(widths)
    bar = spare - names - GAP
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(width=max(min(names, spare), NARROWEST_NAME), no_wrap=True, overflow="ellipsis")
    if bar >= NARROWEST_BAR:
        table.add_column(width=min(bar, WIDEST_BAR))
    for size in widths:
        table.add_column(width=size, justify="right", no_wrap=True)
    table.add_row("", *([""] if bar >= NARROWEST_BAR else []), *(Text(title, style="dim") for title in titles))
    for name, item in items.items():
        bars = [_bar(item, min(bar, WIDEST_BAR))] if bar >= NARROWEST_BAR else []
        table.add_row(Text(name), *bars, *map(Text, rows[name]))
    return table


def _bar(item: Item, width: int) -> ProgressBar:
    if item.complete:
        return ProgressBar(total=1.0, completed=1.0, width=width)
    return ProgressBar(total=item.total, completed=item.done, width=width, pulse=item.total is None)
