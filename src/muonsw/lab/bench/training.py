"""Tokens a second of the trainer's own updates: micro-batches, clipping, Muon-SW and schedule included.

Before timing, compiled losses are checked against uncompiled ones. The time is a median over blocks of updates; on a
GPU each block ends in one synchronisation, and inside it any wait for the device is an error.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from muonsw.lab.bench.timing import milliseconds, synchronize
from muonsw.lab.data.loader import TokenBatch
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.data.tokenizers import ByteTokenizer
from muonsw.lab.model import count
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.graph import WARM_CALLS
from muonsw.lab.train.presets import preset_run
from muonsw.lab.train.records import Journal
from muonsw.lab.train.state import Training, compiles, with_fingerprint

MEAN_LENGTH = 20_000


class WrongLossError(RuntimeError):
    """The compiled model computes other losses than the model, so its speed means nothing."""


@dataclass(frozen=True)
class Amount:
    """How much is timed."""

    batch: int | None = None  # sequences in an update; None is the preset's
    micro: int | None = None  # sequences in a micro-batch; None is the preset's
    blocks: int = 5  # blocks of updates, of which the median is taken
    updates: int = 2  # updates in a block
    graphs: str = "auto"  # "auto", "on" or "off", as in `RunConfig`

    def of(self, config: RunConfig) -> RunConfig:
        """The run with these sizes."""
        batch = self.batch or config.batch
        micro = self.micro or max(1, batch // config.accumulation)
        return replace(config, batch=batch, accumulation=max(1, batch // micro), graphs=self.graphs)


class TimedTraining:
    """A run of a preset on random tokens, whose updates can be timed.

    Args:
        name: A preset.
        device: Where.
        amount: How much.
    """

    def __init__(self, name: str, device: torch.device, amount: Amount) -> None:
        self.name, self.device, self.amount = name, device, amount
        with tempfile.TemporaryDirectory() as folder:
            config = amount.of(preset_run(name, folder))
            # The tokens on disk must suffice for one update, but are not read.
            documents = 10 + 2 * config.tokens_per_step // MEAN_LENGTH
            source = islice(MarkovSource(seed=0, mean_length=MEAN_LENGTH), documents)
            prepare(source, ByteTokenizer(), Path(folder), validation_fraction=0.2)
            config = replace(config, data=replace(config.tokens, eval_windows=1), device=device.type)
            self.training = Training(with_fingerprint(config))
        self.config = self.training.config
        shape = (self.config.batch // self.config.accumulation, self.config.decoder.sequence + 1)
        rows = [torch.randint(self.config.decoder.vocab, shape, device=device) for _ in range(self.config.accumulation)]
        self.batches: list[TokenBatch] = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
        self.journal = Journal(self.training, [])

    def update(self) -> None:
        """One update, noted as the trainer notes it."""
        lr = self.training.base_lr()
        losses, norm, _ = self.training.update(self.batches)
        self.journal.note_update(lr, losses, norm)

    def check(self) -> float:
        """Compile, and compare with what was compiled; seconds that this took.

        Raises:
            WrongLossError: If the losses differ.
        """
        training = self.training
        if not compiles(self.config):
            return 0.0
        with torch.no_grad(), training.autocast():
            plain = training.model(*self.batches[0]).cross_entropy
        start = time.perf_counter()
        with training.autocast():
            compiled = training.forward(*self.batches[0])
        compiled.total.backward()
        training.optimizer.zero_grad(set_to_none=True)
        gap = float((compiled.cross_entropy.detach() - plain).abs() / plain)
        if not gap < 2e-3:
            raise WrongLossError(f"the compiled losses of {self.name} differ by {gap:.1%}; nothing was timed")
        return time.perf_counter() - start

    def measure(self) -> dict[str, Any]:
        """Speed and memory of updates."""
        for _ in range(WARM_CALLS + 2 if self.training.replayed_gradients else 2):
            self.update()
        self.journal.catch_up()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        times = [self._block() for _ in range(self.amount.blocks)]
        seconds = statistics.median(times)
        rate = self.config.tokens_per_step / seconds
        return {
            "preset": self.name,
            "batch": self.config.batch,
            "micro": self.config.batch // self.config.accumulation,
            "tokens_per_second": rate,
            "ms": 1e3 * seconds,
            "optimizer_ms": self.optimizer_ms(),
            "tflops": count(self.config.decoder).flops_per_token * rate / 1e12,
            "gib": torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None,
        }

    def _block(self) -> float:
        """Seconds an update."""
        synchronize(self.device)
        start = time.perf_counter()
        with _no_waiting(self.device):
            for _ in range(self.amount.updates):
                self.update()
        synchronize(self.device)
        taken = time.perf_counter() - start
        self.journal.catch_up()
        return taken / self.amount.updates

    def optimizer_ms(self) -> float:
        """Milliseconds of the optimizer's eager step by itself."""
        self.training.forward_backward(self.batches[:1])
        step = self.training.optimizer.step
        return statistics.median(milliseconds(step, self.device) for _ in range(5))


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Make any wait for a GPU an error."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def measure_training(name: str, device: torch.device, amount: Amount) -> dict[str, Any]:
    """What `TimedTraining.measure` says of a preset, after the check.

    Raises:
        WrongLossError: If the compiled losses are wrong.
    """
    timed = TimedTraining(name, device, amount)
    return {"compile_s": timed.check(), **timed.measure()}


def kernel_table(update: Callable[[], None]) -> str:
    """Every kernel of one call on a GPU: milliseconds, share, launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        update()
        torch.cuda.synchronize()
    found = {event.key: event for event in profiler.key_averages()}
    times = {key: event.self_device_time_total / 1e3 for key, event in found.items() if event.self_device_time_total}
    whole = sum(times.values())
    lines = [f"{whole:9.2f} ms on the device"]
    for key, ms in sorted(times.items(), key=lambda item: -item[1]):
        lines.append(f"{ms:9.3f} {ms / whole:6.1%} {found[key].count:6d}  {key}")
    return "\n".join(lines) + "\n"
