"""Records of a run: losses are read back from the device in groups, checked, and passed to every sink."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonsw.lab.base.errors import needed
from muonsw.lab.base.storage import numbered, parse_json, plain, replacing, reported, write_atomically
from muonsw.lab.tasks import LossParts
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import METRICS
from muonsw.lab.train.state import Evaluation, Training
from muonsw.telemetry import TensorBoardSink, WandbSink

Record = dict[str, Any]
Sink = Callable[[Record], None]
# On an accelerator losses are read back in groups, so that the host can run ahead.
READ_EVERY = 16


@dataclass
class Journal:
    """Turn the losses that updates leave on the device into records."""

    training: Training  # the run
    sinks: Sequence[Sink] = ()  # where the records go; empty on ranks that do not lead
    _waiting: list[tuple[int, float, Tensor]] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)
    _since: float = field(default_factory=time.perf_counter)
    _written: int = field(init=False)
    _names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._written = self.training.step

    def write(self, record: Record) -> None:
        """Hand a record to every sink."""
        for sink in self.sinks:
            sink(record)

    def note_update(self, lr: float, losses: LossParts, norm: Tensor) -> None:
        """Remember an update; losses are read back in groups."""
        self._names = [name for name, part in losses._asdict().items() if not part.dim()]
        single, others = losses[: len(self._names)], losses[len(self._names) :]
        numbers = torch.cat([torch.stack([*single, norm]).double(), *(part.double().flatten() for part in others)])
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
        rows = self.training.world.mean(torch.stack([numbers for _, _, numbers in waiting]).cpu())
        config, task, scalars = self.training.config, self.training.task, len(self._names)
        now, last = time.perf_counter(), waiting[-1][0]
        speed = task.per_step * (last - self._written) / (now - self._since)
        self._since, self._written = now, last
        for (step, lr, _), row in zip(waiting, rows, strict=True):
            total, *parts, norm = row[: scalars + 1].tolist()
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
                        **task.record(row[scalars + 1 :]),
                        f"{task.unit}_per_second": speed,
                    }
                )
            self.training.guard.watch(step, total, norm)

    def restart_clock(self) -> None:
        """Leave time that was not training out of the speed."""
        self._since = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the last call."""
        before, self._started = self._started, time.perf_counter()
        return self._started - before


class MetricsFile:
    """Appends records to `metrics.jsonl`, each flushed, so that a killed run has all but perhaps half a line.

    Args:
        folder: The run's folder.
        after: Records of updates after this one are cut off: the run resumes there and will write them again. At 0
            the run begins, and what an earlier beginning wrote is kept under another name.
        log_every: Updates between training records, by which missing ones are found.
        latest: The evaluation that the checkpoint knows, by which the file of another run is found.
        note: Called with what was put aside or is missing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        after: int,
        log_every: int = 1,
        latest: Evaluation | None = None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.path, self._note = folder / METRICS, note
        if os.path.lexists(self.path) and not self.path.is_file():
            self._put_aside("it is no file of records")
        if after > 0 and latest is not None and not _may_hold(self.path, latest):
            self._put_aside("it holds another run's validation loss")
        if after > 0:
            self._mend(after, log_every)
        elif self.path.exists() and self.path.stat().st_size:
            self._put_aside("there is no checkpoint to go on from, so the run begins again")
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
        """Close the file; failed writes were reported already."""
        with suppress(OSError):
            self._file.close()

    def _put_aside(self, why: str) -> None:
        aside = numbered(self.path)
        with reported(self.path):
            self.path.rename(aside)
        self._note(f"{self.path} was moved to {aside}: {why}")

    def _mend(self, after: int, log_every: int) -> None:
        """Keep the whole records up to an update, and move damaged lines to a file of their own."""
        missing, damaged = set(range(log_every, after + 1, log_every)), []
        with replacing(self.path) as file:
            for line in _lines(self.path):
                record = _record_in(line)
                if record is None:
                    damaged.append(line)
                elif record["step"] <= after:
                    file.write(line)
                    missing -= {record["step"]} if record.get("kind") == "train" else set()
            if damaged:
                aside = write_atomically(numbered(self.path.with_name(f"{METRICS}.damaged")), b"".join(damaged))
                self._note(f"{len(damaged)} damaged lines of {self.path} were moved to {aside}")
        if missing:
            lost = f"of the updates {min(missing)} to {max(missing)}, {len(missing)} have no training record"
            self._note(f"{self.path} is not whole: {lost}; the run itself is not affected")


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, each with its end; half a line that a killed process left at the end is not one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
            elif _record_in(line) is not None:
                yield line + b"\n"


def _may_hold(path: Path, known: Evaluation) -> bool:
    """Whether no record of the same update says another validation loss."""
    records = (_record_in(line) for line in _lines(path) if b'"eval"' in line)
    same = [one.get("loss") for one in records if one and one.get("kind") == "eval" and one["step"] == known.step]
    return not same or plain(known.loss) in same


def _record_in(line: bytes) -> Record | None:
    """The record in a line; None if it holds something else."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def require_sinks(config: RunConfig) -> None:
    """Find out whether the packages are installed that a run is logged with.

    Raises:
        UsageError: If one is missing, with the command that installs it.
    """
    if config.tensorboard:
        needed("tensorboard", "TensorBoard events need", "tensorboard")
    if config.wandb:
        needed("wandb", "logging to Weights & Biases needs", "wandb")


def tensorboard_sink(folder: Path) -> Sink:
    """A sink that writes TensorBoard events into the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    events = folder / "tensorboard"
    with reported(events):
        sink = TensorBoardSink(SummaryWriter(str(events)))

    def write(record: Record) -> None:
        with reported(events):
            sink(record)

    return write


def wandb_sink(project: str, folder: Path, config: Mapping[str, Any]) -> Sink:
    """A sink that logs to a Weights & Biases project; a resumed run goes on under its folder's name."""
    wandb = import_module("wandb")
    return WandbSink(wandb.init(project=project, name=folder.name, id=folder.name, resume="allow", config=dict(config)))
