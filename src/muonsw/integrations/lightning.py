"""Lightning: telemetry in the Trainer's loggers."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from muonsw.integrations.shared import Findings, TelemetryLog

logger = logging.getLogger(__name__)


class TelemetryCallback(TelemetryLog, Callback):
    """Logs what the optimizer does to the weights, to every logger of the Trainer.

    At sampled steps it logs a few values of each role and the number of findings under `telemetry/`. The routing table
    and the findings themselves go to Python's log.

    Args:
        every: sample step 1 and every multiple of this number.
        findings: a function that maps a record to sentences to log, such as `muonsw.lab.diagnose.Findings()`.
        **telemetry: other arguments of `Telemetry`, such as `sink=JsonlSink(path)` for whole records.

    Attributes:
        telemetry: the `Telemetry` of the current run, None before it starts.
    """

    def __init__(self, every: int = 50, *, findings: Findings | None = None, **telemetry: Any) -> None:
        super().__init__(logger, every, findings, telemetry)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start = trainer.global_step // len(trainer.optimizers)  # the sum over all optimizers
        self._attach(trainer.optimizers[0], pl_module, start, is_main=trainer.is_global_zero)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not through the module's log, which is written only every `log_every_n_steps`.
        if values := self._sampled(is_main=trainer.is_global_zero):
            for sink in trainer.loggers:
                sink.log_metrics(values, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
