"""Records of a run: appended to a JSON Lines file, cut back on resume, and passed on to other sinks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from muonsw.lab.errors import UsageError
from muonsw.lab.storage import plain, write_atomically
from muonsw.telemetry import TensorBoardSink, WandbSink

Record = dict[str, Any]
Sink = Callable[[Record], None]
FILE = "metrics.jsonl"


class MetricsFile:
    """Appends records to `metrics.jsonl`, each flushed, so that a killed run has all but perhaps half a line.

    Args:
        folder: The run's folder.
        after: Records of updates after this one are cut off: the run resumes there and will write them again.
    """

    def __init__(self, folder: Path, *, after: int) -> None:
        self.path = folder / FILE
        kept = [line for line, record in _readable(self.path) if record["step"] <= after] if after > 0 else []
        write_atomically(self.path, "".join(kept))
        self._file = self.path.open("a", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        """Append one record."""
        try:
            self._file.write(json.dumps(plain(record), separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def sync(self) -> None:
        """Wait until all records are on disk, so that a checkpoint never knows more than its metrics."""
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
                yield line, json.loads(line)
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
