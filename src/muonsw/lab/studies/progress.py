"""Showing that experiments are running: bars with the time left in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from muonsw.lab.studies.experiment import Study
from muonsw.lab.studies.runner import Finished, Watch


@contextmanager
def watching(console: Console, study: Study) -> Iterator[Watch]:
    """A watch that draws while its block runs."""
    if not console.is_terminal:
        yield Watch(finished=lambda name, result: _line(console, name, result))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        total = sum(experiment.cost for experiment in study.experiments)
        whole = bars.add_task(study.name, total=total)
        done = dict.fromkeys((experiment.name for experiment in study.experiments), 0.0)
        costs = {experiment.name: experiment.cost for experiment in study.experiments}

        def advance(name: str, fraction: float) -> None:
            done[name] = fraction
            running = ", ".join(key for key, value in done.items() if 0.0 < value < 1.0)
            completed = sum(costs[key] * value for key, value in done.items())
            bars.update(whole, completed=completed, description=f"{study.name}: {running}" if running else study.name)

        def finish(name: str, result: Finished) -> None:
            advance(name, 1.0)
            _line(console, name, result)

        yield Watch(progress=advance, finished=finish)


def _line(console: Console, name: str, result: Finished) -> None:
    claims = result.outcome.claims
    held = sum(claim.holds for claim in claims)
    console.print(f"{name}: {held} of {len(claims)} claims hold ({result.seconds:.1f} s)", highlight=False)
