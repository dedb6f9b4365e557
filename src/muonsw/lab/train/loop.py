"""The training loop: batch, forward, backward, clip, step, schedule, telemetry, evaluate, checkpoint, log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from muonsw import Telemetry
from muonsw.lab.base.errors import Diverged, Interrupted, UsageError
from muonsw.lab.base.processes import StopRequest, stop_requests, torch_threads
from muonsw.lab.base.storage import write_json
from muonsw.lab.train.checkpoint import Shelf, require_room
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import CHECKPOINTS, CONFIG, RESULT, claimed, require_free, write_environment
from muonsw.lab.train.records import Journal, MetricsFile, Sink, require_sinks, tensorboard_sink, wandb_sink
from muonsw.lab.train.state import Training, with_fingerprint
from muonsw.lab.train.world import World, agreed
from muonsw.state import state_bytes

# The clock leaves at least 50 times the last save between checkpoints: 2% of the time.
SAVING_INTERVALS = 50


@dataclass
class SaveClock:
    """Ask for a checkpoint when the last one is old; saving changes no result, so a clock may decide."""

    seconds: float  # how old it may be; 0 never asks
    _saved: float = field(default_factory=time.monotonic)
    _took: float = 0.0

    def due(self) -> bool:
        """Whether it is time."""
        wait = max(self.seconds, SAVING_INTERVALS * self._took)
        return bool(self.seconds) and time.monotonic() - self._saved >= wait

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time the block, which saves."""
        begun = time.monotonic()
        yield
        self._saved = time.monotonic()
        self._took = self._saved - begun


@dataclass(frozen=True)
class Watch:
    """Callbacks for what happens during a run."""

    # The run, before its first update; `step` says where it resumes.
    started: Callable[[Training], None] = lambda _training: None
    record: Sink = lambda _record: None  # every record that is logged
    note: Callable[[str], None] = lambda _text: None  # a sentence about something unusual


def train(config: RunConfig, folder: Path, watch: Watch | None = None, world: World | None = None) -> dict[str, Any]:
    """Run to the end, from the newest good checkpoint in the folder if there is one.

    Args:
        config: The run.
        folder: Its folder, the same for all ranks.
        watch: Callbacks for what happens; on rank 0.
        world: The ranks, each of which calls this with the same config.

    Returns:
        The content of `result.json`.

    Raises:
        UsageError: If the run cannot start, or something cannot be written.
        Diverged: If the loss explodes; checkpoints are from before.
        Interrupted: If the process was asked to stop; the run was saved.
    """
    world = world or World()
    watch = watch if watch and world.leads else Watch()
    config = world.together(lambda: with_fingerprint(config))
    world.leading(lambda: require_sinks(config))
    world.leading(lambda: require_free(folder, config))
    with stop_requests() as request, torch_threads(None), ExitStack() as stack:
        try:
            training = Training(config, world)  # before the folder is touched: an invalid run must leave no trace in it
        except ValueError as error:  # the same on all ranks, since they have the same settings
            raise agreed(UsageError(str(error))) from error
        require_held = world.leading(lambda: stack.enter_context(claimed(folder, config))) or (lambda: None)
        world.together(lambda: _require_shared(folder, world))

        shelf = Shelf(folder / CHECKPOINTS, config.keep, watch.note, world, require_held)
        _resume(training, shelf, watch)
        if training.step < config.steps:
            size = training.saved_bytes()
            world.leading(lambda: require_room(folder, size))
        journal = Journal(training)
        metrics = world.leading(lambda: _open_records(training, journal, folder, watch))
        if metrics is not None:
            stack.callback(metrics.close)
        watch.started(training)
        try:
            _updates(training, journal, metrics, shelf, request)
        except Diverged as error:
            saved = shelf.newest()
            left = f"the last good checkpoint is {saved}" if saved else "no checkpoint had been saved"
            reason = f"{error}; {left}"
            outcome = {"diverged": error.step, "steps": error.step, "reason": reason}
            world.leading(lambda: write_json(folder / RESULT, outcome))
            raise Diverged(reason, error.step) from error
        result = _result(training)
        world.leading(require_held)
        world.leading(lambda: write_json(folder / RESULT, result))
        return result


def _require_shared(folder: Path, world: World) -> None:
    if not (folder / CONFIG).exists():
        raise UsageError(f"{folder} is not the same on rank {world.rank} as on rank 0: choose one that all ranks share")


def _resume(training: Training, shelf: Shelf, watch: Watch) -> None:
    here = torch.get_num_threads()
    shelf.resume(training)
    if here != (threads := torch.get_num_threads()):
        watch.note(f"torch uses {threads} CPU threads, as before, and not the {here} it would choose here")


def _open_records(training: Training, journal: Journal, folder: Path, watch: Watch) -> MetricsFile:
    """Describe the machine, and open every place where records go."""
    config, world = training.config, training.world
    write_environment(folder, trained=training.describe(), **({} if world.alone else {"ranks": world.size}))
    metrics = MetricsFile(
        folder, after=training.step, log_every=config.log_every, latest=training.latest, note=watch.note
    )
    sinks: list[Sink] = [metrics, watch.record]
    if config.tensorboard:
        sinks.append(tensorboard_sink(folder))
    if config.wandb:
        sinks.append(wandb_sink(config.wandb, folder, config.as_data()))
    journal.sinks = sinks
    return metrics


def _updates(
    training: Training, journal: Journal, metrics: MetricsFile | None, shelf: Shelf, request: StopRequest
) -> None:
    """Take every update that is left."""
    config, world, clock = training.config, training.world, SaveClock(training.config.checkpoint_seconds)
    training.settle()
    if training.step == 0:
        evaluate(training, journal)
    with _telemetry(training, journal) as telemetry:
        for batches in training.batches():
            lr = training.base_lr()
            if telemetry is not None and training.step == config.steps - 1:
                telemetry.every = 1
            losses, norm, _ = training.update(batches)
            journal.note_update(lr, losses, norm)

            last = training.step == config.steps
            if last or training.step % config.eval_every == 0:
                evaluate(training, journal)
            stop, due = divmod(world.largest(2 * (request.signal or 0) + clock.due()), 2)  # in one message
            if last or stop or due or training.step % config.checkpoint_every == 0:
                with clock.saving():
                    save(training, journal, metrics, shelf)
                stop = world.largest(request.signal or 0)  # a signal may have come meanwhile
            if stop and not last:
                message = f"stopped after {training.step} of {config.steps} updates, saved; "
                raise Interrupted(f"{message}run the same command again to go on in {shelf.folder.parent}", stop)


def evaluate(training: Training, journal: Journal) -> None:
    """Measure and record the validation loss, and what else the task measures."""
    journal.catch_up()
    step, loss = training.evaluate()
    journal.write({"kind": "eval", "step": step, "loss": loss, **training.metrics})
    journal.restart_clock()


def save(training: Training, journal: Journal, metrics: MetricsFile | None, shelf: Shelf) -> None:
    """Write a checkpoint, once every record before it is on disk and no loss has diverged."""
    journal.catch_up()
    if metrics is not None:
        metrics.sync()
    training.seconds += journal.elapsed()
    shelf.save(training.checkpoint())
    journal.restart_clock()


def _telemetry(training: Training, journal: Journal) -> AbstractContextManager[Telemetry | None]:
    every = training.config.telemetry_every
    if not every:
        return nullcontext(None)
    return Telemetry(training.optimizer, every=every, start_step=training.step, sink=journal.write)  # on every rank


def _result(training: Training) -> dict[str, Any]:
    assert training.best is not None
    assert training.latest is not None
    return {
        "steps": training.step,
        "final_loss": training.latest.loss,
        "best_loss": training.best.loss,
        "best_step": training.best.step,
        training.task.unit: training.step * training.task.per_step,
        **({} if (epochs := training.task.epochs(training.step)) is None else {"epochs": epochs}),
        "seconds": training.seconds,
        "state_bytes": sum(state_bytes(training.optimizer.param_groups).values()),
        "skipped": training.guard.skipped,
    }
