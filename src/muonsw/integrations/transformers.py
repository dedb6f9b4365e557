"""Hugging Face's Trainer: the optimizer in one argument, and telemetry in its logs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from muonsw.integrations.shared import Findings, TelemetryLog, refuse_wrong_options
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.variants import MuonSW

logger = logging.get_logger("transformers.muonsw")  # below theirs, so that their verbosity counts


class ModelFactory:
    """Builds the optimizer: Trainer calls `ModelFactory()(model, **options)`, Axolotl passes its arguments second."""

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
            raise ValueError("for_model needs lr=...: this trainer does not pass its learning rate on")
        return optimizer.for_model(model, lr=lr, **options)


def for_model(
    lr: float | None,
    weight_decay: float = 0.1,
    *,
    optimizer: type[ScaledDecayOptimizer] = MuonSW,
    **options: Any,
) -> tuple[type[ModelFactory], dict[str, Any]]:
    """What `Trainer(..., optimizer_cls_and_kwargs=...)` takes: one optimizer for the whole model.

    The Trainer then ignores `learning_rate`, `weight_decay` and `optim` of its own arguments. Its scheduler starts from
    `lr`, which is therefore the peak.

    Args:
        lr: the peak of the learning rate. None takes `learning_rate` from the training arguments, where the trainer
            hands them over (Axolotl does, Trainer does not).
        weight_decay: lambda of the decayed groups.
        optimizer: `MuonSW`, `AdamWSW` or `SGDSW`.
        **options: what `MuonSW.for_model` takes, such as `decay`, `patterns` and `adamw`.
    """
    refuse_wrong_options(optimizer, lr=1e-3 if lr is None else lr, weight_decay=weight_decay, **options)
    return ModelFactory, {"lr": lr, "weight_decay": weight_decay, "optimizer": optimizer, **options}


class TelemetryCallback(TelemetryLog, TrainerCallback):
    """Logs what the optimizer does to the weights, to whatever the Trainer logs to.

    Add it with `trainer.add_callback(TelemetryCallback(trainer))`. It logs a few values of each role at sampled steps
    under `telemetry/`, the size of each group under `routing/` at the start, and the number of findings so far. The
    routing table and the findings are text, and go to the log of transformers.

    Args:
        trainer: the Trainer that it is added to, whose `log` reaches W&B, TensorBoard, MLflow and the others.
        every: sample the steps whose number is a multiple of it, and the first one.
        findings: gives the sentences to log for a record, such as `muonsw.lab.diagnose.Findings()`.
        **telemetry: further arguments of `Telemetry`, such as `sink=JsonlSink(path)` for whole records.

    Attributes:
        telemetry: the `Telemetry` of the current run, None before it.
    """

    def __init__(self, trainer: Any, every: int = 50, *, findings: Findings | None = None, **telemetry: Any) -> None:
        super().__init__(logger, every, findings, telemetry)
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_main = state.is_world_process_zero
        self._log(control, self._attach(kwargs["optimizer"], kwargs["model"], state.global_step, is_main=is_main))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._log(control, self._sampled(is_main=state.is_world_process_zero))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._detach()

    def _log(self, control: TrainerControl, values: dict[str, float]) -> None:
        """Log without disturbing the Trainer: its own log is due when `should_log` is set, and logging clears it."""
        if values:
            due = control.should_log
            self.trainer.log(values)
            control.should_log = due
