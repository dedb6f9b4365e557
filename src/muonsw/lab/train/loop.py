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
from muonsw.lab.train.checkpoint import CheckpointError, Shelf, require_room
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import CHECKPOINTS, CONFIG, RESULT, claimed, require_free, write_environment
from muonsw.lab.train.records import Journal, MetricsFile, Sink, require_sinks, tensorboard_sink, wandb_sink
from muonsw.lab.train.shared import SharedShelf
from muonsw.lab.train.state import Training, with_fingerprint
from muonsw.lab.train.world import World, agreed
from muonsw.state import state_bytes

# Between checkpoints that the clock asks for lies at least so many times what the last one took: 2 % of the time.
SAVING_INTERVALS = 50


@dataclass
class SaveClock:
    """Asks for a checkpoint when the last one is old; saving changes no number of the run, so the clock may decide."""

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
        folder: Where it is, for all ranks.
        watch: Callbacks for what happens; on rank 0.
        world: The ranks, each of which calls this with the same config.

    Returns:
        What `result.json` holds.

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
    with stop_requests() as request, torch_threads(None):
        training = _usable(config, world)  # what cannot be trained must leave no trace in the folder
        with _held(folder, config, world) as require_held:
            return _train(training, folder, watch, request, require_held)


def _train(
    training: Training, folder: Path, watch: Watch, request: StopRequest, require_held: Callable[[], None]
) -> dict[str, Any]:
    """Train in a folder that is held."""
    shelf = _shelf(folder, watch, training, require_held)
    resume(training, shelf, watch)
    if training.step < training.config.steps:
        training.world.leading(lambda: require_room(folder, training.saved_bytes()))
    journal = Journal(training)
    with _recording(training, journal, folder, watch) as metrics:
        watch.started(training)
        try:
            _updates(training, journal, metrics, shelf, request)
        except Diverged as error:
            shelf.finish()
            saved = shelf.newest()
            kept = f"the last good checkpoint is {saved}" if saved else "no checkpoint had been saved"
            raise Diverged(f"{error}; {kept}", error.step) from error
    result = _result(training)
    training.world.leading(require_held)
    training.world.leading(lambda: write_json(folder / RESULT, result))
    return result


@contextmanager
def _held(folder: Path, config: RunConfig, world: World) -> Iterator[Callable[[], None]]:
    """Hold the folder for all ranks, by rank 0; yields what raises there once it is lost."""
    with ExitStack() as stack:
        require_held = world.leading(lambda: stack.enter_context(claimed(folder, config)))
        world.together(lambda: _require_shared(folder, world))
        yield require_held or (lambda: None)


def _require_shared(folder: Path, world: World) -> None:
    if not (folder / CONFIG).exists():
        raise UsageError(f"{folder} is not the same on rank {world.rank} as on rank 0: choose one that all ranks share")


def _shelf(folder: Path, watch: Watch, training: Training, require_held: Callable[[], None]) -> Shelf | SharedShelf:
    shelf = Shelf(folder / CHECKPOINTS, training.config.keep, watch.note, require_held)
    return shelf if training.world.alone else SharedShelf(shelf, training.world)


@contextmanager
def _recording(training: Training, journal: Journal, folder: Path, watch: Watch) -> Iterator[MetricsFile | None]:
    """Write records while the block runs, on rank 0."""
    metrics = training.world.leading(lambda: _open_records(training, journal, folder, watch))
    try:
        yield metrics
    finally:
        if metrics is not None:
            metrics.close()


def _open_records(training: Training, journal: Journal, folder: Path, watch: Watch) -> MetricsFile:
    config, world = training.config, training.world
    write_environment(folder, trained=training.describe(), **({} if world.alone else {"ranks": world.size}))
    metrics = MetricsFile(
        folder, after=training.step, log_every=config.log_every, latest=training.latest, note=watch.note
    )
    journal.sinks = _sinks(metrics, config, folder, watch)
    return metrics


def _updates(
    training: Training,
    journal: Journal,
    metrics: MetricsFile | None,
    shelf: Shelf | SharedShelf,
    request: StopRequest,
) -> None:
    """Every update that is left."""
    config, world, clock = training.config, training.world, SaveClock(training.config.checkpoint_seconds)
    training.settle()
    if training.step == 0:
        evaluate(training, journal)
    world.watch(config.parallel.timeout)
    with _telemetry(training, journal) as telemetry:
        for batches in training.batches():
            world.alive(f"update {training.step + 1}")
            lr = training.base_lr()
            if telemetry is not None and training.step == config.steps - 1:
                telemetry.every = 1
            losses, norm, _ = training.update(batches)
            journal.note_update(lr, losses, norm)
            shelf.look()

            last = training.step == config.steps
            if last or training.step % config.eval_every == 0:
                evaluate(training, journal)
            stop, due = divmod(world.largest(2 * (request.signal or 0) + clock.due()), 2)  # in one message
            if last or stop or due or training.step % config.checkpoint_every == 0:
                with clock.saving():
                    save(training, journal, metrics, shelf)
                stop = world.largest(request.signal or 0)  # a signal may have come meanwhile
            if stop or last:
                shelf.finish()
            if stop and not last:
                message = f"stopped after {training.step} of {config.steps} updates, saved; "
                raise Interrupted(f"{message}run the same command again to go on in {shelf.folder.parent}", stop)


def evaluate(training: Training, journal: Journal) -> None:
    """Measure and record the validation loss, and what else the task measures."""
    journal.catch_up()
    step, loss = training.evaluate()
    journal.write({"kind": "eval", "step": step, "loss": loss, **training.metrics})
    journal.restart_clock()


def save(training: Training, journal: Journal, metrics: MetricsFile | None, shelf: Shelf | SharedShelf) -> None:
    """Write a checkpoint, once everything before it is known to be well and on disk."""
    journal.catch_up()
    if metrics is not None:
        metrics.sync()
    training.seconds += journal.elapsed()
    training.world.alive(f"saving after update {training.step}")
    shelf.save(training.checkpoint())
    journal.restart_clock()


def resume(training: Training, shelf: Shelf | SharedShelf, watch: Watch) -> None:
    """Load the newest checkpoint that is whole; a damaged one is put aside and the one before it tried."""
    here = torch.get_num_threads()
    shelf.sweep()
    while (path := shelf.newest()) is not None:
        training.world.alive(f"reading {path}")
        try:
            shelf.load_into(training, path)
            watch.note(f"going on after update {training.step}, from {path}")
            if here != (threads := torch.get_num_threads()):
                watch.note(f"torch uses {threads} CPU threads, as before, and not the {here} it would choose here")
            return
        except CheckpointError as error:
            shelf.put_aside(path, error)


def _usable(config: RunConfig, world: World) -> Training:
    try:
        return Training(config, world)
    except ValueError as error:  # the same on all ranks, since they have the same settings
        raise agreed(UsageError(str(error))) from error


def _telemetry(training: Training, journal: Journal) -> AbstractContextManager[Telemetry | None]:
    every = training.config.telemetry_every
    if not every:
        return nullcontext(None)
    return Telemetry(training.optimizer, every=every, start_step=training.step, sink=journal.write)  # on every rank


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
        training.task.unit: training.step * training.task.per_step,
        **({} if (epochs := training.task.epochs(training.step)) is None else {"epochs": epochs}),
        "seconds": training.seconds,
        "state_bytes": sum(state_bytes(training.optimizer.param_groups).values()),
        "skipped": training.guard.skipped,
    }
