"""The training loop: batch, forward, backward, clip, step, schedule, telemetry, evaluate, checkpoint, log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muonsw import Telemetry
from muonsw.lab.errors import Diverged, Interrupted, UsageError
from muonsw.lab.processes import StopRequest, stop_requests, torch_threads
from muonsw.lab.train import checkpoint
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import CHECKPOINTS, claimed, write_environment, write_result
from muonsw.lab.train.records import Journal, MetricsFile, Sink, tensorboard_sink, wandb_sink
from muonsw.lab.train.state import Training, with_fingerprint


@dataclass(frozen=True)
class Watch:
    """Who is told what happens during a run.

    Attributes:
        started: The run, before its first update; `step` says where it resumes.
        record: Every record, as it is written.
        note: A sentence about something unusual.
    """

    started: Callable[[Training], None] = lambda _training: None
    record: Sink = lambda _record: None
    note: Callable[[str], None] = lambda _text: None


def train(config: RunConfig, folder: Path, watch: Watch | None = None) -> dict[str, Any]:
    """Run to the end, from the newest good checkpoint in the folder if there is one.

    Returns:
        What `result.json` holds.

    Raises:
        UsageError: If the run cannot start, or something cannot be written.
        Diverged: If the loss explodes; checkpoints are from before.
        Interrupted: If the process was asked to stop; the run was saved.
    """
    watch = watch or Watch()
    config = with_fingerprint(config)
    with claimed(folder, config), stop_requests() as request, torch_threads(None):
        training = _usable(config)
        shelf = checkpoint.Shelf(folder / CHECKPOINTS, config.keep, watch.note)
        resume(training, shelf, watch)
        write_environment(folder)
        metrics = MetricsFile(
            folder, after=training.step, log_every=config.log_every, latest=training.latest, note=watch.note
        )
        journal = Journal(training, _sinks(metrics, config, folder, watch))
        watch.started(training)
        try:
            _updates(training, journal, metrics, shelf, request)
        except Diverged as error:
            saved = next(checkpoint.newest_first(folder / CHECKPOINTS), None)
            kept = f"the last good checkpoint is {saved}" if saved else "no checkpoint had been saved"
            raise Diverged(f"{error}; {kept}", error.step) from error
        finally:
            metrics.close()
        result = _result(training)
        write_result(folder, result)
        return result


def _updates(
    training: Training, journal: Journal, metrics: MetricsFile, shelf: checkpoint.Shelf, request: StopRequest
) -> None:
    """Every update that is left."""
    config = training.config
    if training.step == 0:
        evaluate(training, journal)
    with _telemetry(training, journal) as telemetry:
        for batches in training.batches():
            lr = training.base_lr()
            losses, norm = training.update(batches, measured=telemetry is not None and telemetry.due)
            if telemetry is not None:
                telemetry.step = training.step  # a replayed graph calls no hooks
            journal.note_update(lr, losses, norm)

            last = training.step == config.steps
            saving = last or training.step % config.checkpoint_every == 0
            if saving or training.step % config.eval_every == 0:
                evaluate(training, journal)
            if saving or request.signal is not None:
                save(training, journal, metrics, shelf)
            if request.signal is not None and not last:
                message = f"stopped after {training.step} of {config.steps} updates, saved; "
                raise Interrupted(
                    f"{message}run the same command again to go on in {shelf.folder.parent}", request.signal
                )


def evaluate(training: Training, journal: Journal) -> None:
    """Measure and record the validation loss."""
    journal.catch_up()
    step, loss = training.evaluate()
    journal.write({"kind": "eval", "step": step, "loss": loss})
    journal.restart_clock()


def save(training: Training, journal: Journal, metrics: MetricsFile, shelf: checkpoint.Shelf) -> None:
    """Write a checkpoint, once everything before it is known to be well and on disk."""
    journal.catch_up()
    metrics.sync()
    training.seconds += journal.elapsed()
    shelf.save(training.checkpoint())
    journal.restart_clock()


def resume(training: Training, shelf: checkpoint.Shelf, watch: Watch) -> None:
    """Load the newest checkpoint that is whole; a damaged one is put aside and the one before it tried."""
    here = torch.get_num_threads()
    for path in checkpoint.newest_first(shelf.folder):
        try:
            training.load(checkpoint.load(path))
            watch.note(f"going on after update {training.step}, from {path}")
            if here != (threads := torch.get_num_threads()):
                watch.note(f"torch uses {threads} CPU threads, as before, and not the {here} it would choose here")
            return
        except checkpoint.CheckpointError as error:
            shelf.put_aside(path, error)


def _usable(config: RunConfig) -> Training:
    try:
        return Training(config)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _telemetry(training: Training, journal: Journal) -> AbstractContextManager[Telemetry | None]:
    every = training.config.telemetry_every
    if not every:
        return nullcontext(None)
    return Telemetry(training.optimizer, every=every, start_step=training.step, sink=journal.write)


def _sinks(metrics: MetricsFile, config: RunConfig, folder: Path, watch: Watch) -> list[Sink]:
    sinks: list[Sink] = [metrics, watch.record]
    if config.tensorboard:
        sinks.append(tensorboard_sink(folder))
    if config.wandb:
        sinks.append(wandb_sink(config.wandb, folder, config.as_data()))
    return sinks


def _result(training: Training) -> dict[str, Any]:
    assert training.best is not None
    assert training.latest is not None
    return {
        "steps": training.step,
        "final_loss": training.latest.loss,
        "best_loss": training.best.loss,
        "best_step": training.best.step,
        "tokens": training.step * training.config.tokens_per_step,
        "seconds": training.seconds,
        "skipped": training.guard.skipped,
    }
