"""Hugging Face's Trainer: the optimizer in one argument, and telemetry in its logs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from muonsw.integrations.shared import Findings, TelemetryLog
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.variants import MuonSW

logger = logging.get_logger("transformers.muonsw")  # follows the verbosity of transformers


class ModelFactory:
    """Builds the optimizer: Trainer calls `ModelFactory()(model, **options)`, Axolotl adds its arguments."""

    def __call__(
        self,
        model: torch.nn.Module,
        args: Any = None,
        *,
        lr: float | None = None,
        optimizer: type[ScaledDecayOptimizer] = MuonSW,
        **options: Any,
    ) -> ScaledDecayOptimizer:
        if lr is None:
            lr = getattr(args, "learning_rate", None)
        if lr is None:
            raise ValueError("for_model needs lr=...: this trainer does not pass its learning rate")
        return optimizer.for_model(model, lr=lr, **options)


def for_model(
    lr: float | None,
    weight_decay: float = 0.1,
    *,
    optimizer: type[ScaledDecayOptimizer] = MuonSW,
    **options: Any,
) -> tuple[type[ModelFactory], dict[str, Any]]:
    """Make `optimizer_cls_and_kwargs=` of `Trainer`: one optimizer for the whole model.

    The Trainer then ignores its arguments `learning_rate`, `weight_decay` and `optim`, and its scheduler takes `lr` as
    the peak.

    Args:
        lr: the peak learning rate. None takes `learning_rate` from the training arguments, if the trainer passes them
            (Axolotl does, Trainer does not).
        weight_decay: lambda of the decayed groups.
        optimizer: `MuonSW`, `AdamWSW` or `SGDSW`.
        **options: options of `MuonSW.for_model`, such as `decay`, `patterns` and `adamw`.
    """
    return ModelFactory, {"lr": lr, "weight_decay": weight_decay, "optimizer": optimizer, **options}


class TelemetryCallback(TelemetryLog, TrainerCallback):
    """Logs what the optimizer does to the weights, through the Trainer's `log`.

    Add it with `trainer.add_callback(TelemetryCallback(trainer))`. At sampled steps it logs a few values of each role
    and the number of findings under `telemetry/`. The routing table and the findings themselves go to the log of
    transformers.

    Args:
        trainer: the Trainer that gets this callback.
        every: sample step 1 and every multiple of this number.
        findings: a function that maps a record to sentences to log, such as `muonsw.lab.diagnose.Findings()`.
        **telemetry: other arguments of `Telemetry`, such as `sink=JsonlSink(path)` for whole records.

    Attributes:
        telemetry: the `Telemetry` of the current run, None before it starts.
    """

    def __init__(self, trainer: Any, every: int = 50, *, findings: Findings | None = None, **telemetry: Any) -> None:
        super().__init__(logger, every, findings, telemetry)
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_main = state.is_world_process_zero
        self._attach(kwargs["optimizer"], kwargs["model"], state.global_step, is_main=is_main)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if values := self._sampled(is_main=state.is_world_process_zero):
            should_log = control.should_log  # logging clears it, which would drop the Trainer's own log
            self.trainer.log(values)
            control.should_log = should_log

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._detach()
