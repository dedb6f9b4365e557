"""Real ranks: child processes joined over gloo.

torchrun starts processes with four environment variables, and ends them all when one ends; `Started` does the former.
Tests of torchrun itself are slow, and in `test_end_to_end.py`.
"""

import functools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.fsdp  # noqa: F401 (here once, instead of in every child)

import muonsw.lab.commands.training  # noqa: F401
from muonsw import machine
from muonsw.lab.cli import main
from muonsw.lab.train.config import ParallelConfig, RunConfig
from muonsw.lab.train.state import Training
from tests.common.children import start_child
from tests.faults.commands import CommandResult

# Ranks send themselves signals and limit their disks; with a GPU they would train on it.
NEEDED = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs limits and mounts of Linux"),
    pytest.mark.skipif(machine.gpus() > 0, reason="ranks of CPUs: set CUDA_VISIBLE_DEVICES="),
]
SECONDS = 180.0


def on_ranks(config: RunConfig, **settings) -> RunConfig:
    """The config with these parallel settings."""
    return replace(config, parallel=ParallelConfig(**{"timeout": 120.0, **settings}))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def write_config(config: RunConfig) -> Path:
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(config.as_data()), encoding="utf-8")
    return path


def training(config: Path, folder: Path) -> list[str]:
    """The command line that trains a config."""
    return ["train", "--config", str(config), "--out", str(folder)]


class Started:
    """Ranks that are running."""

    def __init__(self, size: int, config: RunConfig, folder: Path, before: Callable[[int], None] | None) -> None:
        self.begun, words = time.monotonic(), training(write_config(config), folder)
        self.outputs = [Path(tempfile.mkstemp()[1]) for _ in range(size)]
        environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.children = [
            start_child(functools.partial(_rank, rank, environment, words, before), self.outputs[rank])
            for rank in range(size)
        ]

    def wait(self, seconds: float = SECONDS) -> list[CommandResult]:
        """Wait until all ranks have ended; kill late ones and fail."""
        for child in self.children:
            child.join(max(0.0, self.begun + seconds - time.monotonic()))
        late = [rank for rank, child in enumerate(self.children) if child.exitcode is None]
        for rank in late:
            self.children[rank].kill()
        texts = [output.read_text(encoding="utf-8") for output in self.outputs]
        assert not late, f"ranks {late} did not end:\n{texts}"
        return [CommandResult(child.exitcode, text) for child, text in zip(self.children, texts, strict=True)]


def _rank(rank: int, environment: dict[str, str], words: list[str], before: Callable[[int], None] | None) -> int:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if before is not None:
        before(rank)
    return main(words)


def run(size: int, config: RunConfig, folder: Path, before: Callable[[int], None] | None = None) -> list[CommandResult]:
    """Run on this many ranks to the end; `before` is called in each with its rank, and may break something."""
    return Started(size, config, folder, before).wait()


def at_step(number: int, victim: int, act: Callable[[Training], None]) -> Callable[[int], None]:
    """Act on one rank before it takes its n-th step."""

    def before(rank: int) -> None:
        if rank == victim:
            real = Training.update

            def update(self, *args, **kwargs):
                if self.step + 1 == number:
                    act(self)
                return real(self, *args, **kwargs)

            Training.update = update

    return before


def run_well(
    size: int, config: RunConfig, folder: Path, before: Callable[[int], None] | None = None
) -> list[CommandResult]:
    ended = run(size, config, folder, before)
    assert [rank.code for rank in ended] == [0] * size, "\n".join(rank.text for rank in ended)
    return ended
