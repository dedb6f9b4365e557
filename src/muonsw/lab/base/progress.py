"""Progress of work under way: a live table in a terminal, a plain line every ten seconds in a file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from muonsw.lab.console import harmless, say

SECONDS_BETWEEN_LINES = 10.0
REFRESHES_PER_SECOND = 2


class View:
    """Tasks under way, by name, with the numbers to show; `showing` makes one."""

    def __init__(self, console: Console, totals: Mapping[str, float | None], what: str) -> None:
        self.console, self.totals, self.what = console, dict(totals), what
        self.numbers: dict[str, dict[str, str]] = {name: {} for name in totals}
        self.done: dict[str, float] = {}
        self.first: dict[str, float] = {}  # where each task was when it was first seen: a resumed run begins late
        self.ended: set[str] = set()
        self.begun = self.printed = time.monotonic()

    def update(
        self,
        name: str,
        done: float | None = None,
        numbers: Mapping[str, str] | None = None,
        *,
        total: float | None = None,
    ) -> None:
        """Record how far a task is, in the unit of its total, and its numbers; numbers not given stay."""
        if total is not None:
            self.totals[name] = total
        if done is not None:
            self.done[name] = done
            self.first.setdefault(name, done)
        self.numbers[name] = {**self.numbers[name], **(numbers or {})}  # in one go: another thread draws
        if time.monotonic() - self.printed > SECONDS_BETWEEN_LINES and (moving := self._moving()):
            self.printed = time.monotonic()
            texts = {task: ", ".join(f"{key} {text}" for key, text in row.items() if text) for task, row in moving}
            lines = [self.summary(), *(f"{task}: {text}" for task, text in texts.items())]
            self.log("; ".join(filter(None, lines)))

    def finish(self, name: str, said: str) -> None:
        """Record that a task has ended, and print the outcome."""
        self.ended.add(name)
        self.say(f"{name}: {said}")

    def say(self, text: str) -> None:
        """Print a line that stays, above the table."""
        say(self.console, text)

    def log(self, text: str) -> None:
        """Print a line to a file; a terminal shows the same in its table."""
        if not self.console.is_terminal:
            say(self.console, text)

    def summary(self) -> str:
        """Count what is complete, and estimate the time left from the pace so far."""
        count = f"{len(self.ended)} of {len(self.totals)} {self.what} complete" if len(self.totals) > 1 else ""
        totals = {name: total for name, total in self.totals.items() if total is not None}
        made = sum(self._position(name, total) - self.first.get(name, 0.0) for name, total in totals.items())
        left = sum(total - self._position(name, total) for name, total in totals.items())
        if made <= 0 or left <= 0:
            return count
        time_left = f"about {clock((time.monotonic() - self.begun) * left / made)} left"
        return f"{count}, {time_left}" if count else time_left

    def _position(self, name: str, total: float) -> float:
        return total if name in self.ended else min(self.done.get(name, 0.0), total)

    def _moving(self) -> list[tuple[str, dict[str, str]]]:
        rows = self.numbers.items()
        return [(harmless(name), row) for name, row in rows if any(row.values()) and name not in self.ended]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if moving := self._moving()[: max(1, console.height - 4)]:
            headings = list(dict.fromkeys(heading for _, row in moving for heading in row))
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column()  # a long name is broken; numbers never are
            for _ in headings:
                table.add_column(justify="right", no_wrap=True)
            table.add_row("", *(Text(heading, style="dim") for heading in headings))
            for name, row in moving:
                table.add_row(Text(name), *(Text(row.get(heading, "")) for heading in headings))
            yield table
        yield Text(self.summary(), style="dim")


@contextmanager
def showing(console: Console, totals: Mapping[str, float | None], *, what: str = "runs") -> Iterator[View]:
    """Show tasks under way while the block runs.

    Args:
        console: Where to.
        totals: How much there is to do, by name, in one unit for all; None is unknown.
        what: What the tasks are called together, as in "3 of 6 runs complete".

    Examples:
        >>> with showing(Console(width=60), {"training": 12}) as view:
        ...     view.say("72,677,632 parameters")
        ...     view.update("training", 4, {"update": "4/12", "loss": "2.6051"})
        ...     view.finish("training", "validation loss 2.6050")
        72,677,632 parameters
        training: validation loss 2.6050
    """
    view = View(console, totals, what)
    if not console.is_terminal:
        yield view
        return
    with Live(view, console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=True):
        yield view


def clock(seconds: float) -> str:
    """Format seconds as a clock shows them.

    Examples:
        >>> clock(75.2), clock(3675)
        ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
