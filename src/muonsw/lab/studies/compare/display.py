"""All runs of a comparison at a glance: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from muonsw.lab.studies.compare.arms import Job
from muonsw.lab.studies.compare.pool import Audience
from muonsw.lab.terminal import say
from muonsw.lab.train.metrics import Record

SECONDS_BETWEEN_LINES = 20.0


@dataclass
class _State:
    """What is shown of one run."""

    steps: int
    step: int = 0
    loss: float | None = None
    validation: float | None = None
    norm: float | None = None
    begun: float | None = None
    begun_step: int = 0
    done: bool = False

    def update(self, record: Record) -> None:
        if record["kind"] == "eval":
            self.validation = record["loss"]
        elif record["kind"] == "telemetry":
            self.norm = record["decayed"]["weight_rms"] if record.get("decayed") else None
        else:
            self.step, self.loss = record["step"], record["loss"]
            if self.begun is None:
                self.begun, self.begun_step = time.monotonic(), self.step

    def seconds_left(self) -> float | None:
        if self.done:
            return 0.0
        if self.begun is None or self.step <= self.begun_step:
            return None
        each = (time.monotonic() - self.begun) / (self.step - self.begun_step)
        return each * (self.steps - self.step)


@dataclass
class _Board:
    states: dict[str, _State]
    workers: int
    started: float = field(default_factory=time.monotonic)

    def table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("run", "", "update", "loss", "validation", "weight RMS", "left"):
            table.add_column(heading, justify="left" if heading in ("run", "") else "right", no_wrap=True)
        for name, state in self.states.items():
            bar = ProgressBar(total=state.steps, completed=state.steps if state.done else state.step, width=16)
            left = state.seconds_left()
            table.add_row(
                escape(name),
                bar,
                f"{state.step:,}/{state.steps:,}",
                _number(state.loss),
                _number(state.validation),
                _number(state.norm),
                "done" if state.done else "" if left is None else _clock(left),
            )
        table.caption = self.line()
        return table

    def line(self) -> str:
        done = sum(state.done for state in self.states.values())
        left = self.seconds_left()
        rest = "" if left is None else f", about {_clock(left)} left"
        return f"{done} of {len(self.states)} runs complete{rest}"

    def seconds_left(self) -> float | None:
        """Of the whole, from the speed of the runs that are under way."""
        speeds = [
            state.seconds_left() / (state.steps - state.step)  # type: ignore[operator]
            for state in self.states.values()
            if not state.done and state.step < state.steps and state.seconds_left() is not None
        ]
        if not speeds:
            return None
        updates = sum(state.steps - state.step for state in self.states.values() if not state.done)
        return updates * max(speeds) / self.workers


@contextmanager
def displaying(console: Console, jobs: Sequence[Job], workers: int) -> Iterator[Audience]:
    """An audience that shows all runs while its block runs."""
    board = _Board({job.name: _State(job.config.steps) for job in jobs}, min(workers, len(jobs)))
    live = Live(console=console, refresh_per_second=2, get_renderable=board.table) if console.is_terminal else None
    last = time.monotonic()

    def record(name: str, record: Record) -> None:
        nonlocal last
        board.states[name].update(record)
        if live is None and time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            say(console, f"{board.line()}; {_running(board)}")

    def finished(name: str) -> None:
        state = board.states[name]
        state.done = True
        if live is None:
            ended = "" if state.validation is None else f", validation loss {state.validation:.4f}"
            say(console, f"{name}: complete{ended}")

    audience = Audience(record=record, finished=finished, note=lambda name, text: say(console, f"{name}: {text}"))
    if live is None:
        yield audience
    else:
        with live:
            yield audience


def _running(board: _Board) -> str:
    running = [(name, state) for name, state in board.states.items() if not state.done and state.step]
    return ", ".join(f"{name} at {state.step:,} with loss {_number(state.loss)}" for name, state in running)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
