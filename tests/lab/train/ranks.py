"""Ranks that really run: forked from this process, so that its imports serve all of them, and joined over gloo.

What torchrun does for a run is to start processes with four variables and to end them all when one ends; `start` does
the first. Tests of torchrun itself are slow, and in `test_torchrun.py`.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.fsdp  # once, before any fork

from muonsw.lab.settings import as_data
from muonsw.lab.train.__main__ import main
from muonsw.lab.train.config import ParallelConfig, RunConfig

assert torch.distributed.fsdp

# What forks, and sends itself signals.
NEEDED = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork, limits and mounts of Linux"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA does not survive: CUDA_VISIBLE_DEVICES="),
]
FAULT = 99
SECONDS = 180.0


class Ended(NamedTuple):
    """How a rank ended: its exit code, or minus the signal that ended it; what it printed; seconds until then."""

    code: int
    text: str
    seconds: float


def spread_over(config: RunConfig, **settings) -> RunConfig:
    """A config with other settings of the ranks."""
    from dataclasses import replace

    return replace(config, parallel=ParallelConfig(**{"timeout": 120.0, **settings}))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def write_config(config: RunConfig) -> Path:
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps({"version": 1, **as_data(config)}))
    return path


class Started:
    """Ranks under way."""

    def __init__(self, size: int, config: RunConfig, folder: Path, before: Callable[[int], None] | None) -> None:
        self.begun, given = time.monotonic(), [str(write_config(config)), str(folder)]
        self.outputs = [Path(tempfile.mkstemp()[1]) for _ in range(size)]
        environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.pids = [self._fork(rank, environment, given, before) for rank in range(size)]

    def _fork(self, rank, environment, given, before) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            return child
        code = FAULT
        try:
            with self.outputs[rank].open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.stdout = sys.stderr = output
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                if before is not None:
                    before(rank)
                code = main(given)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(code)

    def wait(self, seconds: float = SECONDS) -> list[Ended]:
        """How each ended; whoever takes too long is ended by force, and the test fails."""
        ended: dict[int, Ended] = {}
        while len(ended) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if rank not in ended:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        text = self.outputs[rank].read_text()
                        ended[rank] = Ended(os.waitstatus_to_exitcode(status), text, time.monotonic() - self.begun)
            if time.monotonic() - self.begun > seconds:
                for rank in set(range(len(self.pids))) - set(ended):
                    os.kill(self.pids[rank], signal.SIGKILL)
                said = "\n".join(output.read_text() for output in self.outputs)
                raise AssertionError(f"ranks {set(range(len(self.pids))) - set(ended)} did not end:\n{said}")
            time.sleep(0.02)
        return [ended[rank] for rank in range(len(self.pids))]


def start(size: int, config: RunConfig, folder: Path, before: Callable[[int], None] | None = None) -> Started:
    """Start a run on so many ranks; `before` is called in each with its rank, and may break something."""
    return Started(size, config, folder, before)


def run(size: int, config: RunConfig, folder: Path, before: Callable[[int], None] | None = None) -> list[Ended]:
    """The same, to the end."""
    return start(size, config, folder, before).wait()


def run_well(size: int, config: RunConfig, folder: Path) -> None:
    ended = run(size, config, folder)
    assert [one.code for one in ended] == [0] * size, "\n".join(one.text for one in ended)
