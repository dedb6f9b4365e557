"""From numbers on the device to records: read back in groups, timed, watched, written down and passed on."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonsw.lab.errors import UsageError
from muonsw.lab.model import Losses
from muonsw.lab.storage import parse_json, plain, reported, write_atomically
from muonsw.lab.train.folder import METRICS
from muonsw.lab.train.state import Training
from muonsw.telemetry import TensorBoardSink, WandbSink

Record = dict[str, Any]
Sink = Callable[[Record], None]
# On an accelerator losses are read back in groups, so that the host can run ahead.
READ_EVERY = 16


@dataclass
class Journal:
    """Turns what updates leave on the device into records, and passes them on.

    Attributes:
        training: The run.
        sinks: Who gets the records.
    """

    training: Training
    sinks: Sequence[Sink]
    _waiting: list[tuple[int, float, Tensor]] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)
    _since: float = field(default_factory=time.perf_counter)
    _written: int = field(init=False)

    def __post_init__(self) -> None:
        self._written = self.training.step

    def write(self, record: Record) -> None:
        """Hand a record to every sink."""
        for sink in self.sinks:
            sink(record)

    def note_update(self, lr: float, losses: Losses, norm: Tensor) -> None:
        """Remember an update; its numbers are read back together with others'."""
        *single, load = losses
        numbers = torch.cat([torch.stack([*single, norm]).double(), load.double().flatten()])
        self._waiting.append((self.training.step, lr, numbers))
        if self.training.device.type == "cpu" or len(self._waiting) >= READ_EVERY:
            self.catch_up()

    def catch_up(self) -> None:
        """Write the training records of all updates so far; waits for the device.

        Raises:
            Diverged: If a loss is not finite or far above the lowest.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        rows = torch.stack([numbers for _, _, numbers in waiting]).cpu()
        rate = self._tokens_per_second(last=waiting[-1][0])
        for (step, lr, _), row in zip(waiting, rows, strict=True):
            record = self._record(step, lr, row) | {"tokens_per_second": rate}
            if step % self.training.config.log_every == 0 or step == self.training.config.steps:
                self.write(record)
            self.training.guard.watch(step, record["loss"])

    def restart_clock(self) -> None:
        """Leave what was not training out of the speed."""
        self._since = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since this was last asked."""
        before, self._started = self._started, time.perf_counter()
        return self._started - before

    def _tokens_per_second(self, last: int) -> float:
        now = time.perf_counter()
        rate = self.training.config.tokens_per_step * (last - self._written) / (now - self._since)
        self._since, self._written = now, last
        return rate

    def _record(self, step: int, lr: float, row: Tensor) -> Record:
        loss, cross_entropy, balance, z, norm = row[:5].tolist()
        config = self.training.config
        experts = config.model.experts
        record: dict[str, Any] = {
            "kind": "train",
            "step": step,
            "loss": loss,
            "cross_entropy": cross_entropy,
            "balance": balance,
            "z": z,
            "grad_norm": norm,
            "lr": lr,
            "tokens": step * config.tokens_per_step,
        }
        if experts > 1:
            record["load_entropy"] = load_entropy(row[5:].view(-1, experts)).tolist()
        return record


def load_entropy(load_LE: Tensor) -> Tensor:
    """Entropy of the experts' load in each layer, relative to an even one.

    Examples:
        >>> load_entropy(torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])).tolist()
        [1.0, 0.0]
    """
    entropy: Tensor = torch.special.entr(load_LE).sum(dim=1)
    return entropy / math.log(load_LE.shape[1])


class MetricsFile:
    """Appends records to `metrics.jsonl`, each flushed, so that a killed run has all but perhaps half a line.

    Args:
        folder: The run's folder.
        after: Records of updates after this one are cut off: the run resumes there and will write them again.
    """

    def __init__(self, folder: Path, *, after: int) -> None:
        self.path = folder / METRICS
        kept = [line for line, record in _readable(self.path) if record["step"] <= after] if after > 0 else []
        write_atomically(self.path, "".join(kept))
        with reported(self.path):
            self._file = self.path.open("a", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        """Append one record."""
        with reported(self.path):
            self._file.write(json.dumps(plain(record), separators=(",", ":")) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Wait until all records are on disk, so that a checkpoint never knows more than its metrics."""
        with reported(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _readable(path: Path) -> Iterator[tuple[str, Record]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield line, parse_json(line)
            except ValueError:  # a killed process leaves half a line, and nothing after it
                return


def tensorboard_sink(folder: Path) -> Sink:
    """A sink that writes TensorBoard events into the run's folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("TensorBoard is not installed: pip install 'muonsw[tensorboard]'") from error
    return TensorBoardSink(SummaryWriter(str(folder / "tensorboard")))


def wandb_sink(project: str, folder: Path, config: Mapping[str, Any]) -> Sink:
    """A sink that logs to a Weights & Biases project; a resumed run goes on under its folder's name."""
    try:
        wandb = import_module("wandb")
    except ImportError as error:
        raise UsageError("Weights & Biases is not installed: pip install 'muonsw[wandb]'") from error
    return WandbSink(wandb.init(project=project, name=folder.name, id=folder.name, resume="allow", config=dict(config)))
