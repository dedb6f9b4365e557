"""Showing a run: a bar with loss, speed and the time left in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from muonsw.lab.model import count
from muonsw.lab.terminal import say
from muonsw.lab.train.loop import Watch
from muonsw.lab.train.metrics import Record
from muonsw.lab.train.state import Training

# Dense bfloat16 TFLOP/s by a part of the device's name, from the makers' data sheets.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "4090": 165.0}
SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def showing(console: Console) -> Iterator[Watch]:
    """A watch that draws while its block runs."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            yield _Display(console, bar).watch()
    else:
        yield _Display(console, None).watch()


class _Display:
    def __init__(self, console: Console, bar: Progress | None) -> None:
        self.console, self.bar = console, bar
        self.task = None if bar is None else bar.add_task("training", total=None, numbers="")
        self.steps, self.flops, self.evaluated, self.shown = 0, 0.0, "", -SECONDS_BETWEEN_LINES

    def watch(self) -> Watch:
        return Watch(started=self.started, record=self.record, note=self._print)

    def started(self, training: Training) -> None:
        config = training.config
        self.steps, self.flops = config.steps, _share_of_peak(training)
        epochs = training.loader.epochs(config.steps)
        parameters = sum(parameter.numel() for parameter in training.model.parameters())
        self._print(
            f"{parameters:,} parameters, {config.steps:,} updates of {config.tokens_per_step:,} tokens, "
            f"{epochs:.2f} epochs of {config.data.path}, on {training.device}"
        )
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, total=config.steps, completed=training.step)

    def record(self, record: Record) -> None:
        if record["kind"] == "eval":
            self.evaluated = f"validation {record['loss']:.4f}"
            if self.bar is None:
                self._print(f"update {record['step']:,} of {self.steps:,}: {self.evaluated}")
        elif record["kind"] == "train":
            self._training(record)

    def _training(self, record: Record) -> None:
        speed = record["tokens_per_second"]
        mfu = f"  MFU {100 * self.flops * speed:.1f}%" if self.flops else ""
        numbers = f"loss {record['loss']:.4f}  {speed:,.0f} tokens/s{mfu}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=record["step"], numbers=f"{numbers}  {self.evaluated}")
        elif time.monotonic() - self.shown > SECONDS_BETWEEN_LINES:
            self.shown = time.monotonic()
            self._print(f"update {record['step']:,} of {self.steps:,}: {numbers}")

    def _print(self, text: str) -> None:
        say(self.console, text)


def _share_of_peak(training: Training) -> float:
    """What one token a second is of the device's peak; zero where that is not known."""
    if training.device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(training.device)
    peak = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    return 0.0 if peak is None else count(training.config.model).flops_per_token / (peak * 1e12)
