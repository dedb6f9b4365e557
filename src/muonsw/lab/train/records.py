"""Records of a run: losses are read from the device in groups, checked, and passed to all sinks."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonsw.lab.files import numbered, parse_json, plain, replacing, reported
from muonsw.lab.tasks import LossParts
from muonsw.lab.train.checkpoint import METRICS
from muonsw.lab.train.state import Training

Record = dict[str, Any]
Sink = Callable[[Record], None]
# Losses are read only this often, so that the host can run ahead of an accelerator.
READ_EVERY = 16


class Journal:
    """Turns losses on the device into records."""

    def __init__(self, training: Training) -> None:
        self.training, self.sinks = training, list[Sink]()  # sinks only on rank 0
        self._waiting: list[tuple[int, float, Tensor]] = []
        self._since = time.perf_counter()
        self._written, self._names = training.step, ()

    def write(self, record: Record) -> None:
        for sink in self.sinks:
            sink(record)

    def note_step(self, lr: float, losses: LossParts, norm: Tensor) -> None:
        """Store the losses of a step, and write records when enough have accumulated."""
        self._names = losses._fields
        self._waiting.append((self.training.step, lr, torch.stack([*losses, norm]).double()))
        if self.training.device.type == "cpu" or len(self._waiting) >= READ_EVERY:
            self.catch_up()

    def catch_up(self) -> None:
        """Wait for the device and write the records of all steps so far; may raise `Diverged`."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        world = self.training.world
        rows = world.total(torch.stack([numbers for _, _, numbers in waiting]).cpu()) / world.size
        config, task = self.training.config, self.training.task
        now, last = time.perf_counter(), waiting[-1][0]
        speed = task.per_step * (last - self._written) / (now - self._since)
        self._since, self._written = now, last
        for (step, lr, _), row in zip(waiting, rows, strict=True):
            total, *parts, norm = row.tolist()
            if step % config.log_every == 0 or step == config.steps:
                self.write(
                    {
                        "kind": "train",
                        "step": step,
                        "loss": total,
                        **dict(zip(self._names[1:], parts, strict=True)),
                        "grad_norm": norm,
                        "lr": lr,
                        task.unit: step * task.per_step,
                        f"{task.unit}_per_second": speed,
                    }
                )
            self.training.guard.watch(config, step, total, norm)

    def restart_clock(self) -> None:
        """Exclude the time since the last record from the speed."""
        self._since = time.perf_counter()


class MetricsFile:
    """Appends records to `metrics.jsonl` and flushes each, so a killed run loses at most part of a line.

    Removes records of steps after `after`, which the resumed run will write again. If the run starts from step 0, an
    existing file is renamed. `note` is called with messages about that.
    """

    def __init__(self, folder: Path, *, after: int, note: Callable[[str], None]) -> None:
        self.path = folder / METRICS
        with reported(self.path):
            if after > 0 and self.path.exists():
                damaged = 0
                with self.path.open("rb") as before, replacing(self.path) as file:
                    for line in before:
                        try:
                            if parse_json(line)["step"] <= after:
                                file.write(line.removesuffix(b"\n") + b"\n")
                        except (ValueError, LookupError, TypeError):
                            damaged += line.endswith(b"\n")  # a partial last line is expected after a kill
                    if damaged:
                        shutil.copyfile(self.path, aside := numbered(self.path))
                        note(f"removed {damaged} damaged lines from {self.path}; the original is {aside}")
            elif self.path.exists() and self.path.stat().st_size:
                self.path.rename(aside := numbered(self.path))
                note(f"{self.path} was moved to {aside}: there is no checkpoint to resume from, so the run starts over")
            self._file = self.path.open("a", encoding="utf-8", buffering=1)  # flushed after each line

    def __call__(self, record: Record) -> None:
        with reported(self.path):
            self._file.write(json.dumps(plain(record), separators=(",", ":")) + "\n")

    def close(self) -> None:
        with suppress(OSError):  # failed writes were reported already
            self._file.close()


def numbers_of(record: Record, steps: int) -> dict[str, str]:
    """Format the numbers of a record for display, by heading; `steps` is the length of the run.

    Examples:
        >>> numbers_of({"kind": "train", "step": 1200, "loss": 3.25}, 5000)
        {'step': '1,200/5,000', 'loss': '3.2500'}
    """
    match record["kind"]:
        case "train":
            return {"step": f"{record['step']:,}/{steps:,}", "loss": f"{record['loss']:.4f}"}
        case "eval":
            return {"validation": f"{record['loss']:.4f}"}
        case "telemetry" if (norm := (record.get("decayed") or {}).get("weight_rms")) is not None:
            return {"weight RMS": f"{norm:.4f}"}
    return {}
